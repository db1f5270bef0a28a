"""Conversion of a row of a known form to our columns. Rows that cannot be converted raise InvalidRow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import quote
from data_feeds.rows.find_form import PAIR_KEYS, FormFit
from data_feeds.rows.forms import OURS, Turns
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.read_messages import name_call
from data_feeds.rows.values import IMAGE_TYPES, find_value, is_absent, load_json, parse_list, parse_turns

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function", "function_response"), "tool"),
    **{role: role for role in ("system", "developer")},
}
"""Role names of other forms, with ours."""
MARK = "<image>"
"""Mark in a text for the next image of the row's column."""
IMAGES = ("image", "images")
"""Columns with the images of a row: one image, or a list."""
UNREADABLE = ("video", "videos", "audio", "audios")
"""Columns that the messages of a row refer to, and that are not read."""
WITH_TURNS = ("messages", "chosen", "rejected")


def convert_row(fit: FormFit, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with our columns, and with those of its own that the form does not consume."""
    if lost := [name for name in UNREADABLE if row.get(name)]:
        raise InvalidRow("bad_messages", f"it has {lost[0]}, which are not read, and its messages may need them")
    images = count_images(row)
    made = row
    if fit.name != OURS:
        made = {name: value for name, value in row.items() if name not in fit.used}
        for ours, source in fit.form.fields.items():
            value = find_value(row, source) if isinstance(source, str) else build_turns(source, row)
            if value is not None:
                made[ours] = value
        if fit.begins_with_prompt:
            prompt = row.get(_get_prompt(fit))
            for name in ("chosen", "rejected"):
                if isinstance(reply := row.get(name), str) and isinstance(prompt, str):
                    made[name] = reply.removeprefix(prompt)
        if made.get("tools") is not None:
            made["tools"] = _wrap_tools(made["tools"])
    return place_images(made, images, is_ours=fit.name == OURS) if images else made


def _get_prompt(fit: FormFit) -> str:
    asked = fit.form.fields["messages"]
    assert isinstance(asked, Turns)
    return asked.user[0]


def build_turns(source: Turns, row: Mapping[str, Any]) -> Any:
    """Return the conversation made of several columns; text or turns of a single column as they are."""
    there = [name for name in source.columns if _is_given(find_value(row, name))]
    if len(there) == 1 and there[0] not in (source.system, source.history):
        value = find_value(row, there[0])
        if isinstance(value, str) and not _parse_turns(value, there[0]):
            return value  # text of one column: who says it depends on our column
        if isinstance(value, str) and not _needs_rewriting(value):
            return value  # as JSON text it says more: a null in it was written
    turns: list[dict[str, Any]] = []
    if source.system in there:
        turns += _read_turns(find_value(row, source.system), source.system, "system")
    if source.history in there:
        turns += _read_history(find_value(row, source.history), source.history)
    if source.whole in there:
        whole = _read_turns(find_value(row, source.whole), source.whole, "user")
        if turns and whole and whole[0].get("role") == "system":
            if whole[0] != turns[0]:
                raise InvalidRow("bad_messages", f"{source.system} and {source.whole} hold different system turns")
            whole = whole[1:]
        turns += whole
    asked = [find_value(row, name) for name in source.user if name in there]
    if asked and all(isinstance(text, str) for text in asked) and not _parse_turns(asked[0], source.user[0]):
        turns.append({"role": "user", "content": "\n".join(asked)})
    else:
        for name in source.user:
            if name in there:
                turns += _read_turns(find_value(row, name), name, "user")
    if source.assistant in there:
        turns += _read_turns(find_value(row, source.assistant), source.assistant, "assistant")
    return _number_calls(turns) if turns else None


def _is_given(value: Any) -> bool:
    return value is not None and value != "" and value != []


def _parse_turns(text: str, column: str) -> list[Any] | None:
    """Return the turns in JSON text of any form, or None for other text."""
    listed = parse_list(text)
    if listed and all(isinstance(turn, dict) and ("from" in turn or "role" in turn) for turn in listed):
        return listed
    return parse_turns(text, column)


def _needs_rewriting(text: str) -> bool:
    return any("from" in turn or turn.get("role") not in ROLES.values() for turn in parse_list(text) or [])


def _read_turns(value: Any, column: str, role: str) -> list[dict[str, Any]]:
    """Return the turns of a column: text, which is one turn of `role`, a turn, or a list of turns."""
    if isinstance(value, str):
        value = _parse_turns(value, column) or [{"role": role, "content": value}]
    listed = [value] if isinstance(value, dict) else value
    if not isinstance(listed, list) or not all(isinstance(turn, dict) for turn in listed):
        raise InvalidRow("bad_messages", f"{column} must be text or a list of turns, found {value!r:.60}")
    return [made for turn in listed for made in _read_turn(turn, column)]


def _read_turn(turn: dict[str, Any], column: str) -> list[dict[str, Any]]:
    if "from" not in turn and "role" not in turn:
        for asks, replies in PAIR_KEYS:
            if {asks, replies} <= turn.keys():
                return [{"role": "user", "content": turn[asks]}, {"role": "assistant", "content": turn[replies]}]
        if {"label", "text"} <= turn.keys():
            # a user's, since the text is written as it is: the end of a reply is in it
            return [{"role": "user", "content": turn["text"], "train": turn["label"]}]
    named, said = ("from", "value") if "from" in turn else ("role", "content")
    given = turn.get(named)
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise InvalidRow(
            "bad_messages", f"a turn of {column} is from {quote(given)}, which is none of {', '.join(ROLES)}"
        )
    if named == "role":
        return [turn | {"role": role}]
    # columnar files give every turn all keys
    rest = {name: value for name, value in turn.items() if name not in (named, said) and value is not None}
    if turn["from"] == "function_call":
        return [{"role": role, "content": None, "tool_calls": _read_calls(turn.get(said), column), **rest}]
    return [{"role": role, "content": turn.get(said), **rest}]


def _read_calls(value: Any, column: str) -> list[dict[str, Any]]:
    """Return the calls in the JSON text of a turn from function_call."""
    try:
        given = load_json(value) if isinstance(value, str) else value
    except ValueError:
        given = None
    listed = given if isinstance(given, list) else [given]
    calls: list[dict[str, Any]] = []
    for call in listed:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise InvalidRow(
                "bad_messages", f"a function_call of {column} must be JSON of {{name, arguments}}, found {value!r:.60}"
            )
        arguments = call.get("arguments", {})
        # as text, in which a null was written
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({"type": "function", "function": {"name": call["name"], "arguments": text}})
    return calls


def _read_history(value: Any, column: str) -> list[dict[str, Any]]:
    """Return the turns of a history, [[question, reply], ...]."""
    listed = parse_list(value) if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in listed):
        raise InvalidRow("bad_messages", f"{column} must be a list of [question, reply], found {value!r:.60}")
    return [
        {"role": role, "content": text}
        for pair in listed
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _number_calls(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the calls of a conversation ids, and the results after them the ids of the calls they answer."""
    made: list[dict[str, Any]] = []
    waiting: list[str] = []
    n = 0
    for turn in turns:
        if calls := turn.get("tool_calls"):
            if not isinstance(calls, list) or any(not isinstance(c, dict) or c.get("id") for c in calls):
                return turns
            waiting = [name_call(n + i) for i in range(len(calls))]
            n += len(calls)
            turn = turn | {"tool_calls": [c | {"id": i} for c, i in zip(calls, waiting, strict=True)]}
        elif turn["role"] == "tool" and not turn.get("tool_call_id") and waiting:
            turn = turn | {"tool_call_id": waiting.pop(0)}
        made.append(turn)
    return made


def _wrap_tools(tools: Any) -> Any:
    """Return tools in OpenAI's form, as JSON text; anything else as it is."""
    listed = parse_list(tools) if isinstance(tools, str) else tools
    if tools == "" or listed == []:
        return None
    if not isinstance(listed, list) or not all(
        isinstance(t, dict) and "name" in t and "function" not in t for t in listed
    ):
        return tools
    nothing = {"type": "object", "properties": {}}
    return json.dumps([{"type": "function", "function": {"parameters": nothing, **tool}} for tool in listed])


def count_images(row: Mapping[str, Any]) -> int:
    """Return the number of images in the columns of a row."""
    return sum(len(list_images(row[name])) for name in IMAGES if name in row)


def list_images(given: Any) -> list[Any]:
    """Return the images of a column: one image, a list, or JSON text of a list."""
    if isinstance(given, str) and (listed := parse_list(given)) is not None:
        given = listed
    return [] if is_absent(given) else given if isinstance(given, list) else [given]


def place_images(row: dict[str, Any], images: int, *, is_ours: bool) -> dict[str, Any]:
    """Return a row whose texts with marks, and whose numbered image parts, are parts without a number.

    In turns of another form that have neither, all images come before the first question. Raises InvalidRow if the
    marks are not as many as the images, or if the parts are in another order.
    """
    placed = row | {name: _place(row[name], name, images) for name in WITH_TURNS if row.get(name)}
    turns = placed.get("messages")
    if is_ours or not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return placed
    if any(map(_list_parts, turns)):
        return placed
    first = next((i for i, turn in enumerate(turns) if turn.get("role") == "user"), None)
    if first is not None:
        holes = [{"type": "image"} for _ in range(images)]
        content = [*holes, {"type": "text", "text": turns[first].get("content")}]
        placed["messages"] = [*turns[:first], turns[first] | {"content": content}, *turns[first + 1 :]]
    return placed


def _place(given: Any, column: str, images: int) -> Any:
    if isinstance(given, str) and MARK in given and column == "messages":
        given = parse_turns(given, column) or [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(turn, dict) for turn in given):
        return given
    has_parts = any(part.get("type") in IMAGE_TYPES for turn in given for part in _list_parts(turn))
    marks = 0 if has_parts else sum(_count_marks(turn.get("content")) for turn in given)
    numbers = [
        part["index"]
        for turn in given
        for part in _list_parts(turn)
        if part.get("type") == "image" and part.get("index") is not None
    ]
    if marks and marks != images:
        raise InvalidRow(
            "bad_image", f"it has {images} images, and {marks} marks {MARK} in {column}: write one for each"
        )
    if numbers and numbers != [*range(images)]:
        raise InvalidRow(
            "bad_image", f"the parts of {column} are of the images {numbers}: write them in order, from 0 on"
        )
    if not marks and not numbers:
        return given
    return [{**turn, "content": _split(turn.get("content"))} if "content" in turn else turn for turn in given]


def _list_parts(turn: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = turn.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _count_marks(content: Any) -> int:
    return content.count(MARK) if isinstance(content, str) else 0


def _split(content: Any) -> Any:
    """Return content with an image part in place of each mark, and image parts without their numbers."""
    if isinstance(content, list):
        return [{k: v for k, v in p.items() if k != "index"} if isinstance(p, dict) else p for p in content]
    if not _count_marks(content):
        return content
    parts: list[dict[str, Any]] = []
    for i, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts
