"""Metrics of groups of samples. core/metrics.py declares their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from core import metrics as names
from core.errors import RunStopped, UserError
from core.reserved_metrics import REWARD_NAMES
from core.types.arrays import find_true
from core.types.episodes import list_episodes, split_players
from core.types.samples import Group, Sample
from driver.evaluation.estimators import choose_ks, pass_at_k
from driver.records.episode_metrics import measure_counts
from driver.records.judge_metrics import correlate, measure_judges
from rollouts.scheduling.buffer import FinishedGroup


def measure_staleness(groups: list[Group], *, step: int, max_staleness: int) -> dict[str, float]:
    """Measure the staleness of sampled tokens: the current step minus the version that sampled the token.

    Returns mean, maximum and histogram (fractions of the tokens), and the fraction of samples with several versions.
    Raises RunStopped for a token older than allowed or newer than possible.
    """
    counted = [count_versions(s) for g in groups for s in g if s.origin == "policy"]
    ages: Counter[int] = Counter()
    for own in counted:
        for version, n in own.items():
            ages[step - version] += n
    # The buffer bounds staleness when a group starts; this checks the result, whatever the schedule did.
    if wrong := [age for age in ages if not 0 <= age <= max_staleness]:
        raise RunStopped(
            f"step {step} was to train on a token that is {min(wrong)} steps old, with max_staleness={max_staleness}: "
            "its engine did not sample from the version that it named, or a group was started too early"
        )
    if not ages:
        return {}
    total = ages.total()
    measured = {
        names.ROLLOUT_STALENESS_MEAN: sum(age * n for age, n in ages.items()) / total,
        names.ROLLOUT_STALENESS_MAX: float(max(ages)),
    }
    if max_staleness:
        measured[names.ROLLOUT_MIXED_VERSIONS] = sum(len(own) > 1 for own in counted) / len(counted)
        measured |= {names.ROLLOUT_STALENESS.format(age): ages[age] / total for age in range(max_staleness + 1)}
    return measured


def count_versions(sample: Sample) -> dict[int, int]:
    """Count the sampled tokens per policy version, oldest first."""
    rest = sample.versions[find_true(sample.action_mask)[0]]
    counts: dict[int, int] = {}
    # A comparison per version, of which there are one or two: counting or sorting all numbers takes longer.
    while len(rest):
        differs = rest != rest[0]
        counts[int(rest[0])] = len(rest) - int(np.count_nonzero(differs))
        rest = rest[differs]
    return dict(sorted(counts.items()))


def measure_groups(groups: list[Group], sources: Sequence[str] = (), *, by_turn: bool = False) -> dict[str, float]:
    """Measure rewards and reward parts over rewarded episodes, and lengths over all episodes, of the policy alone.

    sources: names of a mixture's sources, whose mean rewards are also measured. by_turn: rewards of turns are also a
    training signal.
    """
    others = [s.reward for g in groups for s in g if s.origin != "policy" and s.reward is not None]
    groups = select_policy(groups)
    samples = [s for g in groups for s in g]
    episodes = [[list_episodes(part) for part in split_players(g)] for g in groups]  # each as one sample
    played = [part for g in episodes for part in g]
    joined = [e for part in played for e in part]
    rewarded = [e for e in joined if e.reward is not None]
    rewards = [e.reward for e in rewarded if e.reward is not None]
    sampled = [[e.n_sampled for e in part] for part in played]
    lengths = [n for own in sampled for n in own]
    # A group has a signal if any player's rewards differ, since players are compared separately.
    zero_std = sum(not any(_has_signal(part, by_turn=by_turn) for part in g) for g in episodes)
    measured = {
        names.ROLLOUT_SAMPLES: float(len(samples)),
        names.ROLLOUT_BRANCHES: len(samples) / len(joined),
        names.ROLLOUT_FAILED: float(len(joined) - len(rewarded)),
        names.ROLLOUT_TOKENS: float(sum(lengths)),
        # At least 1: every sample may have failed before its first token.
        names.ROLLOUT_TRAINED: sum(s.n_trained for s in samples) / max(1, sum(lengths)),
        names.ROLLOUT_TOKENS_MEAN: sum(lengths) / len(joined),
        names.ROLLOUT_TOKENS_MAX: float(max(lengths)),
        names.ROLLOUT_TRUNCATED: sum(e.stop == "length" for e in joined) / len(joined),
        names.ROLLOUT_ZERO_STD: zero_std / len(groups),
        **measure_counts(samples),
        **_measure_kept_sets(samples),
    }
    if rewards:
        measured[names.REWARD_MEAN] = mean = sum(rewards) / len(rewards)
        measured[names.REWARD_STD] = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
        if (corr := correlate_with_length(played, sampled)) is not None:
            measured[names.REWARD_LENGTH_CORR] = corr
        parts = sorted({name for s in rewarded for name in s.reward_parts})
        # before one of the two numbers replaces the other
        if clash := [part for part in parts if part in REWARD_NAMES]:
            raise UserError(f"the reward returns a part {clash[0]!r}, as another metric is called: rename the part")
        for part in parts:
            values = [s.reward_parts[part] for s in rewarded if part in s.reward_parts]
            measured[names.REWARD_PART.format(part)] = sum(values) / len(values)
    if others:
        measured[names.REWARD_OTHERS] = sum(others) / len(others)
    for source in sources:
        if (name := names.REWARD_PART.format(source)) in measured:
            raise RunStopped(f"{name} is a part of the reward and a source of data.train: give the source another name")
        if own := [s.reward for s in rewarded if s.reward is not None and s.prompt.source == source]:
            measured[name] = sum(own) / len(own)
    return measured


def correlate_with_length(groups: Sequence[Group], sampled: Sequence[Sequence[int]]) -> float | None:
    """Return the correlation of reward and sampled tokens within groups; None if either is the same everywhere."""
    pairs = [
        [(e.reward, n) for e, n in zip(group, own, strict=True) if e.reward is not None]
        for group, own in zip(groups, sampled, strict=True)
    ]
    # within groups, because a hard prompt has long replies and low rewards
    tables = [np.array(own) for own in pairs if own]
    return correlate(np.concatenate([table - table.mean(axis=0) for table in tables]))


def _measure_kept_sets(samples: Sequence[Sample]) -> dict[str, float]:
    """Measure the kept sets of sampled tokens; empty without truncation."""
    sizes = [s.kept.sizes[s.action_mask] for s in samples if s.kept is not None]
    if not sizes:
        return {}
    return {names.ROLLOUT_SET_SIZE: float(np.concatenate(sizes).mean())}


def select_policy(groups: list[Group]) -> list[Group]:
    """Return the samples that the policy in training sampled, by group."""
    return [[s for s in group if s.origin == "policy"] for group in groups]


def _has_signal(episodes: Group, *, by_turn: bool) -> bool:
    """Tell whether the rewards of a player's episodes differ."""
    return len({(e.reward, e.turn_rewards if by_turn else ()) for e in episodes if e.reward is not None}) > 1


def measure_passes(groups: Sequence[Group], *, pass_reward: float) -> dict[str, float]:
    """Return pass@k averaged over groups and players; empty if a player has a single episode.

    A player may have fewer episodes than the others, if games end before the player's first turn. k is limited by the
    smallest number.
    """
    episodes = [list_episodes(part) for group in groups for part in split_players(group)]
    size = min(map(len, episodes))
    solved = [(len(own), sum(s.reward is not None and s.reward >= pass_reward for s in own)) for own in episodes]
    # pass@1 of a single sample is only the mean of a threshold on the reward.
    ks = choose_ks(size) if size > 1 else []
    return {names.PASS_AT.format(k): sum(pass_at_k(n, c, k) for n, c in solved) / len(solved) for k in ks}


def measure_drawn(drawn: Sequence[FinishedGroup]) -> dict[str, float]:
    """Measure all groups drawn for a step, including those that the algorithm rejected."""
    groups = select_policy([d.group for d in drawn])
    samples = [s for g in groups for s in g]
    rewards = [e.reward for g in groups for e in list_episodes(g) if e.reward is not None]
    mean = {names.REWARD_MEAN_DRAWN: sum(rewards) / len(rewards)} if rewards else {}
    seconds = [d.seconds for d in drawn]
    average = sum(seconds) / len(seconds)
    tokens = sum(s.n_sampled for s in samples)
    pairs = zip(drawn, groups, strict=True)
    wasted = sum(s.n_sampled for d, group in pairs for s in group if not d.accepted or s.failure)
    return {
        names.ROLLOUT_GROUPS_DRAWN: float(len(drawn)),
        names.ROLLOUT_WASTED: wasted / tokens if tokens else 0.0,
        names.GROUP_SECONDS_MEAN: average,
        names.GROUP_SECONDS_STD: (sum((s - average) ** 2 for s in seconds) / len(seconds)) ** 0.5,
        **mean,
        **measure_judges([s for d in drawn for s in d.group]),
    }


def check_failures(groups: list[Group], *, max_failed_fraction: float) -> None:
    """Raise RunStopped if too many episodes failed, quoting the first failure."""
    episodes = [e for g in groups for e in list_episodes(g)]
    failures, total = [e.failure for e in episodes if e.failure], len(episodes)
    if len(failures) > max_failed_fraction * total:
        raise RunStopped(
            f"{len(failures)} of {total} samples failed, more than reward.max_failed_fraction="
            f"{max_failed_fraction:g}; the first: {failures[0]}"
        )


def name_train_metrics(measured: Mapping[str, float]) -> dict[str, float]:
    """Rename a trainer's metrics to their logged names, and compute metrics derived from mean squares.

    Metrics of compared losses are excluded; an observer logs them.
    """
    own = {name: value for name, value in measured.items() if not name.startswith(names.COMPARE_LOSSES)}
    named = {f"{names.TRAIN}{name}": value for name, value in own.items()}
    if (ratio_sq := named.pop(names.MISMATCH_RATIO_SQ, None)) is not None:
        # Kish's effective sample size as a fraction: mean(w)^2 / mean(w^2).
        named[names.MISMATCH_ESS] = named[names.MISMATCH_RATIO] ** 2 / ratio_sq
    return_sq, error, error_sq = (named.pop(name, None) for name in names.VALUE_MOMENTS)
    if return_sq is not None and error is not None and error_sq is not None:
        # Var(x) = E[x^2] - E[x]^2. The trainers average moments, because variances of micro-batches cannot be averaged.
        variance = return_sq - named[names.VALUE_RETURN] ** 2
        # Equal returns leave nothing to explain.
        if variance > 0:
            named[names.EXPLAINED_VARIANCE] = 1 - (error_sq - error**2) / variance
    return named
