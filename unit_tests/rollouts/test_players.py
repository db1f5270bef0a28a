"""Games in which the policy plays several sides: each side's rewards are compared with its own, and with no other's."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import product

import pytest

from algs.base import accepts_group, assign_advantages
from algs.grpo import GRPO
from algs.rloo import RLOO
from analysis.capture.batch_file import read_batch, write_batch
from core.types.samples import Group, Prompt, Sample
from driver.evaluation.suites.generations import describe_group
from driver.evaluation.suites.run import grade_prompt
from driver.evaluation.suites.table import measure_prompt
from driver.records.rollout_metrics import measure_groups, measure_passes
from driver.records.sample_files import make_sample_record
from rollouts.engines.base import Completion
from rollouts.envs.base import Env
from rollouts.episode import run_episode
from rollouts.turns import EpisodeRules
from unit_tests.helpers.episodes import Words
from unit_tests.helpers.examples import sample_of

CHANCE = {0: 0.4, 1: 0.7}
"""Probability with which each player makes its move."""
REWARD = {0: lambda a, b: 0.5 * a, 1: lambda a, b: 5.0 * a + b}
"""What each player earns. The first one's move is good for it, and better for the other."""


def a_side(player: int, move: int, reward: float) -> Sample:
    return sample_of([0, move], [False, True], reward=reward, player=player)


def expected_gradient(alg: RLOO | GRPO, *, told_apart: bool) -> dict[int, float]:
    """Return the mean, over all groups of two games, of the gradient by the log-odds of each player's move."""
    found = {0: 0.0, 1: 0.0}
    for moves in product((0, 1), repeat=4):
        games = [moves[:2], moves[2:]]
        group: Group = [
            a_side(player if told_apart else 0, game[player], REWARD[player](*game))
            for game in games
            for player in (0, 1)
        ]
        [credited] = assign_advantages(alg, [group])
        chance = math.prod(CHANCE[i % 2] if move else 1 - CHANCE[i % 2] for i, move in enumerate(moves))
        for i, sample in enumerate(credited):
            assert sample.advantage is not None
            found[i % 2] += chance * float(sample.advantage[1]) * (moves[i] - CHANCE[i % 2]) / len(games)
    return found


def test_the_baseline_of_a_player_leaves_its_gradient_what_it_is():
    """By enumeration. Pooled with the other's rewards, the first player would learn to shun what is good for it."""
    spread = {player: chance * (1 - chance) for player, chance in CHANCE.items()}
    true = {0: 0.5 * spread[0], 1: spread[1]}
    assert expected_gradient(RLOO(), told_apart=True) == pytest.approx(true, abs=1e-7)
    halved = {player: slope / 2 for player, slope in true.items()}  # the mean of two holds one half of the own reward
    assert expected_gradient(GRPO(), told_apart=True) == pytest.approx(halved, abs=1e-7)
    pooled = expected_gradient(RLOO(), told_apart=False)
    assert pooled[0] < 0 < true[0], pooled


def test_advantages_go_back_to_their_samples_however_these_stand():
    first = [a_side(0, 1, 1.0), a_side(0, 0, 0.0)]
    second = [a_side(1, 1, 4.0), a_side(1, 0, 8.0), a_side(1, 0, 0.0)]
    branches = [replace(s, episode=7) for s in (a_side(1, 3, 6.0), a_side(1, 2, 6.0))]
    lost = replace(a_side(0, 1, 0.0), reward=None, failure="timeout")
    group = [second[0], first[0], branches[0], second[1], lost, first[1], branches[1], second[2]]
    [credited] = assign_advantages(GRPO(), [group])
    assert [s.token_ids.tolist() for s in credited] == [s.token_ids.tolist() for s in group]
    # 1 and 0 of the first player; 4, 6 (an episode of two samples), 8 and 0 of the second
    wanted = [-0.5, 0.5, 1.5, 3.5, 0.0, -0.5, 1.5, -4.5]
    assert [float(s.advantage[1]) for s in credited] == pytest.approx(wanted)


def test_a_group_in_which_no_player_can_learn_is_none():
    lopsided = [a_side(player, 1, 1.0 - player) for player in (0, 1)] * 2
    decided = [*lopsided, a_side(1, 1, 5.0)]
    assert [accepts_group(GRPO(dynamic_sampling=True), g) for g in (lopsided, decided)] == [False, True]
    assert measure_groups([lopsided, decided])["rollout/zero_std_groups"] == 0.5
    assert [float(s.advantage[1]) for s in assign_advantages(GRPO(), [lopsided])[0]] == [0.0] * 4


def test_the_passes_of_a_player_are_its_own():
    """The first always wins. The second had its turn in two games of three."""
    group = [a_side(0, 1, 1.0), a_side(1, 1, 0.0), a_side(0, 1, 1.0), a_side(0, 1, 1.0), a_side(1, 1, 0.0)]
    assert measure_passes([group], pass_reward=0.5) == {"pass@1": 0.5, "pass@2": 0.5}


class Duel(Env):
    """The two sides speak in turn, twice."""

    def __init__(self, prompt):
        super().__init__(prompt)
        self.replies = 0

    async def step(self, reply):
        self.replies += 1
        self.player = self.replies % 2
        return [{"role": "user", "content": "5"}] if self.replies < 4 else None

    def scores_of(self, player):
        return {"won": float(player)}


class Yes:
    async def generate(self, token_ids, *, max_new_tokens, seed):
        return Completion(token_ids=[3], logp=[-1.0], versions=[0], stop="eos")


def test_an_episode_numbers_its_players_and_files_keep_the_number(tmp_path):
    rules = EpisodeRules(seed_of_turn=lambda turn: turn, max_new_tokens=20, max_turns=9, timeout_s=60.0)
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "2"}])
    played = asyncio.run(run_episode(Yes(), Duel, prompt, Words(), rules))
    samples = [one.sample for one in played]
    assert [(s.player, s.reward_parts["won"], len(s.turns)) for s in samples] == [(0, 0.0, 2), (1, 1.0, 2)]
    assert [make_sample_record(s, 0).get("player") for s in samples] == [None, 1]
    write_batch(tmp_path, [samples])
    assert [s.player for s in read_batch(tmp_path)[0]] == [0, 1]


def test_an_evaluation_grades_each_side_by_itself():
    """The second side always wins: of two games of one side, none or all pass, however many are left of a side."""
    for sides in ([0, 1, 0, 1], [0, 1, 0, 1, 0]):
        group = [a_side(player, player, float(player)) for player in sides]
        rows = describe_group(group, Prompt(id="game", messages=[]), of_set="s", index=0)
        assert [row.player for row in rows] == sides
        measured = measure_prompt(grade_prompt(rows, by=[], pass_reward=1.0), [1, 2])
        assert measured == {"mean": 0.5, "pass@1": 0.5, "pass@2": 0.5, "pass^2": 0.5, "majority@2": 0.5}
