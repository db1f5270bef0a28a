"""xLAM function calling, 60k (https://arxiv.org/abs/2406.18518, CC BY 4.0): questions, tools, and expected calls.

    python -m data_prep.xlam --out data/xlam/train.parquet
    python -m data_prep.xlam --sft --out data/xlam/sft.parquet --from downloads/xlam_function_calling_60k.json

An original row is {"id", "query", "tools", "answers"}, the last two as JSON text. Our answer is JSON text of the calls,
[{"name", "arguments"}]. With --sft, the calls are also the last turn. Python types of the original ("int", "List[str],
optional") become a JSON schema. The hub requires acceptance of a form; otherwise use --from with a downloaded file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.text.json_text import decode_json
from core.types.messages import FunctionCall, Message, ToolSpec
from data_feeds.chat.tool_specs import check_tools, find_misfit
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows, Reason
from data_feeds.rows.read_messages import name_call
from data_feeds.rows.values import to_text
from data_prep.rows import Record, Row, filter_records, number_records, read_hub, read_records
from data_prep.script import conversion_parser, convert, run_script

HUB_ID = "Salesforce/xlam-function-calling-60k"
TYPES = {
    **{"str": "string", "int": "integer", "float": "number", "bool": "boolean", "none": "null"},
    # JSON has no tuples and no sets.
    **{"list": "array", "tuple": "array", "set": "array", "dict": "object"},
    **{kind: kind for kind in ("string", "integer", "number", "boolean", "null", "array", "object")},
}
"""Python type name -> JSON schema type."""


def make(records: list[Record], *, sft: bool = False) -> tuple[list[Row], InvalidRows]:
    """Convert records of the original."""

    def make_row(numbered: str, record: Record) -> Row:
        own = record.get("id")
        return _make_row(numbered if own is None else f"xlam/{to_text(own, 'id', 'bad_id')}", record, sft=sft)

    return filter_records(number_records("xlam", records), make_row)


def _make_row(row_id: str, record: Record, *, sft: bool) -> Row:
    query = record.get("query")
    if not isinstance(query, str) or not query.strip():
        raise InvalidRow("missing_column", "it has no query")
    tools = [_make_tool(given) for given in _read_list(record, "tools", "bad_tools")]
    check_tools(tools)
    calls = [_make_call(given) for given in _read_list(record, "answers", "bad_answer")]
    if misfits := list(filter(None, (find_misfit(call, tools) for call in calls))):
        raise InvalidRow("bad_answer", misfits[0].removesuffix("."))
    messages: list[Message] = [{"role": "user", "content": query}]
    if sft:
        if not calls:
            raise InvalidRow("no_reply", "no call answers it")
        made: Message = {"role": "assistant", "content": ""}
        made["tool_calls"] = [{"id": name_call(n), "type": "function", "function": c} for n, c in enumerate(calls)]
        messages.append(made)
    return Row(
        id=row_id,
        messages=messages,
        answer=json.dumps(calls, ensure_ascii=False),
        tools=json.dumps(tools, ensure_ascii=False),
    )


def _read_list(record: Record, column: str, reason: Reason) -> list[Any]:
    given = record.get(column)
    if isinstance(given, str):
        try:
            given = decode_json(given)
        except ValueError as error:
            raise InvalidRow(reason, f"{column} is no JSON: {error}") from error
    if not isinstance(given, list):
        raise InvalidRow(reason, f"{column} must be JSON text of a list, found {given!r:.60}")
    return given


def _make_call(given: Any) -> FunctionCall:
    name, arguments = (given.get(key) for key in ("name", "arguments")) if isinstance(given, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise InvalidRow("bad_answer", f"an answer must be {{name, arguments}}, found {given!r:.60}")
    return {"name": name, "arguments": arguments}


def _make_tool(given: Any) -> ToolSpec:
    if not isinstance(given, dict) or not isinstance(given.get("parameters"), dict):
        raise InvalidRow("bad_tools", f"a tool must be {{name, description, parameters}}, found {given!r:.60}")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, described in given["parameters"].items():
        if not isinstance(described, dict):
            raise InvalidRow("bad_tools", f"a parameter must be {{type, description}}, found {described!r:.60}")
        schema, optional = make_schema(str(described.get("type", "")))
        more = {key: described[key] for key in ("description", "default") if key in described}
        properties[name] = schema | more
        # an argument with a default may be omitted, whatever the type says
        if not optional and "default" not in described:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {key: given[key] for key in ("name", "description") if key in given}
    return {"type": "function", "function": function | {"parameters": parameters}}


def make_schema(written: str) -> tuple[dict[str, Any], bool]:
    """Return the JSON schema of a Python type, and whether it is optional. {} for a type without JSON equivalent.

    >>> make_schema("List[int], optional")
    ({'type': 'array', 'items': {'type': 'integer'}}, True)
    >>> make_schema("Optional[Union[str, float]]")
    ({'anyOf': [{'type': 'string'}, {'type': 'number'}]}, True)
    >>> make_schema("Callable[[float], float]"), make_schema("Dict[str, int]")
    (({}, False), ({'type': 'object'}, False))
    """
    parts = _split_list(written)
    optional = "optional" in (part.lower() for part in parts[1:])
    name, _, inner = parts[0].partition("[")
    name = name.strip().lower().removeprefix("typing.")
    inside = _split_list(inner.removesuffix("]")) if inner else []
    if name == "optional" and inside:
        return make_schema(inside[0])[0], True
    if name == "union" and inside:
        return {"anyOf": [make_schema(one)[0] for one in inside]}, optional
    if name not in TYPES:
        return {}, optional
    schema: dict[str, Any] = {"type": TYPES[name]}
    if schema["type"] == "array" and len(inside) == 1 and (items := make_schema(inside[0])[0]):
        schema["items"] = items
    return schema, optional


def _split_list(text: str) -> list[str]:
    """Split at commas outside brackets.

    >>> _split_list("Dict[str, int], optional")
    ['Dict[str, int]', 'optional']
    """
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.xlam", __doc__)
    parser.add_argument("--from", type=Path, dest="source", help="local JSON or JSONL, also .gz, instead of the hub")
    parser.add_argument("--sft", action="store_true", help="with the calls as the last turn")
    args = parser.parse_args(argv)

    def made() -> tuple[list[Row], InvalidRows]:
        records = read_records(args.source) if args.source else read_hub(HUB_ID, "train")
        return make(records, sft=args.sft)

    convert(parser, args, made)


if __name__ == "__main__":
    run_script(main)
