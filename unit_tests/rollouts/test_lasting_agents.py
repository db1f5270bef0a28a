"""Processes of agents that outlive an episode: a helper that the file starts at import, and a server that has died."""

from __future__ import annotations

import asyncio

from configs.agent_schema import AgentConfig
from rollouts.agents import served
from rollouts.agents.processes import AgentProcesses
from rollouts.agents.results import AgentResult
from rollouts.agents.task import Task
from rollouts.registry import resolve_agent
from unit_tests.helpers.agents import MARK, play, write_agent
from unit_tests.helpers.scripted_policy import Policy


def test_a_helper_that_the_import_has_started_serves_all_episodes(qwen, tmp_path, monkeypatch):
    """It ends when the last process that can write to it has ended."""
    monkeypatch.setenv("TEST_OF_AGENTS", MARK)
    plan = write_agent(
        tmp_path,
        """
        HELPER = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

        def run(task):
            ask(task, task.messages)
            HELPER.stdin.write(b"1\\n")
            HELPER.stdin.flush()
            return {"solved": float(HELPER.stdout.readline())}
        """,
    )
    samples = play(plan, Policy(qwen, lambda _: "Seven."), groups=4)
    assert [(sample.failure, sample.reward) for sample in samples] == [("", 2.0)] * 4


DIES_ONCE = """
read task
[ -e {died} ] || {{ touch {died}; exit 3; }}
echo '{{"id": 1, "parts": {{"solved": 1}}}}' >&3
cat
"""


def test_an_episode_long_after_a_server_died_starts_another(tmp_path, monkeypatch):
    """The input is closed by then, too, which is said a moment after its death."""
    monkeypatch.setattr(served, "ERROR_GRACE_S", 0.3)
    command = ["sh", "-c", DIES_ONCE.format(died=tmp_path / "died")]
    task = Task(base_url="http://127.0.0.1:9/s/7/v1", api_key="k", model="policy", messages=[])

    async def run() -> list[AgentResult]:
        agents = AgentProcesses(resolve_agent(AgentConfig(command=command, serve=True)))
        first = await agents.run(task, timeout_s=20.0, log=bytearray())
        await asyncio.sleep(0.6)
        second = await agents.run(task, timeout_s=20.0, log=bytearray())
        await agents.close()
        return [first, second]

    first, second = asyncio.run(run())
    assert first.failure.startswith("the agent's process ")
    assert second == AgentResult(parts={"solved": 1.0})
