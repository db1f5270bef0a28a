"""The arm: what its moves do, what its images show, what its expert can, and a model that learns it."""

import asyncio
import json
import math
import random

import numpy as np
import pytest

from core.errors import UserError
from core.types.action_tokens import write_action_tokens
from core.types.images import read_image
from core.types.messages import find_images
from core.types.samples import Prompt
from data_prep import reach
from rollouts.envs.reach import BINS, HIGH, LINKS, LOW, NEAR, SIDE, STEP, Arm, Reach, name_angles, read_angles, wrap
from unit_tests.helpers.episodes import said

STARTS = [reach.draw_arm(random.Random(i)) for i in range(100)]


def env_of(arm: Arm) -> Reach:
    return Reach(Prompt(id="r", messages=[arm.show()], extra={"arm": reach.describe(arm)}))


def play(arm: Arm, *replies: str) -> Reach:
    env = env_of(arm)

    async def take_turns() -> None:
        for i, reply in enumerate(replies):
            answers = await env.step(said(reply))
            if answers is None:
                assert i == len(replies) - 1, "the episode has ended"
            else:
                assert answers == [env.arm.show()]

    asyncio.run(take_turns())
    return env


@pytest.mark.parametrize("arm", STARTS[:20])
def test_a_move_turns_each_joint_to_its_angle_and_no_farther_than_it_may(arm):
    for wanted in ((-3.0, 0.5), (3.0, 2.0), (0.1, 1.0)):
        moved = arm.turn_to(wanted)
        before = abs(wrap(wanted[0] - arm.angles[0])), abs(wanted[1] - arm.angles[1])
        after = abs(wrap(wanted[0] - moved.angles[0])), abs(wanted[1] - moved.angles[1])
        for b, a in zip(before, after, strict=True):
            assert a == pytest.approx(max(0.0, b - STEP), abs=1e-9)
        shoulder, elbow, tip = moved.joints
        assert math.dist(shoulder, elbow) == pytest.approx(LINKS[0])
        assert math.dist(elbow, tip) == pytest.approx(LINKS[1])


def test_the_expert_computes_angles_that_reach_every_dot():
    for arm in STARTS:
        angles = reach.find_angles(arm.dot)
        assert math.dist(Arm(angles=angles, dot=arm.dot).joints[-1], arm.dot) < 1e-6 * SIDE + 1e-3
        named = read_angles(name_angles(angles))
        bounds = zip(named, angles, LOW, HIGH, strict=True)
        assert all(abs(n - a) <= (high - low) / BINS / 2 + 1e-9 for n, a, low, high in bounds)
        moves = reach.count_moves(arm)
        assert moves is not None
        env = play(arm, *[write_action_tokens(reach.choose(arm))] * moves)
        assert env.scores() == {"reached": 1.0, "no_action": 0.0} and env.counts() == {"moves": moves}
    assert {reach.count_moves(arm) for arm in STARTS} == {*range(1, reach.MOVES + 1)}


def test_moves_by_chance_reach_few_dots():
    rng = random.Random(1)
    games = [reach.play(arm, 1.0, rng) for arm in STARTS]
    assert sum(len(game) < 2 * reach.MOVES for game in games) < 0.4 * len(STARTS)


@pytest.mark.parametrize("reply", ["", "<act_1>", "<act_1><act_2><act_3>", f"<act_{BINS}><act_0>", "up", "1 2"])
def test_what_is_no_action_ends_the_episode_without_reward(reply):
    env = play(STARTS[0], reply)
    assert env.scores() == {"reached": 0.0, "no_action": 1.0} and env.counts() == {"moves": 0.0}


def test_a_image_shows_arm_and_dot_and_is_the_same_to_the_byte():
    for arm in STARTS[:20]:
        pixels = np.asarray(arm.draw()).astype(int)
        red = (pixels[..., 0] > 150) & (pixels[..., 1] < 100)
        rows, columns = red.nonzero()
        assert len(rows) > 20
        assert math.dist((columns.mean(), rows.mean()), arm.dot) < NEAR
        x, y = arm.joints[1]
        assert (pixels[round(y) - 2 : round(y) + 3, round(x) - 2 : round(x) + 3].sum(-1) < 500).any(), "the elbow"
        [one], [other] = find_images([arm.show()]), find_images([arm.show()])
        assert one == other == read_image(one.data) and (one.width, one.height) == (SIDE, SIDE)
    assert len({find_images([arm.show()])[0].hash for arm in STARTS}) == len(STARTS)


@pytest.mark.parametrize(
    "arm",
    [None, 3, {"angles": [1.0], "dot": [1, 2]}, {"angles": "ab", "dot": [1, 2]}]
    + [{"angles": [0, number], "dot": [1, 2]} for number in (10**400, math.nan, math.inf)],
    ids=["none", "number", "one angle", "text", "huge", "nan", "inf"],
)
def test_a_row_without_an_arm_is_one_sentence(arm):
    with pytest.raises(UserError, match="the row r must have a column arm with angles and dot"):
        Reach(Prompt(id="r", messages=[], extra={} if arm is None else {"arm": arm}))


def test_rows_are_starts_and_games():
    splits = reach.make(train=6, held_out=4, sft=30, by_chance=0.5)
    assert splits["eval"] == reach.make(train=9, held_out=4)["eval"], "it depends on the seed alone"
    for row in splits["train"] + splits["eval"]:
        [message] = row.messages
        prompt = Prompt(id=row.id, messages=row.messages, extra=json.loads(row.extra or ""))
        assert Reach(prompt).arm.show() == message, "the environment begins with what the prompt shows"
    by_expert = 0
    for row in splits["sft"]:
        prompt = Prompt(id=row.id, messages=[], extra=json.loads(row.extra or ""))
        env = Reach(prompt)
        told, replies = row.messages[::2], row.messages[1::2]
        assert len(told) == len(replies) and row.messages[-1]["role"] == "assistant"
        for shown, reply in zip(told, replies, strict=True):
            assert env.arm.show() == shown
            by_expert += reply["content"] == write_action_tokens(reach.choose(env.arm))
            asyncio.run(env.step(said(reply["content"])))
        assert env.arm.is_there or len(replies) == reach.MOVES
    n = sum(len(row.messages) // 2 for row in splits["sft"])
    assert 0.3 * n < by_expert < 0.7 * n
