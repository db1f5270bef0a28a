"""What this machine has, and what of it each worker gets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from configs.schema import RLConfig, RunConfig
from core.workers import Place, Resources

if TYPE_CHECKING:
    pass


def gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def cores_of(place: Place | None) -> list[int]:
    """The CPU cores of one of several engines on this machine; all of them for a single one."""
    cores = sorted(os.sched_getaffinity(0))
    if place is None or place.size > len(cores):
        return cores
    return cores[place.rank * len(cores) // place.size : (place.rank + 1) * len(cores) // place.size]


def on_gpu(cfg: RunConfig) -> bool:
    """Do trainers and engines get GPUs? With device=cuda a driver without one may start them on a cluster's."""
    return cfg.device == "cuda" or gpus_here() > 0


def _share(cfg: RunConfig, workers: int, *, gpus: int) -> Resources:
    """What one of several equal workers gets: GPUs of its own, or on a CPU a share of its cores."""
    if on_gpu(cfg):
        return Resources(gpus=gpus)
    return Resources(threads=max(1, (os.cpu_count() or 1) // workers))


def check_devices(cfg: RunConfig) -> str | None:
    """What this machine lacks for the run, in one sentence; None if it has it all."""
    rollout = cfg.rollout if isinstance(cfg, RLConfig) else None
    engines = rollout.engines * rollout.tensor_parallel if rollout else 0
    wanted = cfg.trainer.ranks + engines
    gpus, cores = gpus_here(), os.cpu_count() or 1
    if isinstance(cfg, RLConfig) and cfg.weight_sync.transport == "nccl" and not on_gpu(cfg):
        return "weight_sync.transport is nccl, and trainers and engines get no GPUs: set it to auto, or device=cuda"
    if cfg.ray_address is not None:
        return None  # Ray knows what the cluster has, and waits for it no longer than timeout_s
    if cfg.backend == "local":
        return (
            "device is cuda, and this machine has no GPU: set device=auto"
            if cfg.device == "cuda" and not gpus
            else None
        )
    if on_gpu(cfg) and wanted > gpus:
        return (
            f"{cfg.trainer.ranks} trainer ranks and {engines} engine ranks want {wanted} GPUs, and this machine has "
            f"{gpus}: lower trainer.ranks, rollout.engines or rollout.tensor_parallel"
        )
    if not on_gpu(cfg) and max(cfg.trainer.ranks, engines) > cores:
        return (
            f"{cfg.trainer.ranks} trainer ranks and {engines} engine ranks are more than this machine's {cores} CPU "
            "cores: lower trainer.ranks, rollout.engines or rollout.tensor_parallel"
        )
    return None
