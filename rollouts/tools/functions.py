"""Python functions as tools: name, description and JSON schema come from signature and docstring."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from core.errors import UserError, first_line
from core.messages import ToolSpec

F = TypeVar("F", bound=Callable[..., Any])
MARK = "_is_tool"
PLAIN = (int, float, str, bool, list, tuple, dict, type(None), Any, ...)
"""Types that JSON has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that can be called."""

    spec: ToolSpec
    call: Callable[..., Any]
    """Function, or coroutine function, that takes the arguments by name."""

    @property
    def name(self) -> str:
        return self.spec["function"]["name"]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""
        return self.spec["function"]["parameters"]


def tool(function: F) -> F:
    """Mark a method of a ToolEnv as a tool."""
    setattr(function, MARK, True)
    return function


def make_spec(function: Callable[..., Any]) -> ToolSpec:
    """Return a function's description in OpenAI's form. Raises UserError for one that lacks a type or a text.

    A first argument `self` without a type is left out.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    who = f"the tool {getattr(function, '__name__', function)!r}"
    try:
        described = get_json_schema(function)["function"]
        hints = get_type_hints(function)
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise UserError(
            f"{who} cannot be described to the policy: {first_line(error)}; give every argument a type, and the "
            "function a docstring with a line for each under `Args:`"
        ) from error
    for argument, hint in hints.items():
        if argument != "return" and (strange := _find_strange(hint)):
            raise UserError(
                f"{who}: the argument {argument!r} has the type {strange}, which is not one of JSON's: use int, float, "
                "str, bool, list, dict, Literal, or unions of them"
            )
    parameters = dict(described["parameters"])
    parameters["properties"] = {n: schema for n, schema in parameters["properties"].items() if n != "return"}
    return {
        "type": "function",
        "function": {"name": described["name"], "description": described["description"], "parameters": parameters},
    }


def make_tool(function: Callable[..., Any]) -> Tool:
    """Return a function as a tool. Raises UserError for one that cannot be described."""
    return Tool(spec=make_spec(function), call=function)


def _find_strange(hint: Any) -> str:
    """Return the name of a type in a hint that JSON does not have; "" where there is none."""
    origin = get_origin(hint)
    if origin is None:
        return "" if hint in PLAIN else getattr(hint, "__name__", str(hint))
    if origin is Literal:
        return ""
    if origin in (list, tuple, dict, Union, types.UnionType):
        return next(filter(None, map(_find_strange, get_args(hint))), "")
    return str(hint)


def find_mismatch(value: Any, schema: Mapping[str, Any], where: str) -> str:
    """Return in what a value differs from a JSON schema, as a part of a sentence; "" where it does not.

    Types, choices, items, properties and what is required are compared; whatever else a schema says is the tool's to
    check.

    >>> find_mismatch({"a": 1}, {"type": "object", "properties": {"a": {"type": "string"}}}, "the arguments")
    'a must be a string, found 1'
    """
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        found = [find_mismatch(value, one, where) for one in choices]
        return "" if "" in found or (value is None and schema.get("nullable")) else found[0]
    if value is None and schema.get("nullable"):
        return ""
    given = schema.get("type")
    kinds = given if isinstance(given, list) else [given] if given else []
    if kinds and not any(_is_kind(value, kind) for kind in kinds):
        return f"{where} must be {' or '.join(_NAMES.get(kind, kind) for kind in kinds)}, found {value!r:.60}"
    if (enum := schema.get("enum")) is not None and value not in enum:
        return f"{where} must be one of {', '.join(map(repr, enum))}, found {value!r:.60}"
    if isinstance(value, dict):
        return _find_mismatch_of_object(value, schema, where)
    if isinstance(value, list) and isinstance(items := schema.get("items"), dict):
        return next(filter(None, (find_mismatch(v, items, f"{where}[{i}]") for i, v in enumerate(value))), "")
    return ""


def _find_mismatch_of_object(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> str:
    properties: Mapping[str, Any] | None = schema.get("properties")
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        return f"{where} lack {missing[0]!r}"
    others = schema.get("additionalProperties", properties is None)
    for name, one in value.items():
        of_one = (properties or {}).get(name, others)
        if of_one is False:
            return f"{where} have no {name!r:.60}; there are {', '.join(properties or ()) or 'none'}"
        if isinstance(of_one, dict) and (found := find_mismatch(one, of_one, name)):
            return found
    return ""


_NAMES = {
    **{"string": "a string", "integer": "a whole number", "number": "a number", "boolean": "true or false"},
    **{"array": "a list", "object": "an object", "null": "null"},
}


def _is_kind(value: Any, kind: str) -> bool:
    match kind:
        case "string":
            return isinstance(value, str)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
        case "null":
            return value is None
        case _:
            return True
