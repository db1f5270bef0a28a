"""Run the calls of one reply. Whatever is wrong with a call is answered with one sentence, and counted."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from core.errors import RunStopped, UserError, name_error, shorten
from core.tasks import gather_fail_fast
from core.timing.limit_blocking import LimitBlocking
from core.types.messages import Message, ToolCall
from data_feeds.chat.tool_specs import find_misfit
from rewards.sandbox.base import SandboxUnavailable
from rollouts.tools.functions import Tool

ErrorKind = Literal["unreadable", "unknown", "arguments", "raised", "timeout"]
"""What went wrong: the call cannot be read, names no tool or has wrong arguments; the tool raised or took too long."""
THROUGH = (RunStopped, UserError)
"""Errors of a tool that are not the policy's: they end the run."""


class ToolFailed(Exception):
    """Error of a tool whose text is the answer, as it is."""


class ToolUnavailable(Exception):
    """Error of a tool that does not work through no fault of the policy: the sample fails, and has no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """ToolResult to one call."""

    message: Message
    error: ErrorKind | None = None


async def run_calls(
    calls: Sequence[ToolCall], tools: Mapping[str, Tool], *, seconds: float, key: str, parallel: bool = True
) -> list[ToolResult]:
    """Run calls, each for at most `seconds`, and return their answers in the order of the calls.

    key: what holds `seconds`, for the sentence about a tool that blocks the process. Raises RunStopped, UserError,
    ToolUnavailable and SandboxUnavailable of a tool.
    """
    runs = [_answer_call(call, tools, seconds=seconds, key=key) for call in calls]
    if parallel:
        return await gather_fail_fast(runs, grace_s=0.0)
    answers: list[ToolResult] = []
    try:
        for run in runs:
            answers.append(await run)
    finally:
        for run in runs:
            run.close()  # one that was not begun
    return answers


def make_answer(content: str, call: ToolCall | None, error: ErrorKind | None = None) -> ToolResult:
    """Return the message with a tool's result, or with what was wrong with the call."""
    if error is not None:
        content = f"Error: {content}"
    if call is None:
        return ToolResult(message={"role": "tool", "content": content}, error=error)
    message: Message = {
        "role": "tool",
        "content": content,
        "tool_call_id": call["id"],
        "name": call["function"]["name"],
    }
    return ToolResult(message=message, error=error)


async def _answer_call(call: ToolCall, tools: Mapping[str, Tool], *, seconds: float, key: str) -> ToolResult:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    tool = tools.get(name)
    if tool is None:
        return make_answer(find_misfit(call["function"], [one.spec for one in tools.values()]), call, "unknown")
    if misfit := tool.find_misfit(call["function"]):
        return make_answer(misfit, call, "arguments")
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            result = await _call_tool(tool, arguments, seconds=seconds, key=key)
        return make_answer(write_result(result), call)
    except (*THROUGH, ToolUnavailable, SandboxUnavailable):
        raise
    except ToolFailed as error:
        return make_answer(f"{error}", call, "raised")
    except (Exception, SystemExit) as error:  # the border to the tool, whatever it raises
        if deadline.expired():
            return make_answer(f"{name} took longer than {seconds:g} seconds.", call, "timeout")
        return make_answer(f"{name} raised {name_error(error)}", call, "raised")


async def _call_tool(tool: Tool, arguments: dict[str, Any], *, seconds: float, key: str) -> Any:
    """Return what a tool returns: a coroutine function is awaited here, any other runs in a thread."""
    if inspect.iscoroutinefunction(tool.call):
        return await LimitBlocking(tool.call(**arguments), who=f"the tool {tool.name}", seconds=seconds, key=key)
    return await run_in_thread(lambda: tool.call(**arguments))


async def run_in_thread(call: Callable[[], Any]) -> Any:
    """Run a function in a thread of its own, and return what it returns or raise what it raises.

    No thread of a pool: one that never ends would keep a place there, and the process from ending.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: tuple[Any, BaseException | None]) -> None:
        if not done.done():  # nobody waits for it after its deadline
            done.set_result(result)

    def work() -> None:
        try:
            result: tuple[Any, BaseException | None] = (context.run(call), None)
        except BaseException as error:  # it is raised where the call was made
            result = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended meanwhile
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=work, daemon=True, name="tool").start()
    value, error = await done
    if error is not None:
        raise error
    return value


def write_result(result: Any) -> str:
    """Return a tool's result as text: text as it is, anything else as JSON. Raises ToolFailed for what is neither.

    >>> write_result("21 degrees"), write_result({"degrees": 21}), write_result(None)
    ('21 degrees', '{"degrees": 21}', 'null')
    """
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ToolFailed(shorten(f"the tool returned {result!r}, which is neither text nor JSON")) from error
