"""Python as a tool: names that stay, a process that ends with the episode, and a sandbox that is not there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from core.errors import UserError
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from rewards.sandbox import Limits
from rollouts.envs.python_tool import PythonTool
from rollouts.tools.calls import ToolUnavailable
from unit_tests.helpers.needs_sandbox import needs_sandbox
from unit_tests.helpers.processes import leftovers, wait_until

PROMPT = Prompt(id="0", messages=[])


class Quick(PythonTool):
    limits = Limits(seconds=1.0)


def run(*pieces: str) -> ParsedReply:
    """A reply with one call for each piece of code."""
    calls: list[Any] = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "python", "arguments": {"code": piece}}}
        for i, piece in enumerate(pieces)
    ]
    return ParsedReply(message={"role": "assistant", "content": "", "tool_calls": calls})


def test_the_tool_is_described_to_the_policy():
    [spec] = PythonTool.tools
    assert spec["function"]["name"] == "python"
    assert [*spec["function"]["parameters"]["properties"]] == ["code"]


@needs_sandbox
@pytest.mark.slow
def test_names_stay_through_calls_and_the_process_ends_with_the_episode():
    async def play() -> list[str]:
        one, other = Quick(PROMPT), Quick(PROMPT)
        try:
            said = [await one.step(run("x = 6", "x * 7")), await other.step(run("x"))]
            said += [
                await one.step(run("import time; time.sleep(600)")),
                await one.step(run("x")),
                await one.step(run("1")),
            ]
            assert len(leftovers("cells.py")) >= 6, "bwrap twice and the code, for both"
            ended = await one.step(ParsedReply(message={"role": "assistant", "content": "42"}))
            assert ended is None
            return [message["content"] for messages in said for message in messages or []]
        finally:
            await one.close()
            await other.close()

    nothing, value, stranger, hung, gone, again = asyncio.run(play())
    assert (nothing, value, again) == ("", "42\n", "1\n")
    assert "NameError" in stranger and "NameError" in gone
    assert "it took longer than 1 s" in hung
    wait_until(lambda: not leftovers("cells.py"))


@needs_sandbox
def test_an_episode_that_is_cancelled_leaves_no_process():
    async def cancel() -> None:
        env = PythonTool(PROMPT)
        step = asyncio.create_task(env.step(run("import time; time.sleep(600)")))
        while not leftovers("cells.py"):
            await asyncio.sleep(0.02)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await env.close()

    asyncio.run(cancel())
    wait_until(lambda: not leftovers("cells.py"))


def test_without_a_sandbox_the_run_is_refused_and_the_sample_fails(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="apt install bubblewrap"):
        PythonTool.check()
    with pytest.raises(ToolUnavailable, match="apt install bubblewrap"):
        asyncio.run(PythonTool(PROMPT).step(run("1")))


def test_a_run_with_the_tool_does_not_start_without_a_sandbox(refused, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    changes = {"rollout.env": "python_tool", "rollout.max_turns": 2}
    refused(changes, "error: bubblewrap, the sandbox for code, is not installed")
