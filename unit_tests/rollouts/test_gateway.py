"""The gateway under OpenAI's own client: every branch holds literally the ids that the engine got and returned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from core.errors import RunStopped
from core.types.samples import Prompt
from data_feeds.chat.tokenizer import ChatTokenizer
from rollouts.agents.gateway import Gateway
from rollouts.agents.session import AgentSession
from rollouts.episode import run_episode
from rollouts.tools.env import ToolEnv
from rollouts.tools.functions import tool
from rollouts.turns import EpisodeRules
from unit_tests.helpers.chat_families import TOOLS
from unit_tests.helpers.scripted_policy import PROMPT, Policy, check_exact, make_sampler, make_session, say_calls, spell

openai = pytest.importorskip("openai", reason="OpenAI's client comes with vLLM: make install")

Harness = Callable[[Any], Awaitable[Any]]
USER = {"role": "user", "content": "Which?"}
TWO_CALLS = say_calls("I look.", ("weather", {"place": "Oslo"}), ("weather", {"place": "Rome", "days": 2}))


def play(policy: Policy, harness: Harness, **limits: Any) -> AgentSession:
    """Run a harness with OpenAI's client against the policy; return the session that it leaves."""

    async def run() -> AgentSession:
        session, gateway = make_session(policy, **limits), Gateway()
        async with (
            gateway.serving(session) as base_url,
            openai.AsyncOpenAI(base_url=base_url, api_key=session.key, max_retries=0) as client,
        ):
            await harness(client)
        await gateway.close()
        return session

    return asyncio.run(run())


async def ask(client: Any, messages: list[Any], **more: Any) -> Any:
    """ChatRequest for a reply, and append it to the messages as OpenAI's documentation shows."""
    answer = await client.chat.completions.create(model="policy", messages=messages, **more)
    messages.append(answer.choices[0].message)
    return answer


def result(call: Any, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def test_a_request_without_its_end_does_not_hold_up_closing(qwen):
    async def run() -> None:
        session, gateway = make_session(Policy(qwen, ["7"])), Gateway()
        async with gateway.serving(session):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            head = [f"POST /s/{session.id}/v1/chat/completions HTTP/1.1", "Host: a", "Expect: 100-continue"]
            head += [f"Authorization: Bearer {session.key}", "Content-Length: 9", "", "{"]
            writer.write("\r\n".join(head).encode())
            assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n", "the request is being read"
        async with asyncio.timeout(20):
            await gateway.close()
        writer.close()

    asyncio.run(run())


def test_the_script_is_spelt_otherwise_than_the_tokenizer_would(qwen):
    assert qwen.decode(spell(qwen, TWO_CALLS)) == TWO_CALLS
    assert qwen.encode(TWO_CALLS) != spell(qwen, TWO_CALLS)[:-1]


def test_an_episode_that_has_ended_takes_no_request(qwen):
    async def run() -> tuple[str, httpx.Response]:
        session, gateway = make_session(Policy(qwen, ["7"])), Gateway()
        async with gateway.serving(session) as url:
            pass
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {session.key}"}) as client:
            late = await client.post(f"{url}/chat/completions", json={"model": "policy", "messages": [USER]})
        await gateway.close()
        return late.json()["error"]["message"], late

    said, late = asyncio.run(run())
    assert late.status_code == 404
    assert said == "there is no such episode, or it has ended: each one has a base URL of its own"


def test_parallel_calls_and_their_results_are_one_branch(qwen):
    policy = Policy(qwen, [TWO_CALLS, "It is colder in Oslo."])
    seen = []

    async def harness(client):
        messages = [{"role": "system", "content": "Be brief."}, dict(USER)]
        first = await ask(client, messages, tools=TOOLS)
        calls = first.choices[0].message.tool_calls
        seen.append((first.choices[0].finish_reason, [json.loads(c.function.arguments) for c in calls]))
        messages += [result(calls[0], "3 degrees"), result(calls[1], "19 degrees")]
        seen.append((await ask(client, messages, tools=TOOLS)).choices[0].message.content)

    session = play(policy, harness)
    assert seen == [("tool_calls", [{"place": "Oslo"}, {"place": "Rome", "days": 2}]), "It is colder in Oslo."]
    [branch] = session.trace.list_branches()
    check_exact([branch], policy.log)
    text = qwen.hf.decode(branch.ids)
    assert text.index("3 degrees") < text.index("19 degrees") < text.index("It is colder"), "no result is lost"
    whole = qwen.render_text(branch.messages[:-1], reply_next=True, tools=TOOLS)
    assert qwen.hf.decode(policy.log[1][0]) == whole, "and the text is what the chat template writes of all of it"
    assert session.trace.n_rewritten == 0 and session.trace.n_repeated == 1


def test_usage_counts_the_whole_conversation(qwen):
    """A harness that compacts its context decides by these numbers."""
    policy, usages = Policy(qwen, ["One.", "Two.", "Three."]), []

    async def harness(client):
        messages = [dict(USER)]
        for _ in range(3):
            usages.append((await ask(client, messages)).usage)
            messages.append({"role": "user", "content": "More?"})

    play(policy, harness)
    assert [usage.prompt_tokens for usage in usages] == [len(context) for context, _ in policy.log]
    assert [usage.completion_tokens for usage in usages] == [len(sampled) for _, sampled in policy.log]


def test_the_smaller_of_two_limits_on_a_reply_counts(qwen):
    async def harness(client):
        for one, other in ((3, 9), (9, 3)):
            answer = await ask(client, [dict(USER)], max_tokens=one, max_completion_tokens=other)
            assert answer.usage.completion_tokens == 3 and answer.choices[0].finish_reason == "length"

    play(Policy(qwen, lambda context: "0123456789"), harness)


def test_a_request_with_tool_choice_none_gets_text_and_no_calls(qwen):
    async def harness(client):
        for choice in ("none", "auto"):
            answer = await ask(client, [dict(USER)], tools=TOOLS, tool_choice=choice)
            said, calls = answer.choices[0].message, choice == "auto"
            assert bool(said.tool_calls) == calls and answer.choices[0].finish_reason == ("stop", "tool_calls")[calls]
            assert said.content == ("I look." if calls else TWO_CALLS)

    play(Policy(qwen, lambda context: TWO_CALLS), harness)


def test_a_truncated_reply_is_closed_by_the_template_and_not_by_the_policy(qwen):
    policy = Policy(qwen, ["I think that...", "Seven."])

    async def harness(client):
        messages = [dict(USER)]
        first = await ask(client, messages, max_tokens=12)
        assert first.choices[0].finish_reason == "length" and first.usage.completion_tokens == 12
        messages.append({"role": "user", "content": "Go on."})
        await ask(client, messages)

    [branch] = play(policy, harness).trace.list_branches()
    check_exact([branch], policy.log)
    begin, end = branch.turns[0]
    assert branch.ids[end] == qwen.hf.eos_token_id and not branch.action_mask[end], "given, for nobody sampled it"
    assert qwen.hf.decode(branch.ids[begin:]).startswith("I think that<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>")


def test_a_retry_gets_the_reply_that_was_sampled_for_it(qwen):
    policy = Policy(qwen, ["Seven.", "never said"])

    async def harness(client):
        session = policy.session
        policy.gate.clear()

        async def open_the_gate() -> None:
            while not session.counts.retried:
                await asyncio.sleep(0.01)
            policy.gate.set()

        opening = asyncio.create_task(open_the_gate())
        hasty = client.with_options(timeout=0.3, max_retries=20)
        answer = await asyncio.wait_for(hasty.chat.completions.create(model="policy", messages=[USER]), 30)
        await opening
        assert answer.choices[0].message.content == "Seven."

    async def run() -> AgentSession:
        session, gateway = make_session(policy), Gateway()
        policy.session = session
        async with gateway.serving(session) as base_url:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=session.key) as client:
                await harness(client)
            done = await post(base_url, session.key, {"model": "policy", "messages": [USER]}, retry="2")
            assert done["choices"][0]["message"]["content"] == "Seven.", "done, and asked for again"
        await gateway.close()
        return session

    session = asyncio.run(run())
    assert len(policy.log) == 1
    check_exact(session.trace.list_branches(), policy.log)


async def post(base_url: str, key: str, body: Any, *, retry: str | None = None, timeout: float = 30) -> Any:
    headers = {"Authorization": f"Bearer {key}"} | ({} if retry is None else {"x-stainless-retry-count": retry})
    async with httpx.AsyncClient() as client:
        found = await client.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=timeout)
    return found.json()


def test_a_client_that_does_not_count_its_retries_gets_its_reply_too(qwen):
    policy = Policy(qwen, ["Seven.", "Eight."])
    body = {"model": "policy", "messages": [USER]}

    async def run() -> AgentSession:
        session, gateway = make_session(policy), Gateway()
        async with gateway.serving(session) as url:
            policy.gate.clear()
            gone = asyncio.create_task(post(url, session.key, body))
            await policy.asked.wait()
            gone.cancel()
            await asyncio.wait([gone])
            while any(call.listeners for call in session._calls.values()):
                await asyncio.sleep(0.01)
            policy.gate.set()
            first = await post(url, session.key, body)
            second = await post(url, session.key, body)
            assert [r["choices"][0]["message"]["content"] for r in (first, second)] == ["Seven.", "Eight."], (
                "one that did not arrive is repeated; one that did is asked for again on purpose"
            )
        await gateway.close()
        return session

    session = asyncio.run(run())
    check_exact(session.trace.list_branches(), policy.log)
    assert len({*policy.seeds}) == 2, "two replies to one context have seeds of their own"


def test_a_rewritten_reply_is_context_in_a_branch_of_its_own(qwen):
    policy = Policy(qwen, ["Seven, I would say.", "Sure.", "Quite sure."])

    async def harness(client):
        messages = [dict(USER)]
        await ask(client, messages)
        messages[1] = {"role": "assistant", "content": "Seven."}
        messages.append({"role": "user", "content": "Sure?"})
        await ask(client, messages)
        messages.append({"role": "user", "content": "Really?"})
        await ask(client, messages)

    session = play(policy, harness)
    first, second = branches = session.trace.list_branches()
    check_exact(branches, policy.log)
    assert len(first.turns) == 1 and len(second.turns) == 2
    assert "assistant\nSeven.<|im_end|>" in qwen.hf.decode(second.ids[: second.turns[0][0]])
    assert (session.trace.n_rewritten, session.trace.n_repeated) == (2, 1)


def test_two_agents_that_take_turns_have_a_branch_each(qwen):
    policy = Policy(qwen, lambda context: f"reply {context.count('assistant')} to {'AB'['You are B' in context]}")

    async def harness(client):
        a: list[Any] = [{"role": "system", "content": "You are A"}, dict(USER)]
        b: list[Any] = [{"role": "system", "content": "You are B"}, dict(USER)]
        for _ in range(3):
            await asyncio.gather(ask(client, a), ask(client, b))
            a.append({"role": "user", "content": str(b[-1].content)})
            b.append({"role": "user", "content": str(a[-2].content)})

    session = play(policy, harness)
    branches = session.trace.list_branches()
    check_exact(branches, policy.log)
    assert [len(branch.turns) for branch in branches] == [3, 3]
    assert sorted(n for branch in branches for n in branch.turn_numbers) == [*range(6)]


def test_compaction_begins_a_branch_and_what_two_share_is_trained_on_once(qwen):
    policy = Policy(qwen, lambda context: f"step {len(context)}")

    async def harness(client):
        messages = [dict(USER)]
        await ask(client, messages)
        other = [*messages, {"role": "user", "content": "And else?"}]
        messages.append({"role": "user", "content": "Next?"})
        await ask(client, messages)
        await ask(client, other)
        compact = [{"role": "user", "content": "Which? So far: two steps."}]
        await ask(client, compact)

    session = play(policy, harness)
    shared, other, compact = branches = session.trace.list_branches()
    check_exact(branches, policy.log)
    assert [len(branch.turns) for branch in branches] == [2, 1, 1]
    begin, end = shared.turns[0]
    assert other.ids[begin:end] == shared.ids[begin:end] and not any(other.action_mask[: other.turns[0][0]])
    assert all(learnt or i < compact.turns[0][0] for i, learnt in enumerate(compact.action_mask))


def test_seeds_of_the_main_conversation_are_those_of_an_environment(qwen):
    policy = Policy(qwen, lambda context: "well")

    async def harness(client):
        messages = [dict(USER)]
        for _ in range(3):
            await ask(client, messages)
            messages.append({"role": "user", "content": "More?"})
        await ask(client, [{"role": "user", "content": "Something else"}])
        await ask(client, [*messages[:2], {"role": "user", "content": "Or less?"}])
        await ask(client, [dict(USER)])

    play(policy, harness)
    assert policy.seeds[:3] == [0, 1, 2] and len({*policy.seeds}) == 6, "no two replies of an episode share a seed"


class Weather(ToolEnv):
    @tool
    async def weather(self, place: str) -> str:
        """Say how it is.

        Args:
            place: where
        """
        return "3 degrees"


def test_a_call_that_is_repeated_has_an_id_of_its_own_wherever_it_is_made(qwen):
    """The reply has the same tokens each time; its results must not be taken for those of the call before."""
    script = [say_calls("", ("weather", {"place": "Oslo"}), ("weather", {"place": "Oslo"}))] * 3 + ["Cold."]

    async def harness(client):
        messages = [dict(USER)]
        while calls := (await ask(client, messages, tools=TOOLS)).choices[0].message.tool_calls:
            messages += [result(call, "3 degrees") for call in calls]

    [branch] = play(Policy(qwen, script), harness).trace.list_branches()
    sampler = make_sampler(Policy(qwen, script))
    rules = EpisodeRules(
        seed_of_turn=lambda turn: turn,
        max_new_tokens=2000,
        max_turns=9,
        timeout_s=60.0,
        stops=sampler.stops,
        parser=sampler.parser,
    )
    [played] = asyncio.run(run_episode(sampler.engine, Weather, PROMPT, qwen, rules))
    assert not played.sample.failure, played.sample.failure
    for messages in (branch.messages, played.messages):
        made = [call["id"] for m in messages for call in m.get("tool_calls", [])]
        assert len({*made}) == len(made) == 6 and all(len(one) == 9 and one.isalnum() for one in made)
        assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == made
    ids = [
        [m.get("tool_calls") for m in messages if m["role"] == "assistant"]
        for messages in (branch.messages, played.messages)
    ]
    assert ids[0] == ids[1], "an agent and an environment see the same conversation"


def test_a_streamed_reply_is_the_same_reply(qwen):
    policy = Policy(qwen, [TWO_CALLS, "Done."])

    async def harness(client):
        stream = client.chat.completions.stream(
            model="policy", messages=[USER], tools=TOOLS, stream_options={"include_usage": True}
        )
        async with stream as events:
            whole = await events.get_final_completion()
        calls = whole.choices[0].message.tool_calls
        assert [c.function.name for c in calls] == ["weather", "weather"] and whole.usage.completion_tokens > 100
        messages = [USER, whole.choices[0].message.model_dump(exclude_none=True)]
        for call in messages[1]["tool_calls"]:
            call["function"].pop("parsed_arguments", None)
            call.pop("index", None)
        await ask(client, [*messages, *(result(call, "3") for call in calls)], tools=TOOLS)

    session = play(policy, harness)
    [branch] = session.trace.list_branches()
    check_exact([branch], policy.log)


@pytest.mark.parametrize("ending", ["", "..."])  # the engine's own reason is the end of the turn, or its length
def test_a_stop_string_ends_the_reply_at_the_token_that_completes_it(qwen, ending):
    policy = Policy(qwen, [f"Action: add\nObservation: 7, I guess{ending}", "Fine."])

    async def harness(client):
        messages = [dict(USER)]
        first = await ask(client, messages, stop=["Observation:", "Calling tools:"])
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("Action: add\n", "stop")
        await ask(client, [*messages, {"role": "user", "content": "Observation: 5"}])

    session = play(policy, harness)
    [branch] = session.trace.list_branches()
    kept = spell(qwen, "Action: add\nObservation:...")
    begin, end = branch.turns[0]
    assert branch.ids[begin:end] == kept == policy.log[0][1][: len(kept)]
    assert policy.log[1][0][: end + 1] == [*branch.ids[:end], qwen.hf.eos_token_id]
    assert session.counts.sampled > sum(branch.action_mask), "what came after it had no effect"


REFUSED = {
    "temperature": ({"temperature": 0.2}, 400, "rollout.temperature=1"),
    "top_p": ({"top_p": 0.9}, 400, "top_p is 0.9"),
    "n": ({"n": 2}, 400, "n is 2"),
    "seed": ({"seed": 1}, 400, "seed is not offered"),
    "logit_bias": ({"logit_bias": {"5": 1}}, 400, "logit_bias is"),
    "logprobs": ({"logprobs": True}, 400, "logprobs is True"),
    "json": ({"response_format": {"type": "json_object"}}, 400, "response_format is"),
    "an unknown key": ({"guided_json": {}}, 400, "guided_json is not offered"),
    "max_tokens": ({"max_tokens": 0}, 400, "max_tokens must be a whole number"),
    "stop": ({"stop": [""]}, 400, "stop must be"),
    "model": ({"model": "gpt-5"}, 404, "there is no model gpt-5 here: it is called policy"),
    "no messages": ({"messages": []}, 400, "the last message must be"),
    "a reply to go on with": ({"messages": [USER, {"role": "assistant", "content": "Se"}]}, 400, "is not continued"),
    "role": ({"messages": [{"role": "teacher", "content": "x"}]}, 400, "messages[0] must be an object whose role"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages[0].content[0]: an image by its address is not fetched",
    ),
    "sound": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        400,
        "messages[0].content[0] must be a part of type text or image_url",
    ),
    "arguments": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}, USER]},
        400,
        "messages[1].tool_calls[0] must be",
    ),
    "a field": ({"messages": [{**USER, "mood": "good"}]}, 400, "messages[0] has mood"),
    "half a character": ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "half of a character"),
    "tools": ({"tools": [{"name": "f"}]}, 400, "tools[0] must be"),
}


def test_what_would_sample_otherwise_is_refused_in_one_sentence(qwen):
    policy = Policy(qwen, lambda context: "Seven.")

    async def run() -> None:
        session, gateway = make_session(policy), Gateway()
        async with gateway.serving(session) as url, httpx.AsyncClient() as client:
            for name, (changes, status, words) in REFUSED.items():
                body = json.dumps({"model": "policy", "messages": [USER]} | changes)
                headers = {"Authorization": f"Bearer {session.key}"}
                found = await client.post(f"{url}/chat/completions", content=body, headers=headers)
                said = found.json()["error"]["message"]
                assert found.status_code == status and words in said, (name, said)
            assert session.counts.refused == len(REFUSED) and policy.log == []
            fine = {"temperature": 1, "top_p": 1.0, "n": 1, "user": "u", "tool_choice": "required", "stop": None}
            done = await post(url, session.key, {"model": "policy", "messages": [USER]} | fine)
            assert done["choices"][0]["message"]["content"] == "Seven." and session.counts.must_call == 1
            await check_doors(client, url, session)
        await gateway.close()

    asyncio.run(run())


async def check_doors(client: httpx.AsyncClient, url: str, session: AgentSession) -> None:
    """No key, another key, another episode, another path, no JSON."""
    body = {"model": "policy", "messages": [USER]}
    right = {"Authorization": f"Bearer {session.key}"}
    for headers in ({}, {"Authorization": "Bearer feynrl-wrong"}):
        found = await client.post(f"{url}/chat/completions", json=body, headers=headers)
        assert found.status_code == 401 and "OPENAI_API_KEY" in found.json()["error"]["message"]
        assert (await client.get(f"{url}/models", headers=headers)).status_code == 401
    other = url.replace(session.id, "0" * len(session.id))
    found = await client.post(f"{other}/chat/completions", json=body, headers=right)
    assert found.status_code == 404 and "no such episode" in found.json()["error"]["message"]
    found = await client.post(f"{url}/completions", json=body, headers=right)
    assert (
        found.status_code == 404
        and "only chat/completions, responses, messages and models" in found.json()["error"]["message"]
    )
    found = await client.post(f"{url}/chat/completions", content=b"{", headers=right)
    assert found.status_code == 400 and "must be JSON" in found.json()["error"]["message"]
    models = (await client.get(f"{url}/models", headers=right)).json()
    assert [model["id"] for model in models["data"]] == ["policy"]


def test_limits_of_an_episode_are_said_and_end_its_branches(qwen):
    policy = Policy(qwen, lambda context: "0123456789")
    said: list[str] = []
    codes: list[str | None] = []

    def talk(turns: int) -> Harness:
        async def harness(client):
            messages = [dict(USER)]
            for _ in range(turns):
                try:
                    await ask(client, messages)
                except openai.BadRequestError as error:
                    said.append(error.body["message"])
                    codes.append(error.code)
                    return
                messages.append({"role": "user", "content": "More"})

        return harness

    async def talk_at_length(client):
        answer = await ask(client, [{"role": "user", "content": "Which? " * 4}])
        assert answer.usage.total_tokens == 60 and answer.choices[0].finish_reason == "length"

    [branch] = play(Policy(qwen, lambda context: "01234" * 12), talk_at_length, room=60).trace.list_branches()
    assert len(branch.ids) == 60, "a branch ends where the model's context does, whatever is left of the budget"
    [branch] = play(policy, talk(3), max_turns=2).trace.list_branches()
    assert branch.stop == "turns" and len(branch.turns) == 2 and "rollout.max_turns=2" in said[-1]
    [branch] = play(policy, talk(3), max_new_tokens=70).trace.list_branches()
    assert branch.stop == "length" and "rollout.max_new_tokens=70" in said[-1]
    assert sum(branch.action_mask) <= 70
    assert play(policy, talk(1), room=10).trace.list_branches() == [] and "data.max_prompt_tokens" in said[-1]
    assert codes == ["max_turns_exceeded", "context_length_exceeded", "context_length_exceeded"]


def test_a_flood_is_refused_and_a_harness_that_does_not_listen_fails(qwen, monkeypatch):
    monkeypatch.setattr("rollouts.agents.session.AT_ONCE", at_once := 5)
    monkeypatch.setattr("rollouts.agents.session.MAX_REFUSED", most := 8)
    policy = Policy(qwen, lambda context: "Seven.")

    async def run() -> tuple[AgentSession, list[int]]:
        session = make_session(policy, max_turns=200, max_new_tokens=9000, room=9000)
        gateway = Gateway()
        policy.gate.clear()
        async with gateway.serving(session) as url:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(limits=limits, headers={"Authorization": f"Bearer {session.key}"}) as client:
                body = {"model": "policy", "messages": [USER]}
                calls = [
                    asyncio.create_task(client.post(f"{url}/chat/completions", json={**body, "user": str(i)}))
                    for i in range(at_once + 3)
                ]
                # the gate opens when all three are refused: a call that is late would find a free place
                for _, first in zip(range(3), asyncio.as_completed(calls, timeout=30), strict=False):
                    await first
                policy.gate.set()
                statuses = [found.status_code for found in await asyncio.gather(*calls)]
                for _ in range(most):
                    await client.post(f"{url}/chat/completions", json={**body, "n": 2})
            why = await asyncio.wait_for(session.failed, 30)
        await gateway.close()
        assert "that were refused, the last because: n is 2" in why
        return session, statuses

    session, statuses = asyncio.run(run())
    assert statuses.count(429) == 3 and statuses.count(200) == at_once
    assert session.counts.refused >= most


def test_an_impossible_completion_ends_the_run_and_not_the_request(qwen):
    class Broken(Policy):
        async def generate(self, token_ids, *, max_new_tokens, seed):
            done = await super().generate(token_ids, max_new_tokens=max_new_tokens, seed=seed)
            done.logp[0] = float("nan")
            return done

    async def run() -> None:
        session, gateway = make_session(Broken(qwen, ["Seven."])), Gateway()
        async with gateway.serving(session) as url:
            answer = await post(url, session.key, {"model": "policy", "messages": [USER]})
            assert "the run, is ending" in answer["error"]["message"]
            with pytest.raises(RunStopped, match="log-probability nan"):
                await session.failed
        await gateway.close()

    asyncio.run(run())


def test_tools_that_nobody_would_see_or_read_are_refused(qwen, tiny_path):
    blind = ChatTokenizer(tiny_path, "chat")
    policy = Policy(blind, ["7"])

    async def harness(client):
        with pytest.raises(openai.BadRequestError, match="the model's chat template does not write tools"):
            await ask(client, [dict(USER)], tools=TOOLS)

    assert play(policy, harness, prompt=Prompt(id="p", messages=[dict(USER)])).trace.list_branches() == []
    assert PROMPT.tools == []
