"""Events that keep a step: `capture.on`."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from configs.capture_schema import CaptureConfig
from core import metrics as names

HISTORY, LEAST = 20, 5
"""Number of earlier steps with gradient norms taken as usual, and the minimum number."""


class Triggers:
    """Triggers of a run; they keep the norms of earlier steps."""

    def __init__(self, cfg: CaptureConfig):
        self.cfg = cfg
        self.norms: deque[float] = deque(maxlen=HISTORY)

    def find_event(self, metrics: Mapping[str, float]) -> str:
        """Return the event of a step as a sentence, or "". Called once per step, in order."""
        cfg, found = self.cfg, ""
        if "non_finite" in cfg.on and (skipped := metrics.get(names.TRAIN_SKIPPED, 0.0)):
            found = f"non_finite: {int(skipped)} updates were skipped, each because its gradient was not finite"
        for name in (names.MISMATCH_KL, names.APPROX_KL):
            if "kl" in cfg.on and not found and metrics.get(name, 0.0) > cfg.kl_above:
                found = f"kl: {name} is {metrics[name]:.4g}, above capture.kl_above={cfg.kl_above:g}"
        norm = metrics.get(names.TRAIN_GRAD_NORM)
        if norm is not None and "grad_norm" in cfg.on:
            # the median, because a single spike must not raise the bar for the next one
            usual = statistics.median(self.norms) if len(self.norms) >= LEAST else None
            if usual is not None and not found and norm > cfg.grad_norm_times * usual:
                found = (
                    f"grad_norm: {names.TRAIN_GRAD_NORM} is {norm:.4g}, more than capture.grad_norm_times="
                    f"{cfg.grad_norm_times:g} times {usual:.4g}, the median of the {len(self.norms)} steps before"
                )
            # also after an event, so that a lasting change becomes the usual norm
            self.norms.append(norm)
        return found
