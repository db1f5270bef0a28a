"""YAML in which every value is of the type that it looks like. Anything else is refused, by its key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from core.errors import UserError, first_line, quote

DEEPEST = 32
"""Maximum number of sections above a key: far more than exist, and few enough for recursive functions."""
MOST_VALUES = 100_000
"""Maximum number of values, with those that aliases repeat: a few lines can stand for more than memory holds."""
UNTYPED = ("settings", "optimizer_settings", "template_args", "vllm", "deepspeed")
"""Sections whose values have no declared type, so that a switch written as a word would stay text, which is true."""
_SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_FLOAT = r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+"
_INT = "tag:yaml.org,2002:int"
_PLAIN_INT = re.compile(r"[-+]?(0|[1-9][0-9]*|0x[0-9a-fA-F]+)")


class StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys; plain YAML would silently use the second value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Writer that quotes what StrictLoader would read as a number."""


for _tool in (StrictLoader, _Dumper):
    # YAML 1.1 reads 1e-5 as text, because the dot is missing, and +1e5 too.
    _tool.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^{_FLOAT}$"), list("-+.0123456789"))
# YAML 1.1 reads on, off, yes and no as booleans; they are words here, as in YAML 1.2
StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:bool" or first in "tTfF"]
    for first, known in StrictLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str, where: str, *, key: str = "") -> Any:
    """Parse YAML. Raises UserError, beginning with `where`.

    where: the file or the override. key: key above all of it.
    """
    try:
        loader: Any = StrictLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, where, key, {})
        return loader.construct_document(node)
    # a date of month 13, a list as a key
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise UserError(f"{where}{line} is not valid YAML: {problem}") from error


def write_yaml(value: Any) -> str:
    """Return a value as YAML that `parse_yaml` reads as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def _check(node: Any, where: str, key: str, known: dict[int, int], depth: int = 0, is_key: bool = False) -> int:
    """Return the number of values of a node. Raises UserError for one that contains itself, or looks like another type.

    known: numbers by node, -1 for those above this one.
    """
    if (n := known.get(id(node))) is not None and n >= 0:
        return n
    here = f"{where}, line {node.start_mark.line + 1}: {quote(key) or 'the value'}"
    if n == -1:
        raise UserError(f"{here} is an alias (*) of what it stands in: write the value out")
    if depth > DEEPEST:
        raise UserError(f"{here} has more than {DEEPEST} sections above it: reduce the nesting")
    n, known[id(node)] = 1, -1
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    if is_plain and (misread := _name_misreading(node.tag, node.value)):
        raise UserError(f"{here}: {quote(node.value)} {misread}")
    *above, name = key.split(".")
    # Keys and the items of a list are words, such as a judge's `words: [yes, no]`.
    is_free = not is_key and not name.isdigit() and not {*UNTYPED}.isdisjoint(above)
    if is_plain and is_free and (switch := _SWITCHES.get(node.value.lower())):
        raise UserError(
            f"{here}: {node.value} is text here: write {switch}, or put it in quotes ('{node.value}') if text is meant"
        )
    for name, child in _list_children(node):
        n += _check(child, where, f"{key}.{name}" if key and name else key or name, known, depth + 1, not name)
        if n > MOST_VALUES:
            raise UserError(f"{here} holds more than {MOST_VALUES} values, aliases (*) included: write less")
    known[id(node)] = n
    return n


def _list_children(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the nodes below a node, each with its name there. A key has none of its own."""
    if isinstance(node, yaml.SequenceNode):
        yield from ((str(i), item) for i, item in enumerate(node.value))
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield "", key
            yield (str(key.value) if isinstance(key, yaml.ScalarNode) else ""), value


def _name_misreading(tag: str, text: str) -> str:
    """Name the type as which YAML reads a word without quotes, and the fix; "" if it is the type that it looks like."""
    quotes = f"put it in quotes ('{text}') if text is meant"
    match tag.rpartition(":")[2]:
        case "int" | "float" as kind if set("_:") & {*text} or (kind == "int" and not _PLAIN_INT.fullmatch(text)):
            read = _read_number(tag, text)
            return f"is read by YAML as the number {read}: write {read}, or {quotes}"
        case "timestamp":
            return f"is read by YAML as a date: {quotes}"
        case _:
            return ""


def _read_number(tag: str, text: str) -> float:
    loader: Any = yaml.SafeLoader("")
    node = yaml.ScalarNode(tag, text)
    return loader.construct_yaml_int(node) if tag == _INT else loader.construct_yaml_float(node)
