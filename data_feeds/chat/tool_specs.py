"""Tool specifications in OpenAI's format, and validation of tool calls against them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from core.errors import first_line, quote, shorten
from core.text.json_text import holds_lone_surrogate
from core.types.messages import FunctionCall, ToolSpec, name_of_tool
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.read_messages import holds_null
from data_feeds.rows.values import load_json

FORM = "{type: function, function: {name, description, parameters}}"


def read_tools(given: Any, *, fills_gaps: bool) -> list[ToolSpec]:
    """Return the tools of a row, from a list or JSON text. Raises InvalidRow for an invalid tool.

    fills_gaps: the file format writes null for keys that another row's object has.
    """
    if given is None:
        return []
    is_text = isinstance(given, str)
    if is_text:
        try:
            given = load_json(given)
        except ValueError as error:
            raise InvalidRow("bad_tools", f"tools is text and no JSON: {first_line(error)}") from error
    if not isinstance(given, list):
        raise InvalidRow("bad_tools", f"tools must be a list of {FORM}, found {given!r:.60}")
    # a null may be a filled gap, which would change the meaning of a schema
    if fills_gaps and not is_text and holds_null(given):
        raise InvalidRow(
            "bad_tools",
            "tools hold null, and this kind of file writes null for every key that another tool has: write tools as "
            "JSON text",
        )
    check_tools(given)
    return given


def check_tools(tools: Sequence[Any]) -> None:
    """Raise InvalidRow for an invalid tool or a duplicate name."""
    for tool in tools:
        if wrong := _find_wrong(tool):
            raise InvalidRow("bad_tools", wrong)
    names = [name_of_tool(tool) for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidRow("bad_tools", f"two tools are called {twice[0]!r:.60}")


def _find_wrong(tool: Any) -> str:
    """Return the problem of a tool specification, or ""."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        return f"a tool must be {FORM}, found {tool!r:.60}"
    name, described, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not name.strip():
        return f"a tool has no name, found {function!r:.60}"
    if not isinstance(described, str | None):
        return f"the description of the tool {name:.60} must be text, found {described!r:.60}"
    if not isinstance(parameters, dict) or parameters.get("type") != "object":
        return f"parameters of the tool {name:.60} must be a JSON schema of the type object, found {parameters!r:.60}"
    try:
        # as text, since a cache needs hashable keys
        wrong = _find_flaw(json.dumps(parameters))
    except (TypeError, RecursionError) as error:
        wrong = first_line(error)
    return f"parameters of the tool {name:.60} are no JSON schema: {wrong}" if wrong else ""


@lru_cache(maxsize=1024)
def _find_flaw(parameters: str) -> str:
    """Return the problem of a JSON schema, or "". Cached: rows repeat their tools, and the check is slow."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    schema = json.loads(parameters)
    try:
        validator_for(schema).check_schema(schema)
    except (SchemaError, RecursionError) as error:
        return _first_words(error)
    return ""


def find_misfit(call: FunctionCall, tools: Sequence[ToolSpec]) -> str:
    """Return the reason why a tool call does not fit these tools, as a sentence, or ""."""
    name, arguments = call["name"], call["arguments"]
    # a harness may leave the parameters out
    known = {name_of_tool(tool): tool["function"].get("parameters") or {} for tool in tools}
    if name not in known:
        return f"There is no function {quote(name)}; there {_list_names(list(known))}."
    try:
        # the template writes arguments as JSON, which knows no NaN
        json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):
        return f"The arguments of {quote(name)} hold a number or a depth that JSON does not have."
    if holds_lone_surrogate(arguments):
        return f"The arguments of {quote(name)} hold half of a character."
    if misfit := _find_schema_error(arguments, known[name]):
        return f"The arguments of {quote(name)} do not fit its schema: {misfit}."
    return ""


def _list_names(names: list[str]) -> str:
    return f"are {shorten(', '.join(names))}" if len(names) > 1 else f"is {names[0]}" if names else "is none"


def _find_schema_error(arguments: Mapping[str, Any], schema: dict[str, Any]) -> str:
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:  # the registry is empty, so that a $ref in a data set never opens a connection
        found = best_match(validator_for(schema)(schema, registry=Registry()).iter_errors(arguments))
    except Exception as error:  # a border: a $ref that leads nowhere, a pattern that is no regular expression
        return f"it cannot be checked ({first_line(error)})"
    if found is None:
        return ""
    place = "/".join(map(str, found.absolute_path))
    return shorten(f"{place}: {_first_words(found)}" if place else _first_words(found))


def _first_words(error: Exception) -> str:
    return first_line(Exception(getattr(error, "message", str(error))))
