"""Three protocols, one trace: the vendors' own clients hold one conversation and get the same tokens."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from PIL import Image

from core.types.messages import Message
from rollouts.agents.dialects import chat, messages, responses
from rollouts.agents.gateway import DIALECTS, Gateway
from rollouts.agents.session import AgentSession
from rollouts.agents.trace import is_repeated
from rollouts.agents.wire import ChatResponse
from unit_tests.helpers.chat_families import TOOLS
from unit_tests.helpers.scripted_policy import Policy, check_exact, make_session, say_calls

SYSTEM, ASKED, RESULTS, MORE = "Be brief.", "Which?", ("3 degrees", "19 degrees"), "Why?"
SCRIPT = [
    say_calls("I look.", ("weather", {"place": "Oslo"}), ("weather", {"place": "Rome", "days": 2})),
    "It is colder in Oslo.",
    "Because of the wind...",
]
FUNCTIONS = [tool["function"] for tool in TOOLS]
Ask = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module", autouse=True)
def clients() -> None:
    """Import the vendors' clients. Anthropic's takes seconds, and no process that only lists tests waits for it."""
    global anthropic, openai
    openai = pytest.importorskip("openai", reason="OpenAI's client comes with vLLM: make install")
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client comes with vLLM: make install")


async def talk_chat(url: str, key: str, *, streams: bool) -> list[str]:
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:

        async def ask(**more: Any) -> Any:
            body = {"model": "policy", "messages": said, "tools": TOOLS, **more}
            if not streams:
                return await client.chat.completions.create(**body)
            async with client.chat.completions.stream(**body) as stream:
                try:
                    return await stream.get_final_completion()
                except openai.LengthFinishReasonError as error:  # this client raises where tools are given
                    return error.completion

        said: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]
        first = (await ask()).choices[0].message
        calls = [(call.id, call.function.name, call.function.arguments) for call in first.tool_calls]
        made = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ]
        said.append({"role": "assistant", "content": first.content, "tool_calls": made})
        said += [
            {"role": "tool", "tool_call_id": id, "content": text}
            for (id, _, _), text in zip(calls, RESULTS, strict=True)
        ]
        second = (await ask()).choices[0].message
        said += [{"role": "assistant", "content": second.content}, {"role": "user", "content": MORE}]
        third = (await ask(max_tokens=11)).choices[0]
        return [first.content, *(f"{name} {a}" for _, name, a in calls), second.content, third.finish_reason]


async def talk_messages(url: str, key: str, *, streams: bool) -> list[str]:
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as client:

        async def ask(max_tokens: int = 900) -> Any:
            body = {"model": "policy", "messages": said, "tools": tools, "system": SYSTEM, "max_tokens": max_tokens}
            if not streams:
                return await client.messages.create(**body)
            async with client.messages.stream(**body) as stream:
                return await stream.get_final_message()

        tools = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in FUNCTIONS
        ]
        said: list[Any] = [{"role": "user", "content": ASKED}]
        first = await ask()
        text, *calls = first.content
        assert first.stop_reason == "tool_use" and first.usage.output_tokens > 100 and first.usage.input_tokens > 100
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": text}
            for call, text in zip(calls, RESULTS, strict=True)
        ]
        # as Anthropic's pages show: the reply's blocks go back as they came
        said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = await ask()
        said += [{"role": "assistant", "content": second.content}, {"role": "user", "content": MORE}]
        third = await ask(11)
        called = [f"{call.name} {json.dumps(call.input)}" for call in calls]
        reason = {"max_tokens": "length"}[third.stop_reason]
        return [text.text, *called, second.content[0].text, reason]


async def talk_responses(url: str, key: str, *, streams: bool) -> list[str]:
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:

        async def ask(**more: Any) -> Any:
            body = {"model": "policy", "input": said, "tools": tools, "instructions": SYSTEM, "store": False, **more}
            if not streams:
                return await client.responses.create(**body)
            async with client.responses.stream(**body) as stream:
                # this client's get_final_response() knows no reply that was cut
                return [event async for event in stream][-1].response

        tools = [{"type": "function", "strict": None, **f} for f in FUNCTIONS]
        said: list[Any] = [{"role": "user", "content": ASKED}]
        first = await ask()
        # as OpenAI's pages show: the reply's items go back as they came
        said += first.output
        calls = [item for item in first.output if item.type == "function_call"]
        said += [
            {"type": "function_call_output", "call_id": call.call_id, "output": text}
            for call, text in zip(calls, RESULTS, strict=True)
        ]
        second = await ask()
        said += [*second.output, {"role": "user", "content": MORE}]
        third = await ask(max_output_tokens=11)
        assert third.status == "incomplete" and third.usage.output_tokens == 11
        reason = {"max_output_tokens": "length"}[third.incomplete_details.reason]
        return [first.output_text, *(f"{c.name} {c.arguments}" for c in calls), second.output_text, reason]


def play(policy: Policy, talk: Callable[..., Awaitable[Any]], **more: Any) -> tuple[AgentSession, Any]:
    async def run() -> tuple[AgentSession, Any]:
        session, gateway = make_session(policy), Gateway()
        async with gateway.serving(session) as url:
            found = await talk(url, session.key, **more)
        await gateway.close()
        return session, found

    return asyncio.run(run())


def test_three_protocols_give_one_trace_and_the_same_tokens(qwen):
    found: list[Any] = []
    for talk in (talk_chat, talk_messages, talk_responses):
        for streams in (False, True):
            policy = Policy(qwen, SCRIPT)
            session, heard = play(policy, talk, streams=streams)
            [branch] = session.trace.list_branches()
            check_exact([branch], policy.log)
            assert session.trace.n_rewritten == 0 and session.counts.refused == 0, (talk, streams)
            found.append((branch.ids, branch.action_mask, policy.seeds, heard))
    assert all(one == found[0] for one in found), [heard for *_, heard in found]
    assert found[0][3][-1] == "length" and found[0][3][1] == 'weather {"place": "Oslo"}'


REPLIES: list[Message] = [
    {"role": "assistant", "content": " Seven.\n"},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "7", "reasoning": "3 + 4"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "hm",
        "tool_calls": [
            {"id": "a1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, {"y": "é"}]}}},
            {"id": "a2", "type": "function", "function": {"name": "g", "arguments": {}}},
        ],
    },
]


def test_a_reply_that_comes_back_is_the_reply():
    for reply in REPLIES:
        answer = ChatResponse(id="1", message=reply, finish_reason="stop", prompt_tokens=1, completion_tokens=2)
        said = chat.write_answer(answer, 0)["choices"][0]["message"]
        blocks = messages.write_answer(answer, 0)["content"]
        bodies = (
            {"messages": [said, {"role": "user", "content": "x"}]},
            {"input": [*responses.write_answer(answer, 0)["output"], {"role": "user", "content": "x"}]},
            {"messages": [{"role": "assistant", "content": blocks}, {"role": "user", "content": "x"}]},
        )
        for dialect, body in zip(DIALECTS, bodies, strict=True):
            first, last = dialect.read({"model": "policy", **body}, temperature=1.0).messages
            assert is_repeated(reply, first) and first.get("reasoning") == reply.get("reasoning"), (dialect.path, first)
            assert last == {"role": "user", "content": "x"}


def test_images_and_tools_are_the_same_in_every_protocol():
    pixels = io.BytesIO()
    Image.new("RGB", (3, 2)).save(pixels, "PNG")
    code = base64.b64encode(pixels.getvalue()).decode()
    url = f"data:image/png;base64,{code}"
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": code}}
    parts = [
        [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": url}}],
        [{"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": url, "detail": "auto"}],
        [{"type": "text", "text": "Look:", "cache_control": {"type": "ephemeral"}}, block],
    ]
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {}}},
        {"type": "function", "name": "f", "parameters": {}, "strict": False},
        {"name": "f", "input_schema": {}, "type": "custom"},
    ]
    asked = [
        dialect.read(
            {"model": "policy", key: [{"role": "user", "content": content}], "tools": [tool]},
            temperature=1.0,
        )
        for dialect, key, content, tool in zip(DIALECTS, ("messages", "input", "messages"), parts, tools, strict=True)
    ]
    assert asked[0] == asked[1] == asked[2]
    assert [part["type"] for part in asked[0].messages[0].get("parts", [])] == ["text", "image"]


def test_a_stop_sequence_is_named(qwen):
    async def talk(url: str, key: str) -> Any:
        async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), auth_token=key) as client:
            return await client.messages.create(
                model="policy",
                max_tokens=50,
                messages=[{"role": "user", "content": ASKED}],
                stop_sequences=["Calling:", "Observation:"],
            )

    _, found = play(Policy(qwen, ["Add.\nObservation: 7, I guess"]), talk)
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "Observation:")
    assert found.content[0].text == "Add.\n"


USER = {"role": "user", "content": ASKED}
REFUSED = {
    "messages": {
        "temperature": ({"temperature": 0.2}, "rollout.temperature=1"),
        "a budget of thoughts": ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking is"),
        "effort": ({"output_config": {"effort": "low"}}, "output_config is"),
        "edits of the context": (
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management",
        ),
        "a limit": ({"max_tokens": 0}, "max_tokens must be a whole number"),
        "no parallel calls": (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice must be",
        ),
        "an empty stop": ({"stop_sequences": [""]}, "stop_sequences must be a text"),
        "a server's tool": (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0] must be a tool",
        ),
        "a tool without schema": ({"tools": [{"name": "f"}]}, "tools[0] must be {name, description, input_schema}"),
        "a role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0] must be an object whose role"),
        "a field": ({"messages": [{**USER, "mood": "good"}]}, "messages[0] has mood"),
        "an address": (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
                ]
            },
            "messages[0].content[0] must be a block of type text, or an image as base64",
        ),
        "hidden thoughts": (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, USER]},
            "messages[0].content[0] must be a block of type text",
        ),
        "a call": (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "input": {}}]}, USER]},
            "messages[0].content[0] must be {type: tool_use, id, name, input}",
        ),
        "a result": (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "must be {type: tool_result",
        ),
        "a beginning": ({"messages": [USER, {"role": "assistant", "content": "Se"}]}, "is not continued"),
    },
    "responses": {
        "stored": ({"store": True}, "store is True"),
        "an earlier reply": ({"previous_response_id": "resp_1"}, "previous_response_id is not offered"),
        "a stored item": ({"input": [{"type": "item_reference", "id": "1"}]}, "nothing is stored"),
        "effort": ({"reasoning": {"effort": "low"}}, "reasoning.effort is the policy's choice"),
        "what else is in it": ({"include": ["message.output_text.logprobs"]}, "include is"),
        "a form": ({"text": {"format": {"type": "json_object"}}}, "text is"),
        "cut": ({"truncation": "auto"}, "truncation is"),
        "stop": ({"stop": ["x"]}, "stop is not offered"),
        "one call": ({"parallel_tool_calls": False}, "parallel_tool_calls is False"),
        "a server's tool": ({"tools": [{"type": "web_search"}]}, "tools[0] is of type 'web_search'"),
        "a file": (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "1"}]}]},
            "input[0].content[0] must be a part of type input_text",
        ),
        "encrypted thoughts": (
            {"input": [USER, {"type": "reasoning", "encrypted_content": "x"}]},
            "input[1] has encrypted_content",
        ),
        "arguments": (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[1]"}, USER]},
            "input[0] must be {type: function_call, call_id, name, arguments} with a JSON object",
        ),
        "a result": (
            {"input": [{"type": "function_call_output", "output": "x"}]},
            "must be {type: function_call_output",
        ),
    },
}


def test_what_cannot_be_honoured_is_refused_in_the_clients_own_form(qwen):
    async def talk(url: str, key: str) -> None:
        async with httpx.AsyncClient(headers={"x-api-key": key}) as client:
            for path, cases in REFUSED.items():
                for name, (changes, words) in cases.items():
                    body = {"model": "policy", "messages" if path == "messages" else "input": [USER]} | changes
                    answer = await client.post(f"{url}/{path}", json=body)
                    found = answer.json()
                    assert answer.status_code == 400 and words in found["error"]["message"], (path, name, found)
                    assert found["error"]["type"] == "invalid_request_error"
                    assert (found.get("type") == "error") == (path == "messages"), "each vendor has a form of its own"
            assert (await client.head(url.removesuffix("/v1"))).status_code == 200, "Claude Code looks first"
            answer = await client.post(f"{url}/messages", json={"model": "claude"}, headers={"x-api-key": "wrong"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
            answer = await client.post(f"{url}/messages", json={"model": "claude"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")

    session, _ = play(Policy(qwen, []), talk)
    assert session.counts.refused == sum(map(len, REFUSED.values())) + 2
