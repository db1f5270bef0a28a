"""Groups of samples in numbers. The glossary of these names stands in README.md."""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import RunStopped
from core.types import Group


def describe(groups: list[Group], *, version: int, sources: Sequence[str] = ()) -> dict[str, float]:
    """Reward and its parts over the scored samples, lengths over all; lag is in publishes.

    `sources` names those of a mixture: each one's mean reward is told too.
    """
    samples = [s for g in groups for s in g]
    scored = [s for s in samples if s.reward is not None]
    names = sorted({name for s in scored for name in s.parts})
    rewards = [s.reward for s in scored if s.reward is not None]
    lengths = [sum(s.mask) for s in samples]
    sampled = [v for s in samples for v, m in zip(s.versions, s.mask, strict=True) if m]
    numbers = {
        "rollout/samples": float(len(samples)),
        "rollout/failed": float(len(samples) - len(scored)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/tokens_mean": sum(lengths) / len(samples),
        "rollout/tokens_max": float(max(lengths)),
        "rollout/truncated_share": sum(s.stop == "length" for s in samples) / len(samples),
        "rollout/dead_groups_share": sum(len({s.reward for s in g if s.reward is not None}) < 2 for g in groups)
        / len(groups),
        "rollout/lag_max": float(version - min(sampled)) if sampled else 0.0,
    }
    if rewards:
        mean = sum(rewards) / len(rewards)
        numbers["reward/mean"] = mean
        numbers["reward/std"] = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
        for name in names:
            with_part = [s.parts[name] for s in scored if name in s.parts]
            numbers[f"reward/{name}"] = sum(with_part) / len(with_part)
    for source in sources:
        if f"reward/{source}" in numbers:
            raise RunStopped(
                f"reward/{source} is a part of the reward and a source of data.train: give the source another name"
            )
        if own := [s.reward for s in scored if s.reward is not None and s.prompt.source == source]:
            numbers[f"reward/{source}"] = sum(own) / len(own)
    return numbers


def describe_drawn(groups: list[Group]) -> dict[str, float]:
    """Of all groups that a step drew, those that the algorithm then left out included."""
    rewards = [s.reward for g in groups for s in g if s.reward is not None]
    mean = {"reward/mean_drawn": sum(rewards) / len(rewards)} if rewards else {}
    return {"rollout/groups_drawn": float(len(groups)), **mean}


def check_failures(groups: list[Group], *, bearable_share: float) -> None:
    """Raise RunStopped when too many samples have no reward; the first failure is quoted."""
    failures = [s.failure for g in groups for s in g if s.failure]
    total = sum(len(g) for g in groups)
    if len(failures) > bearable_share * total:
        raise RunStopped(
            f"{len(failures)} of {total} samples failed, more than reward.max_failed_share={bearable_share:g}; "
            f"the first: {failures[0]}"
        )
