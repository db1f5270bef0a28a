"""Environments of gymnasium as conversations."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest

from core.errors import UserError
from core.types import Prompt
from rollouts.envs.gymnasium import BadAction, Gymnasium, describe_actions, read_action
from rollouts.registry import load_env_class, resolve_env
from unit_tests.test_episode import said


def prompt_of(**extra) -> Prompt:
    return Prompt(id="row", messages=[{"role": "user", "content": "play"}], extra=extra)


def test_without_the_package_it_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    env = load_env_class(resolve_env("gymnasium"))(prompt_of(gym="FrozenLake-v1"))
    with pytest.raises(UserError, match="the package gymnasium is not installed: pip install"):
        asyncio.run(env.open())


LAKE = {"gym": "FrozenLake-v1", "gym_args": {"is_slippery": False, "desc": ["SF", "FG"]}}


def test_a_game_from_the_reset_to_the_goal():
    pytest.importorskip("gymnasium", reason="gymnasium is optional (the extra envs)")

    async def play() -> Gymnasium:
        env = Gymnasium(prompt_of(**LAKE))
        [first] = await env.open()
        assert first == {"role": "user", "content": "observation: 0\nactions: a whole number from 0 to 3"}
        [lost] = await env.step(said("go up there")) or []
        assert lost["content"] == "error: the action is a whole number from 0 to 3, found 0 numbers"
        [wrong] = await env.step(said("7")) or []
        assert wrong["content"] == "error: the action is a whole number from 0 to 3, found 7"
        [right] = await env.step(said("I was at 0, so I go right: 2")) or []
        assert right["content"] == "observation: 1\nreward: 0"
        assert await env.step(said("1")) is None
        await env.close()
        return env

    env = asyncio.run(play())
    assert env.scores() == {"return": 1.0, "steps": 2.0, "invalid_actions": 2.0}
    assert [scores["return"] for scores in env.turn_scores(0)] == [0, 0, 0, 1]


def test_all_episodes_of_a_row_begin_alike():
    pytest.importorskip("gymnasium", reason="gymnasium is optional (the extra envs)")

    def begin(**extra) -> str:
        [first] = asyncio.run(Gymnasium(prompt_of(gym="CartPole-v1", **extra)).open())
        return first["content"]

    assert begin(gym_seed=3) == begin(gym_seed=3) != begin(gym_seed=4)
    assert begin().startswith("observation: 0.")


def test_actions_are_read_from_the_end_of_a_reply():
    spaces = pytest.importorskip("gymnasium.spaces", reason="gymnasium is optional (the extra envs)")
    box = spaces.Box(-1.0, 1.0, (2,), np.float32)
    assert read_action("x = 3, so 0.5 and -1e-1", box).tolist() == pytest.approx([0.5, -0.1])
    assert read_action("2 1", spaces.MultiDiscrete([3, 2])).tolist() == [2, 1]
    assert read_action(" look ", spaces.Text(8)) == "look"
    assert read_action("5", spaces.Discrete(2, start=4)) == 5
    for reply, space in (("0.5", box), ("3 4", box), ("1.5", spaces.Discrete(2)), ("longer than that", spaces.Text(8))):
        with pytest.raises(BadAction, match="the action is"):
            read_action(reply, space)
    with pytest.raises(UserError, match="actions of the kind Sequence are neither text nor numbers"):
        describe_actions(spaces.Sequence(spaces.Discrete(2)))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "the row row must name an environment in its column gym"),
        ({"gym": "NoSuchGame-v1"}, "the row row: NoSuchGame-v1: "),
        ({"gym": "FrozenLake-v1", "gym_args": {"depth": 3}}, "the row row: FrozenLake-v1: TypeError"),
    ],
)
def test_a_row_that_names_no_environment_is_one_sentence(extra, words):
    pytest.importorskip("gymnasium", reason="gymnasium is optional (the extra envs)")
    with pytest.raises(UserError, match=words):
        asyncio.run(Gymnasium(prompt_of(**extra)).open())
