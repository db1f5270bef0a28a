"""JSON schemas of recipes, with which editors complete keys and mark mistakes: configs/editor/{rl,sl,eval}.json.

`python -m tools.docs --write` writes them. A recipe names its schema in a line at its head, which VS Code (YAML of Red
Hat), Neovim, Helix and PyCharm read. The schema knows keys, types and bounds; only a run checks what keys demand of one
another.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from algs import find_algorithm, list_algorithms
from algs.base import Algorithm, PolicyGradient
from configs.eval_schema import EvalConfig
from configs.schema import RLConfig, SLConfig

FOLDER = Path(__file__).parent.parent / "configs" / "editor"
PROGRAMS: dict[str, type[BaseModel]] = {"rl": RLConfig, "sl": SLConfig, "eval": EvalConfig}
"""Schema file of each program, by the class of its recipes."""
BASE = {"description": "Recipe to start from, relative to this one's folder.", "type": "string"}


def editor_schemas() -> dict[Path, str]:
    """Return the text of every schema file."""
    return {FOLDER / f"{name}.json": json.dumps(make_schema(cls), indent=1) + "\n" for name, cls in PROGRAMS.items()}


def make_schema(cls: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema (draft 7) of a program's recipes."""
    algs = {name: find_algorithm({"name": name})[1] for name in list_algorithms() if "alg" in cls.model_fields}
    algs = {name: alg for name, alg in algs.items() if issubclass(alg, PolicyGradient) == (cls is RLConfig)}
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in (cls, *algs.values())]
    named, found = models_json_schema(models, ref_template="#/definitions/{model}")
    definitions: dict[str, Any] = found["$defs"]
    refs = {model: ref["$ref"].rpartition("/")[2] for (model, _), ref in named.items()}
    definitions = {name: simplify(found) for name, found in definitions.items()}
    schema = definitions.pop(refs[cls])
    schema["properties"] |= {"base": BASE}
    if algs:
        schema["properties"]["alg"] |= choose_algorithm({name: refs[alg] for name, alg in algs.items()})
        share_properties(definitions, [refs[alg] for alg in algs.values()])
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "definitions": definitions}


def choose_algorithm(of_name: dict[str, str]) -> dict[str, Any]:
    """Return the keys of `alg`: those of the class that its name stands for, and any for a file of the user's."""
    name = {"description": "Module in algs/.", "enum": list(of_name)}
    file = {"description": Algorithm.model_fields["file"].description, "type": "string"}
    rules = [
        {
            "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
            "then": {"$ref": f"#/definitions/{definition}"},
        }
        for name, definition in of_name.items()
    ]
    return {"properties": {"name": name, "file": file}, "allOf": rules}


def share_properties(definitions: dict[str, Any], models: list[str]) -> None:
    """Write a property that several of these models have once, as a definition of its own."""
    count = Counter(
        (key, json.dumps(value)) for model in models for key, value in definitions[model]["properties"].items()
    )
    shared = [found for found, n in count.items() if n > 1]
    name_of = {(key, text): f"{key}-{number}" for number, (key, text) in enumerate(shared)}
    for model in models:
        own = definitions[model]["properties"]
        for key, value in own.items():
            if name := name_of.get((key, json.dumps(value))):
                definitions[name] = value
                own[key] = {"$ref": f"#/definitions/{name}"}


def simplify(node: Any) -> Any:
    """Leave out titles, which repeat names, what a base recipe may hold, and numbers that JSON does not have."""
    if isinstance(node, list):
        return [simplify(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if not drops(key, value)}
    return {
        key: {name: simplify(own) for name, own in value.items()}
        if key in ("properties", "definitions")
        else simplify(value)
        for key, value in kept.items()
    }


def drops(key: str, value: Any) -> bool:
    # a mapping under "title" or "required" is the schema of a key with that name
    if key == "title" and isinstance(value, str):
        return True
    if key == "required" and isinstance(value, list):
        return True
    return isinstance(value, float) and not math.isfinite(value)
