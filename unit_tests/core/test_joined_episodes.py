"""Episodes of several samples, drawn by chance: joined in order of time, and split without a difference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from core.types.episodes import join_episodes, needs_joining, number_episodes, prepare_credit
from core.types.samples import Group, Prompt, Sample, make_sample

PROMPT = Prompt(id="p", messages=[])


def draw_episode(draw: random.Random, fresh: Iterator[int], episode: int, player: int) -> tuple[Group, list[list[int]]]:
    """Return the branches of an episode, and the tokens of its turns in order of time.

    Turns go to branches by chance, each after tokens that the policy did not choose. All tokens of a group differ.
    """
    branches: list[tuple[list[int], list[bool], list[tuple[int, int]], list[int]]] = [
        ([], [], [], []) for _ in range(draw.randint(1, 3))
    ]
    said: list[list[int]] = []

    def add_context(ids: list[int], mask: list[bool], n: int) -> None:
        ids += [next(fresh) for _ in range(n)]
        mask += [False] * n

    for ids, mask, _, _ in branches:
        add_context(ids, mask, draw.randint(1, 3))
    for number in range(draw.randint(0, 6)):
        ids, mask, turns, numbers = draw.choice(branches)
        # also none: two replies may follow one another
        add_context(ids, mask, draw.randint(0, 2))
        new = [next(fresh) for _ in range(draw.randint(1, 3))]
        turns.append((len(ids), len(ids) + len(new)))
        numbers.append(number)
        ids += new
        mask += [True] * len(new)
        said.append(new)
    for ids, mask, _, _ in branches:
        add_context(ids, mask, draw.randint(0, 2))
    scored, reward = draw.random() < 0.5, draw.random()
    group = [
        make_sample(
            prompt=PROMPT,
            token_ids=ids,
            action_mask=mask,
            rollout_logp=[-0.5 if m else 0.0 for m in mask],
            versions=[draw.randint(0, 3) if m else -1 for m in mask],
            reward=reward,
            episode=episode,
            player=player,
            turns=turns,
            turn_numbers=numbers,
            turn_rewards=[float(number) for number in numbers] if scored else (),
            completion=f"{numbers}",
            stop=draw.choice(["eos", "length", "turns"]),
            columns={"values": [draw.random() if m else 0.0 for m in mask]} if turns else {},
        )
        for ids, mask, turns, numbers in branches
    ]
    return group, said


def draw_group(seed: int) -> tuple[Group, dict[int, list[list[int]]], random.Random]:
    draw, fresh = random.Random(seed), count()
    group: Group = []
    said: dict[int, list[list[int]]] = {}
    for episode in range(draw.randint(1, 4)):
        own, said[episode] = draw_episode(draw, fresh, episode, player=draw.choice([0, 0, 1]))
        group += own
    draw.shuffle(group)
    return group, said, draw


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_an_episode_is_joined_in_order_of_time_however_its_samples_stand(seed):
    group, said, _ = draw_group(seed)
    for one in join_episodes(group).samples:
        turns = said[one.episode or 0]
        assert [one.token_ids[slice(*span)].tolist() for span in one.spans] == turns
        assert one.token_ids[one.action_mask].tolist() == [token for turn in turns for token in turn]
        branches = [s for s in group if s.episode == one.episode]
        assert sorted(one.token_ids.tolist()) == sorted(t for s in branches for t in s.token_ids.tolist())
        assert one.turn_rewards in ((), tuple(map(float, range(len(turns)))))
        if turns:  # it ended as the branch of its last turn did
            [last] = [s for s in branches if len(turns) - 1 in s.turn_numbers]
            assert (one.stop, one.completion) == (last.stop, last.completion)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_joining_and_splitting_is_an_exact_round_trip(seed):
    """What an algorithm writes on the joined tokens comes back at the same tokens, and nothing else changes."""
    group, _, draw = draw_group(seed)
    joined = join_episodes(group)
    assert joined.split(joined.samples) == group
    marks = {int(token): draw.random() for s in group for token in s.token_ids}

    def mark(s: Sample) -> Sample:
        values = np.array([marks[int(token)] for token in s.token_ids], dtype=np.float32)
        columns = s.columns if not s.n_trained else s.columns | {"returns": values}
        return replace(s, advantage=values, excluded=values > 0.5, columns=columns)

    assert joined.split([*map(mark, joined.samples)]) == [*map(mark, group)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=3))
def test_credit_is_given_by_player_and_episode_and_taken_back(seeds):
    groups = [draw_group(seed)[0] for seed in seeds]
    given_groups, give_back = prepare_credit(groups)
    assert give_back(given_groups) == groups
    if any(map(needs_joining, groups)):
        assert sum(map(len, given_groups)) == sum(len({*number_episodes(group)}) for group in groups)
        assert all(len({s.player for s in group}) == 1 for group in given_groups)


def test_what_is_of_a_branch_alone_stays_with_it():
    """Routes, an earlier advantage and the numbers of turns are of the tokens of one sample."""
    masks = ([False, True, True], [False, False, True, False])
    group = [
        make_sample(
            prompt=PROMPT,
            token_ids=[10 * b + t for t in range(len(mask))],
            action_mask=mask,
            rollout_logp=[-0.5 if m else 0.0 for m in mask],
            versions=[0 if m else -1 for m in mask],
            reward=1.0,
            episode=0,
            turn_numbers=[1 - b],
            advantage=[1.0 if m else 0.0 for m in mask],
            routes=np.full((len(mask), 2, 1), b, dtype=np.uint8),
        )
        for b, mask in enumerate(masks)
    ]
    joined = join_episodes(group)
    [one] = joined.samples
    assert one.token_ids.tolist() == [10, 11, 12, 13, 0, 1, 2] and one.turns == ((2, 3), (5, 7))
    assert (one.routes, one.advantage, one.kept, one.excluded, one.turn_numbers) == (None, None, None, None, ())
    back = joined.split(joined.samples)
    assert back == [replace(sample, advantage=None) for sample in group]
    assert [{*sample.routes.ravel().tolist()} for sample in back if sample.routes is not None] == [{0}, {1}]


def test_a_branch_that_excludes_nothing_joins_one_that_does():
    def branch(first: int, excluded: list[bool] | None) -> Sample:
        ids, mask = [first, first + 1, first + 2], [False, True, True]
        there = {"rollout_logp": [0.0] * 3, "versions": [0] * 3, "reward": 1.0, "episode": 0, "excluded": excluded}
        return make_sample(prompt=PROMPT, token_ids=ids, action_mask=mask, **there)

    [one] = join_episodes([branch(10, None), branch(20, [False, True, False])]).samples
    assert one.token_ids.tolist() == [10, 11, 12, 20, 21, 22] and one.excluded is not None
    assert one.excluded.tolist() == [False, False, False, False, True, False]
