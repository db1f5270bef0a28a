"""Keys of `capture`, and entries of `compare_losses`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from core.strict_model import StrictModel

Trigger = Literal["kl", "grad_norm", "non_finite"]
ShadowLoss = str | dict[str, Any]
"""Name, path, or settings of an algorithm; see analysis/capture."""


class CaptureConfig(StrictModel):
    """Keys of `capture`."""

    every: int = Field(0, ge=0)
    """Steps between two step snapshots, starting at step 0; 0: none by number. A step snapshot allows the step to be
    recomputed (python -m analysis.capture.replay): samples, numbers per token, and the state of the weights."""
    on: list[Trigger] = Field([])
    """Events that trigger a step snapshot. kl: the divergence between policy and engine, or the policy's change in a
    step, exceeds `kl_above`. grad_norm: the gradient norm exceeds `grad_norm_times` the usual. non_finite: an update
    was skipped because of a non-finite gradient. With events, every step computes checksums of the weights, and stores
    the weights if `weights` is set."""
    kl_above: float = Field(0.1, gt=0)
    """Limit of train/mismatch/kl and train/approx_kl, in nats, for the event kl."""
    grad_norm_times: float = Field(5.0, gt=1)
    """Multiple of the median train/grad_norm over the last 20 steps, for the event grad_norm. Inactive in the first 5
    steps of a run."""
    most: int = Field(10, ge=1)
    """Maximum number of step snapshots triggered by events in a run; those of `every` are not counted."""
    weights: bool = False
    """Store the weights before each update in the snapshot. false: store checksums and the location of the weights."""

    @property
    def is_on(self) -> bool:
        """True if the run takes step snapshots."""
        return bool(self.every or self.on)
