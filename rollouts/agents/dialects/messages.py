"""Anthropic's Messages: `POST /v1/messages`. Source: the types of the package `anthropic`, 2.12.

Thoughts of a reply are a thinking block without a signature, and may be sent back or left out. `is_error` of a tool's
result is not shown to the policy: no chat template has a place for it, and the text says it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from core.types.messages import Message, Part, ToolCall, ToolSpec
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
    check_fields,
    make_message,
    make_tool,
    read_call,
    read_max_tokens,
    read_part,
    read_stop,
    write_event,
)

PARAMETERS = Parameters(
    read=(
        *("model", "messages", "system", "tools", "tool_choice", "temperature", "max_tokens", "stop_sequences"),
        "stream",
    ),
    without_effect=("metadata", "service_tier", "cache_control"),
    neutral=NEUTRAL
    | {
        # how much is thought is the policy's choice; a budget could not be kept to
        "thinking": ({"type": "adaptive"}, {"type": "disabled"}),
        # the default of Anthropic's API
        "output_config": ({}, {"effort": "high"}),
        # removes nothing
        "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    },
)
ROLES = ("user", "assistant", "system")
CHOICES = ("auto", "any", "tool", "none")
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Stop reasons by the reason why a reply ended."""
ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}
"""Types of errors by HTTP status; others are `invalid_request_error`."""


def read_ask(
    body: Any, *, temperature: float, truncation: Truncation = EVERYTHING_KEPT, until: float = math.inf
) -> ChatRequest:
    """Read a parsed body; see ReadRequest."""
    body = check_body(body, PARAMETERS, temperature=temperature, truncation=truncation)
    turns, tools, system = body.get("messages"), body.get("tools") or [], body.get("system")
    if not isinstance(turns, list) or not isinstance(tools, list):
        raise BadRequest("messages and tools must be lists", param="messages")
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type") not in CHOICES or choice.get("disable_parallel_tool_use"):
        raise BadRequest(
            f"tool_choice must be an object of type {', '.join(CHOICES)} without disable_parallel_tool_use, found "
            f"{choice!r:.80}",
            param="tool_choice",
        )
    messages = [] if not system else [make_message("system", _read_parts(system, "system", until))]
    for i, turn in enumerate(turns):
        messages += _read_turn(turn, f"messages[{i}]", until)
    return ChatRequest(
        messages=messages,
        tools=[_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
        may_call=choice["type"] != "none",
        must_call=choice["type"] in ("any", "tool"),
        max_tokens=read_max_tokens(body, "max_tokens"),
        stop=read_stop(body.get("stop_sequences"), "stop_sequences"),
        streams=bool(body.get("stream")),
    )


def _read_turn(turn: Any, where: str, until: float) -> list[Message]:
    """Read a turn, which is several messages if it has results of tools."""
    if not isinstance(turn, dict) or turn.get("role") not in ROLES:
        raise BadRequest(f"{where} must be an object whose role is one of {', '.join(ROLES)}", param=where)
    check_fields(turn, ("role", "content"), where)
    blocks, where = _list_blocks(turn.get("content"), f"{where}.content"), f"{where}.content"
    if turn["role"] == "assistant":
        return [_read_reply(blocks, where, until)]
    found: list[Message] = []
    parts: list[Part] = []
    for i, block in enumerate(blocks):
        if turn["role"] == "user" and _type_of(block) == "tool_result":
            if parts:
                found.append(make_message("user", parts))
                parts = []
            found.append(_read_result(block, f"{where}[{i}]", until))
        else:
            parts.append(_read_block(block, f"{where}[{i}]", until))
    if parts or not found:
        found.append(make_message(turn["role"], parts))
    return found


def _read_reply(blocks: list[Any], where: str, until: float) -> Message:
    """Read an assistant's turn, whose thoughts, texts and calls are one message."""
    parts: list[Part] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(blocks):
        at, kind = f"{where}[{i}]", _type_of(block)
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            check_fields(block, ("type", "id", "name", "input"), at, ignored=("cache_control", "caller"))
            form = "{type: tool_use, id, name, input}"
            calls.append(
                read_call(block.get("id", ""), block.get("name"), block.get("input"), at, key="input", form=form)
            )
        else:
            parts.append(_read_block(block, at, until))
    message = make_message("assistant", parts)
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_result(block: Any, where: str, until: float) -> Message:
    read = ("type", "tool_use_id", "content", "is_error")
    check_fields(block, read, where, ignored=("cache_control",))
    if not isinstance(block.get("tool_use_id"), str):
        raise BadRequest(f"{where} must be {{type: tool_result, tool_use_id, content}}", param=where)
    message = make_message("tool", _read_parts(block.get("content"), f"{where}.content", until))
    message["tool_call_id"] = block["tool_use_id"]
    return message


def _read_parts(content: Any, where: str, until: float) -> list[Part]:
    return [_read_block(block, f"{where}[{i}]", until) for i, block in enumerate(_list_blocks(content, where))]


def _list_blocks(content: Any, where: str) -> list[Any]:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text, or a list of blocks: the policy sees nothing else", param=where)
    return content


def _type_of(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _read_block(block: Any, where: str, until: float) -> Part:
    """Read a block of text, or an image."""
    kind = _type_of(block)
    if kind == "text":
        check_fields(block, ("type", "text"), where, ignored=("cache_control",))
        return read_part(block, where, until)
    source = block.get("source") if kind == "image" else None
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise BadRequest(
            f"{where} must be a block of type text, or an image as base64: the policy sees nothing else",
            param=where,
        )
    check_fields(block, ("type", "source"), where, ignored=("cache_control",))
    url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return read_part({"type": "image_url", "image_url": {"url": url}}, where, until)


def _read_tool(given: Any, where: str) -> ToolSpec:
    if not isinstance(given, dict) or given.get("type") not in (None, "custom"):
        raise BadRequest(
            f"{where} must be a tool of the harness, {{name, description, input_schema}}",
            param="tools",
        )
    read = ("type", "name", "description", "input_schema", "strict")
    check_fields(given, read, where, ignored=("cache_control", "eager_input_streaming"))
    if not isinstance(given.get("name"), str) or not isinstance(given.get("input_schema"), dict):
        raise BadRequest(f"{where} must be {{name, description, input_schema}}", param="tools")
    return make_tool(given["name"], given.get("description"), given["input_schema"], given.get("strict"))


def write_answer(answer: ChatResponse, created: int) -> dict[str, Any]:
    """Return the body of a complete response."""
    return _write_head(answer) | {
        "content": _write_blocks(answer.message),
        "stop_reason": _write_reason(answer),
        "stop_sequence": answer.stop_string,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def stream_answer(answer: ChatResponse, created: int, ask: ChatRequest) -> Iterator[str]:
    """Yield the events of a streamed response, each block as one delta."""
    yield from map(write_event, _list_events(answer))


def _list_events(answer: ChatResponse) -> Iterator[dict[str, Any]]:
    empty = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": 0},
    }
    yield {"type": "message_start", "message": _write_head(answer) | empty}
    for i, block in enumerate(_write_blocks(answer.message)):
        begun, delta = _split_block(block)
        yield {"type": "content_block_start", "index": i, "content_block": begun}
        yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    yield {
        "type": "message_delta",
        "delta": {"stop_reason": _write_reason(answer), "stop_sequence": answer.stop_string},
        "usage": {"output_tokens": answer.completion_tokens},
    }
    yield {"type": "message_stop"}


def _split_block(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a block without its content, and the delta that adds it."""
    match block["type"]:
        case "text":
            return block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        case "thinking":
            return block | {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        case _:
            return block | {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}


def _write_head(answer: ChatResponse) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": MODEL}


def _write_blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if "reasoning" in message:
        blocks.append({"type": "thinking", "thinking": message["reasoning"], "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", []):
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def _write_reason(answer: ChatResponse) -> str:
    if answer.finish_reason == "stop" and answer.stop_string is not None:
        return "stop_sequence"
    return STOP_REASONS[answer.finish_reason]


def refuse(refusal: BadRequest) -> dict[str, Any]:
    """Return the body of a refusal."""
    kind = ERROR_TYPES.get(refusal.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}


MESSAGES = Dialect(path="messages", read=read_ask, write=write_answer, stream=stream_answer, refuse=refuse)
