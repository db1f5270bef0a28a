"""Environments of gymnasium as conversations."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from core.errors import UserError
from core.types.messages import Message
from core.types.samples import Prompt
from rollouts.envs.gymnasium import (
    BadAction,
    Gymnasium,
    describe_actions,
    make_gym,
    read_action,
    read_form,
    write_value,
)
from rollouts.registry import load_env_class, resolve_env
from unit_tests.helpers.episodes import said
from unit_tests.helpers.sentences import tell


def prompt_of(**extra) -> Prompt:
    return Prompt(id="row", messages=[{"role": "user", "content": "play"}], extra=extra)


def test_without_the_package_it_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    env = load_env_class(resolve_env("gymnasium"))(prompt_of(gym="FrozenLake-v1"))
    with pytest.raises(UserError, match="the package gymnasium is not installed: pip install"):
        asyncio.run(env.open())


LAKE = {"gym": "FrozenLake-v1", "gym_args": {"is_slippery": False, "desc": ["SF", "FG"]}}


def test_a_game_from_the_reset_to_the_goal():
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
    def begin(**extra) -> str:
        [first] = asyncio.run(Gymnasium(prompt_of(gym="CartPole-v1", **extra)).open())
        return first["content"]

    assert begin(gym_seed=3) == begin(gym_seed=3) != begin(gym_seed=4)
    assert begin().startswith("observation: 0.")
    # Parquet writes null for a row without a seed, if another row has one
    assert begin(gym_seed=None) == begin(gym_seed=0) == begin()


def test_an_action_is_text_or_numbers():
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
    with pytest.raises(UserError, match=words):
        asyncio.run(Gymnasium(prompt_of(**extra)).open())


class Slide(gymnasium.Env):
    """A white bar on black, to be moved to the middle: what a policy sees is the image alone."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012
    observation_space = spaces.Box(0.0, 1.0, (1,), np.float64)
    action_space = spaces.Box(-0.5, 0.5, (2,), np.float32)

    def __init__(self, render_mode: str | None = None, *, colours: int = 3):
        self.render_mode, self.colours = render_mode, colours

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = float(self.np_random.uniform(0, 1))
        return np.array([self.at]), {}

    def step(self, action):
        assert action.dtype == np.float32
        self.at = min(max(self.at + float(action[0]), 0.0), 1.0)
        near = abs(self.at - 0.5) < 0.15
        return np.array([self.at]), float(near), near, False, {}

    def render(self):
        assert self.render_mode == "rgb_array"
        frame = np.zeros((8, 16, self.colours), np.uint8)
        frame[:, round(15 * self.at)] = 255
        return frame


gymnasium.register("FeynRLSlide-v0", Slide)
SEEN = {"gym": "FeynRLSlide-v0", "gym_seed": 3, "gym_observe": "image", "gym_bins": 5}


def find_bar(message: Message) -> int:
    """Where the bar is, in what the policy sees."""
    [part] = message["parts"]
    assert part["type"] == "image" and message["content"] == ""
    image = part["image"]
    assert (image.width, image.height) == (16, 8)
    pixels = np.asarray(image.open())
    [column] = {*pixels.nonzero()[1].tolist()}
    return column


def test_a_policy_that_sees_plays_by_action_tokens():
    async def play() -> Gymnasium:
        env = Gymnasium(prompt_of(**SEEN))
        [first] = await env.open()
        at = find_bar(first)
        [again] = await Gymnasium(prompt_of(**SEEN)).open()
        assert again == first, "the image of a state is the same to the byte"
        for wrong in ("<act_4>", "<act_4><act_5>", "<act_4> up", "4 4", "<act_1><act_1><act_1>"):
            [lost] = await env.step(said(wrong)) or []
            assert lost["content"].startswith("error: the action is 2 tokens from <act_0> to <act_4>")
            assert "parts" not in lost
        [moved] = await env.step(said("<act_0><act_2>")) or []
        assert find_bar(moved) == 0 < at
        assert await env.step(said("<act_4><act_2>")) is None, "0.4 from the border is near the middle"
        await env.close()
        return env

    env = asyncio.run(play())
    assert env.scores() == {"return": 1.0, "steps": 2.0, "invalid_actions": 5.0}


def test_a_policy_that_sees_may_act_by_text():
    [first] = asyncio.run(Gymnasium(prompt_of(**{**SEEN, "gym_bins": None})).open())
    assert first["content"] == "actions: 2 numbers from -0.5 -0.5 to 0.5 0.5"
    assert [part["type"] for part in first["parts"]] == ["image", "text"]


BOUNDS = [
    # space, how an action is described, replies with the actions they are, and replies that are none
    (spaces.Discrete(3, start=1), "a whole number from 1 to 3", {"3": 3, "no 0, 1": 1}, ["0", "4", "1.0", "9" * 20]),
    (
        spaces.MultiDiscrete([3, 2]),
        "2 whole numbers, each below 3 2",
        {"9 2 1": [2, 1]},
        ["3 0", "0 2", "1", "1 -1", "1 1e0", f"1 {'9' * 20}"],
    ),
    (
        spaces.MultiDiscrete([3, 2], start=[1, 5]),
        "2 whole numbers from 1 5 to 3 6",
        {"1 5": [1, 5], "3 6": [3, 6]},
        ["0 5", "4 5", "1 7"],
    ),
    (spaces.MultiBinary(2), "2 whole numbers, each below 2", {"1 0": [1, 0]}, ["1 2", "1 300", "1 -300"]),
    (
        spaces.Box(0, 255, (1, 2), dtype=np.uint8),
        "2 whole numbers from 0 0 to 255 255",
        {"0 255": [[0, 255]]},
        ["256 0", "0 -1", "1.7 2", "1 1e1", "1"],
    ),
    (
        spaces.Box(-1, 1, (2,)),
        "2 numbers from -1 -1 to 1 1",
        {"-1 .5": [-1.0, 0.5], "x = 3, so 1e-1 and 1.": [0.1, 1.0]},
        ["1.1 0", "1e999 0", "0"],
    ),
    (spaces.Text(3), "a text of at most 3 characters", {" abc ": "abc"}, ["abcd", ""]),
]


@pytest.mark.parametrize(("space", "described", "valid", "wrong"), BOUNDS, ids=[str(space) for space, *_ in BOUNDS])
def test_an_action_outside_of_its_space_is_answered_and_none_is_bent(space, described, valid, wrong):
    assert describe_actions(space) == described
    for reply, action in valid.items():
        found = read_action(reply, space)
        assert space.contains(found) and np.array_equal(found, np.asarray(action, dtype=space.dtype)), reply
    for reply in wrong:
        with pytest.raises(BadAction) as refused:
            read_action(reply, space)
        assert str(refused.value).startswith(f"the action is {described}, found "), reply
    assert len(str(refused.value)) < 200


def test_tokens_name_bins_and_choices():
    box = spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 8.0]), dtype=np.float64)
    assert read_action("<act_0><act_3>", box, 4).tolist() == [-0.75, 7.0]
    assert read_action("<act_1>", spaces.Discrete(2, start=4), 9) == 5
    assert read_action("<act_2><act_0>", spaces.MultiDiscrete([3, 2]), 9).tolist() == [2, 0]
    assert read_action("<act_1>" * 4, spaces.MultiBinary((2, 2)), 9).tolist() == [[1, 1], [1, 1]]
    for reply, space in (("<act_2>", spaces.Discrete(2)), ("<act_0><act_2>", spaces.MultiDiscrete([3, 2]))):
        with pytest.raises(BadAction, match="the action is"):
            read_action(reply, space, 9)
    with pytest.raises(UserError, match="a Box without bounds has no bins"):
        describe_actions(spaces.Box(-np.inf, np.inf, (2,)), 9)
    with pytest.raises(UserError, match="actions of the kind Text are no numbers: leave gym_bins out"):
        describe_actions(spaces.Text(8), 9)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"gym_observe": "smell"}, "gym_observe: text or image"),
        ({"gym_bins": 1001}, "gym_bins: 1 to 1000"),
        ({"gym_bins": True}, "gym_bins: 1 to 1000"),
        ({"gym_args": {"colours": 4}}, "renders no image"),
    ],
)
def test_a_row_that_cannot_be_seen_is_one_sentence(extra, words):
    with pytest.raises(UserError, match=words):
        asyncio.run(Gymnasium(prompt_of(**SEEN | extra)).open())


FORM = (
    "rollout.env=gymnasium: the row row may have gym_observe: text or image, and gym_bins: 1 to 1000, found {} and {}"
)


def test_what_a_row_says_of_its_environment_is_read_or_refused_whole():
    forms = [
        ({}, (False, 0)),
        ({"gym_observe": "image", "gym_bins": 1}, (True, 1)),
        ({"gym_bins": 1000}, (False, 1000)),
    ]
    for extra, form in forms:
        assert read_form(prompt_of(**extra)) == form
    for observe, bins in (("smell", 0), ("text", -1), ("text", 1001), ("image", True), ("text", 1.5)):
        extra = {"gym_observe": observe, "gym_bins": bins}
        assert tell(lambda extra=extra: read_form(prompt_of(**extra))) == FORM.format(repr(observe), repr(bins))
    for name, args in ((None, {}), (3, {"a": 1}), ("A-v1", [1])):
        assert tell(lambda name=name, args=args: make_gym(prompt_of(gym=name, gym_args=args))) == (
            "rollout.env=gymnasium: the row row must name an environment in its column gym (and its arguments as an "
            f"object in gym_args), found {name!r} and {args!r}"
        )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ({"a": np.array([1, 2]), "b": (True, 0.00004)}, "a: 1 2, b: 1; 0"),
        ((1, "x", np.array([[0.5], [1.23456]])), "1; x; 0.5 1.2346"),
        (np.uint8(200), "200"),
        (np.array([]), ""),
    ],
)
def test_an_observation_is_written_in_order(value, text):
    assert write_value(value) == text


def test_an_observation_of_another_kind_is_refused():
    assert tell(lambda: write_value(np.array(["a"]), spaces.Discrete(2))) == (
        "rollout.env=gymnasium: observations of Discrete(2) are neither text nor numbers"
    )


def test_tokens_of_an_action_are_within_its_choices():
    most = "the action is 2 tokens from <act_0> to <act_2>"
    space = spaces.MultiDiscrete([3, 2], start=[1, 5])
    assert read_action("<act_2><act_1>", space, 9).tolist() == [3, 6]
    for reply, found in {
        "<act_0><act_2>": f"{most}, found <act_0><act_2>",
        " <act_3><act_0> ": f"{most}, found <act_3><act_0>",
        "<act_0>": f"{most}, found <act_0>",
        "<act_1>" * 10: f"{most}, found {('<act_1>' * 10)[:60]}",
        "up": f"{most}: 'up' is no action token such as <act_0>",
    }.items():
        assert tell(lambda reply=reply: read_action(reply, space, 9), BadAction) == found
    half = spaces.Box(np.array([-1.0, -np.inf]), np.array([1.0, 1.0]))
    assert tell(lambda: read_action("<act_0>", half, 4)) == (
        "rollout.env=gymnasium: a Box without bounds has no bins: leave gym_bins out"
    )


class Frames(gymnasium.Env):
    """Environment whose frames are as its row says; it ends as cut off after its second step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012
    observation_space, action_space = spaces.Discrete(9), spaces.Discrete(2)
    closed = 0

    def __init__(self, render_mode: str | None = None, *, frame: Any = None):
        self.render_mode, self.frame, self.at = render_mode, frame, 0

    def reset(self, *, seed=None, options=None):
        return seed, {}

    def step(self, action):
        self.at += 1
        return 3, np.float32(0.25), False, self.at == 2, {}

    def render(self):
        return self.frame

    def close(self):
        Frames.closed += 1


gymnasium.register("FeynRLFrames-v0", Frames, disable_env_checker=True, order_enforce=False)


def test_only_frames_of_colours_are_shown():
    for shape, kind in (((2, 2, 3), np.float32), ((2, 2), np.uint8), ((2, 2, 4), np.uint8), (None, None)):
        frame = [[0]] if shape is None else np.zeros(shape, kind)
        env = Gymnasium(prompt_of(gym="FeynRLFrames-v0", gym_args={"frame": frame}, gym_observe="image"))
        assert tell(lambda env=env: asyncio.run(env.open())) == (
            "rollout.env=gymnasium: the row row: FeynRLFrames-v0 renders no image (rgb_array): leave gym_observe out"
        )


def test_an_episode_of_text_counts_steps_and_ends_when_it_is_cut_off():
    async def play() -> Gymnasium:
        env = Gymnasium(prompt_of(gym="FeynRLFrames-v0"))
        await env.close()
        said_first = await env.open()
        assert said_first == [{"role": "user", "content": "observation: 0\nactions: a whole number from 0 to 1"}]
        assert await env.step(said("1")) == [{"role": "user", "content": "observation: 3\nreward: 0.25"}]
        assert await env.step(said("0")) is None
        await env.close()
        return env

    before = Frames.closed
    env = asyncio.run(play())
    assert env.turn_scores(0) == [{"return": 0.25}] * 2 and Frames.closed == before + 1
    assert env.scores() == {"return": 0.5, "steps": 2.0, "invalid_actions": 0.0}
