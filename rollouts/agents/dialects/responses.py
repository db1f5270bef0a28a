"""OpenAI's Responses, not stored: `POST /v1/responses`. Source: the types of the package `openai`, 3.54.

A request holds the whole conversation as items. Adjacent items of the assistant are one turn. Thoughts of a reply are
an item `reasoning` in plain text, and may be sent back or left out; there is no summary and no encrypted content.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import count
from typing import Any

from core.types.messages import Message, Part, ToolSpec
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
    write_event,
)

PARAMETERS = Parameters(
    read=(
        *("model", "input", "instructions", "tools", "tool_choice", "temperature", "max_output_tokens", "reasoning"),
        *("stream", "stream_options"),
    ),
    without_effect=(
        *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"),
        "client_metadata",
    ),
    neutral=NEUTRAL
    | {
        "background": (False,),
        # reasoning comes in plain text
        "include": ([], ["reasoning.encrypted_content"]),
        "text": ({}, {"format": {"type": "text"}}),
        "truncation": ("disabled",),
    },
)
ROLES = ("user", "assistant", "system", "developer")
NAMES = ("id", "status", "phase")
"""Names and states of items, which no chat template is shown."""
BEFORE = {
    "reasoning": (),
    "message": ("reasoning",),
    "function_call": ("reasoning", "message", "function_call"),
}
"""Items of the assistant that begin the same turn, by type of the next item."""


def read_ask(
    body: Any, *, temperature: float, truncation: Truncation = EVERYTHING_KEPT, until: float = math.inf
) -> ChatRequest:
    """Read a parsed body; see ReadRequest."""
    body = check_body(body, PARAMETERS, temperature=temperature, truncation=truncation)
    given, tools, first = body.get("input"), body.get("tools") or [], body.get("instructions")
    items: Any = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not isinstance(tools, list) or not isinstance(first, str | None):
        raise BadRequest("input must be text or a list of items, tools a list and instructions text", param="input")
    choice = body.get("tool_choice")
    demands = choice == "required" or (isinstance(choice, dict) and choice.get("type") == "function")
    if choice not in (None, "auto", "none") and not demands:
        raise BadRequest(f"tool_choice must be auto, none, required or a function, found {choice!r:.80}")
    reasoning = body.get("reasoning") or {}
    if not isinstance(reasoning, dict) or reasoning.get("effort") is not None:
        raise BadRequest(f"reasoning.effort is the policy's choice, found {reasoning!r:.80}: leave it out")
    system = [make_message("system", [{"type": "text", "text": first}])] if first else []
    return ChatRequest(
        messages=system + _read_items(items, until),
        tools=[_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
        may_call=choice != "none",
        must_call=demands,
        max_tokens=read_max_tokens(body, "max_output_tokens"),
        streams=bool(body.get("stream")),
    )


def _read_items(items: list[Any], until: float) -> list[Message]:
    """Read the items of a conversation. Thoughts, a text and calls of the assistant in this order are one message."""
    messages: list[Message] = []
    last = None
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{where} must be an item, which is an object", param=where)
        kind = item.get("type", "message")
        if kind == "reasoning":
            message = _read_thoughts(item, where)
        elif kind == "message":
            message = _read_message(item, where, until)
        elif kind == "function_call":
            message = _read_call(item, where)
        elif kind == "function_call_output":
            message = _read_result(item, where, until)
        else:
            raise BadRequest(
                f"{where} must be of type message, reasoning, function_call or function_call_output: nothing is stored "
                "here, and only functions are called",
                param=where,
            )
        if message is None:
            continue
        # in place: with many calls, copies of the turn would take the square of the time
        if message["role"] != "assistant" or last not in BEFORE[kind]:
            messages.append(message)
        elif kind == "function_call":
            messages[-1].setdefault("tool_calls", []).extend(message.get("tool_calls", []))
        else:
            messages[-1].update(message)
        last = kind if message["role"] == "assistant" else None
    return messages


def _read_thoughts(item: dict[str, Any], where: str) -> Message | None:
    """Read the thoughts of a reply, or return None if the harness has left them out."""
    check_fields(item, ("type", "content"), where, ignored=NAMES)
    content = item.get("content")
    if not content:
        return None
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content must be a list of parts of type reasoning_text", param=where)
    thoughts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}.content must be a list of parts of type reasoning_text", param=where)
        thoughts.append(part["text"])
    return {"role": "assistant", "content": "", "reasoning": "".join(thoughts)}


def _read_message(item: dict[str, Any], where: str, until: float) -> Message:
    if item.get("role") not in ROLES:
        raise BadRequest(f"{where} must be a message whose role is one of {', '.join(ROLES)}", param=where)
    check_fields(item, ("type", "role", "content"), where, ignored=NAMES)
    return make_message(item["role"], _read_parts(item.get("content"), f"{where}.content", until))


def _read_call(item: dict[str, Any], where: str) -> Message:
    check_fields(item, ("type", "call_id", "name", "arguments"), where, ignored=NAMES)
    form = "{type: function_call, call_id, name, arguments}"
    call = read_call(
        item.get("call_id", ""), item.get("name"), item.get("arguments"), where, key="arguments", form=form
    )
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _read_result(item: dict[str, Any], where: str, until: float) -> Message:
    check_fields(item, ("type", "call_id", "output"), where, ignored=NAMES)
    if not isinstance(item.get("call_id"), str):
        raise BadRequest(f"{where} must be {{type: function_call_output, call_id, output}}", param=where)
    message = make_message("tool", _read_parts(item.get("output"), f"{where}.output", until))
    message["tool_call_id"] = item["call_id"]
    return message


def _read_parts(content: Any, where: str, until: float) -> list[Part]:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text, or a list of parts: the policy sees nothing else", param=where)
    return [_read_part(part, f"{where}[{i}]", until) for i, part in enumerate(content)]


def _read_part(part: Any, where: str, until: float) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text"):
        check_fields(part, ("type", "text"), where, ignored=("annotations", "logprobs"))
        return read_part({"type": "text", "text": part.get("text")}, where, until)
    if kind == "input_image":
        check_fields(part, ("type", "image_url"), where, ignored=("detail",))
        return read_part({"type": "image_url", "image_url": part.get("image_url")}, where, until)
    raise BadRequest(
        f"{where} must be a part of type input_text, output_text or input_image: the policy sees nothing else",
        param=where,
    )


def _read_tool(given: Any, where: str) -> ToolSpec:
    if not isinstance(given, dict) or given.get("type") != "function":
        kind = given.get("type") if isinstance(given, dict) else given
        raise BadRequest(f"{where} is of type {kind!r:.40}, and only functions are called: leave it out", param="tools")
    check_fields(given, ("type", "name", "description", "parameters", "strict"), where)
    if not isinstance(given.get("name"), str):
        raise BadRequest(f"{where} must be {{type: function, name, description, parameters}}", param="tools")
    return make_tool(given["name"], given.get("description"), given.get("parameters"), given.get("strict"))


def write_answer(answer: ChatResponse, created: int) -> dict[str, Any]:
    """Return the body of a complete response."""
    is_cut = answer.finish_reason == "length"
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    return _write_head(answer, created) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _write_items(answer),
        "usage": usage,
    }


def stream_answer(answer: ChatResponse, created: int, ask: ChatRequest) -> Iterator[str]:
    """Yield the events of a streamed response, each item as one delta."""
    numbers = count()
    for event in _list_events(answer, created):
        yield write_event(event | {"sequence_number": next(numbers)})


def _list_events(answer: ChatResponse, created: int) -> Iterator[dict[str, Any]]:
    begun = _write_head(answer, created)
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for i, item in enumerate(_write_items(answer)):
        empty = {"content": []} if "content" in item else {"arguments": ""}
        yield {
            "type": "response.output_item.added",
            "output_index": i,
            "item": item | empty | {"status": "in_progress"},
        }
        place = {"item_id": item["id"], "output_index": i}
        if item["type"] == "function_call":
            yield from _list_deltas("response.function_call_arguments", place, "arguments", item["arguments"])
        else:
            [part] = item["content"]
            place["content_index"] = 0
            yield {"type": "response.content_part.added", **place, "part": part | {"text": ""}}
            yield from _list_deltas(f"response.{part['type']}", place, "text", part["text"])
            yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    whole = write_answer(answer, created)
    yield {"type": f"response.{whole['status']}", "response": whole}


def _list_deltas(name: str, place: dict[str, Any], key: str, text: str) -> Iterator[dict[str, Any]]:
    rest = {"logprobs": []} if name == "response.output_text" else {}
    yield {"type": f"{name}.delta", **place, "delta": text, **rest}
    yield {"type": f"{name}.done", **place, key: text, **rest}


def _write_head(answer: ChatResponse, created: int) -> dict[str, Any]:
    """Return a response without a reply."""
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": MODEL,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _write_items(answer: ChatResponse) -> list[dict[str, Any]]:
    message, calls = answer.message, answer.message.get("tool_calls", [])
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if "reasoning" in message:
        content = [{"type": "reasoning_text", "text": message["reasoning"]}]
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": content})
    if message["content"] or not calls:
        content = [{"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}]
        items.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": content})
    for i, call in enumerate(calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{answer.id}-{i}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"]),
            }
        )
    return [item | {"status": status} for item in items]


RESPONSES = Dialect(path="responses", read=read_ask, write=write_answer, stream=stream_answer)
