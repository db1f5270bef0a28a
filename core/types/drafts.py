"""Counts of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

DRAFTED, ACCEPTED = "drafts/drafted", "drafts/accepted"
"""Names in the counts of a sample (`Sample.counts`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Tokens that an engine drafted and accepted, of one or more completions."""

    drafted: int = 0
    accepted: int = 0

    def add(self, other: Drafts) -> Drafts:
        """Return the sums."""
        return Drafts(drafted=self.drafted + other.drafted, accepted=self.accepted + other.accepted)

    def to_counts(self) -> dict[str, float]:
        """Return the counts of a sample; {} without drafts."""
        return {DRAFTED: float(self.drafted), ACCEPTED: float(self.accepted)} if self.drafted else {}


NO_DRAFTS = Drafts()
"""Counts of an engine without speculative decoding."""
