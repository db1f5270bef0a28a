"""Each protocol to the letter: what a request is read as, what of it is refused, and what a client is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollouts.agents.gateway import DIALECTS
from rollouts.agents.wire import BadRequest, ChatRequest, ChatResponse, Dialect, list_models

BY_PATH = {dialect.path: dialect for dialect in DIALECTS}
CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
SENT = Path(__file__).parents[1] / "data" / "dialect_answers.json"
"""What each protocol sends; `python -m unit_tests.rollouts.test_dialect_tables` writes it."""
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
USER = {"role": "user", "content": "Go."}


def read(path: str, **body: Any) -> ChatRequest:
    conversation = {"input": [USER]} if path == RESPONSES else {"messages": [USER]}
    return BY_PATH[path].read({"model": "policy", **conversation, **body}, temperature=1.0)


def make_call(id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Go on."},
    {
        **{"role": "assistant", "content": "I look.", "reasoning": "hm"},
        "tool_calls": [make_call("a", x=1), make_call("b")],
    },
    {"role": "tool", "content": "one", "tool_call_id": "a"},
    {"role": "tool", "content": "two", "tool_call_id": "b"},
    {"role": "user", "content": "And?"},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "g", "parameters": {}}},
]
BODIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # a request with everything in it, and what is read of it besides the conversation and the tools
    CHAT: (
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
                {"role": "user", "content": "Go on."},
                {
                    **{"role": "assistant", "content": "I look.", "reasoning_content": "hm", "refusal": None},
                    "annotations": [],
                    "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                        {"id": "b", "type": "function", "function": {"name": "f", "arguments": ""}},
                    ],
                },
                {"role": "tool", "content": "one", "tool_call_id": "a"},
                {"role": "tool", "content": "two", "tool_call_id": "b"},
                {"role": "user", "content": "And?"},
            ],
            "tools": TOOLS,
            **{"max_tokens": 9, "max_completion_tokens": 7, "stop": "x", "stream": True, "tool_choice": "none"},
            "stream_options": {"include_usage": True},
        },
        {"max_tokens": 7, "stop": ("x",), "streams": True, "may_call": False, "wants_usage": True},
    ),
    RESPONSES: (
        {
            "instructions": "Be brief.",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}], "id": "1"},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": t} for t in "hm"], "status": "x"},
                {"role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": [1]}]},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}', "id": "2"},
                {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}", "phase": "y"},
                {"type": "function_call_output", "call_id": "a", "output": "one"},
                {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "two"}]},
                {"role": "user", "content": "And?"},
            ],
            "tools": [
                {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
                {"type": "function", "name": "g", "description": None, "parameters": {}, "strict": False},
            ],
            **{"max_output_tokens": 5, "stream": False, "tool_choice": {"type": "function", "name": "f"}},
        },
        {"max_tokens": 5, "must_call": True},
    ),
    MESSAGES: (
        {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "Go on."},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "h", "signature": "s"},
                        {"type": "thinking", "thinking": "m"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}, "caller": {"type": "direct"}},
                        {"type": "tool_use", "id": "b", "name": "f", "input": {}, "cache_control": {"type": "x"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "content": "one", "is_error": True},
                        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "two"}]},
                        {"type": "text", "text": "And?"},
                    ],
                },
            ],
            "tools": [
                {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True, "cache_control": {}},
                {"type": "custom", "name": "g", "input_schema": {}, "eager_input_streaming": True},
            ],
            **{"max_tokens": 3, "stop_sequences": ["x", "y"], "stream": True, "tool_choice": {"type": "any"}},
        },
        {"max_tokens": 3, "stop": ("x", "y"), "streams": True, "must_call": True},
    ),
}


@pytest.mark.parametrize("path", BODIES)
def test_everything_in_a_request_is_read(path):
    body, rest = BODIES[path]
    assert read(path, **body) == ChatRequest(messages=CONVERSATION, tools=TOOLS, **rest)
    assert read(path) == ChatRequest(messages=[USER], tools=[])


def test_turns_are_cut_where_another_speaks():
    """Thoughts begin a turn, a text after a text is another turn, and results of tools come before what is said."""
    [one, two] = read(RESPONSES, input=[{"role": "assistant", "content": text} for text in ("a", "b")]).messages
    assert (one["content"], two["content"]) == ("a", "b")
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}
    turns = read(RESPONSES, input=[call, thought, call, {"type": "reasoning", "content": []}, call]).messages
    assert [(turn.get("reasoning"), len(turn["tool_calls"])) for turn in turns] == [(None, 1), ("t", 2)]
    assert read(RESPONSES, input="Go.").messages == [USER]
    result, text = {"type": "tool_result", "tool_use_id": "a", "content": None}, {"type": "text", "text": "x"}
    for content, roles in (([text, result, text], "user tool user"), ([result], "tool"), ([], "user")):
        turns = read(MESSAGES, messages=[{"role": "user", "content": content}]).messages
        assert [turn["role"] for turn in turns] == roles.split()
    assert read(CHAT, messages=[{"role": "tool", "content": None, "name": "f", "tool_call_id": "1"}]).messages == [
        {"role": "tool", "content": "", "name": "f", "tool_call_id": "1"}
    ]


OF_ALL = {"top_p": 1, "top_k": -1, "min_p": 0.0, "top_logprobs": 0, "parallel_tool_calls": True, "store": False}
ACCEPTED: dict[str, list[dict[str, Any]]] = {
    # what changes nothing
    CHAT: [
        *({name: "x"} for name in ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")),
        *({"top_k": 0}, {"n": 1}, {"presence_penalty": 0}, {"frequency_penalty": 0.0}, {"repetition_penalty": 1}),
        *({"logit_bias": {}}, {"logprobs": False}, {"response_format": {"type": "text"}}, {"functions": []}),
        *({"modalities": ["text"]}, {"tool_choice": "auto"}, {"stream_options": {}}, {"stop": []}, {"tools": []}),
    ],
    RESPONSES: [
        *({name: "x"} for name in ("user", "metadata", "safety_identifier", "prompt_cache_key", "client_metadata")),
        *({"prompt_cache_retention": "24h"}, {"service_tier": "auto"}, {"background": False}, {"include": []}),
        *({"include": ["reasoning.encrypted_content"]}, {"text": {}}, {"text": {"format": {"type": "text"}}}),
        *({"truncation": "disabled"}, {"reasoning": {"effort": None}}, {"stream_options": {}}, {"instructions": ""}),
    ],
    MESSAGES: [
        *({"metadata": {"user_id": "x"}}, {"service_tier": "auto"}, {"cache_control": {}}, {"system": ""}),
        *({"thinking": {"type": "adaptive"}}, {"thinking": {"type": "disabled"}}, {"stop_sequences": []}),
        *({"output_config": {}}, {"output_config": {"effort": "high"}}, {"context_management": {"edits": []}}),
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}},
    ],
}


@pytest.mark.parametrize("path", ACCEPTED)
def test_what_changes_nothing_is_accepted(path):
    for more in [*ACCEPTED[path], {"temperature": 1.0}, *({name: value} for name, value in OF_ALL.items())]:
        [name] = more
        assert read(path, **more) == read(path, **{name: None}) == read(path), more
    for name, neutral in OF_ALL.items():
        with pytest.raises(BadRequest, match=f"{name} is .*another distribution than the one in training") as refused:
            read(path, **{name: not neutral if isinstance(neutral, bool) else 0.5})
        assert (refused.value.param, refused.value.status) == (name, 400)


ASSISTANT = {"role": "assistant", "content": ""}
CALL_FORM = "must be {id, type: function, function: {name, arguments}} with a JSON object as function.arguments"
REFUSED: dict[str, list[tuple[dict[str, Any], str | None, str]]] = {
    # changes, the parameter that is named, and the whole sentence
    CHAT: [
        ({"messages": "x"}, "messages", "messages and tools must be lists"),
        ({"tools": "x"}, "messages", "messages and tools must be lists"),
        *(
            ({"tool_choice": choice}, None, f"tool_choice must be auto, none, required or a function, found {choice!r}")
            for choice in ("x", {"type": "allowed_tools"}, {})
        ),
        ({"messages": [3]}, "messages[0]", "messages[0] must be an object whose role is one of {roles}"),
        (
            {"messages": [USER, {"role": "x"}]},
            "messages[1]",
            "messages[1] must be an object whose role is one of {roles}",
        ),
        (
            {"messages": [{"role": "user", "content": 3}]},
            None,
            "messages[0].content must be text, or a list of parts: the policy sees nothing else",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0]",
            "messages[0].content[0] must be a part of type text or image_url: the policy sees nothing else",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0]",
            "messages[0].content[0]: an image by its address is not fetched: send it as a data URI",
        ),
        *(
            (
                {"messages": [{**ASSISTANT, **field}]},
                "messages[0]",
                f"messages[0] has {name}, which no chat template is shown: leave it out",
            )
            for field in (
                {"function_call": {"name": "f", "arguments": "{}"}},
                {"refusal": "no"},
                {"audio": {"id": "1"}},
            )
            for name in field
        ),
        *(
            ({"messages": [{**ASSISTANT, "tool_calls": [call]}]}, "messages[0].tool_calls[0]", f"{at} {CALL_FORM}")
            for at in ["messages[0].tool_calls[0]"]
            for call in (
                3,
                {},
                {"function": {"name": 3, "arguments": {}}},
                {"function": {"name": "f", "arguments": []}},
            )
        ),
        ({"tools": [3]}, "tools", "tools[0] must be {type: function, function: {name, description, parameters}}"),
        ({"max_tokens": True}, "max_tokens", "max_tokens must be a whole number from 1 on, found True"),
        ({"max_completion_tokens": 0}, "max_tokens", "max_tokens must be a whole number from 1 on, found 0"),
        ({"stop": [3]}, "stop", "stop must be a text or a list of texts, none empty, found [3]"),
    ],
    RESPONSES: [
        *(
            (changes, "input", "input must be text or a list of items, tools a list and instructions text")
            for changes in ({"input": 3}, {"tools": "x"}, {"instructions": 3})
        ),
        ({"tool_choice": "x"}, None, "tool_choice must be auto, none, required or a function, found 'x'"),
        (
            {"tool_choice": {"type": "x"}},
            None,
            "tool_choice must be auto, none, required or a function, found {'type': 'x'}",
        ),
        ({"reasoning": "x"}, None, "reasoning.effort is the policy's choice, found 'x': leave it out"),
        ({"input": [3]}, "input[0]", "input[0] must be an item, which is an object"),
        *(
            (
                {"input": [{"type": "reasoning", "content": content}]},
                "input[0]",
                "input[0].content must be a list of parts of type reasoning_text",
            )
            for content in ("x", [3], [{"text": 3}])
        ),
        ({"input": [{"role": "x"}]}, "input[0]", "input[0] must be a message whose role is one of {roles}"),
        (
            {"input": [{"role": "user", "content": 3}]},
            "input[0].content",
            "input[0].content must be text, or a list of parts: the policy sees nothing else",
        ),
        (
            {"input": [{**USER, "mood": 1}]},
            "input[0]",
            "input[0] has mood, which no chat template is shown: leave it out",
        ),
        (
            {"input": [{"type": "function_call", "name": 3, "arguments": "{}"}]},
            "input[0]",
            "input[0] must be {type: function_call, call_id, name, arguments} with a JSON object as arguments",
        ),
        (
            {"input": [{"type": "function_call_output", "output": "x"}]},
            "input[0]",
            "input[0] must be {type: function_call_output, call_id, output}",
        ),
        ({"tools": [3]}, "tools", "tools[0] is of type 3, and only functions are called: leave it out"),
        (
            {"tools": [{"type": "function"}]},
            "tools",
            "tools[0] must be {type: function, name, description, parameters}",
        ),
        (
            {"max_output_tokens": 1.0},
            "max_output_tokens",
            "max_output_tokens must be a whole number from 1 on, found 1.0",
        ),
    ],
    MESSAGES: [
        ({"messages": "x"}, "messages", "messages and tools must be lists"),
        ({"tools": "x"}, "messages", "messages and tools must be lists"),
        *(
            (
                {"tool_choice": choice},
                "tool_choice",
                "tool_choice must be an object of type auto, any, tool, none without disable_parallel_tool_use, found "
                f"{choice!r}",
            )
            for choice in ("auto", {"type": "x"}, {"type": "any", "disable_parallel_tool_use": True})
        ),
        ({"messages": [3]}, "messages[0]", "messages[0] must be an object whose role is one of {roles}"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content",
            "messages[0].content must be text, or a list of blocks: the policy sees nothing else",
        ),
        *(
            (
                {"messages": [{"role": "user", "content": [block]}]},
                "messages[0].content[0]",
                "messages[0].content[0] must be a block of type text, or an image as base64: the policy sees nothing "
                "else",
            )
            for block in (3, {"type": "x"}, {"type": "image"}, {"type": "image", "source": {"type": "url"}})
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 3}]}]},
            "messages[0].content[0]",
            "messages[0].content[0] must be {type: tool_result, tool_use_id, content}",
        ),
        *(
            ({"tools": [tool]}, "tools", f"tools[0] must be {form}")
            for tool, form in (
                (3, "a tool of the harness, {name, description, input_schema}"),
                ({"type": "x"}, "a tool of the harness, {name, description, input_schema}"),
                ({"name": 3, "input_schema": {}}, "{name, description, input_schema}"),
                ({"name": "f", "input_schema": 3}, "{name, description, input_schema}"),
            )
        ),
    ],
}
ROLES = {
    CHAT: "system, developer, user, assistant, tool",
    RESPONSES: "user, assistant, system, developer",
    MESSAGES: "user, assistant, system",
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_refused_is_named_in_one_sentence(path):
    for changes, param, sentence in REFUSED[path]:
        with pytest.raises(BadRequest) as refused:
            read(path, **changes)
        assert (str(refused.value), refused.value.param) == (sentence.replace("{roles}", ROLES[path]), param), changes
    with pytest.raises(BadRequest, match="must be a JSON object with model and messages"):
        BY_PATH[path].read([], temperature=1.0)
    with pytest.raises(BadRequest, match="there is no model other here: it is called policy") as refused:
        read(path, model="other")
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error"}
    if path == MESSAGES:
        kinds |= {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error"}
    assert (refused.value.status, refused.value.param) == (404, "model")
    for status, kind in kinds.items():
        error = {"message": "m", "type": kind}
        wanted = (
            {"type": "error", "error": error} if path == MESSAGES else {"error": error | {"param": "p", "code": "c"}}
        )
        assert BY_PATH[path].refuse(BadRequest("m", status=status, param="p", code="c")) == wanted


CALLS = [
    {"id": "a1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, {"y": "é"}]}}},
    {"id": "a2", "type": "function", "function": {"name": "g", "arguments": {}}},
]
ANSWERS: list[dict[str, Any]] = [
    {"message": {"role": "assistant", "content": "Seven."}, "finish_reason": "stop", "stop_string": "\n"},
    {"message": {"role": "assistant", "content": "", "reasoning": "hm"}, "finish_reason": "length"},
    {
        "message": {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": CALLS},
        "finish_reason": "tool_calls",
    },
    {"message": {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}, "finish_reason": "tool_calls"},
    {"message": {"role": "assistant", "content": ""}, "finish_reason": "stop"},
]


def send(dialect: Dialect) -> list[Any]:
    """Return the body of each answer, and the events of the same as a stream."""
    found: list[Any] = []
    for given in ANSWERS:
        answer = ChatResponse(id="1", prompt_tokens=3, completion_tokens=4, **given)
        asked = ChatRequest(messages=[], tools=[], wants_usage="reasoning" in given["message"])
        events = "".join(dialect.stream(answer, 7, asked)).removesuffix("\n\n").split("\n\n")
        found.append({"body": dialect.write(answer, 7), "events": events})
    return found


@pytest.mark.parametrize("path", BY_PATH)
def test_a_client_is_sent_what_the_table_says(path):
    assert send(BY_PATH[path]) == json.loads(SENT.read_text())[path]


def test_the_list_of_models_has_the_policy():
    model = {"id": "policy", "object": "model", "created": 7, "owned_by": "feynrl"}
    assert list_models(created=7) == {"object": "list", "data": [model]}


if __name__ == "__main__":
    lines = [f"{json.dumps(path)}: {json.dumps(send(dialect))}" for path, dialect in BY_PATH.items()]
    SENT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
