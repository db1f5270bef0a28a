"""Every key and every algorithm, from the code: python -m tools.docs --write makes both pages.

configs/README.md comes from the schema, algs/LIBRARY.md from the docstrings and fields of the algorithms.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from algs import NOT_ALGORITHMS, find_algorithm
from algs.base import Algorithm, GroupRelative, PolicyGradient
from algs.terms import KL, Correction, Overlong
from configs.data_schema import SourceConfig
from configs.schema import RLConfig, RunConfig, SLConfig
from configs.trainer_schema import LoraConfig
from core.loading import load_module

CONFIGS = Path(__file__).parent.parent / "configs"
README = CONFIGS / "README.md"
LIBRARY = CONFIGS.parent / "algs" / "LIBRARY.md"
LIBRARY_INTRO = """# The algorithms

<!-- made by `python -m tools.docs --write` from the algorithms' docstrings and fields; a test compares them -->

A is the advantage, pi the policy in training, pi_prox the same when the step began, pi_rollout the engine's, sg[] holds
the gradient back. L_t is the loss of one trained token, L_b of one sequence; `loss_norm` says how they are averaged.
How to write one of your own: [README.md](README.md).
"""
INTRO = """# Recipes and their keys

<!-- made by `python -m tools.docs --write`; a test compares it with the schema -->

A recipe is a YAML file that states what differs from the defaults below; `key=value` on the command line
overrides it (`trainer.lr=1e-5`). An unknown key is refused. `--explain` prints the resolved configuration
and what follows from it, and starts nothing.

| recipe | what it does |
|---|---|
"""


def document() -> str:
    parts = [INTRO.rstrip("\n")]
    for path in sorted(CONFIGS.glob("*.yaml")):
        first = path.read_text().splitlines()[0].removeprefix("# ")
        parts.append(f"| [`{path.name}`]({path.name}) | {first} |")
    shared = set(RunConfig.model_fields)
    parts += section("Every run", "", RunConfig)
    parts += section("Reinforcement learning (main_rl.py)", "", RLConfig, leave_out=shared)
    parts += section("Supervised learning (main_sl.py)", "", SLConfig, leave_out=shared)
    for name, field in {**RLConfig.model_fields}.items():
        if is_section(field.annotation):
            parts += section(f"`{name}`", f"{name}.", field.annotation)
        if name == "model":
            parts += section("`model.lora`", "model.lora.", LoraConfig)
        if name == "data":
            parts += section("A source: an entry of the list `data.train`, or `data.eval`", "", SourceConfig)
    parts += ["", "The keys under `alg` are the algorithm's: see [algs/LIBRARY.md](../algs/LIBRARY.md)."]
    return "\n".join(parts) + "\n"


def library() -> str:
    """Write a page with every algorithm: its docstring, and the keys that it declares itself."""
    parts = [LIBRARY_INTRO.rstrip("\n")]
    for name in sorted(p.stem for p in LIBRARY.parent.glob("*.py")):
        if name.startswith("_") or name in NOT_ALGORITHMS:
            continue
        spec, cls = find_algorithm({"name": name})
        parts += ["", f"## {name}", "", "```text", (load_module(spec).__doc__ or "").strip(), "```"]
        own = set(cls.model_fields) - set(cls.__annotations__)
        if cls.__annotations__.keys() & cls.model_fields.keys():
            parts += section("", "alg.", cls, leave_out=own)[2:]
    parts += section("Keys of every algorithm", "alg.", Algorithm)
    parts += section(
        "Keys of every policy-gradient algorithm", "alg.", PolicyGradient, leave_out={*Algorithm.model_fields}
    )
    for name, part in (("correction", Correction), ("kl", KL), ("overlong", Overlong)):
        parts += section(f"`alg.{name}`", f"alg.{name}.", part)
    parts += section("Keys of the group-relative ones", "alg.", GroupRelative, leave_out={*PolicyGradient.model_fields})
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
        LIBRARY.write_text(library())
    else:
        print(document() + library(), end="")
