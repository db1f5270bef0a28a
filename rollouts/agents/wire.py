"""Agents' requests and replies, whatever protocol their program speaks. No tokens here.

Each protocol is a file of dialects/, which translates to and from the classes of this one. Requests that would change
sampling are refused with one sentence. Samples at another temperature, for example, would come from a policy other than
the trained one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from core.errors import quote
from core.timing.deadlines import AGENT_REQUEST_TIMEOUT_S
from core.types.images import ImageRefused, read_data_uri, read_image
from core.types.messages import Message, Part, ToolCall, ToolSpec
from core.types.samples import Stop
from core.types.truncation import EVERYTHING_KEPT, Truncation
from rollouts.agents.bounded_json import Unreadable, read_json

LIMIT_CODES: dict[Stop, str] = {"length": "context_length_exceeded", "turns": "max_turns_exceeded"}
"""Codes of requests beyond a limit of the policy, which a harness can tell from mistakes. The first is OpenAI's."""
MODEL = "policy"
"""Name of the model at every endpoint."""
MOST_PIXELS = 2**24
"""Maximum number of pixels of an image. Decoding more would stop other threads for too long."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "store": (False,),
}
"""Parameters of all protocols that are accepted only with these neutral values."""


class BadRequest(Exception):
    """Refused request. The message is one sentence for the author of the harness."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        """status: HTTP status. param: name of the wrong parameter. code: of a limit of the policy, LIMIT_CODES."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def write(self) -> dict[str, Any]:
        """Return the response body, in OpenAI's format."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


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
    """One of stop, length and tool_calls."""
    prompt_tokens: int
    completion_tokens: int
    stop_string: str | None = None
    """String of the request's `stop` that ended the reply."""


class ReadRequest(Protocol):
    """Function that reads a parsed body. Raises BadRequest for an invalid or refused request.

    temperature, truncation: sampling of the run. until: deadline, as a time of time.monotonic().
    """

    def __call__(
        self, body: Any, *, temperature: float, truncation: Truncation = EVERYTHING_KEPT, until: float = math.inf
    ) -> ChatRequest: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Protocol of a client: pure translations of requests, replies and refusals. `created` is in Unix seconds."""

    path: str
    """Path below the base URL."""
    read: ReadRequest
    write: Callable[[ChatResponse, int], dict[str, Any]]
    """Returns the body of a complete response, given `created`."""
    stream: Callable[[ChatResponse, int, ChatRequest], Iterator[str]]
    """Yields the server-sent events of a streamed response."""
    refuse: Callable[[BadRequest], dict[str, Any]] = BadRequest.write


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of a protocol's requests. Others are refused."""

    read: Sequence[str]
    without_effect: Sequence[str]
    """Parameters of the vendor's own service, ignored."""
    neutral: Mapping[str, tuple[Any, ...]]
    """Parameters accepted only with these neutral values."""


def check_body(
    body: Any, parameters: Parameters, *, temperature: float, truncation: Truncation = EVERYTHING_KEPT
) -> dict[str, Any]:
    """Return the body of a request for the policy. Raises BadRequest for another model, or a refused parameter."""
    if not isinstance(body, dict):
        raise BadRequest("the body of a request must be a JSON object with model and messages")
    if (model := body.get("model")) != MODEL:
        raise BadRequest(f"there is no model {quote(model)} here: it is called {MODEL}", status=404, param="model")
    # what is off in the run has several neutral values
    rules = {name: value for name, value in asdict(truncation).items() if value != getattr(EVERYTHING_KEPT, name)}
    _check_parameters(body, parameters, {"temperature": temperature, **rules})
    return body


def _check_parameters(body: dict[str, Any], parameters: Parameters, sampling: Mapping[str, float]) -> None:
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
        if name in parameters.read or name in parameters.without_effect:
            continue
        if name not in parameters.neutral:
            raise BadRequest(
                f"{quote(name)} is not offered: the run decides how replies are sampled; leave it out", param=name
            )
        if value not in parameters.neutral[name]:
            raise BadRequest(
                f"{name} is {value!r:.80}, and it would sample from another distribution than the one in training, or "
                "is not offered: leave it out",
                param=name,
            )


def make_message(role: str, parts: list[Part]) -> Message:
    """Return a message of these parts."""
    message: Message = {"role": role, "content": "".join(part["text"] for part in parts if part["type"] == "text")}
    if any(part["type"] == "image" for part in parts):
        message["parts"] = parts
    return message


def read_part(part: Any, where: str, until: float) -> Part:
    """Read a part of a message, in the form of chat completions. Raises BadRequest."""
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


def read_call(id: Any, name: Any, arguments: Any, where: str, *, key: str, form: str) -> ToolCall:
    """Read a call of an assistant's turn. Raises BadRequest.

    arguments: a JSON object, or the text of one. key: their name in the call. form: shape of a call, for the refusal.
    """
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments or "{}")
        except Unreadable as error:
            raise BadRequest(f"{where}.{key} {error}", param=where) from error
    if not isinstance(arguments, dict) or not isinstance(name, str):
        raise BadRequest(f"{where} must be {form} with a JSON object as {key}", param=where)
    return {"id": str(id), "type": "function", "function": {"name": name, "arguments": arguments}}


def make_tool(name: str, description: Any, parameters: Any, strict: Any) -> ToolSpec:
    """Return a tool, without parts that the harness has not set. strict: false is the same as unset."""
    given = {"name": name, "description": description, "parameters": parameters, "strict": strict or None}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def read_max_tokens(body: dict[str, Any], *names: str) -> int | None:
    """Return the smallest of these limits on a reply, or None without one. Raises BadRequest."""
    asked = [body[name] for name in names if body.get(name) is not None]
    # type(), since isinstance(True, int) holds
    if wrong := [n for n in asked if type(n) is not int or n < 1]:
        raise BadRequest(f"{names[0]} must be a whole number from 1 on, found {wrong[0]!r:.40}", param=names[0])
    return min(asked, default=None)


def read_stop(stop: Any, name: str) -> tuple[str, ...]:
    """Read the strings that end a reply. Raises BadRequest."""
    strings: Any = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise BadRequest(f"{name} must be a text or a list of texts, none empty, found {stop!r:.80}", param=name)
    return tuple(strings)


def check_fields(given: dict[str, Any], read: Sequence[str], where: str, *, ignored: Sequence[str] = ()) -> None:
    """Raise BadRequest for a field that is neither read nor ignored, unless it is empty."""
    for name, value in given.items():
        if name not in read and name not in ignored and value not in (None, [], "", False):
            raise BadRequest(f"{where} has {quote(name)}, which no chat template is shown: leave it out", param=where)


def refuse_slow() -> BadRequest:
    """Return the refusal of a request that takes too long."""
    seconds = f"{AGENT_REQUEST_TIMEOUT_S:g} s"
    return BadRequest(f"the request was not received, parsed and rendered within {seconds}: send less", status=413)


def list_models(*, created: int) -> dict[str, Any]:
    """Return the body of the model list."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": created, "owned_by": "feynrl"}]}


def write_event(event: dict[str, Any]) -> str:
    """Return a server-sent event that has its type as name."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
