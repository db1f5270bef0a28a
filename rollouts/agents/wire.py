"""OpenAI's chat-completions format over HTTP: parse requests, write responses. No tokens here.

Requests that would change sampling are refused with one sentence. Samples at another temperature, for example, would
come from a policy other than the trained one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from core.errors import quote
from core.timing.deadlines import AGENT_REQUEST_TIMEOUT_S
from core.types.images import ImageRefused, read_data_uri, read_image
from core.types.messages import ROLES, Message, Part, ToolCall, ToolSpec
from core.types.truncation import EVERYTHING_KEPT, Truncation
from rollouts.agents.bounded_json import Unreadable, read_json

MODEL = "policy"
"""Name of the model at every endpoint."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "modalities": (["text"],),
    "store": (False,),
}
"""Parameters accepted only with these neutral values."""
WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")
"""Parameters of OpenAI's own service, ignored."""
READ = ("model", "messages", "tools", "tool_choice", "temperature", "max_tokens", "max_completion_tokens", "stop")
STREAMING = ("stream", "stream_options")
EMPTY_IN_MESSAGES = ("refusal", "annotations", "audio", "function_call")
"""Empty fields of a reply that clients send back."""
MOST_PIXELS = 2**24
"""Maximum number of pixels of an image. Decoding more would stop other threads for too long."""
REASONING = ("reasoning", "reasoning_content")
"""Names for the reasoning of an assistant turn."""


class BadRequest(Exception):
    """Refused request. The message is one sentence for the author of the harness."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None):
        """status: HTTP status. param: name of the wrong parameter."""
        super().__init__(message)
        self.status, self.param = status, param

    def write(self) -> dict[str, Any]:
        """Return the response body, in OpenAI's format."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """Request for a reply."""

    messages: list[Message]
    tools: list[ToolSpec]
    may_call: bool = True
    """False with tool_choice: none. The reply is then not parsed for calls."""
    must_call: bool = False
    """True if tool_choice demands a call. Not enforced, since that would change the distribution."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    streams: bool = False
    wants_usage: bool = False
    """True if a streamed response ends with token counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponse:
    """Reply sent to a harness."""

    id: str
    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


def read_ask(
    body: Any, *, temperature: float, truncation: Truncation = EVERYTHING_KEPT, until: float = math.inf
) -> ChatRequest:
    """Read a parsed request body. Raises BadRequest for an invalid or refused request.

    temperature, truncation: sampling of the run. until: deadline, as a time of time.monotonic().
    """
    if not isinstance(body, dict):
        raise BadRequest("the body of a request must be a JSON object with model and messages")
    if (model := body.get("model")) != MODEL:
        raise BadRequest(f"there is no model {quote(model)} here: it is called {MODEL}", status=404, param="model")
    # what is off in the run has several neutral values
    rules = {name: value for name, value in asdict(truncation).items() if value != getattr(EVERYTHING_KEPT, name)}
    _check_parameters(body, {"temperature": temperature, **rules})
    # clients send null for tools that the harness did not set
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not isinstance(tools, list):
        raise BadRequest("messages and tools must be lists", param="messages")
    choice = body.get("tool_choice")
    demands = choice == "required" or isinstance(choice, dict)
    if choice not in (None, "auto", "none") and not demands:
        raise BadRequest(f"tool_choice must be auto, none, required or a function, found {choice!r:.80}")
    options = body.get("stream_options") or {}
    return ChatRequest(
        messages=[read_message(m, f"messages[{i}]", until) for i, m in enumerate(messages)],
        tools=[_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
        may_call=choice != "none",
        must_call=demands,
        max_tokens=_read_max_tokens(body),
        stop=_read_stop(body.get("stop")),
        streams=bool(body.get("stream")),
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _check_parameters(body: dict[str, Any], sampling: Mapping[str, float]) -> None:
    """Raise BadRequest for parameters that would change sampling, or that nothing reads."""
    for name, value in body.items():
        # clients send null for every parameter that the harness did not set
        if value is None or value == sampling.get(name):
            continue
        if name in sampling:
            raise BadRequest(
                f"{name} is {value!r:.40}, and this run samples at rollout.{name}={sampling[name]:g}: leave it out",
                param=name,
            )
        if name in (*READ, *STREAMING, *WITHOUT_EFFECT):
            continue
        if name not in NEUTRAL:
            raise BadRequest(
                f"{quote(name)} is not offered: the run decides how replies are sampled; leave it out", param=name
            )
        if value not in NEUTRAL[name]:
            raise BadRequest(
                f"{name} is {value!r:.80}, and it would sample from another distribution than the one in training, or "
                "is not offered: leave it out",
                param=name,
            )


def read_message(given: Any, where: str, until: float) -> Message:
    """Parse a message of a request. Raises BadRequest for fields that no chat template reads."""
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise BadRequest(f"{where} must be an object whose role is one of {', '.join(ROLES)}", param=where)
    parts = _read_content(given.get("content"), where, until)
    text = "".join(part["text"] for part in parts if part["type"] == "text")
    message: Message = {"role": given["role"], "content": text}
    if any(part["type"] == "image" for part in parts):
        message["parts"] = parts
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
        elif name not in EMPTY_IN_MESSAGES:
            raise BadRequest(f"{where} has {quote(name)}, which no chat template is shown: leave it out", param=where)
    return message


def _read_content(content: Any, where: str, until: float) -> list[Part]:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content must be text, or a list of parts: the policy sees nothing else")
    return [_read_part(part, f"{where}.content[{i}]", until) for i, part in enumerate(content)]


def _read_part(part: Any, where: str, until: float) -> Part:
    # images are decoded here, and small files can hold large ones
    if time.monotonic() > until:
        raise refuse_slow()
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    url = part.get("image_url") if kind == "image_url" else None
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str):
        raise BadRequest(f"{where} must be a part of type text or image_url: the policy sees nothing else", param=where)
    # a harness must not make this process send requests
    if not url.startswith("data:"):
        raise BadRequest(f"{where}: an image by its address is not fetched: send it as a data URI", param=where)
    try:
        return {"type": "image", "image": read_image(read_data_uri(url), most_pixels=MOST_PIXELS)}
    except ImageRefused as refusal:
        raise BadRequest(f"{where}: {refusal}", param=where) from refusal


def _read_call(given: Any, where: str) -> ToolCall:
    function: Any = given.get("function") if isinstance(given, dict) else None
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
    # OpenAI's format is JSON text; an object is read too
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments or "{}")
        except Unreadable as error:
            raise BadRequest(f"{where}.function.arguments {error}", param=where) from error
    if not isinstance(arguments, dict) or not isinstance(name, str):
        raise BadRequest(
            f"{where} must be {{id, type: function, function: {{name, arguments}}}} with arguments that are a JSON "
            "object",
            param=where,
        )
    return {"id": str(given.get("id", "")), "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_tool(given: Any, where: str) -> ToolSpec:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(
            f"{where} must be {{type: function, function: {{name, description, parameters}}}}", param="tools"
        )
    return given


def _read_max_tokens(body: dict[str, Any]) -> int | None:
    asked = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    # type(), since isinstance(True, int) holds
    if wrong := [n for n in asked if type(n) is not int or n < 1]:
        raise BadRequest(f"max_tokens must be a whole number from 1 on, found {wrong[0]!r:.40}", param="max_tokens")
    return min(asked, default=None)


def _read_stop(stop: Any) -> tuple[str, ...]:
    strings: Any = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise BadRequest(f"stop must be a text or a list of texts, none empty, found {stop!r:.80}", param="stop")
    return tuple(strings)


def write_answer(answer: ChatResponse, *, created: int) -> dict[str, Any]:
    """Return the body of a complete response."""
    choice = {
        "index": 0,
        "message": write_message(answer.message),
        "finish_reason": answer.finish_reason,
        "logprobs": None,
    }
    return {
        "id": answer.id,
        "object": "chat.completion",
        "created": created,
        "model": MODEL,
        "choices": [choice],
        "usage": _write_usage(answer),
    }


def write_chunks(answer: ChatResponse, *, created: int, wants_usage: bool) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed response. The first chunk contains the whole reply."""
    delta = write_message(answer.message)
    for i, call in enumerate(delta.get("tool_calls", [])):
        # clients merge the chunks of a call by this number
        call["index"] = i
    head = {"id": answer.id, "object": "chat.completion.chunk", "created": created, "model": MODEL}
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


def refuse_slow() -> BadRequest:
    """Return the refusal of a request that takes too long."""
    seconds = f"{AGENT_REQUEST_TIMEOUT_S:g} s"
    return BadRequest(f"the request was not received, parsed and rendered within {seconds}: send less", status=413)


def list_models(*, created: int) -> dict[str, Any]:
    """Return the body of the model list."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": created, "owned_by": "feynrl"}]}


def _write_usage(answer: ChatResponse) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
