"""An episode of one turn is the one that the loop of turns plays with the environment SingleTurn."""

import asyncio
from dataclasses import replace

import pytest

from core.errors import RunStopped, UserError
from rollouts.envs.single_turn import SingleTurn
from rollouts.episode import run_episode
from rollouts.turns import EpisodeRules, run_single_turns
from unit_tests.helpers.episodes import PROMPT, Scripted, Words, calls_of

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


class Calls:
    """Parser that reads a call of `weather` in every reply."""

    def parse(self, ids, text, tools):
        return calls_of(("weather", {}))


def play(run, *, stop="eos", prompt=PROMPT, **rules):
    """What an episode asks of the engine, and its sample and messages."""
    engine = Scripted([3, 4, 5], stop=stop)
    settings = {"seed_of_turn": lambda turn: 100 + turn, "max_new_tokens": 3, "max_turns": 1, "timeout_s": 60.0}
    [played] = asyncio.run(run(engine, prompt, Words(), EpisodeRules(**settings | rules)))
    return engine.asked, played


async def one_of_the_group(engine, prompt, tokenizer, rules):
    return await run_single_turns(engine, prompt, tokenizer, rules, size=1)


async def loop_of_turns(engine, prompt, tokenizer, rules):
    return await run_episode(engine, SingleTurn, prompt, tokenizer, rules)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"stop": "length"},
        {"max_turns": 2},
        {"max_turns": 4},
        {"max_prompt_tokens": 2},
        {"prompt": replace(PROMPT, tools=[WEATHER]), "parser": Calls()},
    ],
    ids=["plain", "cut off", "two turns allowed", "several turns allowed", "longest prompt", "tools"],
)
def test_one_turn_is_what_the_loop_plays(how):
    assert play(one_of_the_group, **how) == play(loop_of_turns, **how)


@pytest.mark.parametrize(
    ("how", "error", "told"),
    [
        ({"max_prompt_tokens": 1}, UserError, "data.max_prompt_tokens=1: the prompt p has 2 tokens"),
        ({"prompt": replace(PROMPT, tools=[WEATHER])}, UserError, "rollout.tool_parser is unset"),
        ({"max_new_tokens": 2}, RunStopped, "3 tokens where 1 to 2 were asked for"),
        ({"is_truncated": True}, RunStopped, "no kept sets"),
        ({"is_routed": True}, RunStopped, "no routes"),
    ],
)
@pytest.mark.parametrize("run", [one_of_the_group, loop_of_turns])
def test_what_is_wrong_stops_both(run, how, error, told):
    with pytest.raises(error, match=told):
        play(run, **how)
