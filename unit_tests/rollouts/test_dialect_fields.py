"""Fields of agents' requests, one by one: what is ignored, what is refused, and what each choice of a tool means."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from rollouts.agents.dialects.chat import CHAT
from rollouts.agents.dialects.messages import MESSAGES
from rollouts.agents.dialects.responses import RESPONSES
from rollouts.agents.wire import BadRequest, ChatRequest, Dialect
from unit_tests.helpers.sentences import tell

USER = {"role": "user", "content": "Go."}
LONG = "x" * 5000


def draw_png() -> str:
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


PNG = draw_png()


def read(dialect: Dialect, **body: Any) -> ChatRequest:
    conversation = {"input": [USER]} if dialect is RESPONSES else {"messages": [USER]}
    return dialect.read({"model": "policy", **conversation, **body}, temperature=1.0)


def say(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


def show(part: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [part]}]}


def offer(tool: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [tool]}


def send(item: dict[str, Any]) -> dict[str, Any]:
    return {"input": [item]}


Place = tuple[Dialect, str, Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any], dict[str, Any]]
SOURCE = {"type": "base64", "media_type": "image/png", "data": PNG}
CACHED = {"cache_control": {"type": "ephemeral"}}
NAMED = {"id": "1", "status": "completed", "phase": "final"}
PLACES: dict[str, Place] = {
    # how errors call the place, how a request holds it, what stands there, and fields of the vendor's own service
    "text block": (MESSAGES, "messages[0].content[0]", say, {"type": "text", "text": "x"}, CACHED),
    "image block": (MESSAGES, "messages[0].content[0]", say, {"type": "image", "source": SOURCE}, CACHED),
    "result block": (
        MESSAGES,
        "messages[0].content[0]",
        say,
        {"type": "tool_result", "tool_use_id": "a", "content": "3"},
        CACHED,
    ),
    "call block": (
        MESSAGES,
        "messages[0].content[0]",
        lambda block: say(block, "assistant"),
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
        CACHED | {"caller": {"type": "direct"}},
    ),
    "tool of messages": (
        MESSAGES,
        "tools[0]",
        offer,
        {"name": "f", "input_schema": {"type": "object"}},
        CACHED | {"eager_input_streaming": True},
    ),
    "message item": (RESPONSES, "input[0]", send, USER, NAMED),
    "thought item": (
        RESPONSES,
        "input[0]",
        send,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        NAMED,
    ),
    "call item": (
        RESPONSES,
        "input[0]",
        send,
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'},
        NAMED,
    ),
    "result item": (
        RESPONSES,
        "input[0]",
        send,
        {"type": "function_call_output", "call_id": "a", "output": "3"},
        NAMED,
    ),
    "text part": (
        RESPONSES,
        "input[0].content[0]",
        show,
        {"type": "output_text", "text": "x"},
        {"annotations": [{"type": "url_citation"}], "logprobs": [{"token": "x"}]},
    ),
    "image part": (
        RESPONSES,
        "input[0].content[0]",
        show,
        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"},
        {"detail": "high"},
    ),
    "tool of responses": (RESPONSES, "tools[0]", offer, {"type": "function", "name": "f", "parameters": {}}, {}),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_field_that_is_not_shown_is_refused_unless_empty_or_known(name):
    """Known: a field of the vendor's own service, such as a mark for its cache. It changes nothing."""
    dialect, where, hold, given, known = PLACES[name]
    plain = read(dialect, **hold(given))
    for field, value in known.items():
        assert read(dialect, **hold({**given, field: value})) == plain, field
    for empty in (None, [], "", False):
        assert read(dialect, **hold({**given, "mood": empty})) == plain, empty
    said = f"{where} has mood, which no chat template is shown: leave it out"
    for value in ("good", True, 1, ["x"]):
        assert tell(lambda value=value: read(dialect, **hold({**given, "mood": value})), BadRequest) == said


def test_an_empty_field_of_a_chat_message_is_not_there():
    for field in ("name", "refusal", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "mood"):
        for empty in (None, [], ""):
            for role in ("user", "assistant"):
                message = {"role": role, "content": "Go."}
                assert read(CHAT, messages=[{**message, field: empty}]).messages == [message], (field, empty)


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("role", "field", "value"),
    [
        # calls and thoughts are the assistant's alone
        ("user", "tool_calls", [CALL]),
        ("tool", "tool_calls", [CALL]),
        ("user", "reasoning", "hm"),
        ("system", "reasoning_content", "hm"),
        ("assistant", "tool_calls", "x"),
        ("assistant", "tool_calls", {"a": 1}),
        ("assistant", "reasoning", 3),
        ("assistant", "reasoning_content", ["hm"]),
        ("assistant", "annotations", [{"type": "url_citation"}]),
        ("user", "name", 3),
        ("tool", "tool_call_id", 3),
    ],
)
def test_a_field_of_a_chat_message_that_cannot_be_shown_is_refused(role, field, value):
    said = tell(lambda: read(CHAT, messages=[USER, {"role": role, "content": "x", field: value}]), BadRequest)
    assert said == f"messages[1] has {field}, which no chat template is shown: leave it out"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_a_chat_message_has_two_names(name):
    [message] = read(CHAT, messages=[{"role": "assistant", "content": "7", name: "hm"}]).messages
    assert message == {"role": "assistant", "content": "7", "reasoning": "hm"}


OPENAI = {
    # whether calls are read from the reply, and whether one is demanded
    None: (True, False),
    "auto": (True, False),
    "none": (False, False),
    "required": (True, True),
}
ANTHROPIC = {None: (True, False), "auto": (True, False), "none": (False, False), "any": (True, True)}


def test_a_choice_of_tools_says_whether_calls_are_read_and_demanded():
    for dialect in (CHAT, RESPONSES):
        for choice, expected in OPENAI.items():
            asked = read(dialect, tool_choice=choice)
            assert (asked.may_call, asked.must_call) == expected, (dialect.path, choice)
        asked = read(dialect, tool_choice={"type": "function", "name": "f"})
        assert (asked.may_call, asked.must_call) == (True, True)
    for choice, expected in ANTHROPIC.items():
        asked = read(MESSAGES, tool_choice=choice and {"type": choice})
        assert (asked.may_call, asked.must_call) == expected, choice
    asked = read(MESSAGES, tool_choice={"type": "tool", "name": "f"})
    assert (asked.may_call, asked.must_call) == (True, True)


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (RESPONSES, "max_output_tokens"),
        (MESSAGES, "max_tokens"),
    ],
)
def test_a_limit_of_one_token_is_a_limit(dialect, name):
    assert read(dialect, **{name: 1}).max_tokens == 1
    assert read(dialect, **{name: None}).max_tokens is None


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES], ids=lambda dialect: dialect.path)
def test_only_what_asks_for_a_stream_is_streamed(dialect):
    assert [read(dialect, stream=stream).streams for stream in (True, False, None)] == [True, False, False]


def test_only_a_chat_stream_that_asks_for_counts_ends_with_them():
    for options, expected in (({"include_usage": True}, True), ({"include_usage": False}, False), ("x", False)):
        assert read(CHAT, stream=True, stream_options=options).wants_usage == expected, options


def test_a_call_without_an_id_has_an_empty_one():
    """Not "None", which a chat template would show to the policy."""
    asked = (
        read(CHAT, messages=[{"role": "assistant", "tool_calls": [{"function": CALL["function"]}]}]),
        read(RESPONSES, input=[{"type": "function_call", "name": "f", "arguments": "{}"}]),
        read(MESSAGES, **say({"type": "tool_use", "name": "f", "input": {}}, "assistant")),
    )
    expected = {"id": "", "type": "function", "function": {"name": "f", "arguments": {}}}
    for one in asked:
        assert one.messages == [{"role": "assistant", "content": "", "tool_calls": [expected]}]


def test_a_refusal_does_not_repeat_all_of_a_long_request():
    cases: list[tuple[Dialect, dict[str, Any]]] = [
        *(
            (dialect, {name: LONG})
            for dialect in (CHAT, RESPONSES, MESSAGES)
            for name in ("temperature", "top_p", "model")
        ),
        *((dialect, {LONG: 1}) for dialect in (CHAT, RESPONSES, MESSAGES)),
        *((dialect, {"tool_choice": LONG}) for dialect in (CHAT, RESPONSES, MESSAGES)),
        *((CHAT, {name: LONG}) for name in ("max_tokens", "n")),
        (CHAT, {"stop": [3] * 5000}),
        (CHAT, {"messages": [{**USER, LONG: 1}]}),
        *((RESPONSES, body) for body in ({"reasoning": LONG}, {"tools": [LONG]}, {"tools": [{"type": LONG}]})),
        (MESSAGES, {"messages": [{**USER, LONG: 1}]}),
    ]
    for dialect, body in cases:
        said = tell(lambda dialect=dialect, body=body: read(dialect, **body), BadRequest)
        assert len(said) < 400, (dialect.path, next(iter(body))[:20])
