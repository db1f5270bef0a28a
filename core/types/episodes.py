"""Episodes of several samples, and their conversion to one sample and back.

An episode earned one reward. It is one sample as long as every reply continues the tokens before it. If a harness
rewrites the history, compacts it or runs sub-agents, the replies end up in several sequences. These branches share
prefixes. Each reply is trained on in exactly one branch, and is context in the others.

All statistics count episodes: baselines, deviations, sequences of a loss norm, sequence ratios, metrics. So an
algorithm receives every episode as one sample, with the tokens of all branches in chronological order.

In a game where the policy plays several sides, each side has an episode of its own, compared only with the same side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import RunStopped
from core.types.arrays import BOOLS, Floats, Mask
from core.types.kept_sets import KeptSets
from core.types.samples import TOKEN_REWARDS, Group, Sample


def number_episodes(group: Group) -> list[int]:
    """Return the number of each sample's episode, 0..E-1 in order of appearance.

    A group of a, b, c and d, with a and c branches of one episode: [0, 1, 0, 2].
    """
    numbers: dict[tuple[str, int], int] = {}
    return [
        # len(numbers) is evaluated before a new episode is inserted, so it is the next free number.
        numbers.setdefault(("alone", i) if s.episode is None else ("of", s.episode), len(numbers))
        for i, s in enumerate(group)
    ]


def split_players(group: Group) -> list[Group]:
    """Split a group by player, in order of appearance. A group with one side stays whole.

    Rewards are compared only within a side, for two reasons. A side may have an advantage that no move earned. And the
    other sides' rewards depend on this side's moves: a baseline of them would bias the expected gradient.
    """
    players: dict[int, Group] = {}
    for sample in group:
        players.setdefault(sample.player, []).append(sample)
    return list(players.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedGroup:
    """Group with one sample per episode, and the mapping back."""

    samples: Group
    """One per episode."""
    original: Group
    places: list[NDArray[np.intp] | None]
    """Positions of each original sample's tokens in the joined sample; None if the sample is the whole episode."""

    def split(self, joined: Group) -> Group:
        """Copy advantages, columns and exclusions of the joined samples back to the original samples."""
        if all(place is None for place in self.places):
            return joined
        return [
            joined[number] if place is None else _take_back(sample, joined[number], place)
            for sample, number, place in zip(self.original, number_episodes(self.original), self.places, strict=True)
        ]


def list_episodes(group: Group) -> Group:
    """Return the episodes of a group, each as a single sample, for counting only."""
    for sample in group:  # faster than all(), and every group of a step comes here several times
        if sample.episode is not None:
            return join_episodes(group).samples
    return group


def join_episodes(group: Group) -> JoinedGroup:
    """Join the branches of each episode into one sample. Raises RunStopped if branches contradict each other."""
    if all(s.episode is None for s in group):
        return JoinedGroup(samples=group, original=group, places=[None] * len(group))
    members: dict[int, list[int]] = {}
    for i, number in enumerate(number_episodes(group)):
        members.setdefault(number, []).append(i)
    samples: Group = []
    places: list[NDArray[np.intp] | None] = [None] * len(group)
    for own in members.values():
        # The sample is the whole episode, and needs no mapping back.
        if len(own) == 1:
            samples.append(group[own[0]])
            continue
        joined, where = _join([group[i] for i in own])
        samples.append(joined)
        for i, place in zip(own, where, strict=True):
            places[i] = place
    return JoinedGroup(samples=samples, original=group, places=places)


def needs_joining(group: Group) -> bool:
    """Tell whether an episode of the group has several samples, or the group several players."""
    episodes = [s.episode for s in group if s.episode is not None]
    return len({*episodes}) < len(episodes) or len({s.player for s in group}) != 1


def prepare_credit(groups: list[Group]) -> tuple[list[Group], Callable[[list[Group]], list[Group]]]:
    """Return per-episode groups for the algorithm, and a function that maps its advantages back to samples.

    Each returned group contains one player's episodes, one sample per episode. Groups already in this form are returned
    unchanged.
    """
    if not any(map(needs_joining, groups)):
        return groups, lambda credited: credited
    parts = [split_players(group) for group in groups]
    joined = [join_episodes(part) for own in parts for part in own]

    def give_back(credited: list[Group]) -> list[Group]:
        # Walk the groups in their own order, and take the next sample of each sample's player.
        rest = iter([part.split(own) for part, own in zip(joined, credited, strict=True)])
        done: list[Group] = []
        for group, own in zip(groups, parts, strict=True):
            by_player = {part[0].player: iter(next(rest)) for part in own}
            done.append([next(by_player[sample.player]) for sample in group])
        return done

    return [part.samples for part in joined], give_back


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Tokens of a branch from the end of the previous turn to the end of a turn. The last piece also has the tokens
    after it.
    """

    branch: int
    begin: int
    end: int
    turn: tuple[int, int] | None
    earned: float
    number: int
    """Chronological number of the turn."""


def _join(branches: Sequence[Sample]) -> tuple[Sample, list[NDArray[np.intp]]]:
    """Concatenate the branches of an episode in chronological order.

    Returns the joined sample, and the positions of each branch's tokens in it.
    """
    _check_branches(branches)
    pieces = _cut_into_pieces(branches)
    offsets = np.cumsum([0, *(len(s.token_ids) for s in branches)])
    order = np.concatenate([np.arange(p.begin, p.end) + offsets[p.branch] for p in pieces])
    # order maps joined positions to branch positions; place is the inverse permutation, to split advantages again.
    place = np.empty_like(order)
    place[order] = np.arange(len(order))

    turns: list[tuple[int, int]] = []
    first = 0
    for piece in pieces:
        if piece.turn is not None:
            turns.append((first + piece.turn[0] - piece.begin, first + piece.turn[1] - piece.begin))
        first += piece.end - piece.begin
    last = branches[pieces[-1].branch]
    # A branch without turn rewards earned 0 in its turns if another branch has them.
    has_rewards = any(s.turn_rewards for s in branches)

    def gather(values: Callable[[Sample], NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([values(s) for s in branches])[order]

    # A branch without trained tokens was never scored, so it has no columns. The joined sample still gets them.
    trained = [s for s in branches if s.n_trained]
    names = [n for n in (trained[0].columns if trained else ()) if all(n in s.columns for s in trained)]
    # Like turn_rewards: a branch without them earned 0 at its tokens.
    if TOKEN_REWARDS not in names and any(TOKEN_REWARDS in s.columns for s in branches):
        names.append(TOKEN_REWARDS)
    # Reward and prompt are equal in all branches, and the first has the counts.
    joined = replace(
        branches[0],
        token_ids=gather(lambda s: s.token_ids),
        action_mask=gather(lambda s: s.action_mask),
        rollout_logp=gather(lambda s: s.rollout_logp),
        versions=gather(lambda s: s.versions),
        columns={name: gather(lambda s, n=name: _get_column(s, n)) for name in names},
        excluded=None if all(s.excluded is None for s in branches) else gather(_get_excluded),
        kept=_join_kept(branches, order),
        routes=None,  # only the forward pass reads them, which is of the branches
        advantage=None,
        # The episode ended where its last turn did.
        completion=last.completion,
        stop=last.stop,
        turns=tuple(turns),
        turn_rewards=tuple(p.earned for p in pieces if p.turn is not None) if has_rewards else (),
        turn_numbers=(),
    )
    return joined, [place[begin:end] for begin, end in pairwise(offsets)]


def _check_branches(branches: Sequence[Sample]) -> None:
    """Raise RunStopped unless the branches are consistent with one episode."""
    who = f"episode {branches[0].episode} of {branches[0].prompt.id}"
    if len(rewards := {s.reward for s in branches}) > 1:
        raise RunStopped(
            f"the samples of {who} have the rewards {', '.join(sorted(map(str, rewards)))}; all samples of an episode "
            "must have the same reward"
        )
    if len({s.origin for s in branches}) > 1:
        raise RunStopped(f"the samples of {who} have several origins; all samples of an episode must have the same")
    if len({bool(s.failure) for s in branches}) > 1:
        raise RunStopped(f"some samples of {who} failed and some did not; set failure on all or none of them")
    if any(s.action_mask[:1].any() for s in branches):
        raise RunStopped(f"a sample of {who} begins with a token that the policy chose; nothing predicts that token")
    with_turns = [s for s in branches if s.spans]
    if len({bool(s.turn_numbers) for s in with_turns}) > 1:
        raise RunStopped(f"some samples of {who} have turn_numbers and some do not; set them on all or none")
    numbers = [n for s in with_turns for n in s.turn_numbers]
    if len(numbers) != len({*numbers}):
        raise RunStopped(f"two turns of {who} have the same number in turn_numbers; each turn may be trained on once")


def _cut_into_pieces(branches: Sequence[Sample]) -> list[_Piece]:
    """Cut every branch after each turn; return the pieces of all branches in chronological order."""
    pieces: list[_Piece] = []
    for b, s in enumerate(branches):
        spans, begin = s.spans, 0
        if not spans:
            # -1: without a turn it has no place in time, and comes before all turns.
            pieces.append(_Piece(branch=b, begin=0, end=len(s.token_ids), turn=None, earned=0.0, number=-1))
        for k, turn in enumerate(spans):
            end = len(s.token_ids) if k + 1 == len(spans) else turn[1]
            earned = s.turn_rewards[k] if s.turn_rewards else 0.0
            # Without numbers the branches followed one another, in the order of the list.
            number = s.turn_numbers[k] if s.turn_numbers else len(pieces)
            pieces.append(_Piece(branch=b, begin=begin, end=end, turn=turn, earned=earned, number=number))
            begin = end
    return sorted(pieces, key=lambda piece: piece.number)


def _get_column(sample: Sample, name: Any) -> Floats:
    """Return a column, or zeros if the sample has no trained tokens and was never scored."""
    found = sample.columns.get(name)
    return np.zeros(len(sample.token_ids), dtype=sample.float_dtype) if found is None else found


def _get_excluded(sample: Sample) -> Mask:
    return np.zeros(len(sample.token_ids), dtype=BOOLS) if sample.excluded is None else sample.excluded


def _join_kept(branches: Sequence[Sample], order: NDArray[np.intp]) -> KeptSets | None:
    """Return the kept sets of the joined tokens. A branch without sampled tokens may lack them."""
    if all(s.kept is None for s in branches):
        return None
    return KeptSets.join([KeptSets.none(len(s.token_ids)) if s.kept is None else s.kept for s in branches]).take(order)


def _take_back(sample: Sample, joined: Sample, place: NDArray[np.intp]) -> Sample:
    """Return a branch with the joined episode's advantages, exclusions and columns."""
    # The zeros that a branch without trained tokens has in the joined sample are no values of its own.
    columns = {name: values[place] for name, values in joined.columns.items()} if sample.n_trained else {}
    return replace(
        sample,
        advantage=None if joined.advantage is None else joined.advantage[place],
        excluded=None if joined.excluded is None else joined.excluded[place],
        columns=sample.columns | columns,
    )
