"""Keys of `reward`, `rollout` and `weight_sync`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from core.strict_model import Seconds, StrictModel


class RewardConfig(StrictModel):
    """Keys of `reward`."""

    fn: str
    """Reward function: a module of rewards/, or the path of a Python file with a function `score(prompt, messages)`."""
    weights: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field({"correct": 1.0}, min_length=1)
    """Weights of the parts that `fn` returns: the reward is the sum of weight x part. Every part is logged."""
    settings: dict[str, Any] = Field({})
    """Arguments passed to `score` by name, such as the path of a reward model."""
    workers: int = Field(2, ge=1)
    """Number of reward processes per engine. If one hangs or dies, only its own sample fails."""
    timeout_s: Seconds = 20.0
    """Deadline of the reward of one sample, in seconds. A sample without a reward has failed."""
    max_failed_fraction: float = Field(0.1, ge=0, le=1)
    """Largest fraction of a step's samples that may fail; above it the run stops."""


class RolloutConfig(StrictModel):
    """Keys of `rollout`."""

    engine: str = "vllm"
    """Engine: vllm, hf, or the path of a Python file with one subclass of rollouts.engines.base.Engine."""
    env: str = "single_turn"
    """Environment: a module of rollouts/envs/, or the path of a Python file with one subclass of
    rollouts.envs.base.Env."""
    engines: int = Field(1, ge=1)
    """Number of engines. Each has a process and a copy of the weights."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs (on a CPU: processes) per engine."""
    restarts: int = Field(3, ge=0)
    """Largest number of times that an engine which died is restarted, over all engines of a run. Its unfinished groups
    are generated again, by the others or by the engine itself when it has the current weights. 0: its death ends the
    run."""
    temperature: float = Field(1.0, ge=0.01, le=100)
    """Sampling temperature. top-p, top-k and min-p are not offered: they renormalise the sampling distribution on a
    subset of the vocabulary, and the trainer's log-probabilities would silently be those of another policy."""
    max_new_tokens: int = Field(256, ge=1)
    """Token budget of one episode, over all its turns, the environment's turns included."""
    max_turns: int = Field(1, ge=1)
    """Largest number of replies of the policy in one episode."""
    timeout_s: Seconds = 900.0
    """Deadline of one group, in seconds. A late group is retried once, on another engine if there is one, then the run
    stops."""
    enforce_eager: bool = False
    """Run vLLM without CUDA graphs; always so on a CPU."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """Size of vLLM's KV cache on a CPU, in GiB."""
    gpu_memory_utilization: float = Field(0.85, gt=0, lt=1)
    """Fraction of a GPU's memory that vLLM may use."""


RequestMode = Literal["keep", "wait", "abort"]


class WeightSyncConfig(StrictModel):
    """Keys of `weight_sync`."""

    every: int = Field(1, ge=1)
    """Largest number of steps between two weight syncs."""
    max_kl: float | None = Field(None, gt=0)
    """Bound of train/mismatch/kl: a step above it syncs weights at once, before `every` steps are over."""
    requests: RequestMode = "keep"
    """What happens to running requests during a weight sync. keep: they are paused, and continue under the new
    weights with their KV cache recomputed. wait: they finish first (within timeout_s), while new ones wait. abort: they
    are aborted, and continued from the tokens already sampled. Every token carries the version that sampled it."""
    transport: Literal["auto", "nccl", "gloo", "direct", "disk"] = "auto"
    """Transport of the weights. nccl, gloo: trainer rank 0 broadcasts, from GPU to GPU or over TCP. direct: buckets
    through Ray's object store. disk: files below the run folder, which all machines must share. auto: nccl for vLLM on
    GPUs, else gloo; in synchronous runs a transport that fails is replaced by direct, and that by disk, for the rest of
    the run."""
    bucket_mib: int = Field(64, ge=1)
    """Size of a bucket, in MiB. Weights are gathered and sent in buckets; a larger single tensor is its own bucket."""
    timeout_s: Seconds = 300.0
    """Deadline of each step of a sync, in seconds: forming the group, sending, probing."""
    lora: Literal["merged", "adapter"] = "merged"
    """Weights that are sent of a LoRA model: all weights with the adapter merged in, or the adapter alone."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean absolute difference allowed between the trainer's and an engine's log-probabilities of a probe
    prompt after a sync. Unset: 0.002 in float32, 0.1 in bfloat16."""
