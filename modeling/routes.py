"""Routes of a mixture of experts: the choices of its routers, recorded or forced (https://arxiv.org/abs/2510.11370).

One hook serves all families: in a block of experts it looks for the top-k over all experts. A forced choice replaces
the indices, and takes the values from the current scores. So normalisation, scaling and the router's gradient are those
of the family's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from core.errors import UserError
from modeling.experts import ExpertBlock, list_blocks
from modeling.layout_probe import compute_scores
from modeling.probe_rows import draw_segments, make_batch

TOP_K = (torch.topk, torch.Tensor.topk)
NORMALISE = (
    *(functional.softmax, torch.softmax, torch.Tensor.softmax),
    *(functional.sigmoid, torch.sigmoid, torch.Tensor.sigmoid),
)


class ExpertChoice(TorchFunctionMode):
    """Choice of one block in one forward pass."""

    scores: Tensor
    """[P, experts] of the top-k."""
    normalised: Tensor | None = None
    """Softmax or sigmoid of the router's logits; None if the block takes neither before the choice."""
    own: Tensor
    """[P, k] experts of the highest scores."""
    chosen: Tensor
    """[P, k] experts that the block uses."""

    def __init__(self, experts: int, forced: Tensor | None = None):
        """Read a choice, or force it. forced: [P, k] int64, experts to use; negative for the block's own."""
        super().__init__()
        self.experts, self.forced, self.count = experts, forced, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in NORMALISE and not self.count and found.shape[-1] == self.experts:
            self.normalised = found.detach()
        given = args[0] if args else None
        if func not in TOP_K or given is None or given.dim() != 2 or given.shape[-1] != self.experts:
            return found
        self.count += 1
        self.scores, self.own = given.detach(), found[1]
        if self.forced is None:
            self.chosen = self.own
            return found
        if self.forced.shape != self.own.shape:
            raise UserError(
                f"the routes of a sample name {self.forced.shape[-1]} experts per token, and this model chooses "
                f"{self.own.shape[-1]}: the engine must run the same model (model.path)"
            )
        self.chosen = torch.where(self.forced < 0, self.own, self.forced)
        # of the dense scores: a forced expert has its own score, however low
        return torch.return_types.topk((given.gather(-1, self.chosen), self.chosen))


class SeesChoices(Protocol):
    """Reader of the choices of a forward pass."""

    def see(self, number: int, choice: ExpertChoice) -> None:
        """Read the choice of a block. It is not called when activations are computed again in the backward pass."""
        ...


@dataclass(slots=True, kw_only=True)
class RoutedPass:
    """Forward pass over P positions whose choices are read, or forced."""

    forced: Tensor | None = None
    """[P, layers, k] experts to use; negative where a router's own choice is used."""
    reader: SeesChoices | None = None


@dataclass(slots=True)
class Recording:
    """Choices of all blocks."""

    chosen: list[Tensor] = field(default_factory=list[Tensor])

    def see(self, number: int, choice: ExpertChoice) -> None:
        self.chosen.append(choice.chosen.detach())

    def stack(self) -> Tensor:
        """Return the experts as [P, layers, k]."""
        return torch.stack(self.chosen, 1)


class RouterHook:
    """Hooks on all blocks of a model. Outside of `over` and `recording` they do nothing."""

    def __init__(self, module: nn.Module, model: nn.Module, *, device: torch.device | str, key: str):
        """Install the hooks, and check them in a short forward pass. Collective where the model is sharded.

        module: the callable (DeepSpeed's engine, or the model itself). key: the key that needs routes, for errors.
        Raises UserError for a model without experts, or with a block that does not choose by one top-k.
        """
        self.blocks, self.key = list_blocks(model), key
        hf: Any = model
        check_mixture(self.blocks, f"this {hf.config.model_type} model", key=key)
        self.now: RoutedPass | None = None
        self.is_again = False
        for number, block in enumerate(self.blocks):
            block.module.forward = partial(self._run, number, block.module.forward)
        if getattr(hf, "is_gradient_checkpointing", False):
            # The backward pass runs blocks again, when `over` has ended: it must force what the forward pass did.
            hf.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": self._make_contexts})
        batch = make_batch([draw_segments(model)[0]]).to(device)
        with torch.no_grad(), self.recording() as found:
            compute_scores(module, model, batch, layout="padded")
        widths = {chosen.shape[-1] for chosen in found.chosen}
        if len(found.chosen) != len(self.blocks) or len(widths) != 1:
            raise UserError(f"{key}, and the blocks of this model choose {sorted(widths)} experts: leave it out")
        self.k = widths.pop()

    @property
    def experts(self) -> int:
        """Largest number of experts of a block."""
        return max(block.experts for block in self.blocks)

    @contextmanager
    def over(self, now: RoutedPass) -> Generator[None]:
        """Read or force the choices of the forward pass in the body, and of its activations in the backward pass."""
        before, self.now = self.now, now
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def recording(self) -> Generator[Recording]:
        """Record the choices of the forward pass in the body."""
        found = Recording()
        with self.over(RoutedPass(reader=found)):
            yield found

    def _run(self, number: int, run: Callable[..., Any], *args: Any, **given: Any) -> Any:
        now = self.now
        if now is None:
            return run(*args, **given)
        block = self.blocks[number]
        forced = None if now.forced is None else now.forced[:, number].long()
        with ExpertChoice(block.experts, forced) as choice:
            out = run(*args, **given)
        if choice.count != 1:
            raise UserError(
                f"{self.key}, which needs blocks that choose by one top-k over their experts, and {block.name} "
                f"({type(block.module).__name__}) makes {choice.count} such choices: leave it out"
            )
        if now.reader is not None and not self.is_again:
            now.reader.see(number, choice)
        return out

    def _make_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a checkpointed layer: in the forward pass, and when it is computed again."""
        return nullcontext(), self._again(self.now)

    @contextmanager
    def _again(self, now: RoutedPass | None) -> Generator[None]:
        self.is_again = True
        try:
            with nullcontext() if now is None else self.over(now):
                yield
        finally:
            self.is_again = False


def check_mixture(blocks: Sequence[ExpertBlock], who: str, *, key: str) -> None:
    """Raise UserError for a model without blocks of experts. who: the model."""
    if not blocks:
        raise UserError(f"{key}, and {who} has no experts: leave it out")
