"""Two coding agents as their vendors ship them, by protocols of their own: each runs a command, and is one sample."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollouts.agents.gateway import Gateway
from rollouts.agents.processes import name_endpoint
from rollouts.agents.session import AgentSession
from rollouts.agents.task import Task
from unit_tests.helpers.other_packages import ROOT, install_program
from unit_tests.helpers.scripted_policy import Policy, check_exact, make_session, say_calls

pytestmark = [
    pytest.mark.verify,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed: apt install npm"),
]
CAT = {"command": "cat number.txt", "description": "Print the number"}
ASKED = "Which number is in number.txt?"
# the agents' own instructions and tools are long, and this tokenizer has one token per character
ROOM = {"room": 10**6, "max_new_tokens": 10**6}


def read_command(name: str) -> str:
    """Return the command of docs/how_to/agent.md that begins with a name."""
    page = (ROOT / "docs" / "how_to" / "agent.md").read_text(encoding="utf-8")
    found = re.search(rf"^{name} (?:.*\\\n)*.*", page, re.MULTILINE)
    assert found, f"the page has no command of {name}"
    return found[0]


@pytest.mark.parametrize(
    "name, package, version, tool, arguments",
    [
        *[("claude", "@anthropic-ai/claude-code", "2.1.197", "Bash", CAT)],
        *[("codex", "@openai/codex", "0.171.0", "exec_command", {"cmd": "cat number.txt"})],
    ],
)
def test_a_coding_agent_is_one_exact_sample(
    qwen, tmp_path: Path, name: str, package: str, version: str, tool: str, arguments: Any
):
    (tmp_path / "number.txt").write_text("4711\n")
    calls = say_calls("I look.", (tool, arguments))
    policy = Policy(qwen, lambda context: "It is 4711." if "4711" in context else calls)

    async def run() -> tuple[AgentSession, str]:
        session, gateway = make_session(policy, **ROOM), Gateway()
        async with gateway.serving(session) as url:
            task = Task(base_url=url, api_key=session.key, model="policy", messages=[])
            quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ANTHROPIC_SMALL_FAST_MODEL": "policy"}
            program = install_program(package, version, name)
            place = {"TASK": ASKED, "HOME": str(tmp_path / "home"), "PATH": f"{program.parent}:{os.environ['PATH']}"}
            process = await asyncio.create_subprocess_exec(
                *("bash", "-c", read_command(name)),
                cwd=tmp_path,
                env=os.environ | name_endpoint(task) | quiet | place,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                said, _ = await asyncio.wait_for(process.communicate(), 300)
            finally:
                if process.returncode is None:
                    process.kill()
        await gateway.close()
        return session, said.decode()

    session, said = asyncio.run(run())
    assert "It is 4711." in said, said[-2000:]
    [branch] = session.trace.list_branches()
    check_exact([branch], policy.log)
    assert len(branch.turns) == 2 and session.trace.n_rewritten == session.counts.refused == 0
    assert [message["role"] for message in branch.messages[-3:]] == ["assistant", "tool", "assistant"]
