"""The real smolagents as a harness: it rewrites its own history, so that every turn is a branch. And it is learnt from.

It asks for `tool_choice: required`, with `stop`, and tells the policy of earlier calls as text:

    system, task                                              -> call of a tool
    system, task, "Calling tools: ...", "Observation: ..."    -> call of final_answer
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

import main_rl
import main_sl
from configs.rollout_schema import AgentConfig, RewardConfig, RolloutConfig
from core.types.samples import Prompt, Sample
from data_feeds.chat.tool_parsing import make_parser
from data_prep import function_calls, tiny_model
from data_prep.function_calls import write_jsonl
from rewards import resolve_reward
from rewards.rewarder import Rewarder
from rollouts.agents.processes import AgentProcesses
from rollouts.envs.calculator import Calculator
from rollouts.registry import resolve_agent
from rollouts.stops import Stops
from rollouts.worker import RolloutWorker
from unit_tests.helpers.chat_families import load_family
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.one_reward import one_reward
from unit_tests.helpers.other_packages import install_beside
from unit_tests.helpers.runs import metrics_of
from unit_tests.helpers.scripted_policy import Policy, say_calls

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def package() -> str:
    return str(install_beside("smolagents"))


ADDS = '''
import json, os, sys

import smolagents


@smolagents.tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def run(task):
    model = smolagents.OpenAIServerModel(task.model, api_base=task.base_url, api_key=task.api_key)
    agent = smolagents.ToolCallingAgent([add], model, max_steps=4, verbosity_level=0)
    answer = agent.run(task.messages[-1]["content"])
    return {"solved": float(str(answer) == "7")}


if __name__ == "__main__":
    from types import SimpleNamespace

    rewards = run(SimpleNamespace(**json.load(sys.stdin)))
    os.write(3, json.dumps(rewards).encode() + b"\\n")
'''


@pytest.mark.parametrize("way", ["file", "command"])
def test_every_branch_is_exact_and_trained_once(tiny_path, tmp_path, package, monkeypatch, way):
    monkeypatch.setenv("PYTHONPATH", package)
    file = tmp_path / "adds.py"
    file.write_text(ADDS)
    agent = AgentConfig(file=str(file)) if way == "file" else AgentConfig(command=[sys.executable, str(file)])
    qwen = load_family(tiny_path, tmp_path, "qwen2.5")
    policy: Any = Policy(
        qwen, [say_calls("", ("add", {"a": 3, "b": 4})), say_calls("", ("final_answer", {"answer": "7"}))]
    )
    policy.close = lambda: asyncio.sleep(0)

    async def run() -> list[Sample]:
        worker = RolloutWorker(
            policy,
            qwen,
            Calculator,
            Rewarder(one_reward(resolve_reward("environment"), {}), 1, 30.0),
            reward=RewardConfig(function="environment", weights={"solved": 1.0}),
            rollout=RolloutConfig(max_new_tokens=2000, max_turns=8, timeout_s=100),
            seed=5,
            stops=Stops(qwen, [], []),
            parser=make_parser("hermes", qwen),
            max_prompt_tokens=40_000,
            agents=AgentProcesses(resolve_agent(agent)),
        )
        try:
            prompt = Prompt(id="0", messages=[{"role": "user", "content": "3+4=?"}], answer="7")
            return await worker.generate_group(0, prompt, 1) or []
        finally:
            await worker.close()

    samples = asyncio.run(run())
    assert [s.failure for s in samples] == ["", ""], "every turn is a branch: smolagents rewrites its own history"
    assert [s.reward for s in samples] == [1.0, 1.0]
    for sample, (context, ids) in zip(samples, policy.log, strict=True):
        [(begin, end)] = sample.spans
        assert sample.token_ids[:begin].tolist() == context
        assert sample.token_ids[begin:end].tolist() == ids[: end - begin]
        assert sample.action_mask.sum() == end - begin
    assert samples[0].counts["requests_demanding_a_call"] == 2, "it asks for tool_choice: required"
    assert samples[0].counts["assistant/rewritten"] == 1


AGENT = """
import smolagents
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

from rollouts.envs.number_tools import TOOLS

KNOWN = {name: smolagents.tool(function) for name, function in TOOLS.items()}


def run(task):
    offered = [KNOWN[tool["function"]["name"]] for tool in task.tools]
    model = smolagents.OpenAIServerModel(task.model, api_base=task.base_url, api_key=task.api_key)
    agent = smolagents.ToolCallingAgent(
        offered, model, prompt_templates=EMPTY_PROMPT_TEMPLATES, max_steps=task.max_turns, verbosity_level=0
    )
    try:
        agent.run(task.messages[-1]["content"])
    except smolagents.AgentError:  # turns or tokens are used up
        pass
    return {}
"""
REWARD = """
def score(prompt, messages):
    made = [call["function"] for call in messages[-1].get("tool_calls", [])]
    final = [call["arguments"].get("answer") for call in made if call["name"] == "final_answer"]
    return {"correct": float([str(answer) for answer in final] == [prompt.answer])}
"""
FINAL = {
    "type": "function",
    "function": {
        "name": "final_answer",
        "description": "Provides a final answer to the given problem.",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    },
}


def as_smolagents(row: dict[str, Any], draw: random.Random) -> list[dict[str, Any]]:
    """Return a taught row as two: what smolagents tells the policy before each of its replies, and that reply."""
    question, said, result, _ = row["messages"]
    [call] = said["tool_calls"]
    asked = [{"role": "system", "content": ""}, {"role": "user", "content": f"New task:\n{question['content']}"}]
    made = {"id": f"{draw.randrange(16**6):06x}000", "type": "function", "function": call["function"]}
    told = [
        {"role": "assistant", "content": f"Calling tools:\n{[made]}"},
        {"role": "user", "content": f"Observation:\n{result['content']}"},
    ]
    answer = {"name": "final_answer", "arguments": {"answer": result["content"]}}
    replies = [call, {"id": "call_1", "type": "function", "function": answer}]
    turns = [{"role": "assistant", "content": "", "tool_calls": [one]} for one in replies]
    tools = [*row["tools"], FINAL]
    return [
        {"id": f"{row['id']}/{i}", "messages": [*before, turn], "tools": tools}
        for i, (before, turn) in enumerate(zip((asked, [*asked, *told]), turns, strict=True))
    ]


@pytest.fixture
def warm(tmp_path) -> Path:
    """A model that calls tools as smolagents asks for it, taught by one who errs three times of four; and its data."""
    model = str(tmp_path / "model")
    tiny_model.main(["--out", model, "--tools", "--hidden-size", "128", "--heads", "4", "--max-length", "320"])
    rows = function_calls.make(train=200, held_out=100, sft=6000, wrong_share=0.75)
    draw = random.Random(0)
    write_jsonl(tmp_path / "sft.jsonl", [one for row in rows["sft"] for one in as_smolagents(row, draw)])
    for split in ("train", "eval"):
        write_jsonl(tmp_path / f"{split}.jsonl", rows[split])
    sft = "configs/tools_quickstart_sft.yaml"
    given = [f"model.path={model}", f"data.train={tmp_path / 'sft.jsonl'}", "data.train_on=last_reply"]
    room = ["data.max_tokens=320", "steps=200", "rows_per_step=64", "backend=local"]
    code, err = run_here(
        main_sl, "--config", sft, *given, *room, f"save_to={tmp_path / 'warm'}", f"run_dir={tmp_path}/sft"
    )
    assert code == 0, err
    return tmp_path


def test_the_task_is_learnt_through_it(warm, tmp_path, package, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", package)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "final.py").write_text(REWARD)
    code, err = run_here(
        main_rl,
        *("--config", "configs/tools_quickstart.yaml", f"model.path={warm / 'warm'}", f"run_dir={tmp_path / 'rl'}"),
        *(f"data.train={warm / 'train.jsonl'}", f"data.eval={warm / 'eval.jsonl'}", "data.max_prompt_tokens=240"),
        *(
            f"reward.function={tmp_path / 'final.py'}",
            "rollout.env=single_turn",
            f"rollout.agent={{file: {tmp_path}/agent.py}}",
        ),
        *("rollout.max_turns=2", "rollout.max_new_tokens=80", "steps=14", "groups_per_step=12", "group_size=8"),
    )
    assert code == 0, err
    [run] = (tmp_path / "rl").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    before, after = (summary[when]["reward/mean"] for when in ("before", "after"))
    print(f"held-out reward {before:.3f} before, {after:.3f} after")
    assert before <= 0.4 and after >= before + 0.2, (before, after)
    for step in metrics_of(run):
        assert step["rollout/failed"] == 0 and step["rollout/kept_fraction"] == 1
        assert 1 < step["rollout/branches_per_episode"] <= 2 and step["rollout/trained_fraction"] == 1
