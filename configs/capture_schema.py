"""Keys of `capture`, and entries of `compare_losses`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from core.strict_model import StrictModel

Trigger = Literal["kl", "grad_norm", "non_finite"]
ShadowLoss = str | dict[str, Any]
"""Name, path, or settings of an algorithm; see capture/losses.py."""


class CaptureConfig(StrictModel):
    """Keys of `capture`."""

    every: int = Field(0, ge=0)
    """Steps between two snapshots, beginning with step 0; 0 keeps none by number. A snapshot is a step that can be
    computed again: its samples, numbers of every token, and what its weights were
    (python -m analysis.capture.replay)."""
    on: list[Trigger] = Field([])
    """Events that keep a step. kl: the policy is further from its engine, or moved further in a step, than `kl_above`.
    grad_norm: the gradient is `grad_norm_times` as long as usual. non_finite: an update was skipped, because its
    gradient was not finite. With an event every step takes checksums of its weights, and writes them with `weights`."""
    kl_above: float = Field(0.1, gt=0)
    """Bound of train/mismatch/kl and of train/approx_kl, in nats, for kl."""
    grad_norm_times: float = Field(5.0, gt=1)
    """Multiple of the median of train/grad_norm over the 20 steps before, for grad_norm. The first 5 steps of a run are
    compared with nothing."""
    most: int = Field(10, ge=1)
    """Largest number of snapshots that events make in a run; those of `every` are not counted."""
    weights: bool = False
    """Keep the weights before each update in the snapshot. false: it holds their checksums, and says where they lie."""

    @model_validator(mode="before")
    @classmethod
    def on_is_a_word(cls, given: Any) -> Any:
        """Read the key `on` as it was written: in YAML 1.1 it means true."""
        if isinstance(given, dict) and True in given:
            return {("on" if key is True else key): value for key, value in given.items()}
        return given

    @property
    def is_on(self) -> bool:
        """True if the run keeps snapshots at all."""
        return bool(self.every or self.on)
