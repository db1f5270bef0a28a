"""Agent command for environments of verifiers (0.4), run by the Python of another environment.

    PYTHON rollouts/agents/verifiers_agent.py play TASKSET    with serve: true
    PYTHON rollouts/agents/verifiers_agent.py rows TASKSET    print the tasks as JSON, for data_prep/verifiers.py

A third argument of `play` holds settings of verifiers' AgentConfig as JSON, such as {"harness": {"id": "bash"}}. It
imports nothing of FeynRL. One process plays many episodes: rollouts/agents/served.py describes the lines.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import threading
from contextlib import redirect_stdout
from functools import partial
from typing import Any

RESULT_FD = 3
LONGEST_FAILURE = 500
"""Characters of an error that are written; a message may have 1 MiB."""
LIMITS = ("context_length_exceeded", "max_turns_exceeded")
"""Codes of requests beyond the policy's turns or tokens: LIMIT_CODES of rollouts/agents/wire.py."""
SETTINGS: dict[str, Any] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""Settings in place of verifiers' own, whose runtime is a paid cloud."""


def load_tasks(name: str) -> list[Any]:
    """Return the tasks of a taskset by name."""
    vf: Any = importlib.import_module("verifiers.v1")
    loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    return list(loaders.load_taskset(vf.TasksetConfig(id=name)))


def print_rows(name: str) -> None:
    """Print a line per task: the position, and the prompt as messages."""
    out = sys.stdout
    with redirect_stdout(sys.stderr):  # what a taskset prints itself is no row
        tasks = load_tasks(name)
    for idx, task in enumerate(tasks):
        given, system = task.data, task.data.system_prompt
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(given.prompt, str) or given.prompt is None:
            messages.append({"role": "user", "content": given.prompt or ""})
        else:
            messages += [{"role": one.role, "content": str(one.content)} for one in given.prompt]
        print(json.dumps({"idx": idx, "messages": messages}), file=out)


async def play(given: dict[str, Any], tasks: list[Any], settings: dict[str, Any], key_name: str) -> dict[str, Any]:
    """Play an episode. Return {"parts"} or {"failure"}."""
    vf: Any = importlib.import_module("verifiers.v1")
    os.environ[key_name] = given["api_key"]  # verifiers reads a key from a variable only
    client = {"type": "eval", "base_url": given["base_url"], "api_key_var": key_name}
    try:
        config = vf.AgentConfig(model=given["model"], client=client, max_turns=given["max_turns"], **settings)
        agent = vf.make_agent(config)
        async with agent:
            trace = await agent.run(tasks[int(given["extra"]["idx"])])
    finally:
        del os.environ[key_name]
    if trace.last_error is not None and not is_policy_limit(trace):
        return {"failure": f"{trace.last_error.type}: {trace.last_error.message}"[:LONGEST_FAILURE]}
    return {"parts": {"return": float(trace.reward), "turns": float(trace.num_turns)}}


def is_policy_limit(trace: Any) -> bool:
    """Tell whether an episode ended because the policy had used up its turns or tokens.

    Whatever the harness makes of the refusal, the policy did that: it keeps the return of the environment so far, or 0.
    """
    refused = [call.error.message for call in trace.calls[-1:] if call.error is not None]
    said = " ".join([trace.last_error.message, *refused])
    return trace.num_turns > 0 and any(code in said for code in LIMITS)


async def serve(tasks: list[Any], settings: dict[str, Any]) -> None:
    """Play the tasks of the standard input at the same time, until it ends.

    As rollouts/agents/run_file.py does, which the Python of another environment cannot import.
    """
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(number: int, given: dict[str, Any]) -> None:
        try:
            found = await play(given, tasks, settings, f"FEYNRL_KEY_{number}")
        except asyncio.CancelledError:
            found = {"failure": "the episode was cancelled"}
        except Exception as error:  # a border: whatever an environment raises fails its episode
            found = {"failure": f"{type(error).__name__}: {error}"[:LONGEST_FAILURE]}
        write(number, found)

    def write(number: int, found: dict[str, Any]) -> None:
        os.write(RESULT_FD, json.dumps({"id": number} | found).encode() + b"\n")

    def end(number: int, task: asyncio.Task[None]) -> None:
        del running[number]
        if task.cancelled():  # before it began
            write(number, {"failure": "the episode was cancelled"})

    def take(message: dict[str, Any]) -> None:
        if "cancel" in message:
            if message["cancel"] in running:
                running[message["cancel"]].cancel()
            return
        number = message["id"]
        running[number] = loop.create_task(answer(number, message["task"]))
        running[number].add_done_callback(partial(end, number))

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(take, json.loads(line))
        loop.call_soon_threadsafe(is_over.set)

    threading.Thread(target=read, daemon=True).start()
    await is_over.wait()


if __name__ == "__main__":
    what, taskset, *more = sys.argv[1:]
    if what == "rows":
        print_rows(taskset)
    else:
        # a runtime starts programs such as uv by their name
        os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
        asyncio.run(serve(load_tasks(taskset), SETTINGS | (json.loads(more[0]) if more else {})))
