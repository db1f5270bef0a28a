"""Base of algorithms with a baseline of their own within a group."""

from __future__ import annotations

from algs.base import PolicyGradient, with_advantages
from core.types.samples import Group


class ComparesGroup(PolicyGradient):
    """Base of algorithms that compute a sample's advantage from its group alone. A subclass defines `compare`."""

    @property
    def needs_siblings(self) -> bool:
        return True

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        scored = ((g, [self.penalised_reward(s) for s in g]) for g in groups)
        return with_advantages(groups, [a for group, rewards in scored for a in self.compare(group, rewards)])

    def compare(self, group: Group, rewards: list[float | None]) -> list[float]:
        """Return the advantage of each sample of a group. rewards: with penalties; None for a failed sample, which gets
        0."""
        raise NotImplementedError
