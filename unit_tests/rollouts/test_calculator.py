"""The calculator computes what it is asked, and answers whatever else a policy writes."""

from __future__ import annotations

import asyncio

import pytest

from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.envs.calculator import Calculator


def ask(env: Calculator, reply: str) -> str | None:
    answer = asyncio.run(env.step(ParsedReply(message={"role": "assistant", "content": reply})))
    if answer is None:
        return None
    [message] = answer
    assert message["role"] == "user"
    return message["content"]


def test_sums_differences_and_products_are_computed_and_counted():
    env = Calculator(Prompt(id="row", messages=[]))
    replies = {"2 + 3 = ?": "5", "Let me see:\n (7 - 9) * 4= ? ": "-8", "0 - 12*12 - 1 = ?": "-145", "7 = ?": "7"}
    for reply, answer in replies.items():
        assert ask(env, reply) == answer, reply
    assert env.scores() == {"calculator_calls": 4.0}
    for reply in ("It is 5.", "", "2 + 3 = ? I think"):
        assert ask(env, reply) is None, reply
    assert env.scores() == {"calculator_calls": 4.0}


WHOLE = "error: only whole numbers, + - and *"


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        *((text, WHOLE) for text in ("1 / 2", "2 ** 3", "x", "f(1)", "1.5 + 1", "-1", "'a' * 9", "True + 1", "[1]")),
        ("1 +", "error: invalid syntax"),
        *(
            (text, "error: ")
            for text in ("", "\n", "\0", "(" * 500, "+1" * 5000, "9" * 5000, "9" * 3000 + "*" + "9" * 3000)
        ),
    ],
    ids=lambda text: text[:12].encode("unicode_escape").decode(),
)
def test_what_cannot_be_computed_is_answered_with_an_error(expression, answer):
    found = ask(Calculator(Prompt(id="row", messages=[])), f"{expression}= ?")
    assert found is not None and found.startswith(answer) and len(found) < 250


@pytest.mark.parametrize(
    "expression",
    ["-" * 20_000 + "1", "1" + "+1" * 5000, "9" * 3000 + "*" + "9" * 3000],
    ids=["too deep to be read", "too many operations", "too many digits"],
)
def test_what_is_too_long_to_be_computed_is_answered_with_one_sentence(expression):
    env = Calculator(Prompt(id="row", messages=[]))
    assert ask(env, f"{expression} = ?") == "error: the expression is too long, or no text"
    assert env.scores() == {"calculator_calls": 1.0}
