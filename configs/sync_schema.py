"""Keys of `weight_sync`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from core.strict_model import Seconds, StrictModel
from core.text.secrets import refuse_secret

PauseMode = Literal["keep", "wait", "abort"]
PROBE_TOLERANCE = {"float32": 0.002, "bfloat16": 0.1}
"""Default of weight_sync.probe_tolerance by model.dtype, in nats."""
QUANTIZED_TOLERANCE = 0.3
"""The same with rollout.quantization."""


class WeightSyncConfig(StrictModel):
    """Keys of `weight_sync`."""

    every: int = Field(1, ge=1)
    """Maximum number of steps between two weight syncs."""
    max_kl: float | None = Field(None, gt=0)
    """Limit of train/mismatch/kl. A step above it syncs weights at once, before `every` steps have passed."""
    pause_mode: PauseMode = "keep"
    """Handling of running requests during a weight sync. keep: pause them, and continue under the new weights with
    recomputed KV cache. wait: finish them first (within timeout_s), while new requests wait. abort: abort them, and
    continue from the tokens already sampled. Every token records the version that sampled it."""
    transport: Literal["auto", "nccl", "gloo", "direct", "disk"] = "auto"
    """Transport of the weights. nccl, gloo: broadcast from trainer rank 0, between GPUs or over TCP. direct: buckets
    through Ray's object store. disk: files in the run folder, which all machines must share, or in `folder`. auto: nccl
    for vLLM on GPUs (with placement: colocate, memory handles on the same GPU), otherwise gloo. In synchronous runs, a
    failed transport is replaced by direct, then by disk, for the rest of the run."""
    folder: str | None = None
    """With transport: disk, folder for the weights in place of the run folder: a path, or an address in a store that
    trainers and engines can reach (s3://, gs:// and others of fsspec). A sync writes its buckets, then their list, and
    removes them when every engine has read them."""
    bucket_mib: int = Field(64, ge=1)
    """Size of a bucket in MiB. Weights are gathered and sent in buckets; a larger tensor is a bucket by itself."""
    timeout_s: Seconds = 300.0
    """Deadline of each phase of a sync in seconds: forming the process group, sending, probing."""
    lora: Literal["merged", "adapter"] = "merged"
    """Weights to send of a LoRA model. merged: all weights, with the adapter merged in. adapter: only the adapter."""
    delta: bool = False
    """Send only the values that changed since the last sync, with their places, compressed. A small step in bfloat16
    changes few. Trainer rank 0 and each engine rank keep a copy of the weights in the memory of their machine. New
    engines receive all weights, as do all engines after a failed transfer or, once, after changes whose proof fails."""
    whole_every: int = Field(50, ge=1)
    """With delta, every n-th sync sends all weights."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Maximum mean absolute difference between trainer's and engine's log-probabilities of a probe prompt after a sync.
    Unset: 0.002 in float32, 0.1 in bfloat16, 0.3 with rollout.quantization."""

    @field_validator("folder")
    @classmethod
    def holds_no_secret(cls, value: str | None) -> str | None:
        names = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        refuse_secret(value, f"them into the environment variables that the store's package reads, such as {names}")
        return value

    @model_validator(mode="after")
    def _check_folder(self) -> WeightSyncConfig:
        if self.folder is not None and self.transport != "disk":
            raise ValueError(
                f"folder is set, and transport is {self.transport}: set weight_sync.transport to disk, or leave the "
                "folder out"
            )
        return self

    def bound_probe(self, dtype: str, *, quantized: bool = False) -> float:
        """Return probe_tolerance, or the default of a model's dtype, in nats. quantized: with rollout.quantization."""
        # `or` means unset here, because the key must be above 0.
        return self.probe_tolerance or (QUANTIZED_TOLERANCE if quantized else PROBE_TOLERANCE[dtype])


def min_staleness(*, sync_every: int, sample_reuse: int) -> int:
    """Return the smallest `max_staleness` a run can satisfy; samples reach this staleness whatever the timing.

    >>> min_staleness(sync_every=1, sample_reuse=1)
    0
    """
    # The last step before a sync trains on samples sync_every - 1 versions old. Each further use adds a step.
    return sync_every + sample_reuse - 2
