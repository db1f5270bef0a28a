"""Parse the messages of a row into our form (core/types/messages.py), with images that are not loaded yet.

In place of an image, a part holds what the row has there: bytes, a path or a data URI. It has no image if it takes the
next one of the row's column. data_feeds/images/read_images.py loads them.
"""

from __future__ import annotations

from typing import Any, cast

from core.errors import quote
from core.types.messages import ROLES, ImagePart, Message, Part, ToolCall
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.values import IMAGE_TYPES, SOURCES, is_absent, load_json

REASONING = ("reasoning", "reasoning_content")
"""Keys under which data sets store the reasoning of an assistant turn."""
FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name", "train", "weight", *REASONING}


def read_messages(given: Any, column: str, *, fills_gaps: bool) -> list[Message]:
    """Parse the messages of a column. Raises InvalidRow for an invalid list, and for content that would be lost.

    fills_gaps: the file format writes null for keys that another row's object has.
    """
    if not isinstance(given, list) or not given or not all(map(_is_message, given)):
        raise InvalidRow(
            "bad_messages", f"{column} must be text or a list of {{role, content}} texts, found {given!r:.60}"
        )
    if lost := {k for m in given for k, v in m.items() if k not in FIELDS and v is not None}:
        raise InvalidRow(
            "bad_messages",
            f"a message holds {min(lost)!r}, which is not passed to the template: remove it, or write it into the "
            "content",
        )
    if strange := sorted({m["role"] for m in given} - set(ROLES)):
        raise InvalidRow(
            "bad_messages",
            f"a message has the role {strange[0]!r:.60}, which is none of {', '.join(ROLES)}: rename it "
            "(form: sharegpt of the source renames those of ShareGPT)",
        )
    messages: list[Message] = []
    for turn in given:
        # ids of calls without one are numbered over the whole conversation, so that they are unique
        made = sum(len(m.get("tool_calls", [])) for m in messages)
        messages.append(_read_message(turn, made=made, fills_gaps=fills_gaps))
    _check_results(messages)
    return messages


def _is_message(turn: Any) -> bool:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        return False
    content = turn.get("content")
    return isinstance(content, str | list) or (content is None and bool(turn.get("tool_calls")))


def _read_message(turn: dict[str, Any], *, made: int, fills_gaps: bool) -> Message:
    """Parse a message. `made` is the number of earlier calls in the conversation."""
    parts = _read_content(turn.get("content"))
    message: Message = {"role": turn["role"], "content": "".join(p["text"] for p in parts if p["type"] == "text")}
    if any(part["type"] == "image" for part in parts):
        message["parts"] = parts
        if turn["role"] == "assistant":
            raise InvalidRow("bad_image", "a turn of assistant holds an image, and the policy writes text alone")
    if calls := turn.get("tool_calls"):
        if not isinstance(calls, list):
            raise InvalidRow("bad_messages", f"tool_calls must be a list of calls, found {calls!r:.60}")
        message["tool_calls"] = [_read_call(call, n, fills_gaps) for n, call in enumerate(calls, start=made)]
    # some data sets write the same reasoning under both keys
    thoughts = {said for name in REASONING if (said := _read_name(turn, name))}
    if len(thoughts) > 1:
        raise InvalidRow("bad_messages", "a message has reasoning and reasoning_content, and they differ")
    if thoughts:
        message["reasoning"] = thoughts.pop()
    if (answered := _read_name(turn, "tool_call_id")) is not None:
        message["tool_call_id"] = answered
    if (name := _read_name(turn, "name")) is not None:
        message["name"] = name
    if (train := _read_train(turn)) is not None:
        message["train"] = train
    for field, role in (("tool_calls", "assistant"), ("reasoning", "assistant"), ("tool_call_id", "tool")):
        if field in message and turn["role"] != role:
            raise InvalidRow(
                "bad_messages", f"{field} belongs to a turn of {role}, found it in a turn of {turn['role']}"
            )
    return message


def _read_train(turn: dict[str, Any]) -> bool | None:
    """Return whether to train on a turn: its `train`, or its `weight` as OpenAI's files write it; None if unset."""
    given = {name: turn[name] for name in ("train", "weight") if turn.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise InvalidRow("bad_messages", f"{name} of a message must be true, false, 1 or 0, found {value!r:.60}")
    said = {bool(value) for value in given.values()}
    if len(said) > 1:
        raise InvalidRow("bad_messages", "a message has train and weight, and they differ")
    return said.pop() if said else None


def _read_name(turn: dict[str, Any], field: str) -> str | None:
    given = turn.get(field)
    if not isinstance(given, str | None):
        raise InvalidRow("bad_messages", f"{field} of a message must be text, found {given!r:.60}")
    return given


def _read_content(content: Any) -> list[Part]:
    """Parse content: text, a list of parts, or None beside tool calls."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_read_part(part) for part in content]


def _read_part(part: Any) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", *IMAGE_TYPES) and isinstance(kind, str):
        raise InvalidRow(
            "bad_messages", f"a message holds a part of the type {quote(kind)}, and only text and images can be read"
        )
    if kind in IMAGE_TYPES:
        known = {"type", "text", *SOURCES}
        if lost := {key for key, value in part.items() if key not in known and value is not None}:
            raise InvalidRow("bad_image", f"an image holds {min(lost)!r}, which is not read: remove it")
        if part.get("text") is not None:
            raise InvalidRow("bad_messages", f"a part of a content must be text or an image, found {part!r:.60}")
        return cast(ImagePart, {"type": "image", **_find_image(part)})
    # Columnar files give every part all keys, most of them null.
    if kind != "text" or not isinstance(part.get("text"), str) or any(not is_absent(part.get(key)) for key in SOURCES):
        raise InvalidRow("bad_messages", f"a part of a content must be {{type: text, text}}, found {part!r:.60}")
    return {"type": "text", "text": part["text"]}


def _find_image(part: dict[str, Any]) -> dict[str, Any]:
    """Return the image of a part under the key image, or {} if it takes the next image of the row's column."""
    given = [name for name in sorted(SOURCES) if not is_absent(part.get(name))]
    if len(given) > 1:
        raise InvalidRow("bad_image", f"a part has several images: {', '.join(given)}")
    if not given:
        return {}
    source = part[given[0]]
    # OpenAI's form is {image_url: {url}}
    return {"image": source["url"] if isinstance(source, dict) and "url" in source else source}


def _read_call(call: Any, n: int, fills_gaps: bool) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRow(
            "bad_messages", f"a call must be {{id, type, function: {{name, arguments}}}}, found {call!r:.60}"
        )
    if call.get("type") not in (None, "function"):
        raise InvalidRow("bad_messages", f"a call has the type {call['type']!r:.60}, and only function can be read")
    call_id = call.get("id")
    if not isinstance(call_id, str | None):
        raise InvalidRow("bad_messages", f"id of a call must be text, found {call_id!r:.60}")
    arguments = _read_arguments(function.get("arguments"), function["name"], fills_gaps)
    return {
        "id": call_id or name_call(n),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def name_call(n: int) -> str:
    """Return an id for the nth call of a conversation. Some templates require exactly nine characters.

    >>> name_call(0), name_call(12)
    ('call00000', 'call00012')
    """
    return f"call{n:05d}"


def _read_arguments(given: Any, function: str, fills_gaps: bool) -> dict[str, Any]:
    if isinstance(given, dict):
        # A null cannot be told from a filled gap, and a wrong argument would be trained on.
        if fills_gaps and holds_null(given):
            raise InvalidRow(
                "bad_messages",
                f"the arguments of a call of {function:.60} hold null, and this kind of file writes null for every "
                "argument that another call has: write arguments as JSON text",
            )
        return given
    try:
        arguments = load_json(given) if isinstance(given, str) else None
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRow(
            "bad_messages", f"arguments of a call of {function:.60} must be a JSON object, found {given!r:.60}"
        )
    return arguments


def holds_null(value: Any) -> bool:
    """Return whether an object contains null at any depth.

    >>> holds_null({"a": [{"b": None}]}), holds_null({"a": [0, ""]})
    (True, False)
    """
    if isinstance(value, dict):
        return any(map(holds_null, value.values()))
    return value is None or (isinstance(value, list) and any(map(holds_null, value)))


def _check_results(messages: list[Message]) -> None:
    """Raise InvalidRow if a result answers no call, or two calls of a reply have the same id."""
    made: set[str] = set()
    for message in messages:
        ids = [call["id"] for call in message.get("tool_calls", [])]
        if len({*ids}) < len(ids):
            raise InvalidRow("bad_messages", "two calls of one reply have the same id")
        made |= {*ids}
        answered = message.get("tool_call_id")
        if answered is not None and answered not in made:
            raise InvalidRow("bad_messages", f"a result answers the call {answered!r:.60}, which no turn before made")
