"""From a configuration to the objects of a run: the only factory. What is built where is decided here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algs import load_algorithm
from configs.schema import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from core.cluster import Cluster, Local, Place, Remote, Resources, Workers
from core.errors import UserError
from core.loading import FileSpec, load_module, resolve
from core.types import Prompt
from data_feeds.tokenizer import ChatTokenizer
from rewards import resolve_reward
from rollouts.engine import Engine
from rollouts.envs import ENVIRONMENTS, Env
from rollouts.publish import LocalSync, Probe, RemoteSync, WeightSync
from rollouts.transports import GRACE_S, Ends, Parcels, Stream, Transport, TransportName
from trainers.weights import Part

if TYPE_CHECKING:
    from trainers.step import Settings


OUR_ENGINES = ["hf", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """All a trainer process needs to know; it loads the algorithm's file itself and checks its hash."""

    model: ModelConfig
    trainer: TrainerConfig
    alg_spec: FileSpec
    alg: dict[str, Any]
    temperature: float
    total_updates: int
    seed: int
    sources: tuple[str, ...] = ()
    reference_ahead: bool = False
    timeout_s: float = 1800.0
    """Deadline of the ranks' collectives."""


def gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


if gpus_here() == 0:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed looks for one, and warns


def build_trainer(place: Place | None, plan: TrainerPlan) -> Any:
    """A DeepSpeed rank at its place; without a place, the reference trainer in this process."""
    import torch

    alg = load_algorithm(plan.alg_spec, plan.alg)
    torch.manual_seed(plan.seed)
    settings: Settings = {
        "temperature": plan.temperature,
        "total_updates": plan.total_updates,
        "sources": plan.sources,
        "reference_ahead": plan.reference_ahead,
    }
    if place is None:
        from trainers.reference import ReferenceTrainer

        return ReferenceTrainer(plan.model, plan.trainer, alg, **settings)
    from trainers.deepspeed import DeepSpeedTrainer

    os.environ |= {
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": "0",  # Ray shows each actor its own device only
    }
    return DeepSpeedTrainer(plan.model, plan.trainer, alg, timeout_s=plan.timeout_s, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """All a rollout worker needs to know; it loads reward, environment and engine itself and checks their hashes."""

    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    reward_spec: FileSpec
    env_spec: FileSpec | None
    engine_spec: FileSpec | None
    max_model_len: int
    seed: int
    timeout_s: float
    over_nccl: bool
    """How the weights come; decided once, for trainer and engines."""
    lora: LoraConfig | None
    """The adapter that comes instead of weights, beside those of the model's folder; None where weights come."""


def build_worker(place: Place | None, plan: RolloutPlan) -> Any:
    """A rollout worker with its engine; without a place, everything is in this process."""
    from rewards.pool import RewardPool
    from rollouts.worker import RolloutWorker

    tokenizer = ChatTokenizer(plan.model.path, plan.data.template)
    return RolloutWorker(
        build_engine(place, plan, tokenizer.stop_token_ids),
        tokenizer,
        environment_of(plan.env_spec, plan.rollout.env),
        RewardPool(plan.reward_spec, plan.reward.settings, plan.reward.workers, plan.reward.timeout_s),
        reward=plan.reward,
        rollout=plan.rollout,
        seed=plan.seed,
    )


def build_engine(place: Place | None, plan: RolloutPlan, stop_token_ids: list[int]) -> Engine:
    rollout = plan.rollout
    common: dict[str, Any] = {
        "model_path": plan.model.path,
        "dtype": plan.model.dtype,
        "temperature": rollout.temperature,
        "stop_token_ids": stop_token_ids,
        "timeout_s": plan.timeout_s,
        "update": rollout.update,
    }
    if plan.engine_spec is not None:
        return engine_class_of(plan.engine_spec)(**common)
    if rollout.engine == "hf":
        from rollouts.hf_engine import HfEngine

        return HfEngine(**common)
    from rollouts.vllm_engine import LocalVllmEngine, VllmEngine
    from trainers.lora import with_named_targets

    return (LocalVllmEngine if place is None else partial(VllmEngine, over_nccl=plan.over_nccl))(
        **common,
        max_model_len=plan.max_model_len,
        tensor_parallel=rollout.tensor_parallel,
        cores=cores_of(place),
        seed=plan.seed,
        kv_cache_gib=rollout.kv_cache_gib if gpus_here() == 0 else None,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        load_format="dummy" if plan.lora is None else "auto",  # the first publish brings the weights
        lora=plan.lora and with_named_targets(plan.lora, plan.model.path),
    )


def engine_class_of(spec: FileSpec | None) -> Any:
    """The class `Engine` of a file of the user's; None for one of ours."""
    if spec is None:
        return None
    module = load_module(spec)
    if not hasattr(module, "Engine"):
        raise UserError(f"rollout.engine={spec.path} defines no class Engine")
    return module.Engine


def cores_of(place: Place | None) -> list[int]:
    """The CPU cores of one of several engines on this machine; all of them for a single one."""
    cores = sorted(os.sched_getaffinity(0))
    if place is None or place.size > len(cores):
        return cores
    return cores[place.rank * len(cores) // place.size : (place.rank + 1) * len(cores) // place.size]


def environment_of(spec: FileSpec | None, name: str) -> Callable[[Prompt], Env]:
    if spec is None:
        return ENVIRONMENTS[name]
    module = load_module(spec)
    if not hasattr(module, "Environment"):
        raise UserError(f"rollout.env={name} defines no class Environment")
    return module.Environment


def by_path(name: str, known: list[str], *, key: str) -> FileSpec | None:
    """None for one of ours, the file for somebody else's."""
    if name in known:
        return None
    if not name.endswith(".py"):
        raise UserError(f"{key}={name!r} is neither one of {', '.join(known)} nor the path of a Python file")
    return resolve(name, "rollouts", key=key)


def plan_rollouts(cfg: RLConfig) -> RolloutPlan:
    return RolloutPlan(
        model=cfg.model,
        data=cfg.data,
        rollout=cfg.rollout,
        reward=cfg.reward,
        reward_spec=resolve_reward(cfg.reward.fn, key="reward.fn"),
        env_spec=by_path(cfg.rollout.env, sorted(ENVIRONMENTS), key="rollout.env"),
        engine_spec=by_path(cfg.rollout.engine, OUR_ENGINES, key="rollout.engine"),
        max_model_len=cfg.longest,
        seed=cfg.seed,
        timeout_s=cfg.weight_sync.timeout_s,
        over_nccl=transports_of(cfg)[0] == "nccl",
        lora=cfg.model.lora if cfg.weight_sync.lora == "adapter" else None,
    )


def on_gpu(cfg: RunConfig) -> bool:
    """Do trainers and engines get GPUs? With device=cuda a driver without one may start them on a cluster's."""
    return cfg.device == "cuda" or gpus_here() > 0


def transports_of(cfg: RLConfig) -> list[TransportName]:
    """What weights go over, and what a synchronous run may fall back to, in this order.

    From GPU to GPU where there are any, but over gloo to the hf engine and to engines of one's own.
    """
    engine = engine_class_of(by_path(cfg.rollout.engine, OUR_ENGINES, key="rollout.engine"))
    is_fed = engine is None or hasattr(engine, "feed")
    if (chosen := cfg.weight_sync.transport) == "auto":
        first = "nccl" if cfg.rollout.engine == "vllm" and on_gpu(cfg) else "gloo"
        return [first, "direct", "disk"] if is_fed else [first]
    if chosen in ("direct", "disk") and not is_fed:
        raise UserError(
            f"weight_sync.transport is {chosen}, and the Engine of rollout.engine={cfg.rollout.engine} has no method "
            "feed: add it and open_feed, as in rollouts/hf_engine.py, or set the transport to auto"
        )
    return [chosen]


def plan_trainer(
    cfg: RunConfig,
    alg_spec: FileSpec,
    *,
    temperature: float,
    total_updates: int,
    sources: tuple[str, ...] = (),
    reference_ahead: bool = False,
) -> TrainerPlan:
    return TrainerPlan(
        model=cfg.model,
        trainer=cfg.trainer,
        alg_spec=alg_spec,
        alg=cfg.alg,
        temperature=temperature,
        total_updates=total_updates,
        seed=cfg.seed,
        sources=sources,
        reference_ahead=reference_ahead,
        timeout_s=cfg.timeout_s,
    )


async def start_trainers(cluster: Cluster | None, cfg: RunConfig, plan: TrainerPlan) -> Workers:
    if cluster is None:
        return Local(build_trainer(None, plan))
    ranks = cfg.trainer.ranks
    resources = _share(cfg, ranks, gpus=1)
    return await cluster.spawn("trainer", ranks, build_trainer, plan, resources=resources, timeout_s=cfg.timeout_s)


async def start_rollouts(cluster: Cluster | None, cfg: RLConfig, plan: RolloutPlan) -> Workers:
    if cluster is None:
        return Local(build_worker(None, plan))
    engines = cfg.rollout.engines
    resources = _share(cfg, engines, gpus=cfg.rollout.tensor_parallel)
    return await cluster.spawn("engine", engines, build_worker, plan, resources=resources, timeout_s=cfg.timeout_s)


def _share(cfg: RunConfig, workers: int, *, gpus: int) -> Resources:
    """What one of several equal workers gets: GPUs of its own, or on a CPU a share of its cores."""
    if on_gpu(cfg):
        return Resources(gpus=gpus)
    return Resources(threads=max(1, (os.cpu_count() or 1) // workers))


def weight_sync_of(
    cfg: RLConfig,
    trainers: Workers,
    rollouts: Workers,
    probe_ids: list[int],
    *,
    say: Callable[[str], None],
    facts: dict[str, Any],
    folder: Path,
) -> WeightSync:
    """say: tells the user that another transport is used; facts: gets the name of the last one.
    folder: of the run, where weights may lie for a moment."""
    bound = cfg.weight_sync.probe_tolerance or (0.002 if cfg.model.dtype == "float32" else 0.1)
    probe = Probe(token_ids=probe_ids, bound=bound)
    max_bytes = cfg.weight_sync.bucket_mib * 2**20
    part: Part = "adapter" if cfg.weight_sync.lora == "adapter" else "whole"
    if isinstance(trainers, Local) and isinstance(rollouts, Local):
        return LocalSync(trainers, rollouts, probe, max_bytes, part)
    assert isinstance(trainers, Remote) and isinstance(rollouts, Remote)
    deadline_s, key = cfg.weight_sync.timeout_s + GRACE_S, "weight_sync.timeout_s"
    ends = Ends(
        trainers=trainers.within(deadline_s, key=key),
        engines=rollouts.within(deadline_s, key=key),
        ranks_per_engine=cfg.rollout.tensor_parallel,
        max_bytes=max_bytes,
        part=part,
        timeout_s=cfg.weight_sync.timeout_s,
    )
    return RemoteSync(
        ends=ends,
        rollouts=rollouts,
        probe=probe,
        transports=[transport_of(name, ends, folder) for name in transports_of(cfg)],
        may_fall_back=cfg.max_lag == 0,
        say=say,
        facts=facts,
    )


def transport_of(name: TransportName, ends: Ends, folder: Path) -> Transport:
    if name in ("nccl", "gloo"):
        return Stream(name, ends)
    return Parcels(name, ends, folder / "weights" if name == "disk" else None)


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
