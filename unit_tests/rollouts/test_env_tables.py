"""Environments in tables: where an arm is, what games earn and show, and what an environment may return."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from core.types.messages import ToolSpec
from core.types.samples import Prompt
from rollouts.envs import number_tools
from rollouts.envs.check_env import check_answers, check_turn_scores
from rollouts.envs.reach import COLOURS, Arm, Reach, name_angles, read_angles, read_arm, wrap
from rollouts.envs.textarena import TextArena
from rollouts.envs.treasure import Treasure, best_return
from unit_tests.helpers.episodes import calls_of, said
from unit_tests.helpers.sentences import tell


def row(**extra: Any) -> Prompt:
    return Prompt(id="r", messages=[], extra=extra)


# The arm, the treasure, and numbers -----------------------------------------------------------------------------------


def test_an_arm_is_where_its_angles_say():
    arm = Arm(angles=(0.0, math.pi / 2), dot=(42.0, 35.0))
    assert [tuple(round(x, 9) for x in one) for one in arm.joints] == [(28, 28), (42, 28), (42, 39)]
    assert arm.is_there and not Arm(angles=arm.angles, dot=(42.0, 34.9)).is_there, "4 pixels are near"
    for angle, found in ((0.0, 0.0), (3.0, 3.0), (-math.pi, -math.pi), (math.pi, -math.pi), (4.0, 4.0 - 2 * math.pi)):
        assert wrap(angle) == pytest.approx(found)
    for begin, wanted, end in (
        ((0.0, 1.0), (0.5, 1.1), (0.5, 1.1)),
        ((0.0, 2.4), (2.0, 0.4), (1.2, 1.2)),
        ((3.0, 1.0), (-3.0, 2.4), (-3.0, 2.2)),
        ((-3.0, 1.0), (1.5, 1.0), (2 * math.pi - 4.2, 1.0)),
    ):
        turned = Arm(angles=begin, dot=(1.0, 2.0)).turn_to(wanted)
        assert turned.angles == pytest.approx(end) and turned.dot == (1.0, 2.0)
    assert name_angles((-math.pi, 0.4)) == [0, 0] and name_angles((math.pi, 2.4)) == [15, 15]
    assert read_angles([0, 15]) == pytest.approx((-math.pi * 15 / 16, 2.4 - 1 / 16))


def test_an_arm_is_drawn_over_its_dot():
    image = Arm(angles=(0.0, math.pi / 2), dot=(10.0, 50.0)).draw()
    assert image.size == (56, 56)
    seen = {
        at: image.getpixel(at) for at in ((0, 0), (35, 28), (42, 34), (10, 50), (6, 50), (10, 54), (10, 45), (28, 10))
    }
    white, dot = (255, 255, 255), COLOURS["dot"]
    assert seen == {
        **{(0, 0): white, (35, 28): COLOURS["upper"], (42, 34): COLOURS["fore"], (28, 10): white},
        **{(10, 50): dot, (6, 50): dot, (10, 54): dot, (10, 45): white},
    }
    over = Arm(angles=(0.0, 0.5), dot=(35.0, 28.0)).draw()
    assert over.getpixel((35, 28)) == COLOURS["upper"] and over.getpixel((35, 31)) == dot


def test_a_row_has_an_arm_or_is_refused():
    assert read_arm(row(arm={"angles": [1, 2], "dot": [3, 4]})) == Arm(angles=(1.0, 2.0), dot=(3.0, 4.0))
    for given in (None, {}, {"angles": [1, 2]}, {"angles": [1], "dot": [3, 4]}, {"angles": ["a", 2], "dot": [3, 4]}):
        assert tell(lambda given=given: read_arm(row(arm=given))) == (
            "rollout.env=reach: the row r must have a column arm with angles and dot, two numbers each, found "
            f"{given!r}: make rows with data_prep/reach.py"
        )


def test_an_arm_that_is_there_and_acts_wrongly_has_not_reached():
    there = {"angles": [0.0, 0.5], "dot": [28 + 14 + 11 * math.cos(0.5), 28 + 11 * math.sin(0.5)]}
    env = Reach(row(arm=there))
    assert env.scores() == {"reached": 1.0, "no_action": 0.0}
    assert asyncio.run(env.step(said("<act_15><act_16>"))) is None
    assert env.scores() == {"reached": 0.0, "no_action": 1.0} and env.counts() == {"moves": 0.0}
    moved = Reach(row(arm={"angles": [0.0, 2.0], "dot": [0, 0]}))
    [shown] = asyncio.run(moved.step(said("<act_15><act_15>"))) or []
    assert shown == Arm(angles=(1.2, 2.3375), dot=(0.0, 0.0)).show() and moved.counts() == {"moves": 1.0}


@pytest.mark.parametrize(
    ("replies", "earned"),
    [("a", [0.5]), ("b", [-0.1]), ("bz", [-0.1, 0.8]), ("ba", [-0.1, 0.0]), ("bb", [-0.1, 0.0]), ("z", [0.0])],
)
def test_a_treasure_is_taken_or_opened(replies, earned):
    env = Treasure(Prompt(id="r", messages=[{"role": "user", "content": "5"}], answer="z"))
    told = [asyncio.run(env.step(said(reply))) for reply in replies]
    letter = [{"role": "user", "content": "z"}]
    assert told == ([letter] if replies[0] == "b" else [None]) + [None] * (len(replies) - 1)
    assert env.turn_scores(0) == [{"earned": one} for one in earned] and env.scores() == {"earned": sum(earned)}
    assert [best_return(coin) for coin in (0.2, 0.9)] == [pytest.approx(0.7), 0.9]


def test_a_row_offers_some_tools_of_numbers():
    answers = {"add": "5", "sub": "1", "max": "3", "min": "2"}
    specs: list[ToolSpec] = [{"type": "function", "function": {"name": name}} for name in ("min", "add")]  # type: ignore[typeddict-item]
    env = number_tools.NumberTools(Prompt(id="r", messages=[], tools=specs))
    calls = [(name, {"a": 3, "b": 2}) for name in answers]
    told = asyncio.run(env.step(calls_of(*calls))) or []
    missing = "Error: There is no function {}; there are add, min."
    assert [one["content"] for one in told] == ["5", missing.format("sub"), missing.format("max"), "2"]
    assert {name: str(made(3, 2)) for name, made in number_tools.TOOLS.items()} == answers
    assert [made(2, 3) for made in number_tools.TOOLS.values()] == [5, -1, 3, 2]


# TextArena ------------------------------------------------------------------------------------------------------------


class Game:
    """Game of a library: the players draw numbers in turn, and the third move ends it."""

    def __init__(self, env_id: str) -> None:
        if env_id == "None-v0":
            raise ValueError("no such game")
        self.env_id, self.moves, self.born = env_id, list[str](), random.random()
        self.state = SimpleNamespace(current_player_id="0", get_current_player_observation=self.see)

    def see(self) -> list[Any]:
        told, moved = SimpleNamespace(name="GAME"), SimpleNamespace(name="PLAYER_ACTION")
        me = int(self.state.current_player_id)
        by_turn = [
            [(-1, f"{self.env_id} {self.given}", told), (me, "rule", told)],
            [(0, "x", moved), (1, "y", moved)],
            [],
        ]
        return by_turn[len(self.moves)]

    def reset(self, *, num_players: int, seed: int) -> None:
        self.given = f"{num_players} {seed}"
        random.seed(seed)

    def step(self, *, action: str) -> tuple[bool, dict[str, Any]]:
        self.moves.append(f"{action} {random.random():.6f}")
        self.state.current_player_id = str(len(self.moves) % 2)
        return len(self.moves) == 3, {}

    def close(self) -> tuple[dict[str, float], dict[int, Any]]:
        return {"0": 1, "1": -1}, {0: {"invalid_move": False}, 1: {"invalid_move": True}}


def test_players_of_a_game_see_what_is_new_and_draw_their_own_numbers(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=lambda *, env_id: Game(env_id)))  # type: ignore[arg-type]

    async def play(**extra: Any) -> TextArena:
        env = TextArena(row(game="A-v0", **extra))
        sides, seed = extra.get("players") or 2, extra.get("game_seed") or 0
        outside = random.getstate()
        assert await env.open() == [{"role": "user", "content": f"A-v0 {sides} {seed}\nrule"}]
        assert (env.player, env.sides) == (0, sides)
        assert env.scores_of(0) == {"return": 0.0, "invalid_move": 0.0, "finished": 0.0} and env.result_of(0) is None
        assert random.getstate() == outside, "the process keeps its own"
        random.random()  # of another game
        outside = random.getstate()
        assert await env.step(said("x")) == [{"role": "user", "content": "x"}] and env.player == 1
        assert await env.step(said("y")) == [{"role": "user", "content": "It is your turn."}]
        assert await env.step(said("z")) is None
        assert random.getstate() == outside and env.game.born == random.Random(0).random()
        return env

    state = random.getstate()
    for extra in ({}, {"players": 3, "game_seed": 5}):
        env = asyncio.run(play(**extra))
        own = random.Random(extra.get("game_seed", 0))
        assert env.game.moves == [f"{move} {own.random():.6f}" for move in "xyz"]
        assert env.scores_of(0) == {"return": 1.0, "invalid_move": 0.0, "finished": 1.0}
        assert env.scores_of(1) == {"return": -1.0, "invalid_move": 1.0, "finished": 1.0}
        assert [env.result_of(n) for n in (0, 1, 2)] == ["won", "lost", None]
    random.setstate(state)
    env.rewards = {0: 1.0}
    assert env.result_of(0) == "drawn", "nobody else"
    unknown = tell(lambda: asyncio.run(TextArena(row(game="None-v0")).open()))
    assert unknown == "rollout.env=textarena: the row r: None-v0: ValueError: no such game"
    assert tell(lambda: asyncio.run(TextArena(row(game=["a" * 99])).open())) == (
        f"rollout.env=textarena: the row r must name a game in its column game, found {repr(['a' * 99])[:60]}"
    )


# What an environment returns ------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "a"}


def test_messages_of_an_environment_are_checked_whole():
    assert check_answers(None, "E") is None and check_answers([], "E") == [] and check_answers([USER], "E") == [USER]
    part = "E returned the part {}: a part is {{type: text, text}} or {{type: image, image}} with an image of "
    part += "core.types.images.read_image"
    text = {"type": "text", "text": "a"}
    twice = USER | {"parts": [text, text]}
    for answers, sentence in (
        (USER, "E must return a list of messages, it returned one message alone: return [message]"),
        ({"a": 1}, "E must return None or a list of messages, it returned {'a': 1}"),
        (3, "E must return None or a list of messages, it returned 3"),
        ("role", "E must return None or a list of messages, it returned 'role'"),
        ("x" * 99, f"E must return None or a list of messages, it returned '{'x' * 79}"),
        ([USER, {"role": "user"}], "E must return messages with role and content, it returned {'role': 'user'}"),
        ([{"content": "a"}], "E must return messages with role and content, it returned {'content': 'a'}"),
        (["a"], "E must return messages with role and content, it returned 'a'"),
        ([USER | {"z": 1, 3: 2}], f"E returned a message with '3', which no message has: {USER | {'z': 1, 3: 2}}"),
        (
            [{"role": "user", "content": 3}],
            "E must return messages whose content is text, it returned {'role': 'user', 'content': 3}",
        ),
        (
            [{"role": "user", "content": "a \ud800"}],
            'E returned a text that holds half of a character (such as "\\ud800"): '
            "{'role': 'user', 'content': 'a \\ud800'}",
        ),
        (
            [{"role": "tool", "content": "a", "name": "\udfff"}],
            'E returned a text that holds half of a character (such as "\\ud800"): '
            "{'role': 'tool', 'content': 'a', 'name': '\\udfff'}",
        ),
        ([USER | {"parts": 3}], "E must return messages whose parts are a list, it returned 3"),
        ([USER | {"parts": ["a"]}], part.format("'a'")),
        ([USER | {"parts": [{"type": "text", "text": 3}]}], part.format("{'type': 'text', 'text': 3}")),
        ([USER | {"parts": [{"type": "sound", "text": "a"}]}], part.format("{'type': 'sound', 'text': 'a'}")),
        ([USER | {"parts": [{"type": "image", "image": "a"}]}], part.format("{'type': 'image', 'image': 'a'}")),
        (
            [{"role": "boss", "content": "a"}],
            "E answered as 'boss', which is none of system, developer, user, assistant, tool",
        ),
        (
            [twice],
            f"E returned a message whose content is not the text of its parts: {twice!r:.80}",
        ),
    ):
        assert tell(lambda answers=answers: check_answers(answers, "E"), TypeError) == sentence
    shown = [USER | {"parts": [text]}]
    assert check_answers(shown, "E") is shown


@pytest.mark.parametrize(
    ("given", "replies", "checked"),
    [
        ([], 3, ([], "")),
        ([], 1, ([], "")),
        ([{"a": 1}, {}], 2, ([{"a": 1.0}, {}], "")),
        ([{"a": 1}], 2, ([{"a": 1.0}, {}], "")),
        ([{}], 3, ([], "Env.turn_scores() must be empty or have one dict per reply, it has 1 for 3")),
        ([{}, {}], 1, ([], "Env.turn_scores() must be empty or have one dict per reply, it has 2 for 1")),
    ],
)
def test_scores_of_turns_are_one_per_reply_and_the_last_may_be_cut_off(given, replies, checked):
    assert check_turn_scores(lambda: given, replies) == checked


def test_scores_that_are_none_are_a_reason():
    bad: Any = [{"a": "b"}]
    scores, why = check_turn_scores(lambda: bad, 1)
    assert scores == [] and why.startswith("Env.turn_scores() must return ")

    def fail() -> list[dict[str, float]]:
        raise KeyError("x")

    scores, why = check_turn_scores(fail, 1)
    assert scores == [] and why.startswith("KeyError: 'x' (test_env_tables.py, line ")
