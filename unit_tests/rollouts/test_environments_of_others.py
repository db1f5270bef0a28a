"""Harnesses of docs/how_to/environments_of_others.md in environments of their own, against a scripted policy."""

from __future__ import annotations

import json
import os

import pytest

from configs.agent_schema import AgentConfig
from core.errors import UserError
from core.types.samples import Prompt
from data_prep import verifiers as prep
from rollouts.registry import resolve_agent
from unit_tests.helpers.agents import MARK, PROMPT, play
from unit_tests.helpers.environments import PAGE, make_environment
from unit_tests.helpers.scripted_policy import Policy, say_calls

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800)]
ADD = say_calls("", ("add", {"a": 3, "b": 4}))
SUBMIT = {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
SCRIPTS = {
    # harness: (what the policy says, samples of an episode)
    "openai-agents": ([ADD, "It is 7."], 1),
    "langgraph": ([ADD, "It is 7."], 1),
    "smolagents": ([ADD, say_calls("", ("final_answer", {"answer": "7"}))], 2),
    "mini-swe-agent": ([say_calls("", ("bash", SUBMIT))], 1),
}


@pytest.fixture(autouse=True)
def _marked(monkeypatch):
    monkeypatch.setenv("TEST_OF_AGENTS", MARK)


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_episode_of_a_harness_is_exact(qwen, name):
    script, branches = SCRIPTS[name]
    policy = Policy(qwen, script)
    file = PAGE.parent / "harnesses" / f"{name.replace('-', '_')}_agent.py"
    plan = resolve_agent(AgentConfig(command=[str(make_environment(name)), str(file)]))
    rollout = {"max_new_tokens": 20_000, "timeout_s": 300}
    samples = play(plan, policy, prompt=PROMPT, agent_timeout_s=200.0, max_prompt_tokens=40_000, **rollout)
    assert [sample.failure for sample in samples] == [""] * branches, samples[0].log
    assert all(sample.reward_parts["solved"] == 1.0 for sample in samples)
    sampled = [sample.token_ids[begin:end].tolist() for sample in samples for begin, end in sample.spans]
    assert sampled == [ids for _, ids in policy.log]


SUMS = """
import verifiers.v1 as vf

__all__ = ["Sums"]

class Sum(vf.TaskData):
    answer: str

class SumTask(vf.Task[Sum, vf.State]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

class Sums(vf.Taskset[SumTask]):
    def load(self):
        for i in range(4):
            yield SumTask(Sum(prompt=f"{i}+4=", answer=str(i + 4)), self.config.task)
"""


def test_an_environment_of_verifiers_is_served_and_exact(qwen, tmp_path, monkeypatch):
    (tmp_path / "sums_taskset.py").write_text(SUMS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    python = str(make_environment("verifiers"))
    rows = prep.make("sums-taskset", python)
    assert [row.messages[0]["content"] for row in rows] == ["0+4=", "1+4=", "2+4=", "3+4="]
    with pytest.raises(UserError, match=r"--env no-taskset: .* cannot list its tasks: ModuleNotFoundError"):
        prep.make("no-taskset", python)
    command = [python, str(prep.AGENT), "play", "sums-taskset"]
    plan = resolve_agent(AgentConfig(command=command, serve=True))
    prompt = Prompt(id=rows[3].id, messages=rows[3].messages, extra=json.loads(rows[3].extra or ""))
    policy = Policy(qwen, lambda context: "7" if "3+4=" in context else "8")
    samples = play(plan, policy, prompt=prompt, size=3, agent_timeout_s=200.0, timeout_s=300, part="return")
    assert [sample.failure for sample in samples] == [""] * 3, samples[0].log
    assert [sample.reward for sample in samples] == [2.0] * 3 and len(policy.log) == 3
    for sample, (context, ids) in zip(samples, policy.log, strict=True):
        assert sample.token_ids.tolist() == [*context, *ids]
    # a first prompt beyond every limit is no doing of the policy, and the refusal has a code that verifiers hands on
    short = {"max_prompt_tokens": 2, "max_new_tokens": 2, "agent_timeout_s": 200.0, "timeout_s": 300, "part": "return"}
    [failed] = play(plan, Policy(qwen, lambda context: "7"), prompt=prompt, size=1, **short)
    assert "context_length_exceeded" in failed.failure
