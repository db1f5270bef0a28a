"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from core.errors import quote
from core.types.messages import ROLES, Message, Part, ToolCall, ToolSpec
from core.types.truncation import EVERYTHING_KEPT, Truncation
from rollouts.agents.wire import (
    MODEL,
    NEUTRAL,
    BadRequest,
    ChatRequest,
    ChatResponse,
    Dialect,
    Parameters,
    check_body,
    make_message,
    read_call,
    read_max_tokens,
    read_part,
    read_stop,
)

PARAMETERS = Parameters(
    read=(
        *("model", "messages", "tools", "tool_choice", "temperature", "max_tokens", "max_completion_tokens", "stop"),
        *("stream", "stream_options"),
    ),
    without_effect=("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier"),
    neutral=NEUTRAL
    | {
        "n": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "logprobs": (False,),
        "response_format": ({"type": "text"},),
        "functions": ([],),
        "modalities": (["text"],),
    },
)
REASONING = ("reasoning", "reasoning_content")
"""Names for the reasoning of an assistant turn."""


def read_ask(
    body: Any, *, temperature: float, truncation: Truncation = EVERYTHING_KEPT, until: float = math.inf
) -> ChatRequest:
    """Read a parsed body; see ReadRequest."""
    body = check_body(body, PARAMETERS, temperature=temperature, truncation=truncation)
    # clients send null for tools that the harness did not set
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not isinstance(tools, list):
        raise BadRequest("messages and tools must be lists", param="messages")
    choice = body.get("tool_choice")
    demands = choice == "required" or (isinstance(choice, dict) and choice.get("type") == "function")
    if choice not in (None, "auto", "none") and not demands:
        raise BadRequest(f"tool_choice must be auto, none, required or a function, found {choice!r:.80}")
    options = body.get("stream_options") or {}
    return ChatRequest(
        messages=[read_message(m, f"messages[{i}]", until) for i, m in enumerate(messages)],
        tools=[_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
        may_call=choice != "none",
        must_call=demands,
        max_tokens=read_max_tokens(body, "max_tokens", "max_completion_tokens"),
        stop=read_stop(body.get("stop"), "stop"),
        streams=bool(body.get("stream")),
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def read_message(given: Any, where: str, until: float) -> Message:
    """Read a message of a request. Raises BadRequest for fields that no chat template reads."""
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise BadRequest(f"{where} must be an object whose role is one of {', '.join(ROLES)}", param=where)
    message = make_message(given["role"], _read_content(given.get("content"), where, until))
    for name, value in given.items():
        # OpenAI's clients return a reply with all of its fields, most of them empty
        if name in ("role", "content") or value in (None, [], ""):
            continue
        if name == "tool_calls" and given["role"] == "assistant" and isinstance(value, list):
            message["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(value)]
        elif name == "tool_call_id" and isinstance(value, str):
            message["tool_call_id"] = value
        elif name == "name" and isinstance(value, str):
            message["name"] = value
        elif name in REASONING and isinstance(value, str) and given["role"] == "assistant":
            message["reasoning"] = value
        else:
            raise BadRequest(f"{where} has {quote(name)}, which no chat template is shown: leave it out", param=where)
    return message


def _read_content(content: Any, where: str, until: float) -> list[Part]:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content must be text, or a list of parts: the policy sees nothing else")
    return [read_part(part, f"{where}.content[{i}]", until) for i, part in enumerate(content)]


def _read_call(given: Any, where: str) -> ToolCall:
    call: Any = given if isinstance(given, dict) else {}
    function: Any = call.get("function") if isinstance(call.get("function"), dict) else {}
    form = "{id, type: function, function: {name, arguments}}"
    arguments = function.get("arguments")
    return read_call(call.get("id", ""), function.get("name"), arguments, where, key="function.arguments", form=form)


def _read_tool(given: Any, where: str) -> ToolSpec:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(
            f"{where} must be {{type: function, function: {{name, description, parameters}}}}", param="tools"
        )
    return given


def write_answer(answer: ChatResponse, created: int) -> dict[str, Any]:
    """Return the body of a complete response."""
    choice = {
        "index": 0,
        "message": write_message(answer.message),
        "finish_reason": answer.finish_reason,
        "logprobs": None,
    }
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": created,
        "model": MODEL,
        "choices": [choice],
        "usage": _write_usage(answer),
    }


def stream_answer(answer: ChatResponse, created: int, ask: ChatRequest) -> Iterator[str]:
    """Yield the events of a streamed response."""
    for chunk in _write_chunks(answer, created, wants_usage=ask.wants_usage):
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _write_chunks(answer: ChatResponse, created: int, *, wants_usage: bool) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed response. The first chunk contains the whole reply."""
    delta = write_message(answer.message)
    for i, call in enumerate(delta.get("tool_calls", [])):
        # clients merge the chunks of a call by this number
        call["index"] = i
    head = {"id": f"chatcmpl-{answer.id}", "object": "chat.completion.chunk", "created": created, "model": MODEL}
    # as OpenAI does: null in every chunk but the last
    rest = {"usage": None} if wants_usage else {}
    yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} | rest
    yield head | {"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]} | rest
    if wants_usage:
        yield head | {"choices": [], "usage": _write_usage(answer)}


def write_message(message: Message) -> dict[str, Any]:
    """Return a reply for clients, with the arguments of calls as JSON text."""
    written: dict[str, Any] = {"role": "assistant", "content": message["content"], "refusal": None}
    if "reasoning" in message:
        written["reasoning_content"] = message["reasoning"]
    if calls := message.get("tool_calls"):
        written["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
        written["content"] = message["content"] or None  # clients expect null, not "", beside calls
    return written


def _write_usage(answer: ChatResponse) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


CHAT = Dialect(path="chat/completions", read=read_ask, write=write_answer, stream=stream_answer)
