"""GPUs and CPU cores of this machine, and the share of each worker."""

from __future__ import annotations

import os
from collections.abc import Sequence

from configs.eval_schema import EvalConfig
from configs.rollout_schema import RolloutConfig
from configs.schema import RLConfig, RunConfig
from core.cluster.capacity import Resources
from core.cluster.machine_check import describe_torch
from core.cluster.workers import RankInfo
from core.gpu_checks import Use, refuse_run
from core.gpus import find_gpus
from core.timing.deadlines import GPU_CHECK_TIMEOUT_S

CPU_CACHE_GIB = 1.0
"""Size of vLLM's KV cache on a CPU, unless a recipe sets another."""


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def list_cores(info: RankInfo | None) -> list[int]:
    """Return the CPU cores of an engine: an equal share of this machine, or all cores for a single engine."""
    # The cores that this process may use: in a container or a job, fewer than the machine has.
    cores = sorted(os.sched_getaffinity(0))
    if info is None or info.size > len(cores):
        return cores
    return cores[info.rank * len(cores) // info.size : (info.rank + 1) * len(cores) // info.size]


def uses_gpus(cfg: RunConfig | EvalConfig) -> bool:
    """Return True if trainers and engines use GPUs. With device=cuda the driver's machine may have none."""
    return cfg.device == "cuda" or count_gpus() > 0


def find_cache_gib(cfg: RLConfig | EvalConfig) -> float | None:
    """Return the size of vLLM's KV cache; None for the part of a GPU that rollout.gpu_memory_utilization leaves."""
    return cfg.rollout.kv_cache_gib if uses_gpus(cfg) else find_cpu_cache_gib(cfg.rollout)


def find_cpu_cache_gib(rollout: RolloutConfig) -> float:
    return CPU_CACHE_GIB if rollout.kv_cache_gib is None else rollout.kv_cache_gib


def share_machine(cfg: RunConfig | EvalConfig, workers: int, *, gpus: int) -> Resources:
    """Return the resources of a worker: separate GPUs, or on a CPU an equal share of the cores.

    gpus: number of ranks of the worker, each with a GPU.
    """
    if uses_gpus(cfg):
        return Resources(gpus=gpus, ranks=gpus)
    return Resources(threads=max(1, (os.cpu_count() or 1) // workers), ranks=gpus)


def shares_devices(cfg: RunConfig | EvalConfig) -> bool:
    """Return True if trainers and engines are colocated on the same devices."""
    return isinstance(cfg, RLConfig) and cfg.placement == "colocate"


def share_devices(of_ranks: Sequence[str], *, per_engine: int) -> tuple[str, ...]:
    """Return the GPUs of every engine, from those of the trainer ranks; nothing on a CPU.

    >>> share_devices(["0", "1", "2", "3"], per_engine=2)
    ('0,1', '2,3')
    >>> share_devices(["", ""], per_engine=1)
    ()
    """
    if not any(of_ranks):
        return ()
    return tuple(",".join(of_ranks[i : i + per_engine]) for i in range(0, len(of_ranks), per_engine))


def judge_takes_turns(cfg: RunConfig | EvalConfig) -> bool:
    """Return True if the judge's own engines share the devices of trainers and engines."""
    judge = cfg.judge if isinstance(cfg, RLConfig) else None
    return shares_devices(cfg) and judge is not None and not judge.is_policy and judge.placement != "separate"


def plan_gpu_use(cfg: RunConfig | EvalConfig) -> Use:
    """Return the use of GPUs that a run intends, with this process's torch."""
    rollout = cfg.rollout if isinstance(cfg, RLConfig | EvalConfig) else None
    on_vllm = rollout is not None and rollout.engine.startswith("vllm") and cfg.backend == "ray"
    return Use(
        **describe_torch(),
        bfloat16=cfg.model.dtype == "bfloat16",
        triton=on_vllm,
        ranks=count_ranks(cfg),
        engine_share=rollout.gpu_memory_utilization if rollout and on_vllm else None,
        colocate=shares_devices(cfg),
        quantization=rollout.quantization if rollout and on_vllm else None,
    )


def check_gpus(cfg: RunConfig | EvalConfig) -> str | None:
    """Return an error sentence if this run cannot use this machine's GPUs, or None. A machine without any is fine."""
    return refuse_run(find_gpus(timeout_s=GPU_CHECK_TIMEOUT_S), plan_gpu_use(cfg)) or None


def count_engine_ranks(cfg: RunConfig | EvalConfig) -> int:
    """Return the number of ranks of all engines, at least; 0 without engines."""
    rollout = cfg.rollout if isinstance(cfg, RLConfig | EvalConfig) else None
    # the devices of rollout.servers are not the run's
    return rollout.least_engines * rollout.tensor_parallel_size if rollout and not rollout.servers else 0


def count_judge_ranks(cfg: RunConfig | EvalConfig) -> int:
    """Return the number of ranks of the judge's own engines that share no device."""
    judge = cfg.judge if isinstance(cfg, RLConfig) else None
    if judge is None or judge.is_policy or judge_takes_turns(cfg):
        return 0
    return judge.num_engines * judge.tensor_parallel_size


def count_ranks(cfg: RunConfig | EvalConfig) -> int:
    """Return the number of ranks with a device of their own: those of trainers, and of engines that share none."""
    engines = count_engine_ranks(cfg)
    if isinstance(cfg, EvalConfig):
        return engines
    # Colocated engines use the trainers' devices.
    return cfg.trainer.ranks + (0 if shares_devices(cfg) else engines) + count_judge_ranks(cfg)


def advise_fewer_gpus(cfg: RunConfig | EvalConfig, gpus: int) -> str:
    """Return the keys that make a run fit on this machine's GPUs, without those that are as low as they can be."""
    ways: list[str] = []
    ranks = {} if isinstance(cfg, EvalConfig) else {"trainer.ranks": cfg.trainer.ranks}
    if isinstance(cfg, RLConfig | EvalConfig):
        engines, parallel = cfg.rollout.least_engines, cfg.rollout.tensor_parallel_size
        ranks |= {"rollout.num_engines": engines, "rollout.tensor_parallel_size": parallel}
        ranks |= {"judge's engines (judge.num_engines)": count_judge_ranks(cfg)}
        if shares_devices(cfg) and count_judge_ranks(cfg):
            ways.append("leave judge.placement out")
        if isinstance(cfg, RLConfig) and max(cfg.trainer.ranks, engines * parallel) + count_judge_ranks(cfg) <= gpus:
            ways.append("set placement=colocate")
    if lower := [key for key, value in ranks.items() if value > 1]:
        ways.append(f"lower {' or '.join([', '.join(lower[:-1]), lower[-1]][len(lower) == 1 :])}")
    return ", or ".join(ways) or "set device=auto"


def check_devices(cfg: RunConfig) -> str | None:
    """Return an error sentence if this machine lacks devices for the run, or None."""
    engines, wanted = count_engine_ranks(cfg), count_ranks(cfg)
    gpus, cores = count_gpus(), os.cpu_count() or 1
    if isinstance(cfg, RLConfig) and cfg.weight_sync.transport == "nccl" and not uses_gpus(cfg):
        return "weight_sync.transport is nccl, and trainers and engines get no GPUs: set it to auto, or device=cuda"
    if cfg.ray_address is not None:
        return None  # core/cluster/placement.py and machine_check.py ask the cluster
    if refused := check_gpus(cfg):
        return refused
    if cfg.backend == "local":
        return (
            "device is cuda, and this machine has no GPU: set device=auto"
            if cfg.device == "cuda" and not gpus
            else None
        )
    if uses_gpus(cfg) and wanted > gpus:
        both = "share" if shares_devices(cfg) else "want"
        judge = f" and {n} judge ranks" if (n := count_judge_ranks(cfg)) else ""
        return (
            f"{cfg.trainer.ranks} trainer ranks and {engines} engine ranks{judge} {both} {wanted} GPUs, and this "
            f"machine has {gpus}: {advise_fewer_gpus(cfg, gpus)}"
        )
    # Trainers and engines share a CPU's cores, so the larger number counts.
    if not uses_gpus(cfg) and max(cfg.trainer.ranks, engines) > cores:
        return (
            f"{cfg.trainer.ranks} trainer ranks and {engines} engine ranks are more than this machine's {cores} CPU "
            "cores: lower trainer.ranks, rollout.num_engines or rollout.tensor_parallel_size"
        )
    return None
