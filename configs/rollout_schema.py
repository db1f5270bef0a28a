"""Keys of `reward`, `rollout` and `weight_sync`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from core.section import Section


class RewardConfig(Section):
    fn: str
    """A module of rewards/, or the path of a Python file with a function `score(prompt, messages)`."""
    weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field({"correct": 1.0}, min_length=1)
    """Reward = sum of weight x part, over the parts that `fn` returns. Every part is logged, weighted or not."""
    settings: dict[str, Any] = Field({})
    """Passed to `score` by name, such as the path of a reward model."""
    workers: int = Field(2, ge=1)
    """Processes per rollout worker that score; one that hangs or dies costs its sample only."""
    timeout_s: float = Field(20.0, gt=0)
    """Seconds that the reward of one sample may take; a sample without one is failed."""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """The run stops when more of a step's samples than this have no reward because it failed."""


UpdateMode = Literal["in_flight", "drain", "abort"]


class RolloutConfig(Section):
    engine: str = "vllm"
    """vllm, hf, or the path of a Python file with a class `Engine`."""
    env: str = "single_turn"
    """A name in rollouts/envs.py, or the path of a Python file with a class `Environment`."""
    engines: int = Field(1, ge=1)
    """Each has a process and a copy of the weights."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs (on a CPU: processes) per engine."""
    temperature: float = Field(1.0, gt=0)
    """top-p, top-k and min-p are not offered: they renormalise the sampling distribution on a subset of the
    vocabulary, and the trainer's log-probabilities would silently be those of another policy."""
    max_new_tokens: int = Field(256, ge=1)
    """Budget of one episode, over all its turns, the environment's included."""
    max_turns: int = Field(1, ge=1)
    """Replies of the policy in one episode, at most."""
    timeout_s: float = Field(900.0, gt=0)
    """Deadline of one group. One that has not come is asked of another engine, and the run stops where that brings
    none either."""
    update: UpdateMode = "in_flight"
    """What new weights do to requests that are being answered. in_flight: they are held, and go on under the new
    weights, their cache computed anew. drain: they are finished first (within timeout_s), while new ones wait. abort:
    they are cut off, and asked again from the tokens already there. Every token carries the version that sampled it."""
    enforce_eager: bool = False
    """vLLM without compiled graphs; always so on a CPU."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """vLLM's key-value cache on a CPU."""
    gpu_memory_utilization: float = Field(0.85, gt=0, lt=1)
    """vLLM's share of a GPU's memory."""


class WeightSyncConfig(Section):
    transport: Literal["auto", "nccl", "gloo", "direct", "disk"] = "auto"
    """nccl, gloo: trainer rank 0 broadcasts, from GPU to GPU or over TCP. direct: in buckets through Ray's object
    store. disk: in files below the run folder, which on several machines all must share. auto: nccl for vLLM on GPUs,
    else gloo; in synchronous runs one that raises is replaced by direct, and that by disk, for the rest of the run."""
    bucket_mib: int = Field(256, ge=1)
    """Weights are gathered and sent in buckets of this size; a single larger tensor makes its own."""
    timeout_s: float = Field(300.0, gt=0)
    """Deadline of each step of a sync: forming the group, sending, probing."""
    lora: Literal["merged", "adapter"] = "merged"
    """What is sent of a LoRA model: its weights with the adapter merged in, or the adapter alone."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean absolute difference allowed between the trainer's and an engine's log-probabilities of a probe
    prompt after a sync. Unset: 0.002 in float32, 0.1 in bfloat16."""
