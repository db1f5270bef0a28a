"""Build rollout workers and their engines from a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.data_schema import DataConfig
from configs.rollout_schema import RewardConfig, RolloutConfig
from configs.schema import RLConfig
from configs.trainer_schema import LoraConfig, ModelConfig
from core.loading import FileSpec
from core.ray_cluster import Cluster
from core.workers import Local, Place, Workers
from data_feeds.tokenizer import ChatTokenizer
from rewards import resolve_reward
from rollouts.engines.base import Engine
from rollouts.envs import ENVIRONMENTS

if TYPE_CHECKING:
    pass

from driver.devices import _share, cores_of, gpus_here
from driver.weight_sync_factory import transports_of
from rollouts.registry import OUR_ENGINES, by_path, engine_class_of, environment_of


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
        from rollouts.engines.hf import HfEngine

        return HfEngine(**common)
    from modeling.lora import with_named_targets
    from rollouts.engines.vllm import VllmEngine
    from rollouts.engines.vllm_common import VllmConfig
    from rollouts.engines.vllm_local import LocalVllmEngine

    config = VllmConfig(
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
    return LocalVllmEngine(config) if place is None else VllmEngine(config, over_nccl=plan.over_nccl)


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


async def start_rollouts(cluster: Cluster | None, cfg: RLConfig, plan: RolloutPlan) -> Workers:
    if cluster is None:
        return Local(build_worker(None, plan))
    engines = cfg.rollout.engines
    resources = _share(cfg, engines, gpus=cfg.rollout.tensor_parallel)
    return await cluster.spawn("engine", engines, build_worker, plan, resources=resources, timeout_s=cfg.timeout_s)
