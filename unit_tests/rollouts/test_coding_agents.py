"""Two coding agents as their vendors ship them, by protocols of their own: each runs a command, and is one sample."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollouts.agents.gateway import Gateway
from rollouts.agents.processes import name_endpoint
from rollouts.agents.session import AgentSession
from rollouts.agents.task import Task
from unit_tests.helpers.other_packages import install_program
from unit_tests.helpers.scripted_policy import Policy, check_exact, make_session, say_calls

pytestmark = [
    pytest.mark.verify,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed: apt install npm"),
]
ASKED = "Which number is in number.txt?"
# the agents' own instructions and tools are long, and this tokenizer has one token per character
ROOM = {"room": 10**6, "max_new_tokens": 10**6}


def write_claude(url: str) -> list[str]:
    program = install_program("@anthropic-ai/claude-code", "2.1.197", "claude")
    return [str(program), "-p", ASKED, "--model", "policy", "--tools", "Bash", "--allowedTools", "Bash"]


def write_codex(url: str) -> list[str]:
    program = install_program("@openai/codex", "0.171.0", "codex")
    provider = f'{{name = "policy", base_url = "{url}", env_key = "OPENAI_API_KEY", wire_api = "responses"}}'
    options = ["model_provider=policy", f"model_providers.policy={provider}", 'web_search="disabled"']
    written = [word for option in options for word in ("-c", option)]
    rest = ["--skip-git-repo-check", "-s", "danger-full-access", "--disable", "multi_agent", "-m", "policy"]
    return [str(program), "exec", *written, *rest, ASKED]


@pytest.mark.parametrize(
    "write, tool, arguments",
    [
        (write_claude, "Bash", {"command": "cat number.txt", "description": "Print the number"}),
        (write_codex, "exec_command", {"cmd": "cat number.txt"}),
    ],
    ids=["claude", "codex"],
)
def test_a_coding_agent_is_one_exact_sample(
    qwen, tmp_path: Path, write: Callable[[str], list[str]], tool: str, arguments: Any
):
    (tmp_path / "number.txt").write_text("4711\n")
    calls = say_calls("I look.", (tool, arguments))
    policy = Policy(qwen, lambda context: "It is 4711." if "4711" in context else calls)

    async def run() -> tuple[AgentSession, str]:
        session, gateway = make_session(policy, **ROOM), Gateway()
        async with gateway.serving(session) as url:
            task = Task(base_url=url, api_key=session.key, model="policy", messages=[])
            quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ANTHROPIC_SMALL_FAST_MODEL": "policy"}
            process = await asyncio.create_subprocess_exec(
                *write(url),
                cwd=tmp_path,
                env=os.environ | name_endpoint(task) | quiet | {"HOME": str(tmp_path / "home")},
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
