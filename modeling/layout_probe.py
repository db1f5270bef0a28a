"""Row layout of a model, measured: the first in which every sequence has the log-probabilities that it has alone.

    shared  packed rows that compute shared prefixes once
    packed  packed rows
    padded  a row per sequence

A few short sequences are scored alone with transformers' plain attention (eager), and then in each layout. A layout
holds if the difference is within the rounding noise of the model, and if NaN in one sequence reaches no other. The
noise is that of the plain attention when the embeddings are changed by a rounding error. So no list of families decides
anything, and a model with code of its own is measured like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from core.errors import UserError, first_line
from core.patches import read_attention
from core.types.samples import Batch
from modeling.attention import BY_SEQUENCE, TAKE_BORDERS, TAKE_SEGMENTS, set_attention
from modeling.forward import forward
from modeling.model_inputs import Layout, lay_out_part
from modeling.paths import PathLayers, find_mixers
from modeling.probe_rows import draw_segments, list_sequences, make_batch, make_shared_batch

Level = Literal["shared", "packed", "padded"]
Setting = Literal["auto", "padded", "packed"]
PLAIN = "eager"
"""Attention of the reference: torch's kernel ignores caps and sinks."""
TIMES_NOISE = 5.0
LEAST_BOUND = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Differences in nats that are never refused. Rounding between the embeddings and the head is not in the noise."""
LARGEST_BOUND = 0.3
"""Differences in nats that are always refused, as of a model whose passes are random."""
NAMES: dict[Level, str] = {
    "shared": "packed rows with shared prefixes",
    "packed": "packed rows",
    "padded": "padded rows",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutProbe:
    """Best layout of a model, and how it was found."""

    level: Level
    attention: str
    """Attention that was measured; with another the probe does not hold."""
    error: float
    """Largest difference of log-probabilities from each sequence alone, in nats; in half precision that of nine tokens
    in ten."""
    bound: float
    by_path: str = ""
    """Layers that run by path (modeling/paths.py), or ""."""
    refuted: tuple[str, ...] = ()
    """Better layouts, each with the reason."""
    seconds: float = 0.0

    def describe(self) -> str:
        """Return the layout and the numbers in a line."""
        parts = [f"{NAMES[self.level]} ({self.attention} attention): log-probabilities as of each sequence alone"]
        parts[0] += f" to {self.error:.0e} (bound {self.bound:.0e}, {self.seconds:.1f} s)"
        return "; ".join([*parts, *([f"by path: {self.by_path}"] if self.by_path else []), *self.refuted])


def layout_for(setting: Setting, model: nn.Module) -> Layout:
    """Choose the layout: packed rows where they are exact."""
    if setting == "auto":
        return "padded" if find_probe(model).level == "padded" else "packed"
    return setting


def can_share_prefixes(model: nn.Module) -> bool:
    """Tell whether packed rows of this model may share prefixes."""
    return read_attention(_config(model)) in TAKE_SEGMENTS and find_probe(model).level == "shared"


def find_probe(model: nn.Module) -> LayoutProbe:
    """Return the probe of a model, measured at the first call, and again if the attention has changed."""
    hf: Any = model
    known: LayoutProbe | None = getattr(hf, "layout_probe", None)
    if known is None or known.attention != read_attention(_config(model)):
        return probe_layout(model, model, device=next(model.parameters()).device)
    return known


def probe_layout(
    module: nn.Module,
    model: nn.Module,
    *,
    device: torch.device | str,
    layout: Setting = "auto",
    agree: Callable[[Tensor], Tensor] = lambda worst: worst,
    key: str = "this model",
    has_images: bool = True,
) -> LayoutProbe:
    """Find the best layout of a model, set the attention accordingly, and keep the result on the model.

    module: the callable (DeepSpeed's engine, or the model itself). layout: only these are tried. agree: largest values
    over all ranks, which all call this together. has_images: as in `draw_segments`. Raises UserError if no layout is
    exact, or not the given one.
    """
    begin = time.monotonic()
    bench = _Bench(module, model, torch.device(device), agree, has_images=has_images)
    with torch.no_grad():
        found = bench.find_first(_list_attempts(read_attention(_config(model)), layout))
    if found is None:
        *others, last = bench.refuted
        where = f"trainer.layout={layout}" if layout != "auto" else f"model.attention={bench.attention}"
        before = f" ({'; '.join(others)})" if others else ""
        raise UserError(
            f"{key}: {last}{before}, so its training would not be that of its sequences: with {where} it cannot be "
            "trained; leave trainer.layout and model.attention at auto, or take another model"
        )
    level, error = found
    probe = LayoutProbe(
        level=level,
        attention=read_attention(_config(model)),
        error=error,
        bound=bench.bound,
        by_path=bench.describe_paths(),
        refuted=tuple(bench.refuted),
        seconds=time.monotonic() - begin,
    )
    hf: Any = model
    hf.layout_probe = probe
    return probe


def set_exact_attention(
    model: nn.Module, *, device: torch.device | str, names: Sequence[str] = ("sdpa", PLAIN)
) -> None:
    """Set the first attention with which padded rows are exact. Raises UserError if there is none."""
    bench = _Bench(model, model, torch.device(device), lambda worst: worst)
    with torch.no_grad():
        if bench.find_first([_Attempt(level="padded", attention=name) for name in names]) is None:
            raise UserError(f"this model: {'; '.join(bench.refuted)}: take another model")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    level: Level
    attention: str
    poisons: bool = True
    """Whether NaN must stay in a sequence. With a dense mask it does not: 0 * NaN is NaN."""


def _list_attempts(attention: str, layout: Setting) -> list[_Attempt]:
    """Return the attempts, best first. Only our own attention may be replaced; another one was chosen by the user."""
    packed: list[_Attempt] = []
    if layout != "padded":
        if attention in TAKE_SEGMENTS:
            packed.append(_Attempt(level="shared", attention=attention))
        if attention in TAKE_BORDERS or layout == "packed":
            packed.append(_Attempt(level="packed", attention=attention, poisons=attention in TAKE_BORDERS))
    if layout == "packed":
        return packed
    names = [BY_SEQUENCE, "sdpa", PLAIN] if attention == BY_SEQUENCE else [attention]
    return [*packed, *(_Attempt(level="padded", attention=name) for name in names)]


class _Bench:
    """Sequences scored alone, and the comparison of layouts with them."""

    def __init__(
        self,
        module: nn.Module,
        model: nn.Module,
        device: torch.device,
        agree: Callable[[Tensor], Tensor],
        *,
        has_images: bool = True,
    ) -> None:
        self.module, self.model, self.device, self.agree = module, model, device, agree
        self.attention = read_attention(_config(model))
        self.segments = draw_segments(model, has_images=has_images)
        self.sequences = list_sequences(self.segments)
        self.paths: PathLayers | None = None
        self.refuted: list[str] = []
        self.dtype = torch.float32
        with torch.no_grad():
            set_attention(model, PLAIN)
            with self._changed_embeddings(self._note_dtype):
                self.alone = torch.cat([self._score(make_batch([s]), "padded") for s in self.sequences])
            with self._changed_embeddings(self._round):
                noise = self._measure(make_batch(self.sequences), "padded")
            set_attention(model, self.attention)
        self.bound = min(max(LEAST_BOUND[self.dtype], TIMES_NOISE * noise), LARGEST_BOUND)

    def find_first(self, attempts: Sequence[_Attempt]) -> tuple[Level, float] | None:
        """Return the first level that holds, and the error; None if there is none."""
        for attempt in attempts:
            error = self._try(attempt)
            is_ours = attempt.attention == BY_SEQUENCE and attempt.level != "padded"
            if error is None and is_ours and self._run_by_path():
                self.refuted.pop()  # it was of the layers as they were
                error = self._try(attempt)
                if error is None and self.paths is not None:
                    self.paths.remove()
                    self.paths = None
            if error is not None:
                return attempt.level, error
        set_attention(self.model, self.attention)
        return None

    def describe_paths(self) -> str:
        return "" if self.paths is None else f"{self.paths.count} x {', '.join(self.paths.names)}"

    def _try(self, attempt: _Attempt) -> float | None:
        """Return the error of a layout that holds; None if it does not, with the reason in `refuted`."""
        batch = make_shared_batch(self.segments) if attempt.level == "shared" else make_batch(self.sequences)
        layout: Layout = "padded" if attempt.level == "padded" else "packed"
        name = f"{NAMES[attempt.level]} ({attempt.attention} attention)"
        try:
            set_attention(self.model, attempt.attention)
        except ValueError as error:  # the model's code has no such attention
            self.refuted.append(f"{name}: {first_line(error)}")
            return None
        try:
            error = self._measure(batch, layout)
            leaks = attempt.poisons and layout == "packed" and self._leaks(batch)
        except Exception as error:  # a border: a model's code may raise anything for rows that it does not know
            self._refuse_sharded(error, name)
            self.refuted.append(f"{name}: {first_line(error)}")
            return None
        if not error <= self.bound:  # also NaN
            self.refuted.append(f"{name} differ by {error:.1e} nats from each sequence alone (bound {self.bound:.0e})")
        elif leaks:
            self.refuted.append(f"{name}: NaN of a sequence reaches another")
        else:
            return error
        return None

    def _refuse_sharded(self, error: Exception, name: str) -> None:
        """Raise UserError if the model is sharded: after an error in the middle of a pass the shards are undefined."""
        if self.module is not self.model or any(hasattr(p, "placements") for p in self.model.parameters()):
            raise UserError(
                f"{name} are not known to this model ({first_line(error)}): set model.attention=eager and "
                "trainer.layout=padded"
            ) from error

    def _score(self, batch: Batch, layout: Layout) -> Tensor:
        return compute_scores(self.module, self.model, batch.to(self.device), layout=layout).float()

    def _measure(self, batch: Batch, layout: Layout) -> float:
        """Return the difference from each sequence alone, the largest over all ranks."""
        apart = (self._score(batch, layout) - self.alone).abs()
        if self.dtype.itemsize < 4 and not apart.isnan().any():
            # In half precision an expert chosen by a hair may change, and with it single tokens by tenths of a nat.
            parts = apart.split([len(s) - 1 for s in self.sequences])
            apart = torch.stack([part.sort().values[len(part) * 9 // 10] for part in parts])
        worst = apart.max()
        return float(self.agree(torch.where(worst.isnan(), torch.inf, worst)))

    def _leaks(self, batch: Batch) -> bool:
        """Tell whether NaN in D and in the first reply reaches another token."""
        poisoned = (batch.segment_ids == 0) | (batch.segment_ids == (2 if (batch.parents >= 0).any() else 1))
        with self._changed_embeddings(lambda x: torch.where(_fit(poisoned, x), torch.nan, x)):
            scores = self._score(batch, "packed")
        # of the second reply and of C; the prefix's own tokens come before the first reply, and are not scored again
        others = sum(len(s) - 1 for s in self.sequences[2:])
        return bool(self.agree(scores[-others:].isnan().any().float()))

    def _run_by_path(self) -> bool:
        """Let the layers that mix sequences run by path; return False if there are none, or they do so already."""
        if self.paths is not None:
            return False
        batch = make_batch(self.sequences)
        first = (batch.segment_ids == 0).to(self.device)
        try:
            mixers = find_mixers(self.model, lambda: self._score(batch, "packed"), first, ~first)
        except Exception as error:  # a border, as above
            self._refuse_sharded(error, NAMES["packed"])
            return False
        if mixers:
            self.paths = PathLayers(mixers)
        return bool(mixers)

    def _note_dtype(self, x: Tensor) -> Tensor:
        """Record the dtype of the passes: FSDP2's parameters have a wider one."""
        self.dtype = x.dtype
        return x

    def _round(self, x: Tensor) -> Tensor:
        """Change hidden states by a rounding error."""
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.device)
        return (x * (1 + noise * torch.finfo(x.dtype).eps / 4)).to(x.dtype)

    @contextmanager
    def _changed_embeddings(self, change: Callable[[Tensor], Tensor]) -> Generator[None]:
        hf: Any = self.model
        # at the output, since some models read the token ids once more in their layers
        hook = hf.get_input_embeddings().register_forward_hook(lambda _module, _args, out: change(out))
        try:
            yield
        finally:
            hook.remove()


def compute_scores(module: nn.Module, model: nn.Module, batch: Batch, *, layout: Layout) -> Tensor:
    """Compute a number per trained token, [M], that depends on all that its position attends to.

    It is the log-probability at temperature 1. A value or reward model has none, and a new one has a head of zeros: the
    softmax is then over the components of the hidden state below its head.
    """
    hf: Any = model
    if hf.get_output_embeddings() is not None:
        return forward(module, model, batch, layout=layout, temperature=1.0).logp
    part = lay_out_part(model, batch, layout, None)
    seen: list[Tensor] = []
    hook = hf.score.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        module(**part.inputs, use_cache=False)
    finally:
        hook.remove()
    [hidden] = seen  # [rows, columns, H]
    chosen = hidden[part.at].float().log_softmax(-1)
    return chosen.gather(-1, (part.labels % chosen.shape[-1])[:, None])[:, 0]


def _fit(mask: Tensor, x: Tensor) -> Tensor:
    return mask.to(x.device)[None, :, None]


def _config(model: nn.Module) -> Any:
    hf: Any = model
    return hf.config.get_text_config()
