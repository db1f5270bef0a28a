"""Edges of environments: what one method leaves to the base, what is shown whole, and numbers that are none."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from core.types.images import encode_image
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.envs.base import Env
from rollouts.envs.check_env import check_answers
from rollouts.envs.gymnasium import BadAction, Gymnasium, describe_actions, read_action
from rollouts.envs.harbor import Harbor
from rollouts.envs.openenv import OpenEnv
from rollouts.envs.python_tool import PythonTool
from rollouts.envs.reach import Arm, Reach, read_arm
from rollouts.envs.textarena import TextArena
from rollouts.envs.treasure import Treasure
from rollouts.tools.env import ToolEnv
from unit_tests.helpers.episodes import said
from unit_tests.helpers.sentences import tell


def row(**extra: Any) -> Prompt:
    return Prompt(id="r", messages=[], extra=extra)


class Short(Env):
    """Environment with the one method that it must have."""

    async def step(self, reply: ParsedReply) -> None:
        return None


class Scored(Short):
    def scores(self) -> dict[str, float]:
        return {"a": 2.0}


def test_an_environment_of_one_method_has_one_side_and_no_scores():
    env = Short(prompt := row())
    assert (env.prompt, env.tools, env.least_turns, env.player, env.sides) == (prompt, (), 1, 0, 1)
    assert env.scores() == env.scores_of(3) == env.counts() == {}
    assert (env.turn_scores(3), env.result_of(3)) == ([], None)
    assert Scored(prompt).scores_of(3) == {"a": 2.0}

    async def go() -> list[Any]:
        return [await env.open(), await env.end(), await env.close()]

    Short.check()
    assert asyncio.run(go()) == [[], None, None]


def test_classes_of_environments_begin_with_these_settings():
    assert (ToolEnv.least_turns, ToolEnv.tool_timeout_s, ToolEnv.parallel_calls) == (2, 30.0, True)
    assert (Harbor.backend, Harbor.network, Harbor.on_timeout) == ("bubblewrap", False, "score")
    assert (Harbor.command_s, Harbor.most_characters) == (60.0, 4000)
    assert (Harbor.parallel_calls, PythonTool.parallel_calls) == (False, False), "calls share a box, or names"
    assert (OpenEnv.timeout_s, TextArena.sides) == (60.0, 2)


# Gymnasium ------------------------------------------------------------------------------------------------------------

FRAME = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)


class Lamp(gymnasium.Env):
    """A lamp whose picture is always the same."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012
    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 1, 0.5, False, False, {}

    def render(self):
        return FRAME


gymnasium.register("FeynRLLamp-v0", Lamp, disable_env_checker=True, order_enforce=False)


def test_what_a_policy_sees_of_a_game_is_a_whole_message():
    env = Gymnasium(row(gym="FeynRLLamp-v0", gym_observe="image"))
    first = asyncio.run(env.open())
    actions = "actions: a whole number from 0 to 1"
    image = {"type": "image", "image": encode_image(Image.fromarray(FRAME))}
    text = {"type": "text", "text": actions}
    assert first == [{"role": "user", "content": actions, "parts": [image, text]}]
    assert asyncio.run(env.step(said("1"))) == [{"role": "user", "content": "", "parts": [image]}]
    assert check_answers(first, "E") is first
    asyncio.run(env.close())


def test_a_bit_of_an_action_has_two_tokens():
    space = spaces.MultiBinary(2)
    described = "2 tokens from <act_0> to <act_1>"
    assert describe_actions(space, 9) == described
    assert read_action("<act_1><act_0>", space, 9).tolist() == [1, 0]
    told = tell(lambda: read_action("<act_1><act_2>", space, 9), BadAction)
    assert told == f"the action is {described}, found <act_1><act_2>"


# The arm, and the treasure --------------------------------------------------------------------------------------------

FAR = {"angles": [0.5, 1.5], "dot": [2.0, 3.0]}


@pytest.mark.parametrize("reply", ["", "up", "<act_3>", "<act_3><act_4><act_5>", "<act_16><act_3>", "<act_3><act_16>"])
def test_a_reply_that_names_no_two_angles_ends_the_episode(reply):
    env = Reach(row(arm=FAR))
    assert asyncio.run(env.step(said(reply))) is None
    assert env.scores() == {"reached": 0.0, "no_action": 1.0} and env.counts() == {"moves": 0.0}
    assert env.arm == read_arm(row(arm=FAR)), "it has not moved"


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("value", [math.nan, math.inf, True, None])
def test_each_number_of_an_arm_is_one_or_the_row_is_refused(at, value):
    numbers: list[Any] = [*FAR["angles"], *FAR["dot"]]
    numbers[at] = value
    given = {"angles": numbers[:2], "dot": numbers[2:]}
    told = tell(lambda: read_arm(row(arm=given)))
    assert told.startswith("rollout.env=reach: the row r must have a column arm with angles and dot, two numbers each")


def test_the_links_of_an_arm_are_two_pixels_wide_and_of_these_colours():
    image = Arm(angles=(0.0, math.pi / 2), dot=(10.0, 50.0)).draw()
    of_upper = [image.getpixel((35, y)) for y in range(56)]
    of_fore = [image.getpixel((x, 34)) for x in range(56)]
    assert of_upper.count((31, 80, 220)) == 2 and of_upper.count((255, 255, 255)) == 54
    assert of_fore.count((44, 160, 44)) == 2 and of_fore.count((255, 255, 255)) == 54
    assert image.getpixel((10, 50)) == (214, 39, 40)


def test_the_coin_is_that_of_the_last_message():
    messages: list[Any] = [{"role": "system", "content": "9"}, {"role": "user", "content": "4"}]
    env = Treasure(Prompt(id="r", messages=messages, answer="z"))
    assert env.scores() == {"earned": 0} and env.turn_scores(0) == []
    assert asyncio.run(env.step(said("a"))) is None
    assert env.scores() == {"earned": 0.4}


def test_an_arm_is_shown_as_a_message_of_the_user():
    arm = read_arm(row(arm=FAR))
    image = {"type": "image", "image": encode_image(arm.draw())}
    assert arm.show() == {"role": "user", "content": "", "parts": [image]}
