"""A session of an agent in tables: each reply, limit, seed and refusal, to the letter, without a server."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core.errors import RunStopped
from core.timing.phases import Activity
from core.types.samples import Prompt
from core.types.truncation import Truncation
from data_feeds.chat.tool_parsing import PlainParser, say_deaf
from rollouts.agents.session import AgentSession, Request
from rollouts.agents.wire import BadRequest, ChatRequest, ChatResponse
from rollouts.stops import Stops
from unit_tests.helpers.chat_families import TOOLS, assistant, user
from unit_tests.helpers.scripted_policy import PROMPT, Policy, make_sampler, make_session, say_calls, spell

ASKED = [user("Which?")]
LONG = "0123456789" * 20 + "..."
CALL = say_calls("I look.", ("weather", {"place": "Oslo"}))
SPENT = (
    "the episode has used up rollout.max_new_tokens={}, its budget of sampled and answered tokens: end it, or raise "
    "that key"
)
TOO_LONG = (
    "the conversation has {}, and with a reply it may have data.max_prompt_tokens + rollout.max_new_tokens={}: shorten "
    "it, or raise them"
)
ENDING = "the policy cannot answer any more: the episode, or the run, is ending"


def request(messages: Any, retry: int | None = 0, digest: str = "", **more: Any) -> Request:
    ask = ChatRequest(messages=messages, **({"tools": []} | more))
    return Request(ask=ask, digest=digest or repr((messages, more)), retry=retry)


async def ask(session: AgentSession, messages: Any, **more: Any) -> ChatResponse:
    async with session.answering(request(messages, **more)) as answer:
        return answer


async def refuse(session: AgentSession, messages: Any, **more: Any) -> tuple[str, int, str | None, str | None]:
    """Return the sentence of a refusal, the status, the parameter and the code."""
    with pytest.raises(BadRequest) as refused:
        await ask(session, messages, **more)
    return str(refused.value), refused.value.status, refused.value.param, refused.value.code


def play(session_of: Callable[[], AgentSession], harness: Callable[[AgentSession], Awaitable[Any]]) -> AgentSession:
    async def run() -> AgentSession:
        session = session_of()
        await asyncio.wait_for(harness(session), 30)
        await session.close()
        return session

    return asyncio.run(run())


def test_a_reply_is_answered_with_counts_reason_and_stop(qwen):
    """The tokens end with the one that completes the first stop string; the text ends before it."""
    cases: list[tuple[str, dict[str, Any], tuple[str, str, str | None, str]]] = [
        ("Seven.", {}, ("Seven.", "stop", None, "Seven.")),
        ("Seven...", {}, ("Seven", "length", None, "Seven")),
        ("Seven.", {"max_tokens": 3}, ("Sev", "length", None, "Sev")),
        ("a END b\nObs", {"stop": ("\nObs", "END")}, ("a ", "stop", "END", "a END")),
        ("a b...", {"stop": ("END",)}, ("a b", "length", None, "a b")),
        (CALL, {"tools": TOOLS}, ("I look.", "tool_calls", None, CALL)),
        (CALL, {"tools": TOOLS, "may_call": False}, (CALL, "stop", None, CALL)),
        (CALL, {}, (CALL, "stop", None, CALL)),
    ]
    policy = Policy(qwen, [text for text, *_ in cases])

    async def harness(session: AgentSession) -> None:
        for n, (_, more, (text, reason, string, sampled)) in enumerate(cases):
            given = [user(f"{n}?")]
            found = await ask(session, given, **more)
            assert (found.id, found.message["content"]) == (f"{session.id}-{n}", text)
            assert (found.finish_reason, found.stop_string) == (reason, string)
            assert found.prompt_tokens == len(qwen.render(given, more.get("tools", [])))
            node = session.trace.roots[n]
            assert qwen.decode(node.completion.token_ids) == sampled
            assert found.completion_tokens == len(node.completion.token_ids)
            assert node.completion.stop == ("length" if reason == "length" else "eos") and node.is_kept
        assert session.counts.sampled == sum(len(ids) for _, ids in policy.log), "also what a stop has cut off"
        assert session.timer.read_seconds()[Activity.GENERATE] > 0
        assert session.sampler.timer.read_seconds()[Activity.GENERATE] > 0

    session = play(lambda: make_session(policy, max_new_tokens=4000), harness)
    assert session.trace.n_replies == session.n_started == len(cases)


@pytest.mark.parametrize(("budget", "model"), [(500, 4000), (4000, 250)], ids=["budget", "model"])
def test_the_room_of_a_reply_is_what_budget_and_model_leave(budget, model, qwen):
    """Replies and what is appended to them use the budget up; the prompt of a new branch does not."""
    policy = Policy(qwen, lambda context: LONG * 9)

    async def harness(session: AgentSession) -> None:
        first = await ask(session, ASKED, max_tokens=10)
        talk = [*ASKED, first.message, user("More")]
        await ask(session, talk, max_tokens=5)
        await ask(session, [user("Another")], max_tokens=1)
        await ask(session, talk, max_tokens=1000)
        (start, one), (context, two), (_, three), (again, rest) = policy.log
        added = len(context) - len(start) - 10
        assert again == context and [len(one), len(two), len(three)] == [10, 5, 1]
        used = 10 + added + 5 + 1 + added
        assert len(rest) == (budget - used if budget < model else model - len(context))
        assert session.left == budget - used - len(rest)
        if not session.left:
            said = SPENT.format(budget), 400, None, "context_length_exceeded"
            assert await refuse(session, ASKED) == said

    play(lambda: make_session(policy, max_new_tokens=budget, room=model), harness)


def test_a_limit_is_said_and_ends_the_branch_it_is_met_in(qwen):
    length = len(qwen.render(ASKED))
    full = TOO_LONG.format(f"{length} tokens", length), 400, None, "context_length_exceeded"

    async def at_the_limit(session: AgentSession) -> None:
        assert await refuse(session, ASKED) == full
        assert await refuse(session, [user("")] * (length + 1)) == (
            TOO_LONG.format(f"{length + 1} messages", length),
            *full[1:],
        )
        assert await refuse(session, [user("x" * 9000)]) == (
            TOO_LONG.format(f"more than {length} tokens", length),
            *full[1:],
        )
        assert session.trace.list_branches() == [] and session.n_started == 0

    async def one_below(session: AgentSession) -> None:
        assert (await ask(session, ASKED)).completion_tokens == 1

    async def far_too_long(session: AgentSession) -> None:
        first = await ask(session, ASKED)
        said = await refuse(session, [*ASKED, first.message, user("x" * 9000)])
        assert said == (TOO_LONG.format("more than 60 tokens", 60), *full[1:])
        [branch] = session.trace.list_branches()
        assert branch.stop == "length"

    async def turns(session: AgentSession) -> None:
        first = await ask(session, ASKED)
        said = "the episode has had rollout.max_turns=1 replies: end it, or raise that key"
        expected = said, 400, None, "max_turns_exceeded"
        assert await refuse(session, [*ASKED, first.message, user("More")]) == expected
        assert [branch.stop for branch in session.trace.list_branches()] == ["turns"]
        assert await refuse(session, [user("Another")]) == expected

    async def budget(session: AgentSession) -> None:
        first = await ask(session, ASKED, max_tokens=9)
        said = await refuse(session, [*ASKED, first.message, user("More")])
        assert said == (SPENT.format(10), *full[1:])
        assert [branch.stop for branch in session.trace.list_branches()] == ["length"]
        assert (await ask(session, [user("Another")])).completion_tokens == 1
        assert await refuse(session, [user("A third")]) == (SPENT.format(10), *full[1:])

    for harness, limits in (
        (at_the_limit, {"room": length}),
        (one_below, {"room": length + 1}),
        (far_too_long, {"room": 60}),
        (turns, {"max_turns": 1}),
        (budget, {"max_new_tokens": 10}),
    ):
        script = "Seven." if harness in (far_too_long, turns) else LONG
        play(lambda script=script, limits=limits: make_session(Policy(qwen, lambda _: script), **limits), harness)


def test_seeds_are_keyed_by_depth_and_by_context(qwen):
    """Whole numbers in the conversation of the prompt, and elsewhere depth, hash and number of the same context."""
    keys: list[int | str] = []
    policy = Policy(qwen, lambda context: "7")

    def choose(key: int | str) -> int:
        keys.append(key)
        return len(keys)

    async def harness(session: AgentSession) -> None:
        first = await ask(session, ASKED)
        talk = [*ASKED, first.message, user("More")]
        await ask(session, talk)
        await ask(session, talk)
        await ask(session, ASKED)
        await ask(session, [user("Else")])
        await ask(session, [*ASKED, first.message, user("Less")])
        await ask(session, ASKED, tools=TOOLS)

    play(lambda: AgentSession(make_sampler(policy), PROMPT, choose), harness)

    def other(n: int, depth: int, before: int) -> str:
        context = np.array(policy.log[n][0], dtype=np.int64).tobytes()
        return f"{depth}/{hashlib.blake2b(context, digest_size=8).hexdigest()}/{before}"

    expected = [0, 1, other(2, 1, 1), other(3, 0, 1), other(4, 0, 0), other(5, 1, 0), other(6, 0, 0)]
    assert keys == expected and policy.seeds == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("retry", "delivered", "waits", "is_repeated"),
    [
        (None, True, False, False),
        (None, False, False, True),
        (None, False, True, False),
        (0, True, False, False),
        (0, False, False, False),
        (1, True, False, True),
        (1, False, False, True),
        (2, False, True, True),
    ],
)
def test_a_request_is_a_retry_by_count_or_where_nobody_heard(qwen, retry, delivered, waits, is_repeated):
    """waits: the first client is still there."""
    policy = Policy(qwen, ["Seven.", "Eight."])

    async def harness(session: AgentSession) -> None:
        policy.gate.clear()
        first = asyncio.create_task(ask(session, ASKED))
        await policy.asked.wait()
        if not delivered and not waits:
            first.cancel()
            await asyncio.wait([first])
        if not waits:
            policy.gate.set()
        if delivered:
            await first
        second = asyncio.create_task(ask(session, ASKED, retry=retry))
        while waits and not (session.counts.retried or policy.n == 2):
            await asyncio.sleep(0)
        policy.gate.set()
        assert (await second).message["content"] == ("Seven." if is_repeated else "Eight.")
        assert (policy.n, session.counts.retried) == (1, 1) if is_repeated else (2, 0)

    play(lambda: make_session(policy), harness)


def test_what_cannot_be_answered_is_refused_with_its_parameter(qwen, monkeypatch):
    plain = replace(make_sampler(Policy(qwen, [])), parser=PlainParser())
    [deaf] = {say_deaf(PlainParser())}
    picture: Any = {"role": "user", "content": "", "parts": [{"type": "image", "image": object()}]}
    unfinished = (
        "the last message must be the user's, the system's or a tool's: a reply of the assistant's is not continued"
    )

    async def harness(session: AgentSession) -> None:
        assert await refuse(session, ASKED, tools=TOOLS) == (deaf, 400, "tools", None)
        assert await refuse(session, [picture]) == (
            "the policy is a language model, which sees no images: leave them out",
            400,
            "messages",
            None,
        )
        assert await refuse(session, [*ASKED, assistant("7")]) == (unfinished, 400, "messages", None)
        await refuse(session, [*ASKED, assistant("7")], must_call=True)
        monkeypatch.setattr("rollouts.agents.session.AGENT_REQUEST_TIMEOUT_S", 0.0)
        said, status, *_ = await refuse(session, ASKED)
        assert (said, status) == (
            "the request was not received, parsed and rendered within 60 s: send less",
            413,
        )
        assert session.counts.must_call == 1 and session.n_started == 0

    play(lambda: AgentSession(plain, PROMPT, lambda _: 0), harness)


def test_a_template_that_refuses_says_why(families):
    llama = families["llama3"]
    two = assistant("", *[{"id": n, "type": "function", "function": {"name": "f", "arguments": {}}} for n in "ab"])

    async def harness(session: AgentSession) -> None:
        said, status, param, _ = await refuse(session, [*ASKED, two, user("Go on")])
        assert said.startswith("the model's chat template refuses these messages: ") and "one call at once" in said
        assert (status, param) == (400, "messages")

    play(lambda: make_session(Policy(llama, [])), harness)


def test_only_64_requests_of_an_episode_run_at_once(qwen):
    policy = Policy(qwen, lambda context: "7")

    async def harness(session: AgentSession) -> None:
        policy.gate.clear()
        running = [asyncio.create_task(ask(session, ASKED, digest=str(n))) for n in range(64)]
        await asyncio.sleep(0)
        flood = "64 requests of this episode are running, and more are not taken at once: await some first"
        assert await refuse(session, ASKED) == (flood, 429, None, None)
        async with session.reading, session.reading, session.reading:
            assert not session.reading.locked()
            async with session.reading:
                assert session.reading.locked()
        policy.gate.set()
        await asyncio.gather(*running)
        assert (await ask(session, ASKED)).message["content"] == "7"

    play(lambda: make_session(policy, max_turns=99), harness)


def test_replies_count_before_they_are_sampled(qwen):
    policy = Policy(qwen, lambda context: "7")

    async def harness(session: AgentSession) -> None:
        policy.gate.clear()
        running = [asyncio.create_task(ask(session, ASKED, digest=str(n))) for n in range(2)]
        while policy.n < 2:
            await asyncio.sleep(0)
        assert (await refuse(session, ASKED))[3] == "max_turns_exceeded"
        policy.gate.set()
        await asyncio.gather(*running)

    play(lambda: make_session(policy, max_turns=2), harness)


def test_the_200th_refusal_fails_the_episode(qwen):
    async def harness(session: AgentSession) -> None:
        for n in range(199):
            session.count_refusal(str(n))
        assert not session.failed.done()
        session.count_refusal("n is 2")
        session.count_refusal("later")
        said = "the agent has made 200 requests that were refused, the last because: n is 2"
        assert await session.failed == said and session.counts.refused == 201

    play(lambda: make_session(Policy(qwen, [])), harness)


def test_an_episode_that_ends_cancels_what_is_sampled(qwen):
    policy = Policy(qwen, ["7"])

    async def run() -> None:
        session = make_session(policy)
        policy.gate.clear()
        waiting = asyncio.create_task(refuse(session, ASKED))
        await policy.asked.wait()
        await session.close()
        assert await waiting == (ENDING, 500, None, None)
        assert session.failed.cancelled() and policy.log == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("strings", "top_p", "said", "wrong"),
    [
        ([], 1.0, "7", "the engine (rollout.engine) returned 2 tokens with 1 log-probabilities and 2 versions"),
        ([], 0.9, "8", "the engine (rollout.engine) returned no kept sets, and rollout.top_p, top_k or min_p is set"),
        (["7"], 1.0, "7 or 8", "the engine went on sampling after a stop string (rollout.stop)"),
    ],
)
def test_an_engine_that_is_wrong_ends_the_run(qwen, strings, top_p, said, wrong):
    class Wrong(Policy):
        async def generate(self, token_ids, *, max_new_tokens, seed):
            done = await super().generate(token_ids, max_new_tokens=max_new_tokens, seed=seed)
            return replace(done, logp=done.logp[1:]) if said == "7" else done

    def make() -> AgentSession:
        rules: dict[str, Any] = {"stops": Stops(qwen, strings, []), "truncation": Truncation(top_p=top_p)}
        sampler = replace(make_sampler(Wrong(qwen, [said])), **rules)
        return AgentSession(sampler, PROMPT, lambda _: 0)

    async def harness(session: AgentSession) -> None:
        assert await refuse(session, ASKED) == (ENDING, 500, None, None)
        with pytest.raises(RunStopped) as stopped:
            await session.failed
        assert str(stopped.value) == f"{wrong}: correct its generate()"
        assert session.trace.n_replies == 0

    play(make, harness)


def test_a_session_that_failed_unheard_is_closed_without_a_warning(qwen):
    """Its episode has ended for another reason, and asyncio would log an exception that was never retrieved."""
    logged: list[str] = []

    def say(context: str) -> str:
        raise RunStopped("the engine died")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
        session = make_session(Policy(qwen, say))
        assert await refuse(session, ASKED) == (ENDING, 500, None, None)
        assert session.failed.done()
        await session.close()
        del session
        gc.collect()

    asyncio.run(run())
    assert logged == []


def test_a_session_has_a_key_of_its_own_that_is_hidden_in_logs(qwen):
    from rollouts.agents.results import hide_keys

    async def harness(session: AgentSession) -> None:
        assert len(session.id) == 16 and hide_keys(session.key) == "***" and session.key.startswith("feynrl-")
        assert session.left == 2000 and session.prompt == Prompt(id="p", messages=ASKED, answer="7")
        assert spell(qwen, "7") == [*qwen.encode("7"), qwen.hf.eos_token_id]

    play(lambda: make_session(Policy(qwen, [])), harness)
