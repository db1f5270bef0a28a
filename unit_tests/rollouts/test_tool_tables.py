"""Calls of tools and specifications of functions, in tables of whole answers and sentences."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from typing import Any, Literal

import pytest

from core.errors import RunStopped, Unavailable, UserError
from rollouts.tools.calls import ToolFailed, ToolUnavailable, make_answer, run_calls, write_result
from rollouts.tools.functions import make_spec, make_tool
from unit_tests.helpers.sentences import tell


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


def now() -> str:
    """Tell the time."""
    return "noon"


async def fail(how: str) -> Any:
    """Fail in some way.

    Args:
        how: Name of the way.
    """
    if how == "late":
        await asyncio.Event().wait()
    raise {"own": TimeoutError("mine"), "exit": SystemExit(3), "bare": KeyError(), "told": ToolFailed("no such row")}[
        how
    ]


TOOLS = {one.name: one for one in map(make_tool, (add, now, fail))}


def call(name: str, **arguments: Any) -> Any:
    return {"id": f"of_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


ANSWERS = [
    (call("add", a=1), "3", None),
    (call("add", a=1, b=5), "6", None),
    (call("now"), "noon", None),
    (call("sub", a=1), "Error: There is no function sub; there are add, now, fail.", "unknown"),
    (call("add", a=1, c=2), "Error: add has no argument c; it has a, b.", "arguments"),
    (call("now", zone="x"), "Error: now has no argument zone; it has none.", "arguments"),
    (call("fail", how="own"), "Error: fail raised TimeoutError: mine", "raised"),
    (call("fail", how="exit"), "Error: fail raised SystemExit: 3", "raised"),
    (call("fail", how="bare"), "Error: fail raised KeyError", "raised"),
    (call("fail", how="told"), "Error: no such row", "raised"),
]


@pytest.mark.parametrize("parallel", [True, False])
def test_every_call_has_one_answer_in_the_order_of_the_calls(parallel):
    calls = [one for one, _, _ in ANSWERS]
    found = asyncio.run(run_calls(calls, TOOLS, seconds=60, key="a.key", parallel=parallel))
    assert [(one.message, one.error) for one in found] == [
        ({"role": "tool", "content": said, "tool_call_id": of["id"], "name": of["function"]["name"]}, error)
        for of, said, error in ANSWERS
    ]


def test_a_call_that_takes_too_long_is_answered_and_does_not_stop_the_next():
    calls = [call("fail", how="late"), call("sub")]
    found = asyncio.run(run_calls(calls, TOOLS, seconds=0.05, key="a.key", parallel=False))
    assert [(one.message["content"], one.error) for one in found] == [
        ("Error: fail took longer than 0.05 seconds.", "timeout"),
        ("Error: There is no function sub; there are add, now, fail.", "unknown"),
    ]


def test_calls_in_turn_begin_one_after_the_other():
    seen: list[str] = []

    async def note(word: str) -> None:
        """Note a word.

        Args:
            word: The word.
        """
        seen.append(word)
        await asyncio.sleep(0)
        seen.append(word)

    tools = {"note": make_tool(note)}
    calls = [call("note", word="x"), call("note", word="y")]
    for parallel, order in ((True, "xyxy"), (False, "xxyy")):
        seen.clear()
        found = asyncio.run(run_calls(calls, tools, seconds=5, key="a.key", parallel=parallel))
        assert "".join(seen) == order and [one.message["content"] for one in found] == ["null", "null"]


@pytest.mark.parametrize(
    "error", [RunStopped("stop"), UserError("wrong"), Unavailable("away"), ToolUnavailable("gone")]
)
@pytest.mark.parametrize("parallel", [True, False])
def test_errors_that_are_not_the_policys_go_through(error, parallel):
    def broken() -> None:
        """Break."""
        raise error

    calls = [call("broken"), call("broken")]
    with pytest.raises(type(error)) as raised:
        asyncio.run(run_calls(calls, {"broken": make_tool(broken)}, seconds=5, key="a.key", parallel=parallel))
    assert raised.value is error


def test_half_of_a_character_is_answered_as_its_code(qwen):
    def cut() -> str:
        """Cut."""
        return "\ud83d of a smiley"

    def fall() -> None:
        """Fall."""
        raise ValueError("no \ude00")

    tools = {one.name: one for one in map(make_tool, (cut, fall))}
    found = asyncio.run(run_calls([call("cut"), call("fall")], tools, seconds=60, key="a.key"))
    assert [one.message["content"] for one in found] == [
        "\\ud83d of a smiley",
        "Error: fall raised ValueError: no \\ude00",
    ]
    assert qwen.render([one.message for one in found])


def test_an_answer_without_a_call_refers_to_none():
    plain, failed = make_answer("x", None), make_answer("x", None, "malformed")
    assert (plain.message, plain.error) == ({"role": "tool", "content": "x"}, None)
    assert (failed.message, failed.error) == ({"role": "tool", "content": "Error: x"}, "malformed")


@pytest.mark.parametrize(
    ("result", "text"), [("a\n", "a\n"), (1.5, "1.5"), (["é", None, True], '["é", null, true]'), ({"a": 1}, '{"a": 1}')]
)
def test_a_result_is_text_or_json(result, text):
    assert write_result(result) == text


@pytest.mark.parametrize(("result", "shown"), [({1}, "{1}"), ((loop := [], loop.append(loop))[0], "[[...]]")])
def test_a_result_that_json_does_not_have_is_refused(result, shown):
    with pytest.raises(ToolFailed) as refused:
        write_result(result)
    assert str(refused.value) == f"the tool returned {shown}, which is neither text nor JSON"


def test_a_specification_is_the_signature_with_null_as_a_type():
    def find(
        text: str | None, kinds: list[int | None], mode: Literal["a", "b"] | None = None, deep: dict | None = None
    ):
        """Find a text.

        Args:
            text: The text.
            kinds: The kinds.
            mode: The mode.
            deep: The rest.
        """

    assert make_spec(find) == {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find a text.",
            "parameters": {
                "type": "object",
                "required": ["text", "kinds"],
                "properties": {
                    "text": {"type": ["string", "null"], "description": "The text."},
                    "kinds": {
                        "type": "array",
                        "items": {"type": ["integer", "null"]},
                        "description": "The kinds.",
                    },
                    "mode": {"type": ["string", "null"], "enum": ["a", "b", None], "description": "The mode."},
                    "deep": {"type": ["object", "null"], "description": "The rest."},
                },
            },
        },
    }


# Threads --------------------------------------------------------------------------------------------------------------

WHO = contextvars.ContextVar("WHO", default="nobody")


def test_a_function_has_a_thread_that_sees_the_caller_s_variables():
    def look() -> list[Any]:
        """Look."""
        thread = threading.current_thread()
        return [WHO.get(), thread.name, thread.daemon, thread is threading.main_thread()]

    async def body() -> str:
        WHO.set("the episode")
        [found] = await run_calls([call("look")], {"look": make_tool(look)}, seconds=60, key="a.key")
        return found.message["content"]

    assert asyncio.run(body()) == '["the episode", "tool", true, false]'


@pytest.mark.parametrize("during_the_run", [True, False])
def test_a_function_that_returns_too_late_disturbs_nobody(monkeypatch, during_the_run):
    go, threads, faults = threading.Event(), list[threading.Thread](), list[Any]()
    monkeypatch.setattr(threading, "excepthook", faults.append)

    def hang() -> str:
        """Hang."""
        threads.append(threading.current_thread())
        go.wait(60)
        return "late"

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        [found] = await run_calls([call("hang")], {"hang": make_tool(hang)}, seconds=0.02, key="a.key")
        assert (found.message["content"], found.error) == ("Error: hang took longer than 0.02 seconds.", "timeout")
        if during_the_run:
            go.set()
            while threads[0].is_alive():
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)

    asyncio.run(body())
    go.set()
    threads[0].join()
    assert faults == []


def test_calls_after_one_that_ends_the_run_are_left_without_a_warning(recwarn):
    made: list[str] = []

    def note() -> str:
        """Note that it was called."""
        made.append("x")
        return ""

    def stop() -> None:
        """Stop."""
        raise UserError("wrong")

    tools = {one.name: one for one in map(make_tool, (note, stop))}
    calls = [call(name) for name in ("note", "stop", "note", "note")]
    told = tell(lambda: asyncio.run(run_calls(calls, tools, seconds=5, key="a.key", parallel=False)))
    gc.collect()
    assert (told, made) == ("wrong", ["x"])
    assert [str(one.message) for one in recwarn if "_answer_call" in str(one.message)] == []


def test_calls_at_the_same_time_end_with_the_first_error_that_goes_through():
    async def break_off() -> None:
        """Break off."""
        raise ToolUnavailable("away")

    async def stop_later() -> None:
        """Stop a moment later."""
        await asyncio.sleep(0.05)
        raise UserError("wrong")

    tools = {one.name: one for one in map(make_tool, (break_off, stop_later))}
    calls = [call("break_off"), call("stop_later")]
    told = tell(lambda: asyncio.run(run_calls(calls, tools, seconds=5, key="a.key")), ToolUnavailable)
    assert told == "away"
