"""Agents of a few lines, played by a worker with a scripted policy; and the processes that they leave."""

from __future__ import annotations

import asyncio
import os
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.agent_schema import AgentConfig
from configs.rollout_schema import RewardConfig, RolloutConfig
from core.types.samples import Prompt, Sample
from data_feeds.chat.tool_parsing import make_parser
from rewards import resolve_reward
from rewards.rewarder import Rewarder
from rollouts.agents.remote import start_agents
from rollouts.agents.task import AgentPlan
from rollouts.envs.base import Env
from rollouts.registry import resolve_agent
from rollouts.stops import Stops
from rollouts.worker import RolloutWorker
from unit_tests.helpers.one_reward import one_reward
from unit_tests.helpers.scripted_policy import Policy

MARK = f"{os.getpid()}.{time.monotonic_ns() % 10**6:06d}"
"""What nobody else's processes have; also a number of seconds for `sleep`."""
PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "Which?"}], answer="secret", extra={"level": 3})
ASK = """
import json, os, subprocess, sys, time, urllib.request

def ask(task, messages, **more):
    body = json.dumps({"model": task.model, "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(task.base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

"""


def write_agent(folder: Path, text: str, **settings: Any) -> AgentPlan:
    file = folder / "my_agent.py"
    file.write_text(ASK + textwrap.dedent(text))
    return resolve_agent(AgentConfig(file=str(file), **settings))


def play(
    plan: AgentPlan | Callable[[Prompt], Env],
    policy: Policy,
    *,
    size: int = 1,
    groups: int = 1,
    agent_timeout_s: float = 50.0,
    prompt: Prompt = PROMPT,
    reward: str = "environment",
    max_prompt_tokens: int = 400,
    part: str = "solved",
    **rollout: Any,
) -> list[Sample]:
    """Return the samples of some groups, one after the other, after all processes are gone.

    plan: an agent, or an environment. rollout: keys of the recipe.
    """

    is_agent = isinstance(plan, AgentPlan)

    async def run() -> list[Sample]:
        pool = Rewarder(one_reward(resolve_reward(reward), {}), 1, 30.0)
        engine: Any = policy
        engine.close = lambda: asyncio.sleep(0)
        worker = RolloutWorker(
            engine,
            policy.tokenizer,
            (lambda prompt: pytest.fail("an agent takes the place of an environment")) if is_agent else plan,
            pool,
            reward=RewardConfig(function="environment", weights={part: 2.0}),
            rollout=RolloutConfig(**{"max_new_tokens": 600, "max_turns": 8, "timeout_s": 60} | rollout),
            seed=11,
            stops=Stops(policy.tokenizer, [], []),
            parser=make_parser("hermes", policy.tokenizer),
            max_prompt_tokens=max_prompt_tokens,
            agents=start_agents(plan) if is_agent else None,
        )
        if worker.agents is not None:
            worker.agents.timeout_s = agent_timeout_s
        try:
            samples: list[Sample] = []
            for _ in range(groups):
                group = await worker.generate_group(4, prompt, size)
                assert group is not None, "the whole group timed out"
                samples += group
            return samples
        finally:
            await worker.close()

    samples = asyncio.run(run())
    if isinstance(plan, AgentPlan) and plan.address:  # the processes are those of another machine
        return samples
    # a guard says that its episode has ended, and exits a moment later
    end = time.monotonic() + 20
    while (left := find_processes("rollouts.agents.launcher")) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left, "an agent, or the process that starts them, is left"
    return samples


def find_processes(words: str) -> list[str]:
    """Commands of this test's processes that hold these words: they inherited its mark, or the words are its own."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            marks = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        is_own = f"TEST_OF_AGENTS={MARK}".encode() in marks or MARK in words
        if words in command and state != "Z" and is_own:
            found.append(command)
    return found
