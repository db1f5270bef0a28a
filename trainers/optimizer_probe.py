"""Probe of an optimizer that a recipe names by a path: what it computes on a small tensor, before the start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.trainer_schema import TrainerConfig
from core.device import find_device
from core.errors import UserError
from trainers.checkpoint.fsdp2_state import is_saved
from trainers.deepspeed_masters import refuse_offload
from trainers.optimizer import make_optimizer
from trainers.parameter_groups import set_lr

_SHAPE = (64, 256)
"""Shape of the matrix: more numbers than an optimizer may keep in float32, though its states are of eight bits."""
_UPDATES = 3
_LR = 0.1
"""Learning rate: with that of a run, the updates of different rules might differ by less than rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedOptimizer:
    """Properties of an optimizer."""

    is_elementwise: bool
    """True if each number's update depends on its own gradients alone, so that ranks may hold parts of a tensor."""
    keeps_by_shape: bool
    """True if all states are tensors, each a single number or of the parameter's shape."""
    state_bytes: float
    """Bytes of states per parameter."""
    moves_groups: bool
    """True if updates change values of the parameter groups, such as a rate that the optimizer estimates."""
    unsaved: str | None
    """Type of a state that FSDP2's checkpoints would not return as it was; None if there is none."""


def probe_optimizer(cfg: TrainerConfig, *, is_sharded: bool) -> ProbedOptimizer:
    """Run a few updates on a matrix, and on its rows alone. Raises UserError for an optimizer that fails.

    is_sharded: as in `check_optimizer`.
    """
    # ranks on Ray have devices that this process may lack
    device = "cpu" if is_sharded else find_device()
    cfg = cfg.model_copy(update={"lr": _LR})
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.linspace(-2, 3, _SHAPE[0])[:, None]  # rows that differ, as factored states would show
    weight = torch.randn(_SHAPE, generator=generator).to(device)
    gradients = [(torch.randn(_SHAPE, generator=generator) * scales).to(device) for _ in range(_UPDATES)]
    try:
        whole, optimizer = _run_updates(cfg, weight, gradients)
    except UserError:
        raise
    except Exception as error:  # the border to a class of another package, whatever it raises
        raise UserError(f"trainer.optimizer={cfg.optimizer} fails on a matrix of float32: {error}") from error
    try:
        # an optimizer for each row, as each rank has: one may read all tensors that it is given, as for a norm
        rows = [_run_updates(cfg, weight[i], [g[i] for g in gradients])[0] for i in range(len(weight))]
        is_elementwise = torch.allclose(torch.stack(rows), whole, rtol=1e-4, atol=1e-6)
    except Exception:  # one that takes matrices only, such as Muon, cannot update a part
        is_elementwise = False
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if isinstance(value, Tensor)]
    return ProbedOptimizer(
        is_elementwise=is_elementwise,
        keeps_by_shape=len(tensors) == len(states) and all(t.ndim == 0 or t.shape == _SHAPE for t in tensors),
        state_bytes=sum(t.nbytes for t in tensors if t.ndim) / weight.numel(),
        moves_groups=_describe_groups(optimizer) != _describe_groups(make_optimizer(cfg, [weight])),
        unsaved=next((_describe_type(value) for value in states if not is_saved(value)), None),
    )


def check_optimizer(
    cfg: TrainerConfig, *, is_sharded: bool, has_adapter: bool = False, is_cleared: bool = False
) -> None:
    """Raise UserError for an optimizer that cannot run.

    is_sharded: the trainer is on Ray. is_cleared: a teacher's reset clears the optimizer, too.
    """
    if cfg.ema is not None and is_sharded and cfg.strategy == "deepspeed":
        refuse_offload(cfg, "trainer.ema is set")
    if cfg.optimizer == "muon":
        check_muon(cfg, is_sharded=is_sharded, has_adapter=has_adapter)
    if not cfg.is_optimizer_named:
        return
    found = probe_optimizer(cfg, is_sharded=is_sharded)
    if found.moves_groups and is_cleared:
        raise UserError(
            f"trainer.optimizer={cfg.optimizer} keeps numbers in its groups, which reset_optimizer or with_optimizer "
            "of alg would not reset: leave them out, or choose another optimizer"
        )
    if is_sharded and (why := _refuse_on_ray(cfg, found)):
        raise UserError(f"trainer.optimizer={cfg.optimizer} {why}, or backend: local")


def check_muon(cfg: TrainerConfig, *, is_sharded: bool, has_adapter: bool) -> None:
    """Raise UserError if muon cannot run, or has settings that it does not take."""
    if has_adapter:
        raise UserError("trainer.optimizer=muon updates whole matrices, and an adapter has factors: use adamw")
    if is_sharded and cfg.strategy == "deepspeed":
        raise UserError(
            "trainer.optimizer=muon updates whole matrices, and DeepSpeed's ranks hold parts of flattened ones: "
            "set trainer.strategy=fsdp2, or backend=local"
        )
    if unknown := {*cfg.optimizer_settings} - {"momentum"}:
        raise UserError(f"trainer.optimizer_settings has {min(unknown)}, and muon has momentum only: leave it out")
    # refuses a wrong momentum
    make_optimizer(cfg, [torch.zeros(2, 2)])


def _refuse_on_ray(cfg: TrainerConfig, found: ProbedOptimizer) -> str | None:
    """Return why the optimizer cannot run on Ray, and the fix beside `backend: local`; None if it can."""
    if found.moves_groups:
        return "keeps numbers in its groups, which a resumed run on Ray would begin anew: choose another optimizer"
    if cfg.strategy == "fsdp2" and found.unsaved is not None:
        return f"keeps a state of type {found.unsaved}, which FSDP2's checkpoints cannot hold: choose another optimizer"
    # a single rank of FSDP2 has whole tensors; DeepSpeed's optimizers see flattened ones
    if cfg.strategy == "fsdp2" and cfg.ranks == 1:
        return None
    if found.is_elementwise and found.keeps_by_shape:
        return None
    why = "computes a number's update from other numbers of its tensor"
    if found.is_elementwise:
        why = "keeps states of other shapes than the parameter's"
    return (
        f"{why}, and trainer ranks on Ray hold parts of tensors: choose another optimizer, trainer.strategy=fsdp2 with "
        "trainer.ranks=1"
    )


def _run_updates(cfg: TrainerConfig, weight: Tensor, gradients: list[Tensor]) -> tuple[Tensor, torch.optim.Optimizer]:
    """Return the updated weight and the optimizer."""
    weight = weight.clone()
    optimizer = make_optimizer(cfg, [weight])
    for gradient in gradients:
        weight.grad = gradient.clone()
        set_lr(optimizer, cfg.lr)
        optimizer.step()
    return weight, optimizer


def _describe_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """Return the values of the parameter groups as text, but for those that the trainer sets."""
    ours = ("params", "lr")
    return [{key: repr(value) for key, value in group.items() if key not in ours} for group in optimizer.param_groups]


def _describe_type(value: object) -> str:
    return f"{value.dtype} without dimensions" if isinstance(value, Tensor) else type(value).__name__
