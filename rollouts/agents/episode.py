"""One episode of an agent: its process runs beside the gateway, and its trace becomes samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.errors import RunStopped, UserError
from core.messages import Message
from core.types import Prompt, Sample, make_sample
from rollouts.agents.processes import AgentProcesses, AgentResult
from rollouts.agents.task import Task
from rollouts.episode import Tokenizer
from rollouts.gateway import Gateway
from rollouts.session import Sampler, Session
from rollouts.trace import Branch, Trace, write_key
from rollouts.wire import MODEL

SHARE_OF_TIMEOUT = 0.9
"""Part of `rollout.timeout_s`, the deadline of a whole group, that an agent has; the rest is for the rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of an agent's episode."""

    samples: list[Sample]
    """One per branch, at least one."""
    messages: list[Message]
    """The conversation of the last reply, after the prompt."""
    counts: dict[str, float]
    """Numbers for the log."""


class AgentRunner:
    """What a rollout worker needs to run agents: their processes, the endpoint that they talk to, and the sampler."""

    def __init__(self, processes: AgentProcesses, sampler: Sampler, *, timeout_s: float):
        """timeout_s: of one agent."""
        self.processes, self.sampler, self.timeout_s = processes, sampler, timeout_s
        self.gateway = Gateway()

    async def play(self, prompt: Prompt, *, episode: int, seed_of_turn: Callable[[int | str], int]) -> Played:
        """Run one episode. A harness that fails makes failed samples, of whatever it has asked."""
        session = Session(self.sampler, prompt, seed_of_turn)
        async with self.gateway.serving(session) as base_url:
            result = await self._run_agent(session, make_task(prompt, session, base_url, seed=seed_of_turn("agent")))
        trace, counts = session.trace, session.counts
        branches = trace.list_branches()
        failure = result.failure
        if not failure and not branches:
            failure = "the agent ended without a reply of the policy"
        if not branches:
            ids = self.sampler.tokenizer.render(prompt.messages, prompt.tools)
            branches = [_make_empty_branch(ids)]
        samples = [
            make_sample_of(branch, prompt, self.sampler.tokenizer, episode, result.parts, failure)
            for branch in branches
        ]
        measured = {
            "requests_repeated": trace.n_repeated,
            "requests_rewritten": trace.n_rewritten,
            "not_appended": trace.n_not_appended,
            "refused": counts.refused,
            "retried": counts.retried,
            "must_call": counts.must_call,
        }
        return Played(
            samples=samples,
            messages=find_conversation(trace, branches, prompt),
            counts={name: float(n) for name, n in measured.items()},
        )

    async def close(self) -> None:
        """End the agents and the endpoint."""
        await self.gateway.close()
        await self.processes.close()

    async def _run_agent(self, session: Session, task: Task) -> AgentResult:
        """Return what the agent returned, or why the episode has failed. Raises the engine's errors."""
        running = asyncio.create_task(self.processes.run(task, timeout_s=self.timeout_s))
        try:
            await asyncio.wait([running, session.failed], return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                return AgentResult(failure=session.failed.result())
            return running.result()
        finally:
            running.cancel()
            await asyncio.wait([running])  # until its processes are gone


def make_task(prompt: Prompt, session: Session, base_url: str, *, seed: int) -> Task:
    """Return what the agent sees of an episode: never the answer."""
    return Task(
        base_url=base_url,
        api_key=session.key,
        model=MODEL,
        messages=prompt.messages,
        tools=prompt.tools,
        id=prompt.id,
        source=prompt.source,
        extra=prompt.extra,
        max_turns=session.sampler.max_turns,
        seed=seed,
    )


def make_sample_of(
    branch: Branch, prompt: Prompt, tokenizer: Tokenizer, episode: int, parts: dict[str, float], failure: str
) -> Sample:
    """Return the sample of one branch of an episode."""
    begin = branch.action_mask.index(True) if branch.turns else len(branch.ids)
    return make_sample(
        prompt=prompt,
        token_ids=branch.ids,
        action_mask=branch.action_mask,
        rollout_logp=branch.logp,
        versions=branch.versions,
        stop=branch.stop,
        reward_parts=parts,
        failure=failure,
        completion=tokenizer.decode(branch.ids[begin:]),
        episode=episode,
        turns=branch.turns,
        turn_numbers=branch.turn_numbers,
    )


def find_conversation(trace: Trace, branches: Sequence[Branch], prompt: Prompt) -> list[Message]:
    """Return the messages of the branch with the last reply, after those of the prompt if it begins with them."""
    last = max(branches, key=lambda branch: branch.last)
    n = len(prompt.messages)
    begins = [write_key(message) for message in last.messages[:n]] == trace.prompt
    return last.messages[n:] if begins else last.messages


def _make_empty_branch(ids: list[int]) -> Branch:
    n = len(ids)
    return Branch(
        ids=ids,
        action_mask=[False] * n,
        logp=[0.0] * n,
        versions=[-1] * n,
        turns=(),
        turn_numbers=(),
        stop="eos",
        messages=[],
        last=-1,
    )


def check_task(prompt: Prompt) -> None:
    """Raise UserError for a row that cannot be sent to another process."""
    import json

    try:
        json.dumps(prompt.extra)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"row {prompt.id}: its columns cannot be given to an agent as JSON ({error}): leave the column out"
        ) from error


__all__ = ["AgentRunner", "Played", "RunStopped", "check_task", "find_conversation", "make_sample_of", "make_task"]
