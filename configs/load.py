"""Load a recipe: YAML, `a.b=value` overrides, validation. Every mistake becomes a sentence that names the key."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from configs.other_names import describe_other_name, describe_other_value
from configs.strict_yaml import DEEPEST, parse_yaml
from core.errors import UserError, find_closest, quote, suggest_name
from core.text.text_files import read_text


def read_recipe(recipe: str | Mapping[str, Any]) -> dict[str, Any]:
    """Read a recipe and its base recipes: `base: other.yaml`, relative to the recipe's folder.

    recipe: path of a file, or a mapping of keys, whose `base` is relative to the working folder.
    """
    own, *bases = read_layers(recipe)
    raw = own[1]
    for _, below in bases:
        raw = merge_recipes(below, raw)
    return raw


def read_layers(recipe: str | Mapping[str, Any]) -> list[tuple[Path, dict[str, Any]]]:
    """Read a recipe and its base recipes, each with its file and without `base`, the recipe first."""
    if isinstance(recipe, str):
        file, raw = Path(recipe), read_yaml(recipe)
    else:
        # A copy, because overrides change it in place. The made-up name stands for a file in the working folder, to
        # which `base` is then relative.
        _refuse_circle(recipe)
        file, raw = Path("the given keys"), copy.deepcopy(dict(recipe))
    layers = [(file, raw)]
    while (base := raw.pop("base", None)) is not None:
        where = file.resolve()
        if not isinstance(base, str) or not base.isprintable():
            raise UserError(f"{where}: base={base!r:.200} must be the path of another recipe")
        file = where.parent / base
        if file.resolve() in [known.resolve() for known, _ in layers]:
            raise UserError(f"{where}: base={base} leads back to itself")
        raw = read_yaml(str(file), key=f"{where}: base={base}, looked for at")
        layers.append((file, raw))
    return layers


def find_inherited(recipe: str | Mapping[str, Any]) -> dict[str, Path]:
    """Return the keys that a recipe has from its base recipes, flattened, each with the file that sets it."""
    (_, raw), *bases = read_layers(recipe)
    inherited: dict[str, Path] = {}
    for file, below in bases:
        own = flatten_settings(raw)
        raw = merge_recipes(below, raw)
        new = flatten_settings(raw).keys() - own.keys()
        inherited |= dict.fromkeys(sorted(new), file)
    return inherited


@contextmanager
def naming_inherited(inherited: Mapping[str, Path]) -> Generator[None]:
    """Add to a UserError of the body, if it names an inherited key, the file that sets the key."""
    try:
        yield
    except UserError as error:
        # Only dotted words and `key=`: a word such as `steps` alone may be prose.
        named = {dotted or single for dotted, single in _KEY.findall(str(error))}
        found = [key for key in inherited if any(f"{key}.".startswith(f"{word}.") for word in named)]
        if found:
            files = ", ".join(dict.fromkeys(str(inherited[key]) for key in found))
            error.args = (f"{error} (the recipe inherits {', '.join(found)} from its base {files})",)
        raise


_KEY = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)|\b([a-z_]+)=")


def _refuse_circle(recipe: Mapping[str, Any]) -> None:
    try:
        json.dumps(recipe, default=str, skipkeys=True)
    except (ValueError, RecursionError) as error:
        raise UserError("the recipe contains itself: give a dict without circles") from error


def merge_recipes(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Merge `own` into `base`, section by section; an `alg` with another algorithm replaces the section.

    >>> merge_recipes({"steps": 2, "trainer": {"lr": 1, "ranks": 2}}, {"trainer": {"lr": 3}})
    {'steps': 2, 'trainer': {'lr': 3, 'ranks': 2}}
    >>> merge_recipes({"alg": {"name": "grpo", "clip_low": 0.1}}, {"alg": {"name": "rloo"}})
    {'alg': {'name': 'rloo'}}
    >>> merge_recipes({"alg": {"name": "grpo", "clip_low": 0.1}}, {"alg": {"name": "grpo", "clip_high": 0.2}})
    {'alg': {'name': 'grpo', 'clip_low': 0.1, 'clip_high': 0.2}}
    """
    merged = dict(base)
    for key, value in own.items():
        below = base.get(key)
        # Hyper-parameters of the base's algorithm would be unknown keys of another algorithm.
        if isinstance(value, dict) and isinstance(below, dict):
            is_other = key == "alg" and any(
                name in value and value[name] != below.get(name) for name in ("name", "file")
            )
            merged[key] = value if is_other else merge_recipes(below, value)
        else:
            merged[key] = value
    return merged


def read_yaml(path: str, *, key: str = "--config") -> dict[str, Any]:
    """Read a YAML file with a mapping. Raises UserError with the line of a mistake.

    key: option or key that names the file, for errors.
    """
    file = Path(path)
    if not os.path.isfile(path):  # unlike file.is_file, False for a name that is too long
        recipes = [p.name for p in file.parent.glob("*.yaml")] if os.path.isdir(file.parent) else []
        raise UserError(f"{key} {quote(path)}: there is no such file{suggest_name(file.name, recipes)}")
    text = read_text(file, f"{key} {path}")
    raw = parse_yaml(text, path)
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold keys and values (name: ..., steps: ...), found {type(raw).__name__}")
    return raw


def apply_override(raw: dict[str, Any], item: str) -> None:
    """Apply `a.b=value` in place; the value is YAML."""
    keys, equals, value = item.partition("=")
    if not equals or not keys:
        raise UserError(f"override {item!r:.200} is not of the form key=value, such as trainer.lr=1e-5")
    *parents, last = keys.split(".")
    if len(parents) > DEEPEST:
        raise UserError(f"override {item!r:.200}: a key has at most {DEEPEST} sections above it, found {len(parents)}")
    node = raw
    for i, key in enumerate(parents):
        # An empty section is None in YAML.
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict):
            raise UserError(
                f"override {item!r:.200}: {'.'.join(parents[: i + 1])} is not a section, it holds {node!r:.200}"
            )
    # As YAML, so that true, null and [a, b] have the same meaning as in a recipe.
    node[last] = parse_yaml(value, f"override {item!r:.200}", key=keys)


def validate(cls: type[BaseModel], raw: dict[str, Any], *, prefix: str) -> Any:
    """Build the model from parsed YAML. Raises UserError that names the first wrong key, prefixed by `prefix`."""
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        found = without_branches(error.errors(include_url=False))
        # One at a time, because a mistake often causes the errors after it.
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(describe_error(cls, found[0], prefix) + more) from error


def without_branches(found: list[Any]) -> list[Any]:
    """Return errors under keys of the recipe; for a union, only errors of the intended choice."""
    # pydantic reports an error for every choice of a union, and a user has written only one of them.
    meant = [e for e in found if not any(map(is_branch, e["loc"][-1:]))] or found[:1]
    return [e | {"loc": tuple(p for p in e["loc"] if not is_branch(p))} for e in meant]


def is_branch(part: str | int) -> bool:
    """Tell whether a location's part is pydantic's name for a union's choice instead of a key."""
    choices = ("list[", "dict[", "literal[")
    named = ("str", "int", "SourceConfig", "HoldOutConfig", "EngineRange")
    return isinstance(part, str) and (part in named or part.startswith(choices))


def describe_error(cls: type[BaseModel], found: Any, prefix: str) -> str:
    """Describe a pydantic error in one sentence."""
    loc = [str(p) for p in found["loc"]]
    key = quote(prefix + ".".join(loc))
    match found["type"]:
        case "extra_forbidden":
            return f"{key} is not a known key; {hint_key(cls, loc, prefix, found['input'])}"
        case "missing":
            return f"{key} is missing: set it in the recipe or as {key}=VALUE on the command line"
        case "model_type" | "model_attributes_type" | "dict_type" if hint := hint_section(
            cls, loc, key, found["input"]
        ):
            return f"{key}={found['input']!r:.200} is not valid: {hint}"
        case "value_error":
            message = str(found["msg"]).removeprefix("Value error, ")
            return f"{key}: {message}" if key else message
        case _:
            said = f"{key}={found['input']!r:.200} is not valid: {found['msg'][0].lower() + found['msg'][1:]}"
            other = describe_other_value(prefix + ".".join(loc), found["input"])
            return f"{said}; {other}" if other else said


def hint_key(cls: type[BaseModel], loc: list[str], prefix: str, value: object) -> str:
    """Return the key that an unknown key was meant to be, as a clause, or all keys of its section."""
    known = list(section_at(cls, loc[:-1]).model_fields)
    dotted = prefix + ".".join(loc)
    if other := describe_other_name(dotted, value, is_certain=True):
        return other
    if elsewhere := [key for key in list_keys(cls) if key.rpartition(".")[2] == loc[-1]]:
        return f"did you mean {' or '.join(prefix + key for key in elsewhere)}?"
    if close := find_closest(loc[-1], known):
        return f"did you mean {close!r}?"
    if other := describe_other_name(dotted, value):
        return other
    # All known keys only if none is close, because the list can be long.
    return f"known keys: {', '.join(known)}"


def hint_section(cls: type[BaseModel], loc: list[str], key: str, value: object) -> str:
    """Return the key below a section that was meant by a value of the section itself, as a clause; "" without one."""
    if key == "alg":
        return "alg is a section, set alg.name, or alg.file"
    section = section_at(cls, loc)
    if section is cls:
        return ""
    fields = section.model_fields
    name = next((name for name, field in fields.items() if field.is_required()), next(iter(fields)))
    # a key that takes any text fits every value, and so says nothing about what was meant
    takes_all = isinstance(value, str) and not fields[name].is_required() and _takes(section, name, "any text")
    if takes_all or not _takes(section, name, value):
        return f"{key} is a section with the keys {', '.join(fields)}"
    return f"{key} is a section, did you mean {key}.{name}={quote(value)}?"


def _takes(section: type[BaseModel], name: str, value: object) -> bool:
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        return all(found["loc"][:1] != (name,) for found in error.errors())
    return True


def list_keys(cls: type[BaseModel], prefix: str = "") -> list[str]:
    """List the dotted keys of a configuration, sections included."""
    keys: list[str] = []
    for name, field in cls.model_fields.items():
        below = sections_in(field.annotation)
        keys += [prefix + name, *(key for section in below for key in list_keys(section, f"{prefix}{name}."))]
    return keys


def section_at(cls: type[BaseModel], loc: list[str]) -> type[BaseModel]:
    """Return the configuration section at a location."""
    for key in loc:
        # A number is a place in a list, whose items are all of one class.
        if key.isdigit():
            continue
        inside = sections_in(cls.model_fields[key].annotation)
        if not inside:
            return cls
        cls = inside[0]
    return cls


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """List the section classes that a field may contain: directly, in a list, or as a union's choice."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for choice in get_args(annotation) for section in sections_in(choice)]


def flatten_settings(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted keys; an empty section or a list is a value.

    >>> flatten_settings({"a": {"b": 1, "c": {}}, "d": [1]})
    {'a.b': 1, 'a.c': {}, 'd': [1]}
    """
    found: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"  # YAML also has keys that are no text
        found |= flatten_settings(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


def add_new_keys(then: Mapping[str, Any], now: Mapping[str, Any], cls: type[BaseModel]) -> dict[str, Any]:
    """Return flat settings of an earlier version of FeynRL, with the defaults of the keys of `now` that it lacks."""
    return {**{key: _find_default(cls, key) for key in now if key not in then}, **then}


def _find_default(cls: type[BaseModel], key: str) -> Any:
    """Return the default of a dotted key as JSON has it. None if the key is required, or under no section."""
    *above, name = key.split(".")
    for part in above:
        field = cls.model_fields.get(part)
        inside = [] if field is None else sections_in(field.annotation)
        if field is None or not inside or field.default is None:
            return None
        cls = inside[0]
    field = cls.model_fields.get(name)
    if field is None or field.is_required():
        return None
    return to_jsonable_python(field.get_default(call_default_factory=True))
