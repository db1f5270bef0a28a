"""Groups of samples in numbers. The glossary of these names stands in README.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from core.errors import RunStopped
from core.types import Group
from rollouts.buffer import Drawn


def describe_lag(groups: list[Group], *, step: int, max_lag: int) -> dict[str, float]:
    """How far behind the policy the sampled tokens are: the step that trains on one less the version that sampled it.

    Mean, maximum and histogram, as shares of the tokens; and the share of samples that new weights reached on their
    way, which are of more than one version. Raises RunStopped for a token that is older than promised, or
    younger than can be.
    """
    versions = [[v for v, m in zip(s.versions, s.mask, strict=True) if m] for g in groups for s in g]
    lags = Counter(step - v for of_sample in versions for v in of_sample)
    if wrong := [lag for lag in lags if not 0 <= lag <= max_lag]:
        raise RunStopped(
            f"step {step} was to train on a token that lags by {wrong[0]} steps, where max_lag={max_lag}: its engine "
            "did not sample from the version that it named, or a group was started too early"
        )
    tokens = lags.total()
    if not tokens:
        return {}
    numbers = {
        "rollout/lag_mean": sum(lag * n for lag, n in lags.items()) / tokens,
        "rollout/lag_max": float(max(lags)),
    }
    if max_lag:
        numbers["rollout/mixed_versions_share"] = sum(len(set(v)) > 1 for v in versions) / len(versions)
        numbers |= {f"rollout/lag/{lag}": lags[lag] / tokens for lag in range(max_lag + 1)}
    return numbers


def describe(groups: list[Group], sources: Sequence[str] = ()) -> dict[str, float]:
    """Reward and its parts over the scored samples, lengths over all.

    `sources` names those of a mixture: each one's mean reward is told too.
    """
    samples = [s for g in groups for s in g]
    scored = [s for s in samples if s.reward is not None]
    names = sorted({name for s in scored for name in s.parts})
    rewards = [s.reward for s in scored if s.reward is not None]
    lengths = [sum(s.mask) for s in samples]
    numbers = {
        "rollout/samples": float(len(samples)),
        "rollout/failed": float(len(samples) - len(scored)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/tokens_mean": sum(lengths) / len(samples),
        "rollout/tokens_max": float(max(lengths)),
        "rollout/truncated_share": sum(s.stop == "length" for s in samples) / len(samples),
        "rollout/dead_groups_share": sum(len({s.reward for s in g if s.reward is not None}) < 2 for g in groups)
        / len(groups),
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


def describe_drawn(drawn: Sequence[Drawn]) -> dict[str, float]:
    """Of all groups that a step drew, those that the algorithm then left out included."""
    samples = [s for d in drawn for s in d.group]
    rewards = [s.reward for s in samples if s.reward is not None]
    mean = {"reward/mean_drawn": sum(rewards) / len(rewards)} if rewards else {}
    seconds = [d.seconds for d in drawn]
    average = sum(seconds) / len(seconds)
    tokens = sum(sum(s.mask) for s in samples)
    wasted = sum(sum(s.mask) for d in drawn for s in d.group if not d.kept or s.failure)
    return {
        "rollout/groups_drawn": float(len(drawn)),
        "rollout/wasted_share": wasted / tokens if tokens else 0.0,
        "time/groups/mean_s": average,
        "time/groups/std_s": (sum((s - average) ** 2 for s in seconds) / len(seconds)) ** 0.5,
        **mean,
    }


def check_failures(groups: list[Group], *, bearable_share: float) -> None:
    """Raise RunStopped when too many samples have no reward; the first failure is quoted."""
    failures = [s.failure for g in groups for s in g if s.failure]
    total = sum(len(g) for g in groups)
    if len(failures) > bearable_share * total:
        raise RunStopped(
            f"{len(failures)} of {total} samples failed, more than reward.max_failed_share={bearable_share:g}; "
            f"the first: {failures[0]}"
        )
