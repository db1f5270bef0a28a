"""Selection of the samples of a step for the page: whole groups if they fit, chosen by fixed rules."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

SHARE_OF_A_GROUP = 4
"""At most the fourth part of the selection goes to one group, so that four kinds of groups are seen."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Group and reward of a sample."""

    group: int
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Selected group, with the selected samples."""

    group: int
    why: str
    samples: list[int]
    """Numbers of the samples within the step, in order."""


def choose_samples(samples: Sequence[Entry], limit: int, *, step: int) -> list[Chosen]:
    """Return groups with at most `limit` samples together: best, worst, most divided, failed and random ones in turn.

    Ties go to the more divided group, then to a hash of step and group, so the choice is the same every time.
    """
    members: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        members.setdefault(sample.group, []).append(i)
    rewards = {g: [r for i in own if (r := samples[i].reward) is not None] for g, own in members.items()}
    failed = [g for g, own in members.items() if len(rewards[g]) < len(own)]
    # a hash and no random numbers: the same run makes the same page
    luck = {g: hashlib.sha256(f"{step}/{g}".encode()).digest() for g in members}
    spread = {g: max(r) - min(r) if r else 0.0 for g, r in rewards.items()}
    known = [r for own in rewards.values() for r in own]
    good = [g for g in members if rewards[g] and max(rewards[g]) > min(known)]  # none where all rewards are equal
    bad = [g for g in members if rewards[g] and min(rewards[g]) < max(known)]
    orders = {
        "best": sorted(good, key=lambda g: (-max(rewards[g]), -spread[g], luck[g])),
        "worst": sorted(bad, key=lambda g: (min(rewards[g]), -spread[g], luck[g])),
        "most divided": sorted((g for g in members if spread[g]), key=lambda g: (-spread[g], luck[g])),
        "failed": sorted(failed, key=lambda g: luck[g]),
        "random": sorted(members, key=lambda g: luck[g]),
    }
    # a page with room for all of few groups may take more than a fourth of each
    largest = max(1, limit // SHARE_OF_A_GROUP, -(-limit // max(1, len(members))))
    chosen: dict[int, Chosen] = {}
    left = limit
    for why in cycle(orders):
        if left < 1 or not any(orders.values()):
            break
        group = next((g for g in orders[why] if g not in chosen), None)
        if group is None:
            # the loop ends when every order is used up
            orders[why] = []
            continue
        kept = thin_out(members[group], [samples[i].reward for i in members[group]], min(largest, left))
        chosen[group] = Chosen(group=group, why=why, samples=kept)
        left -= len(kept)
    return list(chosen.values())


def thin_out(members: list[int], rewards: list[float | None], n: int) -> list[int]:
    """Keep n members in their order: the best, the worst, and others evenly between them by reward.

    Those without a reward stand behind the worst.

    >>> thin_out([4, 5, 6, 7, 8], [0.0, 1.0, 0.5, 0.2, None], 4)
    [4, 5, 6, 8]
    """
    if len(members) <= n:
        return members
    known = [i for _, i in sorted((r, i) for i, r in enumerate(rewards) if r is not None)]
    lowest_first = known[:1] + [i for i, r in enumerate(rewards) if r is None] + known[1:]
    places = [round(k * (len(members) - 1) / (n - 1)) for k in range(n)] if n > 1 else [len(members) - 1]
    return sorted(members[lowest_first[place]] for place in places)
