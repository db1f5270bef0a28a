"""Collectives of every rank, recorded without the other ranks: torch's fake process group has no peers.

A run with real ranks hangs if two of them disagree about the next collective. `record_ranks` builds the trainer of each
rank in turn, in this process, and `find_disagreement` compares what they called.

As a program it is a rank among real ones, under TORCH_DISTRIBUTED_DEBUG=DETAIL; test_collectives.py starts it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trainers.distributed
from core.cluster.workers import RankInfo
from core.patches import patched
from core.types.samples import Group
from data_feeds.packing.batches import micro_batches
from driver.start.trainers import TrainerPlan, build_trainer
from trainers.trainer import Trainer
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.ray_trainers import SMALL, plan_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A call that every rank of a group must make."""

    name: str
    ranks: tuple[int, ...]
    tensors: tuple[tuple[Any, ...], ...]
    """Dtype and shape of each tensor."""
    numbers: tuple[int, ...]
    """The root of a broadcast, and whether the call waits."""


class Recording(TorchDispatchMode):
    """Record every collective of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and (group := find_group(name, leaves)) is not None:
            self.seen.append(
                Collective(
                    name=name,
                    ranks=tuple(distributed.get_process_group_ranks(group)),
                    tensors=tuple((x.dtype, *x.shape) for x in leaves if isinstance(x, Tensor)),
                    numbers=tuple(x for x in leaves if isinstance(x, int)),
                )
            )
        return func(*args, **(kwargs or {}))


def find_group(name: str, leaves: list[Any]) -> Any:
    """Return the process group among the arguments of a collective; None for a call that is no collective."""
    if name.startswith("_wrap") or "wait" in name:
        return None
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return distributed.ProcessGroup.unbox(leaf)
        if isinstance(leaf, str):
            return distributed.distributed_c10d._resolve_process_group(leaf)
    return None


def find_disagreement(ranks: Sequence[Sequence[Collective]]) -> str | None:
    """Compare the common collectives of every two ranks; None if all are equal, in one order."""
    for a, b in combinations(range(len(ranks)), 2):
        ours, theirs = ([c for c in ranks[at] if {a, b} <= {*c.ranks}] for at in (a, b))
        for i, (x, y) in enumerate(zip_longest(ours, theirs)):
            if x != y:
                return f"call {i} that ranks {a} and {b} make together is {x} and {y}"
    return None


def work(trainer: Trainer, micro: list[Any]) -> None:
    """Do what a trainer does in a step of a run, and before it."""
    columns = {"prox_logp"} | ({"values"} if trainer.critic is not None else set())
    trainer.compute_columns(micro, frozenset(columns))
    trainer.step([micro, micro])
    trainer.measure_loss(micro)
    trainer.probe([30, 31, 32])
    for _ in trainer.export_weights(2**16):
        pass


def batches_of(plan: TrainerPlan, groups: list[Group], rank: int, max_tokens: int = 60) -> list[Any]:
    """Return the micro-batches of a rank; those of a sequence group are the same."""
    cfg = plan.trainer
    per_group = micro_batches(groups, "token", max_tokens, padded=False, ranks=cfg.ranks // cfg.sequence_parallel)
    return per_group[rank // cfg.sequence_parallel]


def record_ranks(
    plan: TrainerPlan, groups: list[Group], *, max_tokens: int = 60, work: Any = work
) -> list[list[Collective]]:
    """Return the collectives of every rank of `plan`, from loading the model to the end of `work`."""
    ranks = range(plan.trainer.ranks)
    return [record_rank(plan, batches_of(plan, groups, rank, max_tokens), rank, work) for rank in ranks]


def record_rank(plan: TrainerPlan, micro: list[Any], rank: int, work: Any) -> list[Collective]:
    # the trainer sets the ranks in the environment, which other tests read
    with mock.patch.dict(os.environ), fake_group(rank, plan.trainer.ranks), Recording() as recording:
        trainer = build_trainer(RankInfo(rank=rank, size=plan.trainer.ranks, address="127.0.0.1", port=1), plan)
        work(trainer, micro)
    return recording.seen


@contextmanager
def fake_group(rank: int, size: int) -> Generator[None]:
    """Be a rank without peers while the body runs: a sum is the own value, and nobody is waited for."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    with ExitStack() as stack:
        stack.callback(distributed.destroy_process_group)
        # such a group has no deadline
        stack.enter_context(patched(trainers.distributed, set_group_timeouts=lambda _: None))
        if (groups := sys.modules.get("deepspeed.utils.groups")) is not None:
            # DeepSpeed keeps its groups for a process's life, and this one is the next rank in a moment
            for module in (groups, sys.modules["deepspeed.comm.comm"]):
                stack.callback(vars(module).update, dict(vars(module)))
        yield


def be_a_rank(rank: int, size: int, port: int, path: str, folder: str) -> None:
    """Be a real rank with ZeRO-3 over gloo: a step, a checkpoint and its resume, and at last a disagreement."""
    plan = plan_of(path, dtype="bfloat16", attention="auto", timeout_s=60.0, ranks=size, zero_stage=3, deepspeed=SMALL)
    trainer = build_trainer(RankInfo(rank=rank, size=size, address="127.0.0.1", port=port), plan)
    micro = batches_of(plan, some_groups(16), rank)
    work(trainer, micro)
    trainer.save_state(Path(folder))
    trainer.step([micro])
    trainer.load_state(Path(folder))
    trainer.step([micro])
    distributed.barrier()
    print("agreed", distributed.get_debug_level(), flush=True)
    try:
        distributed.all_reduce(torch.zeros(1 + (rank == size - 1)))
    except RuntimeError as error:
        print("noticed", "mismatch between collectives" in str(error), flush=True)
    os._exit(0)  # without waiting for ranks that have heard of it before


if __name__ == "__main__":
    torch.set_num_threads(1)
    be_a_rank(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
