"""Runner of an agent's file in a separate process: one episode, or many at a time.

One episode: the task is the standard input, a JSON object. Many, with an async `run`: a line of JSON per message,
{"id", "task"} or {"cancel": id}. rollouts/agents/served.py describes the messages.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from rewards.calls import call_user_code
from rewards.scored import LONGEST_FAILURE
from rollouts.agents.task import Task

Run = Callable[[Task], Any]
Write = Callable[[dict[str, Any]], None]
CANCELLED = "the episode was cancelled"


def run_file(run: Run, path: str, task: int, result: int, *, many: bool) -> int:
    """Run the episodes of an agent's file; return the exit code.

    task, result: file descriptors. many: see the module.
    """
    write = make_writer(result)
    if many:
        # a pipe is written in blocks, and this process does not end with an episode
        cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
        asyncio.run(serve_episodes(run, path, task, write))
        return 0
    with open(task, encoding="utf-8") as file:
        given = json.load(file)
    write(run_agent(run, given, path, write))
    return 0


def make_writer(result: int) -> Write:
    """Return a function that writes a JSON object as a line."""
    lock = threading.Lock()  # an agent may report from a thread of its own

    def write(found: dict[str, Any]) -> None:
        line = json.dumps(found).encode() + b"\n"
        with lock:
            while line:
                line = line[os.write(result, line) :]

    return write


def run_agent(run: Run, given: dict[str, Any], path: str, write: Write) -> dict[str, Any]:
    """Run the agent's function. Return {"parts", "failure"}: named numbers, or a failure."""
    failures: list[str] = []

    def call() -> Any:
        try:
            found = run(make_task(given, write))
            return asyncio.run(_wait(found)) if inspect.isawaitable(found) else found
        except (SystemExit, BaseExceptionGroup, Exception) as error:  # a border: the user's code
            failures.append(describe_error(error, path))
        return {}

    parts, failure = call_user_code(call, "run()")
    return {"parts": parts, "failure": failures[0] if failures else failure}


async def serve_episodes(run: Run, path: str, task: int, write: Write) -> None:
    """Play the tasks of a file descriptor at the same time, until it ends.

    task: the descriptor. write: receives each message, as rollouts/agents/served.py describes it.
    """
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    running: dict[int, asyncio.Task[None]] = {}

    def take(message: dict[str, Any]) -> None:
        if "cancel" in message:
            if (one := running.get(message["cancel"])) is not None:
                one.cancel()
            return
        number = message["id"]
        running[number] = loop.create_task(play_episode(run, path, number, message["task"], write))
        running[number].add_done_callback(partial(end, number))

    def end(number: int, task: asyncio.Task[None]) -> None:
        del running[number]
        if task.cancelled():  # before it began
            write({"id": number, "failure": CANCELLED})

    def read() -> None:
        with open(task, encoding="utf-8") as file:
            for line in file:
                loop.call_soon_threadsafe(take, json.loads(line))
        loop.call_soon_threadsafe(is_over.set)

    threading.Thread(target=read, name="tasks", daemon=True).start()
    await is_over.wait()


async def play_episode(run: Run, path: str, number: int, given: dict[str, Any], write: Write) -> None:
    """Play an episode of many by the user's `run`, and write the result. Never raises the user's errors."""

    def report(found: dict[str, Any]) -> None:
        write({"id": number} | found)

    failure, found = "", {}
    try:
        found = await run(make_task(given, report))
    except asyncio.CancelledError:
        failure = CANCELLED
    except (SystemExit, BaseExceptionGroup, Exception) as error:  # a border: the user's code
        failure = describe_error(error, path)
    parts, wrong = call_user_code(lambda: found, "run()")
    report({"parts": parts, "failure": failure or wrong})


def make_task(given: dict[str, Any], write: Write) -> Task:
    """Return the task of an episode, whose numbers so far are written, too."""

    def report(parts: dict[str, float]) -> None:
        numbers, wrong = call_user_code(lambda: parts, "task.report()")
        if wrong:
            raise ValueError(wrong)
        write({"so_far": numbers})

    return Task(**given, report=report)


async def _wait(found: Awaitable[Any]) -> Any:
    return await found


def describe_error(error: BaseException, path: str) -> str:
    """Describe an error of the agent, with the line in the file, or else the line that raised it."""
    if isinstance(error, SystemExit):
        return f"the agent ended its process by sys.exit({error.code!r})"
    # asyncio.TaskGroup wraps errors in groups; the first of them is the cause
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == path] or frames
    said = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_FAILURE]
    return f"{said} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else said
