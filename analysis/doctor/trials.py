"""Toggles, and the effect of changing one of them on the gap."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from analysis.doctor.gap import Gap

CLOSED_SHARE = 1 / 3
"""Largest fraction of a gap that may remain after a change that closes it."""


class Toggle(StrEnum):
    """Things that may differ between engine and trainer. Every cause has one of these names."""

    TEMPERATURE = "temperature"
    DTYPE = "dtype"
    WEIGHTS = "weights"
    ROUTES = "routes"
    TOKENISED_AGAIN = "tokenised again"
    BATCH = "batch"
    PREFIX_CACHE = "prefix cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Change, and the gap of the same requests without it and with it."""

    toggle: Toggle
    change: str
    """The change, as a clause."""
    before: Gap
    after: Gap
    means: str
    """Meaning of a change that closes the gap, as an unfinished sentence."""

    def closes(self, bound: float) -> bool:
        """Return True if there was a gap, and the change closes it."""
        # `not <=`, because NaN is a gap, too. Both bounds: a gap just above the bound may fall below it by chance.
        was_open, still_open = (not gap.mean <= bound for gap in (self.before, self.after))
        return was_open and not still_open and not self.after.mean > CLOSED_SHARE * self.before.mean

    @property
    def left(self) -> float:
        """Fraction of the gap that remains; 1 if there was none, or if it is unknown."""
        share = self.after.mean / self.before.mean if self.before.mean else 1.0
        return 1.0 if math.isnan(share) else share

    def describe(self, bound: float) -> str:
        """Return the trial as a line."""
        outcome = "closes it" if self.closes(bound) else ""
        return f"{self.toggle:<16} {self.before.mean:>9.2g} -> {self.after.mean:<9.2g} {outcome:<10} {self.change}"

    def to_json(self, bound: float) -> dict[str, Any]:
        return {
            "toggle": str(self.toggle),
            "change": self.change,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "closes": self.closes(bound),
        }
