"""Agents in whole runs: the same tokens as an environment, and more samples than episodes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

import main_eval
from configs.rollout_schema import AgentConfig, RewardConfig, RolloutConfig
from core.types.samples import Prompt, Sample, make_sample
from core.types.truncation import Truncation
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.evaluation.suites.generations import WHOLE
from rewards import resolve_reward
from rewards.rewarder import Rewarder
from rollouts.agents.processes import AgentProcesses
from rollouts.engines.base import EngineConfig
from rollouts.engines.hf import HfEngine
from rollouts.envs.calculator import Calculator
from rollouts.registry import resolve_agent
from rollouts.scheduling.buffer import FinishedGroup, ReplayBuffer, Schedule
from rollouts.stops import Stops
from rollouts.worker import RolloutWorker
from unit_tests.helpers.chat_families import call
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.one_reward import one_reward
from unit_tests.helpers.runs import metrics_of


class Asks(Calculator):
    """Answers every reply, so that a random model has several turns."""

    async def step(self, reply):
        self.calls += 1
        return [{"role": "user", "content": self.compute("3+4")}]


ASKS = """
import openai

async def run(task):
    messages, calls = list(task.messages), 0
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for turn in range(task.max_turns):
            answer = await client.chat.completions.create(model=task.model, messages=messages)
            if answer.choices[0].finish_reason == "length":
                break
            calls += 1
            messages += [answer.choices[0].message, {"role": "user", "content": "7"}]
    return {"calculator_calls": float(calls)}
"""


def sample_groups(tiny_path: str, *, agent: Path | None, groups: int, size: int, top_p: float = 1.0) -> list[Sample]:
    """Sample with the hf engine; the environment, or the agent's file, is the other party."""
    tokenizer = ChatTokenizer(tiny_path, "chat")
    end = tokenizer.stop_token_ids[0]

    async def run() -> list[Sample]:
        stops = Stops(tokenizer, [], list(range(end, end + 40)))  # so that a random model's replies end
        engine = HfEngine(
            EngineConfig(
                model_path=tiny_path,
                temperature=1.0,
                truncation=Truncation(top_p=top_p),
                max_model_len=96,
                stop_token_ids=stops.token_ids,
                dtype="float32",
            )
        )
        engine.version = 0
        worker = RolloutWorker(
            engine,
            tokenizer,
            Asks,
            Rewarder(one_reward(resolve_reward("arithmetic"), {}), 1, 30.0),
            reward=RewardConfig(function="arithmetic", weights={"correct": 1.0, "calculator_calls": 0.5}),
            rollout=RolloutConfig(max_new_tokens=64, max_turns=4, timeout_s=120, top_p=top_p),
            seed=5,
            stops=stops,
            max_prompt_tokens=32,
            agents=None if agent is None else AgentProcesses(resolve_agent(AgentConfig(file=str(agent)))),
        )
        try:
            found: list[Sample] = []
            for ticket in range(groups):
                prompt = Prompt(id=str(ticket), messages=[{"role": "user", "content": f"{ticket}+2="}], answer="7")
                found += await worker.generate_group(ticket, prompt, size) or []
            return found
        finally:
            await worker.close()

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_an_agent_with_openais_client_samples_what_the_environment_samples(tiny_path, tmp_path):
    pytest.importorskip("openai")
    file = tmp_path / "asks.py"
    file.write_text(ASKS)
    as_env = sample_groups(tiny_path, agent=None, groups=3, size=2, top_p=0.95)
    as_agent = sample_groups(tiny_path, agent=file, groups=3, size=2, top_p=0.95)
    assert len(as_env) == len(as_agent) == 6 and max(len(s.spans) for s in as_env) > 1
    for ours, theirs in zip(as_env, as_agent, strict=True):
        assert not ours.failure and not theirs.failure, (ours.failure, theirs.failure)
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.action_mask.tolist() == theirs.action_mask.tolist()
        np.testing.assert_allclose(ours.rollout_logp, theirs.rollout_logp, atol=1e-5)
        assert ours.kept == theirs.kept is not None
        assert ours.spans == theirs.spans and ours.stop in (theirs.stop, "turns")
        assert (ours.reward, ours.reward_parts) == (theirs.reward, theirs.reward_parts)


BRANCHING = '''
import openai

async def run(task):
    """ChatRequest, rewrite what was said, and ask again: two branches."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        async def ask(messages):
            answer = await client.chat.completions.create(model=task.model, messages=messages, max_tokens=4)
            return {"role": "assistant", "content": answer.choices[0].message.content}

        first = await ask(task.messages)
        again = {"role": "user", "content": "?"}
        await ask([*task.messages, first, again])
        if task.seed % 2:
            await ask([*task.messages, {"role": "assistant", "content": "7"}, again])
    return {"odd": float(task.seed % 2)}
'''


def branching(folder: Path) -> dict[str, Any]:
    """Changes of a recipe: an agent that leaves one branch or two."""
    file = folder / "branching.py"
    file.write_text(BRANCHING)
    return {
        "rollout.agent": {"file": str(file)},
        "rollout.max_turns": 4,
        "rollout.max_new_tokens": 24,
        "reward.weights": {"correct": 1.0, "odd": 0.5},
        "data.max_prompt_tokens": 24,
    }


def check_run(run: Path) -> None:
    """The whole step has taken more samples than episodes."""
    lines = metrics_of(run)
    branches = [line["rollout/branches_per_episode"] for line in lines]
    assert all(1 < n <= 2 for n in branches)
    for step, line in enumerate(lines):
        samples = [json.loads(x) for x in (run / f"samples/step_{step:05d}.jsonl").read_text().splitlines()]
        assert len(samples) == line["rollout/samples"] == round(16 * branches[step])
        assert {(s["group"], s["episode"]) for s in samples} == {(g, e) for g in range(4) for e in range(4)}
        assert 0 < line["rollout/rewritten_fraction"] < 1 and line["rollout/kept_fraction"] == 1
        assert line["rollout/failed"] == 0 and line["train/tokens"] > 0
        rewards = {(s["group"], s["episode"]): s["reward"] for s in samples}
        assert all(s["reward"] == rewards[s["group"], s["episode"]] for s in samples)
        assert line["reward/mean"] == pytest.approx(sum(rewards.values()) / 16)


@pytest.mark.slow
@pytest.mark.usual
def test_a_run_with_an_agent_takes_more_samples_than_episodes(trained, tmp_path):
    pytest.importorskip("openai")
    changes = branching(tmp_path) | {"backend": "ray", "rollout.num_engines": 1, "max_staleness": 1}
    check_run(trained(changes))


@pytest.mark.one_core
@pytest.mark.slow
def test_an_evaluation_with_an_agent_has_one_row_per_episode(tmp_path, tiny_path, sums):
    pytest.importorskip("openai")
    changes = branching(tmp_path)
    raw = {
        "name": "eval",
        "backend": "local",
        "run_dir": str(tmp_path / "runs"),
        "model": {"path": tiny_path, "dtype": "float32"},
        "data": {"sets": [{"path": str(sums / "eval.parquet"), "name": "sums"}], "max_prompt_tokens": 24},
        "reward": {"function": "arithmetic", "workers": 1, "weights": changes["reward.weights"]},
        "rollout": {"engine": "hf", "max_new_tokens": 24, "max_turns": 4, "agent": changes["rollout.agent"]},
        "samples": 2,
        "pass_reward": 0.5,
        "resamples": 100,
    }
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(raw))
    code, err = run_here(main_eval, "--config", str(tmp_path / "eval.yaml"))
    assert code == 0, err
    [run] = (tmp_path / "runs").glob("*")
    rows = pq.read_table(run / WHOLE).to_pylist()
    assert sorted((row["index"], row["sample"]) for row in rows) == [(i, n) for i in range(10) for n in (0, 1)]
    assert not any(row["failure"] for row in rows) and all(row["completion"] is not None for row in rows)


def test_groups_of_branches_survive_a_checkpoint():
    branch = make_sample(
        prompt=Prompt(id="p", messages=[{"role": "user", "content": "?"}]),
        token_ids=[1, 2, 3, 4],
        action_mask=[False, True, False, True],
        rollout_logp=[0.0, -1.0, 0.0, -1.0],
        versions=[-1, 0, -1, 0],
        reward=1.0,
        episode=3,
        turns=((1, 2), (3, 4)),
        turn_numbers=(0, 2),
        transcript=[{"role": "assistant", "content": "x", "tool_calls": [call("f", a=1)]}],
        counts={"turns": 3.0},
    )
    buffer = ReplayBuffer(Schedule(steps=2, per_step=1))
    asyncio.run(buffer.reserve_ticket())
    group = [branch, replace(branch, turn_numbers=(1, 3))]
    buffer.add_group(FinishedGroup(ticket=0, group=group, accepted=True, seconds=1.0))
    state = json.loads(json.dumps(buffer.get_state()))
    again = ReplayBuffer.from_state(state, buffer.schedule, lambda ticket: branch.prompt, step=0)
    assert again.ready[0].group == buffer.ready[0].group
    # earlier versions described no prompts
    [earlier] = state["finished"]
    del earlier["prompts"]
    for sample in earlier["group"]:
        del sample["prompt"]
    again = ReplayBuffer.from_state(state, buffer.schedule, lambda ticket: branch.prompt, step=0)
    assert again.ready[0].group == buffer.ready[0].group
