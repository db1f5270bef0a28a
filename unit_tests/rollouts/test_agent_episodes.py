"""Episodes of agents without their processes: deadlines, tasks, counts, logs, and what the samples hold."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from core.timing.clock import ActivityTimer
from core.timing.phases import ENGINE_ACTIVITIES
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import PlainParser
from rollouts.agents.episode import AgentRunner, judge_timeout, read_log
from rollouts.agents.results import AgentResult
from rollouts.agents.session import AgentSession, Request, Sampler
from rollouts.agents.task import AgentPlan, Task
from rollouts.agents.wire import BadRequest, ChatRequest
from rollouts.stops import Stops
from rollouts.turns import Played
from unit_tests.helpers.episodes import Scripted, Words

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}
ASKED: Any = [{"role": "user", "content": "1 2"}]
PROMPT = Prompt(id="p/1", messages=ASKED, answer="secret", extra={"level": 3}, source="sums", tools=[ADD])
SEEDS = {"agent": 77, 0: 10, 1: 11}
Act = Callable[[AgentSession], Awaitable[Any]]
UNASKED = {
    **dict.fromkeys(("turns", "assistant/repeated", "assistant/rewritten", "tokens/sampled", "tokens/kept"), 0.0),
    **dict.fromkeys(("requests_refused", "requests_retried", "requests_demanding_a_call"), 0.0),
    **dict.fromkeys(("requests_not_appended", "agent/timeouts", "agent/slow"), 0.0),
}


class Numbers(Words):
    """Words whose 6 ends a turn."""

    def __init__(self) -> None:
        self.stop_token_ids, self.turn_end, self.written_ids = [6], [6], frozenset(range(99))


class Agent:
    """Takes the place of an agent's processes: acts in the session, prints, and returns results one after the other."""

    def __init__(self, *results: AgentResult, act: Act | None = None, plan: AgentPlan | None = None) -> None:
        self.results, self.act, self.plan = list(results), act, plan or AgentPlan()
        self.tasks: list[Task] = []
        self.deadlines: list[float] = []
        self.runner: AgentRunner
        self.is_closed = False

    async def run(self, task: Task, *, timeout_s: float, log: bytearray) -> AgentResult:
        self.tasks.append(task)
        self.deadlines.append(timeout_s)
        log += b"said %d\n" % len(self.tasks)
        [session] = self.runner.gateway.sessions.values()
        if self.act is not None:
            await self.act(session)
        return self.results.pop(0)

    async def close(self) -> None:
        self.is_closed = True


async def ask(session: AgentSession, messages: Any, **more: Any) -> Any:
    request = Request(ask=ChatRequest(messages=messages, tools=[], **more), digest=repr(messages), retry=0)
    async with session.answering(request) as answer:
        return answer.message


def play(processes: Any, *prompts: Prompt, replies: Any = ()) -> list[list[Played]]:
    """Play an episode of each prompt, with the number 3."""
    tokenizer: Any = Numbers()
    sampler = Sampler(
        engine=Scripted(*replies),
        tokenizer=tokenizer,
        stops=Stops(tokenizer, [], []),
        parser=PlainParser(),
        timer=ActivityTimer(*ENGINE_ACTIVITIES),
        temperature=1.0,
        max_new_tokens=50,
        max_turns=4,
        max_model_len=100,
    )

    async def run() -> list[list[Played]]:
        processes.runner = AgentRunner(processes, sampler, timeout_s=40.0)
        played = [
            await processes.runner.play(prompt, episode=3, seed_of_turn=lambda turn: SEEDS.get(turn, 0))
            for prompt in prompts
        ]
        await processes.runner.close()
        return played

    return asyncio.run(run())


@pytest.mark.parametrize(("row", "deadline"), [(None, 40.0), (3, 3.0), (90, 40.0), (0.5, 0.5)])
def test_the_deadline_is_the_shorter_of_the_rows_and_the_runs(row, deadline):
    processes = Agent(AgentResult())
    play(processes, replace(PROMPT, extra={} if row is None else {"timeout_s": row}))
    assert processes.deadlines == [deadline] and processes.is_closed


def test_a_task_is_the_row_without_its_answer():
    processes = Agent(AgentResult())
    play(processes, PROMPT)
    [task] = processes.tasks
    given = {"messages": ASKED, "tools": [ADD], "id": "p/1", "source": "sums", "extra": {"level": 3}}
    assert task == Task(base_url=task.base_url, api_key=task.api_key, model="policy", max_turns=4, seed=77, **given)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/s/[0-9a-f]{16}/v1", task.base_url)
    assert task.api_key.startswith("feynrl-") and "secret" not in repr(task)


@pytest.mark.parametrize("failure", ["", "it broke"])
def test_an_agent_that_asked_nothing_leaves_one_failed_sample(failure):
    processes = Agent(AgentResult(parts={} if failure else {"won": 1.0}, failure=failure))
    [[(sample, messages)]] = [[(one.sample, one.messages) for one in found] for found in play(processes, PROMPT)]
    assert sample.failure == (failure or "the agent ended without a reply of the policy")
    assert (sample.token_ids.tolist(), sample.n_sampled, sample.reward_parts) == ([1, 2], 0, {})
    assert (sample.prompt, sample.transcript, messages) == (PROMPT, [], [])
    assert (sample.counts, sample.episode, sample.log) == (UNASKED, 3, "said 1")


def test_a_lost_episode_begins_again_at_another_address_with_another_key():
    processes = Agent(AgentResult(was_lost=True, failure="gone"), AgentResult(was_lost=True, failure="gone too"))
    [[played]] = play(processes, PROMPT)
    one, two = processes.tasks
    assert one.base_url != two.base_url and one.api_key != two.api_key and one.seed == two.seed
    assert (played.sample.failure, played.sample.log) == ("gone too", "said 1\nsaid 2"), "not a third time"


async def talk(session: AgentSession) -> None:
    """Ask in two conversations, lose an answer, and be refused."""
    first = await ask(session, ASKED)
    await ask(session, [{"role": "user", "content": "7"}])
    with contextlib.suppress(ConnectionError):
        lost = ChatRequest(messages=[{"role": "user", "content": "8"}], tools=[])
        async with session.answering(Request(ask=lost, digest="lost", retry=0)):
            raise ConnectionError
    await ask(session, [*ASKED, first, {"role": "user", "content": "9"}], must_call=True)
    session.count_refusal("n is 2")


def test_the_samples_of_an_episode_are_its_branches_with_its_numbers():
    replies = ([3, 6], [4, 6], [5, 5, 6], [6])
    [found] = play(Agent(AgentResult(parts={"won": 0.5}), act=talk), PROMPT, replies=replies)
    main, other = [played.sample for played in found]
    assert main.token_ids.tolist() == [1, 2, 3, 6, 9, 6] and other.token_ids.tolist() == [7, 4, 6]
    assert main.action_mask.tolist() == [False, False, True, True, False, True]
    assert (main.turns, main.turn_numbers) == (((2, 4), (5, 6)), (0, 3))
    assert (other.turns, other.turn_numbers) == (((1, 3),), (1,))
    # a conversation that begins with the prompt is shown without it
    assert [message["content"] for message in main.transcript] == ["3 6", "9", "6"]
    assert [message["content"] for message in other.transcript] == ["7", "4 6"]
    assert [played.messages for played in found] == [main.transcript] * 2, "that of the last reply"
    assert [(one.failure, one.reward_parts, one.episode) for one in (main, other)] == [("", {"won": 0.5}, 3)] * 2
    assert [one.prompt for one in (main, other)] == [replace(PROMPT, tools=[])] * 2, "with the tools that were sent"
    assert (main.completion, other.completion) == ("3 6 9 6", "4 6")
    counts = {"turns": 4.0, "assistant/repeated": 1.0, "tokens/sampled": 8.0, "tokens/kept": 5.0}
    assert main.counts == UNASKED | counts | {"requests_refused": 1.0, "requests_demanding_a_call": 1.0}
    assert (main.log, other.counts, other.log) == ("said 1", {}, "")


def test_numbers_of_an_agent_that_failed_are_not_kept():
    result = AgentResult(parts={"won": 1.0}, failure="it broke")
    [found] = play(Agent(result, act=talk), PROMPT, replies=([3, 6], [4, 6], [5, 6], [6]))
    assert [(played.sample.failure, played.sample.reward_parts) for played in found] == [("it broke", {})] * 2


def test_that_no_call_is_forced_is_said_once(capsys):
    async def demand(session: AgentSession) -> None:
        await ask(session, ASKED, must_call=True)

    async def leave_alone(session: AgentSession) -> None:
        await ask(session, ASKED)

    plain = Agent(AgentResult(), act=leave_alone)
    play(plain, PROMPT, replies=[[6]])
    assert capsys.readouterr().err == ""
    play(Agent(AgentResult(), AgentResult(), act=demand), PROMPT, PROMPT, replies=[[6], [6]])
    said = "rollout.agent: the harness asks for tool_choice: required, taken as auto here: "
    assert capsys.readouterr().err.count(said) == 1


def test_an_address_is_that_of_a_running_episode_and_takes_no_packed_body():
    """Some bytes can hold gigabytes. A streamed reply says what it is, and that no proxy may keep it."""
    found: list[Any] = []

    async def look(session: AgentSession) -> None:
        url = processes.tasks[0].base_url
        body = json.dumps({"model": "policy", "messages": ASKED, "stream": True}).encode()
        async with aiohttp.ClientSession(headers={"x-api-key": session.key}) as http:
            for address in (url.removesuffix("/v1"), url.removesuffix("/v1")[:-1] + "x"):
                async with http.head(address) as answer:
                    found.append(answer.status)
            packed = {"data": gzip.compress(body), "headers": {"Content-Encoding": "gzip"}}
            async with http.post(f"{url}/chat/completions", **packed) as answer:
                found.append((answer.status, (await answer.json())["error"]["message"]))
            async with http.post(f"{url}/chat/completions", data=body) as answer:
                found.append((answer.status, answer.headers["Content-Type"], answer.headers["Cache-Control"]))
                found.append((await answer.text()).split("\n\n")[-2:])

    processes = Agent(AgentResult(), act=look)
    [[played]] = play(processes, PROMPT, replies=[[3, 6]])
    packed = (400, "the body of a request must be JSON")
    assert found == [200, 404, packed, (200, "text/event-stream", "no-cache"), ["data: [DONE]", ""]]
    assert played.sample.token_ids.tolist() == [1, 2, 3, 6] and played.sample.counts["requests_refused"] == 1.0


async def ask_once(session: AgentSession) -> None:
    await ask(session, ASKED)


def test_an_episode_at_its_deadline_has_its_numbers_if_the_policy_was_busy():
    """A deadline of a nanosecond, of which the policy was busy for all; and one of 30 s."""
    for seconds, parts, slow in ((1e-9, {"won": 0.5}, 0.0), (30, {}, 1.0)):
        processes = Agent(AgentResult(parts={"won": 0.5}, timed_out=True), act=ask_once)
        [[played]] = play(processes, replace(PROMPT, extra={"timeout_s": seconds}), replies=[[6]])
        assert played.sample.reward_parts == parts and bool(played.sample.failure) == bool(slow)
        assert (played.sample.counts["agent/timeouts"], played.sample.counts["agent/slow"]) == (1.0, slow)


LATE = AgentResult(parts={"won": 0.25}, timed_out=True)


@pytest.mark.parametrize(
    ("row", "plan", "busy_s", "waited_s", "failure", "slow"),
    [
        # 10 s: the policy was busy for half of them, and a tenth of waiting is none
        (10, {}, 5.0, 1.0, "", False),
        (10, {}, 5.0, 1.05, "(see the column timeout_s), and the policy was idle for 5 s of them", True),
        (10, {}, 4.99, 0.0, "(see the column timeout_s), and the policy was idle for 5.01 s of them", True),
        (10, {"on_timeout": "fail"}, 9.0, 0.0, "(see the column timeout_s)", False),
        (10, {"on_timeout": "fail"}, 1.0, 0.0, "(see the column timeout_s)", True),
        # the run's deadline comes before the row's, or the row has none
        (20, {"timeout_s": 10.0}, 9.0, 0.0, "(see rollout.agent.timeout_s)", False),
        (20, {"on_timeout": "score"}, 9.0, 0.0, "", False),
        (None, {}, 1.0, 0.0, "(see rollout.timeout_s)", True),
        (
            None,
            {"timeout_s": 10.0, "on_timeout": "score"},
            1.0,
            0.0,
            "(see rollout.agent.timeout_s), and the policy was idle for 9 s of them",
            True,
        ),
    ],
)
def test_an_episode_at_its_deadline_is_judged_by_who_was_slow(row, plan, busy_s, waited_s, failure, slow):
    prompt, late = replace(PROMPT, extra={"timeout_s": row}), replace(LATE, waited_s=waited_s)
    found = judge_timeout(late, AgentPlan(**plan), prompt, busy_s=busy_s, deadline_s=10.0)
    whole = failure and f"the agent has not ended after 10 s {failure}"
    assert found == replace(late, failure=whole, was_slow=slow)


def test_a_log_is_plain_text_without_keys():
    log = b"\n one\ttwo\r\x1b[31m \xff\n the key feynrl-" + b"k" * 43 + b" \n\n"
    assert read_log(bytearray(log)) == "one\ttwo\\r\\x1b[31m \\xff\n the key ***"
    assert read_log(bytearray()) == ""


def test_an_agent_that_does_not_listen_is_ended_with_its_episode():
    ended: list[str] = []

    async def flood(session: AgentSession) -> None:
        for n in range(200):
            session.count_refusal(f"n is {n}")
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(session.id)

    [[played]] = play(Agent(act=flood), PROMPT)
    said = "the agent has made 200 requests that were refused, the last because: n is 199"
    assert (played.sample.failure, played.sample.log, len(ended)) == (said, "said 1", 1)
    assert played.sample.counts == UNASKED | {"requests_refused": 200.0}


def test_an_error_of_the_engine_ends_the_run_and_not_the_episode():
    """The engine has nothing to say, which is an error of the script."""
    ended: list[str] = []

    async def ask_in_vain(session: AgentSession) -> None:
        with contextlib.suppress(BadRequest):
            await ask(session, ASKED)
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(session.id)

    with pytest.raises(IndexError, match="pop from empty list"):
        play(Agent(act=ask_in_vain), PROMPT)
    assert len(ended) == 1


def test_an_episode_that_has_asked_is_not_played_again_elsewhere():
    processes = Agent(AgentResult(was_lost=True, failure="gone"), act=ask_once)
    [[played]] = play(processes, PROMPT, replies=[[6]])
    assert played.sample.failure == "gone" and len(processes.tasks) == 1
    assert played.sample.counts["tokens/kept"] == 1.0
