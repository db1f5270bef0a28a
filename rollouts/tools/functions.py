"""Tool specifications of Python functions: name, description and JSON schema from signature and docstring."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from core.errors import UserError, first_line, quote
from core.types.messages import FunctionCall, ToolSpec, name_of_tool
from data_feeds.chat.tool_specs import find_misfit

F = TypeVar("F", bound=Callable[..., Any])
MARK = "_is_tool"
PLAIN = (int, float, str, bool, list, tuple, dict, type(None), Any, ...)
"""Types with a JSON equivalent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Tool that can be called."""

    spec: ToolSpec
    call: Callable[..., Any]
    """Function or coroutine function with keyword arguments."""

    @property
    def name(self) -> str:
        return name_of_tool(self.spec)

    def find_misfit(self, call: FunctionCall) -> str:
        """Return the reason why a call does not fit this tool, as a sentence, or ""."""
        if misfit := find_misfit(call, [self.spec]):
            return misfit
        schema = self.spec["function"]["parameters"]
        # JSON Schema allows unknown arguments unless told otherwise, but a Python function would raise
        if "additionalProperties" in schema:
            return ""
        known: Mapping[str, Any] = schema.get("properties", {})
        if strange := [name for name in call["arguments"] if name not in known]:
            return f"{self.name} has no argument {quote(strange[0])}; it has {', '.join(known) or 'none'}."
        return ""


def tool(function: F) -> F:
    """Mark a method of a ToolEnv as a tool."""
    setattr(function, MARK, True)
    return function


def make_spec(function: Callable[..., Any]) -> ToolSpec:
    """Return a function's specification in OpenAI's format. Raises UserError for missing types or descriptions.

    An untyped first argument `self` is skipped.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    who = f"the tool {getattr(function, '__name__', function)!r}"
    try:
        described = get_json_schema(function)["function"]
        hints = get_type_hints(function)
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise UserError(
            f"{who} cannot be described to the policy: {first_line(error)}; give every argument a type, and the "
            "function a docstring with a line for each under `Args:`"
        ) from error
    # transformers describes an unknown class as an object, without an error
    for argument, hint in hints.items():
        if argument != "return" and (strange := _find_strange(hint)):
            raise UserError(
                f"{who}: the argument {argument!r} has the type {strange}, which is not one of JSON's: use int, float, "
                "str, bool, list, dict, Literal, or unions of them"
            )
    properties = described["parameters"]["properties"]
    parameters = described["parameters"] | {
        "properties": {name: _allow_null(schema) for name, schema in properties.items() if name != "return"}
    }
    return {
        "type": "function",
        "function": {"name": described["name"], "description": described["description"], "parameters": parameters},
    }


def _allow_null(schema: Any) -> Any:
    """Replace OpenAPI's `nullable` by its JSON Schema equivalent, also in the items of a list or an object."""
    if isinstance(schema, list):
        return [_allow_null(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {key: _allow_null(value) for key, value in schema.items() if key != "nullable"}
    # any value at all may be null already
    if not schema.get("nullable") or not rest.keys() & {"anyOf", "type"}:
        return rest
    if "anyOf" in rest:
        return rest | {"anyOf": [*rest["anyOf"], {"type": "null"}]}
    if "enum" in rest:
        rest["enum"] = [*rest["enum"], None]
    # a union of simple types is a list
    kinds = rest["type"] if isinstance(rest["type"], list) else [rest["type"]]
    return rest | {"type": [*kinds, "null"]}


def make_tool(function: Callable[..., Any]) -> Tool:
    """Convert a function to a tool. Raises UserError if it cannot be described."""
    return Tool(spec=make_spec(function), call=function)


def _find_strange(hint: Any) -> str:
    """Return the name of a type without JSON equivalent in a hint, or ""."""
    origin = get_origin(hint)
    if origin is None:
        return "" if hint in PLAIN else getattr(hint, "__name__", str(hint))
    if origin is Literal:
        return ""
    if origin in (list, tuple, dict, Union, types.UnionType):
        return next(filter(None, map(_find_strange, get_args(hint))), "")
    return str(hint)
