"""Agent episode: a process uses the gateway, and the trace of requests becomes samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from configs.agent_schema import SLOW, TIMEOUTS
from configs.gateway_schema import GatewayConfig
from core.tasks import start_task
from core.text.plain_text import escape_controls
from core.timing.phases import Activity
from core.timing.progress import say
from core.types.messages import Message
from core.types.samples import Prompt, Sample
from rollouts.agents.processes import AgentProcesses
from rollouts.agents.remote import RemoteAgents
from rollouts.agents.results import AgentResult, hide_keys
from rollouts.agents.session import AgentSession, Sampler
from rollouts.agents.task import AgentPlan, Task
from rollouts.agents.trace import Branch, Trace
from rollouts.agents.wire import MODEL
from rollouts.row_timeout import find_timeout
from rollouts.transcript import Tokenizer, find_places
from rollouts.turns import Played


class AgentRunner:
    """Runner of agent episodes: the agent processes, the gateway, and the sampler."""

    def __init__(
        self,
        processes: AgentProcesses | RemoteAgents,
        sampler: Sampler,
        *,
        timeout_s: float,
        address: GatewayConfig | None = None,
        engine: int = 0,
    ):
        """timeout_s: deadline of one agent, in seconds. address: keys of `rollout.gateway`. engine: its number."""
        from rollouts.agents.gateway import Gateway  # here, since only agents need aiohttp

        self.processes, self.sampler, self.timeout_s = processes, sampler, timeout_s
        self.gateway = Gateway(address, engine)
        self.said_must_call = False

    async def play(self, prompt: Prompt, *, episode: int, seed_of_turn: Callable[[int | str], int]) -> list[Played]:
        """Run an episode of a prompt to its samples, one per branch, each with the messages for the reward.

        A failing harness yields failed samples of the requests made so far. Raises the engine's errors.
        """
        deadline_s, log = min(find_timeout(prompt), self.timeout_s), bytearray()
        session, result = await self._run_session(prompt, seed_of_turn, deadline_s, log)
        # No reply was requested, so the episode begins again as it was. A session of its own shuts out the agent of the
        # lost machine, which may still run there.
        if result.was_lost and not session.n_started:
            session, result = await self._run_session(prompt, seed_of_turn, deadline_s, log)
        branches = session.trace.list_branches()
        failure = result.failure
        if not branches:
            failure = failure or "the agent ended without a reply of the policy"
            # the trainer expects a sample for every episode, also for a failed one
            branches = [_make_empty_branch(self.sampler.tokenizer, prompt)]
        tokenizer, trace = self.sampler.tokenizer, session.trace
        samples = [
            make_sample_of(branch, trace, prompt, tokenizer, {} if failure else result.parts, failure)
            for branch in branches
        ]
        self._say_once(session)
        counts = count_requests(session, samples) | count_timeouts(result)
        # The reward of all samples reads the branch with the last reply. Counts are logged once per episode.
        messages = cut_prompt(max(branches, key=lambda branch: branch.last).messages, trace)
        # once per episode too
        first = {"counts": samples[0].counts | counts, "log": read_log(log)}
        return [
            Played(sample=replace(sample, episode=episode, **({} if i else first)), messages=messages)
            for i, sample in enumerate(samples)
        ]

    def _say_once(self, session: AgentSession) -> None:
        if session.counts.must_call and not self.said_must_call:
            self.said_must_call = True
            say(
                "rollout.agent: the harness asks for tool_choice: required, taken as auto here: to force a call is to "
                "sample from another distribution than the one in training"
            )

    async def close(self) -> None:
        """Kill the agents and close the endpoint."""
        await self.gateway.close()
        await self.processes.close()

    async def _run_session(
        self, prompt: Prompt, seed_of_turn: Callable[[int | str], int], deadline_s: float, log: bytearray
    ) -> tuple[AgentSession, AgentResult]:
        """Run the agent in a new session, with a new address and key. log: receives the output."""
        session = AgentSession(self.sampler, prompt, seed_of_turn)
        async with self.gateway.serving(session) as base_url:
            # "agent" is a key that no turn has
            task = make_task(prompt, session, base_url, seed=seed_of_turn("agent"))
            result = await self._run_agent(session, task, deadline_s, log)
            if result.timed_out:
                busy_s = session.timer.read_seconds()[Activity.GENERATE]
                result = judge_timeout(result, self.processes.plan, prompt, busy_s=busy_s, deadline_s=deadline_s)
        return session, result

    async def _run_agent(self, session: AgentSession, task: Task, deadline_s: float, log: bytearray) -> AgentResult:
        """Return the agent's result or failure. log: receives what it prints. Raises the engine's errors."""
        running = start_task(self.processes.run(task, timeout_s=deadline_s, log=log))
        try:
            # an engine error or too many refused requests end the episode, even while the agent still runs
            await asyncio.wait([running, session.failed], return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                return AgentResult(failure=session.failed.result())
            return running.result()
        finally:
            running.cancel()
            await asyncio.wait([running])  # until its processes are gone


def make_task(prompt: Prompt, session: AgentSession, base_url: str, *, seed: int) -> Task:
    """Return the task for the agent. It never contains the answer."""
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
    branch: Branch, trace: Trace, prompt: Prompt, tokenizer: Tokenizer, parts: dict[str, float], failure: str
) -> Sample:
    """Convert a branch of an episode to a sample."""
    return branch.make_sample(
        # the sample's prompt is the one that the policy saw, as in an environment
        replace(prompt, tools=branch.tools),
        reward_parts=parts,
        failure=failure,
        completion=tokenizer.decode(branch.completion_ids),
        transcript=cut_prompt(branch.messages, trace),
        turns=tuple(branch.turns),
        turn_numbers=tuple(branch.turn_numbers),
    )


def read_log(log: bytearray) -> str:
    """Return the output of an agent as text, without API keys of episodes."""
    return escape_controls(hide_keys(log.decode(errors="backslashreplace")), keep="\n\t").strip()


def cut_prompt(messages: list[Message], trace: Trace) -> list[Message]:
    """Return a conversation without the prompt, if it begins with the prompt."""
    return messages[len(trace.prompt) :] if trace.holds_prompt(messages) else messages


def count_requests(session: AgentSession, samples: Sequence[Sample]) -> dict[str, float]:
    """Return numbers of an episode for the log. driver/records/episode_metrics.py makes metrics of them."""
    trace, counts = session.trace, session.counts
    found = {
        "turns": trace.n_replies,
        "assistant/repeated": trace.n_repeated,
        "assistant/rewritten": trace.n_rewritten,
        "tokens/sampled": counts.sampled,
        "tokens/kept": sum(sample.n_sampled for sample in samples),
        "requests_refused": counts.refused,
        "requests_retried": counts.retried,
        "requests_demanding_a_call": counts.must_call,
        "requests_not_appended": trace.n_not_appended,
    }
    return {name: float(n) for name, n in found.items()}


def judge_timeout(
    result: AgentResult, plan: AgentPlan, prompt: Prompt, *, busy_s: float, deadline_s: float
) -> AgentResult:
    """Return the result of an episode that reached the deadline: the last numbers, or a failure.

    A time-out that is always discarded is an exit that the policy can learn to take. It is a failure where the policy
    was idle for most of the time, or the episode waited for a machine: it cannot have caused it. busy_s: seconds in
    which the policy was sampling.
    """
    # agent.timeout_s may be lower than the row's
    is_of_row = find_timeout(prompt) <= deadline_s
    chosen = plan.on_timeout or ("score" if is_of_row else "fail")
    is_slow = busy_s < deadline_s / 2 or result.waited_s > deadline_s / 10
    if chosen == "score" and not is_slow:
        return result
    key = "rollout.timeout_s" if plan.timeout_s is None else "rollout.agent.timeout_s"
    idle = f", and the policy was idle for {deadline_s - busy_s:.3g} s of them" if chosen == "score" else ""
    why = f"the agent has not ended after {deadline_s:g} s (see {'the column timeout_s' if is_of_row else key}){idle}"
    return replace(result, failure=why, was_slow=is_slow)


def count_timeouts(result: AgentResult) -> dict[str, float]:
    """Return numbers of an episode for the log: whether it reached the deadline."""
    return {TIMEOUTS: float(result.timed_out), SLOW: float(result.was_slow)}


def _make_empty_branch(tokenizer: Tokenizer, prompt: Prompt) -> Branch:
    ids = tokenizer.render(prompt.messages, prompt.tools)
    branch = Branch(last=-1, tools=prompt.tools, images=find_places(tokenizer, ids, prompt.messages))
    branch.append_context(ids)
    return branch
