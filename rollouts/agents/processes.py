"""Agent processes of a rollout worker: one per episode, or one that plays many (rollouts/agents/served.py).

A harness that raises, hangs, dies, kills its parent or returns an invalid result fails only the episodes in that
process, with one sentence. rollouts/agents/launching.py starts and ends the processes.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

from core.errors import UserError, shorten
from rollouts.agents.launching import NO_START, AgentProcess, LauncherClient, name_clients
from rollouts.agents.results import AgentResult, describe_exit, hide_keys, read_result, read_so_far
from rollouts.agents.served import ServedAgent
from rollouts.agents.task import AgentPlan, Task
from rollouts.output import LARGEST_RESULT, Output


class AgentProcesses:
    """Owner of the processes of a rollout worker's agents. `close()` ends all of them."""

    def __init__(self, plan: AgentPlan):
        """Start the launcher. Errors of the agent's import are raised before the first episode."""
        self.plan, self._launcher = plan, LauncherClient(plan)
        self._served = ServedAgent(self._launcher)

    async def run(self, task: Task, *, timeout_s: float, log: bytearray) -> AgentResult:
        """Run the agent of one episode. It is ended after `timeout_s` seconds, or on cancellation.

        log: receives the end of what the agent prints. Raises UserError if the agent's file cannot be used.
        """
        given = write_task(task)
        if await self._launcher.serves():
            found = await self._served.run(given, name_endpoint(task), timeout_s=timeout_s, log=log)
        else:
            found = await self._run_process(given, name_endpoint(task), timeout_s=timeout_s, log=log)
        # an error message may quote a key, and it ends up in logs
        return replace(found, failure=shorten(hide_keys(found.failure)))

    async def close(self) -> None:
        """End all agents and the launcher."""
        await self._served.close()
        await self._launcher.close()

    async def _run_process(
        self, given: str, environment: dict[str, str], *, timeout_s: float, log: bytearray
    ) -> AgentResult:
        """Run an agent in a separate process, to the end."""
        process: AgentProcess | None = None
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                process = await self._launcher.start(partial(write_memory, given), environment, lambda: Output(log))
                if process is not None:
                    await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            # also after a cancellation: no agent outlives the episode
            if process is not None:
                await process.end()
        is_file = self.plan.file is not None
        if process is None:
            return AgentResult(timed_out=True) if timed_out else AgentResult(failure=NO_START)
        if timed_out:
            return AgentResult(parts=read_so_far(process.output.result, is_file=is_file), timed_out=True)
        if process.output.is_too_long:
            return AgentResult(failure=f"the agent returned more than {LARGEST_RESULT} bytes")
        if process.status != 0:
            return AgentResult(failure=describe_exit(process.status, process.output.log))
        return read_result(process.output.result, is_file=is_file)


def write_task(task: Task) -> str:
    """Return a task as JSON. Raises UserError for a value that JSON cannot represent."""
    try:
        return json.dumps(task.as_json())
    except (TypeError, ValueError) as error:
        raise UserError(
            f"row {task.id}: a column cannot be given to an agent as JSON ({error}): leave the column out of the data"
        ) from error


def write_memory(text: str) -> int:
    """Return a file descriptor of a new memory file with a text, at the beginning."""
    # not a pipe: a task with images exceeds its buffer, and nobody reads it yet
    found = os.memfd_create("task")
    with open(found, "w", encoding="utf-8", closefd=False) as file:
        file.write(text)
    os.lseek(found, 0, os.SEEK_SET)
    return found


def name_endpoint(task: Task) -> dict[str, str]:
    """Return the environment variables with which clients reach the gateway directly, without a proxy."""
    local = f"127.0.0.1,localhost,{urlsplit(task.base_url).hostname}"
    before = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    no_proxy = f"{before},{local}" if before else local
    return {
        **name_clients(task.base_url, task.api_key),
        # programs read one spelling or the other
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }
