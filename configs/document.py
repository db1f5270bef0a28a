"""Every key of a recipe, from the schema: python -m configs.document [--write] makes configs/README.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from algs import find_algorithm
from algs.base import KL, Correction
from configs.schema import RLConfig, RunConfig, SLConfig

README = Path(__file__).parent / "README.md"
INTRO = """# Recipes and their keys

<!-- made by `python -m configs.document --write`; a test compares it with the schema -->

A recipe is a YAML file that states what differs from the defaults below; `key=value` on the command line
overrides it (`trainer.lr=1e-5`). An unknown key is refused. `--explain` prints the resolved configuration
and what follows from it, and starts nothing.

| recipe | what it does |
|---|---|
"""


def document() -> str:
    parts = [INTRO.rstrip("\n")]
    for path in sorted(Path(__file__).parent.glob("*.yaml")):
        first = path.read_text().splitlines()[0].removeprefix("# ")
        parts.append(f"| [`{path.name}`]({path.name}) | {first} |")
    shared = set(RunConfig.model_fields)
    parts += section("Every run", "", RunConfig)
    parts += section("Reinforcement learning (main_rl.py)", "", RLConfig, leave_out=shared)
    parts += section("Supervised learning (main_sl.py)", "", SLConfig, leave_out=shared)
    for name, field in {**RLConfig.model_fields}.items():
        if is_section(field.annotation):
            parts += section(f"`{name}`", f"{name}.", field.annotation)
    parts += ["", "Every algorithm has keys of its own under `alg`; they are described in its file in `algs/`."]
    parts += section("`alg` of grpo", "alg.", find_algorithm({"name": "grpo"})[1])
    parts += section("`alg.correction`", "alg.correction.", Correction)
    parts += section("`alg.kl`", "alg.kl.", KL)
    return "\n".join(parts) + "\n"


def section(title: str, prefix: str, cls: type[BaseModel], leave_out: set[str] = frozenset()) -> list[str]:
    rows = ["", f"## {title}", "", "| key | default | meaning |", "|---|---|---|"]
    for name, field in cls.model_fields.items():
        if name in leave_out or is_section(field.annotation):
            continue
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{prefix}{name}` | {default_of(field)} | {choices_of(field)}{meaning} |")
    return rows


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def default_of(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "unset" if field.default is None else f"`{field.default}`" if field.default != "" else "unset"


def choices_of(field: FieldInfo) -> str:
    options = [a for a in get_args(field.annotation) if isinstance(a, str | int)]
    return f"One of {', '.join(f'`{o}`' for o in options)}. " if options else ""


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(document())
    else:
        print(document(), end="")
