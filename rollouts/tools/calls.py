"""Execution of tool calls. Every invalid or failing call is answered with one sentence, and counted."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import RunStopped, Unavailable, UserError, name_error, shorten
from core.metrics import ToolErrorKind
from core.tasks import gather_fail_fast
from core.timing.limit_blocking import LimitBlocking
from core.types.messages import Message, ToolCall
from data_feeds.chat.tool_specs import find_misfit
from rollouts.tools.functions import Tool

THROUGH = (RunStopped, UserError, Unavailable)
"""Errors of a tool that end the run or fail the sample, since they are not the policy's fault."""


class ToolFailed(Exception):
    """Error of a tool with the answer as its text."""


class ToolUnavailable(Unavailable):
    """Error of an unavailable tool, not the policy's fault. The sample fails without a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Result of one call."""

    message: Message
    error: ToolErrorKind | None = None


async def run_calls(
    calls: Sequence[ToolCall], tools: Mapping[str, Tool], *, seconds: float, key: str, parallel: bool = True
) -> list[ToolResult]:
    """Run calls with a timeout of `seconds` each. Return results in the order of the calls.

    key: setting of `seconds`, for the error of a blocking tool. Raises RunStopped, UserError and
    Unavailable of a tool.
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
            run.close()  # a coroutine never awaited would log a warning
    return answers


def make_answer(content: str, call: ToolCall | None, error: ToolErrorKind | None = None) -> ToolResult:
    """Return the message with a tool's result, or with the error."""
    if error is not None:
        content = f"Error: {content}"
    # half of a character, which a server's JSON may hold, and no tokenizer reads
    content = content.encode(errors="backslashreplace").decode()
    # a malformed call has no id to refer to
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
    except THROUGH:
        raise
    except ToolFailed as error:
        return make_answer(f"{error}", call, "raised")
    # SystemExit too: a tool must not end the engine's process
    except (Exception, SystemExit) as error:  # the border to the tool, whatever it raises
        # else the TimeoutError is the tool's own
        if deadline.expired():
            return make_answer(f"{name} took longer than {seconds:g} seconds.", call, "timeout")
        return make_answer(f"{name} raised {name_error(error)}", call, "raised")


async def _call_tool(tool: Tool, arguments: dict[str, Any], *, seconds: float, key: str) -> Any:
    """Call a tool. Coroutine functions are awaited; other functions run in a thread."""
    if inspect.iscoroutinefunction(tool.call):
        return await LimitBlocking(tool.call(**arguments), who=f"the tool {tool.name}", seconds=seconds, key=key)
    return await run_in_thread(lambda: tool.call(**arguments))


async def run_in_thread(call: Callable[[], Any]) -> Any:
    """Run a function in a new thread. Return its result, or raise its exception.

    No thread pool: a function that never returns would occupy a place there, and block the exit of the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    # context variables, such as those of a tracing library, are seen in the thread too
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
    """Return a tool's result: text unchanged, other values as JSON. Raises ToolFailed if JSON cannot represent it.

    >>> write_result("21 degrees"), write_result({"degrees": 21}), write_result(None)
    ('21 degrees', '{"degrees": 21}', 'null')
    """
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ToolFailed(shorten(f"the tool returned {result!r}, which is neither text nor JSON")) from error
