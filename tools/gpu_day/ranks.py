"""Rows of a GPU day for one rank of each sharding library, over NCCL on a GPU and over gloo on a CPU.

A rank trains beside the local trainer, is offloaded and reloaded as with `placement: colocate`, and goes on from its
checkpoint in a second trainer.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from algs.sft import SFT
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.cluster.addresses import listen_at
from tools.gpu_day.bench import BOUND, Bench, compare, make_batches
from tools.gpu_day.rows import CheckFailed, Numbers
from trainers.distributed import DistributedTrainer
from trainers.local import LocalTrainer
from trainers.offload.offloaded_trainer import OffloadedTrainer
from trainers.trainer import Trainer

WAYS: dict[str, dict[str, Any]] = {
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2 offload": {"strategy": "fsdp2", "offload": True},
}
"""Keys of the trainer, by the row's name."""
LOSS_BOUND = 2e-3
"""Largest difference of a loss in bfloat16, as a share of the other trainer's, after updates that round differently."""
UPDATES = 3
TIMEOUT_S = 60.0


def check_rank(bench: Bench, way: str) -> Numbers:
    """Compare one rank with the local trainer; offload and reload it; resume in another trainer."""
    become_a_rank()
    path, batches = bench.make_model("bfloat16"), make_batches(70, padded=False)
    local, rank = make_local(path), make_rank(path, way)
    start = local.flatten_weights()
    losses = [(local.step([batches])["loss"], rank.step([batches])["loss"]) for _ in range(UPDATES)]
    found: Numbers = {"backend": str(torch.distributed.get_backend()), "device": rank.device}
    found |= {"lacks": lack} if (lack := stand_in_for_old_torch()) else {}
    found["losses, % from the local trainer"] = max(compare_losses(way, *pair) for pair in losses)
    trained, bound = local.flatten_weights() - start, BOUND["bfloat16"]
    gap = compare(f"{UPDATES} updates of {way}", rank.flatten_weights() - start, trained, bound)
    found["updates, % from the local trainer"] = 100 * gap
    state = copy_state(rank)
    if not rank.cfg.offload:  # with it, colocation is refused
        found["freed, MiB"] = leave_and_return(rank) / 2**20
        refuse_other_state(f"{way}: after leave and return", copy_state(rank), state)
    folder = bench.folder / f"checkpoint {way}"
    folder.mkdir()
    rank.save_state(folder)
    resumed = make_rank(path, way)
    resumed.load_state(folder)
    refuse_other_state(f"{way}: after resume", copy_state(resumed), state)
    wrong = [name for name, x in state.items() if name.startswith("state") and x.dim() and not x.any()]
    if wrong or len(state) < 3:
        raise CheckFailed(f"{way}: of the optimizer {len(state)} tensors are kept, and these are zero: {wrong}")
    found["tensors equal after resume"] = len(state)
    pairs = [(rank.step([batches])["loss"], resumed.step([batches])["loss"]) for _ in range(2)]
    found["losses, % apart after resume"] = max(compare_losses(f"{way}, resumed", *pair) for pair in pairs)
    torch.distributed.destroy_process_group()
    return found


def become_a_rank() -> None:
    """Set the environment of the only rank of a group on this machine."""
    with listen_at("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def make_local(path: str) -> Trainer:
    return LocalTrainer(*make_settings(path, {}), temperature=0.9, total_updates=10)


def make_rank(path: str, way: str) -> DistributedTrainer:
    torch.manual_seed(0)
    # imported here: DeepSpeed may be missing
    if WAYS[way].get("strategy") == "fsdp2":
        from trainers.fsdp2 import FsdpTrainer as Library

        stand_in_for_old_torch()
    else:
        from trainers.deepspeed import DeepSpeedTrainer as Library
    return Library(*make_settings(path, WAYS[way]), timeout_s=TIMEOUT_S, temperature=0.9, total_updates=10)


def make_settings(path: str, keys: dict[str, Any]) -> tuple[ModelConfig, TrainerConfig, SFT]:
    model = ModelConfig.model_validate({"path": path, "dtype": "bfloat16"})
    return model, TrainerConfig.model_validate({"lr": 1e-3} | keys), SFT()


def stand_in_for_old_torch() -> str:
    """Give FSDP2 of torch before 2.13 a call that one rank can do without; return a sentence if it lacked it."""
    from torch.distributed.fsdp import FSDPModule

    own: Any = FSDPModule
    name = "set_reduce_scatter_unused_params"
    if not hasattr(own, name):
        setattr(own, name, _nobody_waits)
    return f"torch {torch.__version__} has no {name}" if getattr(own, name) is _nobody_waits else ""


def _nobody_waits(*_: Any, **__: Any) -> None:
    """Do nothing: of several ranks one would wait for a rank without rows of some unit."""


def compare_losses(what: str, want: float, got: float) -> float:
    """Return the difference in percent. Raises CheckFailed above LOSS_BOUND."""
    gap = abs(got - want) / abs(want)
    if not gap <= LOSS_BOUND:
        raise CheckFailed(f"{what}: the loss is {got:.6g} where {want:.6g} is expected, within {LOSS_BOUND:.1%}")
    return 100 * gap


def copy_state(trainer: Trainer) -> dict[str, Tensor]:
    """Return a copy of the training state on the CPU: exported weights, master weights and moments."""
    learner: Any = trainer.policy
    # DeepSpeed wraps torch's optimizer
    optimizer = getattr(learner.optimizer, "optimizer", learner.optimizer)
    # in this order, since a resume fills the states in another one; ZeRO-3 takes its parameters out of the groups
    listed = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    found = {"weights": trainer.flatten_weights()}
    for i, held in enumerate(listed or optimizer.state):
        found[f"master {i}"] = held.detach().float().cpu().clone()
        for kind, value in optimizer.state[held].items():
            if isinstance(value, Tensor):
                found[f"state {kind} {i}"] = value.detach().float().cpu().clone()
    return found


def refuse_other_state(what: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Raise CheckFailed unless the states are equal to the bit."""
    if got.keys() != want.keys():
        raise CheckFailed(f"{what} the optimizer holds {len(got)} tensors, and {len(want)} are expected")
    if changed := [name for name in want if not torch.equal(got[name], want[name])]:
        raise CheckFailed(f"{what} {len(changed)} of {len(want)} tensors have changed, such as {changed[0]}")


def leave_and_return(trainer: Trainer) -> int:
    """Offload a trainer and reload it, as in a step of a colocated run; return the freed bytes."""
    away = OffloadedTrainer(trainer)
    freed = away.offload_states() + away.offload_weights()
    away.reload_states()
    if not freed:
        raise CheckFailed("a trainer that leaves frees no memory")
    return freed
