"""Page of runs: data, style and scripts in a single HTML file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.capture.tokens import captured_steps
from analysis.report.assemble import UPLOT, join_scripts, make_html, save_page
from analysis.report.captured import read_captured_step, select_captured
from analysis.report.embed import data_element, pack
from analysis.report.header import describe_metrics, describe_run, describe_time, list_profile
from analysis.report.run_files import RunRecord, is_unfinished, read_run, read_samples
from analysis.report.step_data import average_groups, make_step, make_whole_step
from analysis.report.token_account import PARTS, account_tokens
from core import metrics as names
from core.errors import UserError

SCRIPTS = (
    *("dom", "blocks", "data", "stacked", "curves", "account", "histogram", "samples", "fell", "tokens"),
    *("microscope", "overview", "main"),
)
"""Files of assets/, in the order in which they are put together; each may use what those before it define."""
LARGE = 50_000_000
"""Bytes beyond which a page opens slowly, so that a smaller selection is advised."""


class Beside:
    """Folder beside the page for the samples that are not in it, made when the first is written."""

    def __init__(self, out: Path) -> None:
        if out.is_dir():  # "." has no name to make another from
            raise UserError(f"--out {out} cannot be written: it is a folder")
        self.folder = out.with_name(f"{out.stem}_files")
        self.files = 0

    def write(self, name: str, value: Any) -> None:
        """Write a script file with the data of an element.

        A page opened from a disk may load scripts, but no other files.
        """
        text = f'feynrl_receive("{name}","{pack(value)}")\n'
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # ASCII, because base64 is, and a script file names no encoding
            (self.folder / f"{name}.js").write_text(text, encoding="ascii")
        except OSError as error:
            raise UserError(f"--all: {self.folder} cannot be written: {error.strerror or error}") from error
        self.files += 1


def write_page(folders: list[Path], out: Path, *, samples: int, everything: bool) -> list[str]:
    """Write the page of these runs to `out`; return messages for the user, in sentences.

    samples: how many of a step the page holds. everything: write all of them beside the page too.
    """
    if samples < 0:
        raise UserError(f"--samples {samples}: give a whole number from 0 on")
    runs = [read_run(folder) for folder in folders]
    beside = Beside(out) if everything else None
    notes: list[str] = []
    descriptions: list[dict[str, Any]] = []
    blocks: list[str] = []
    for number, run in enumerate(runs):
        description, own = describe_with_blocks(run, f"r{number}", samples, beside, notes)
        description["profile"] = list_profile(run, out)
        descriptions.append(description)
        blocks += own
    head = {
        "runs": descriptions,
        "metrics": describe_metrics(runs),
        "time": describe_time(),
        "tokens": PARTS,
        "files": beside.folder.name if beside else None,
    }
    text = make_html(
        title=", ".join(run["name"] for run in descriptions),
        head=head,
        blocks=blocks,
        script=assemble_script(),
        style=(UPLOT / "uPlot.min.css").read_text(encoding="utf-8"),
        files_beside=beside is not None,
    )
    notes.append(save_page(out, text, key="--out"))
    if beside:
        notes.append(f"all samples: {beside.folder} ({beside.files} files; keep them beside the page)")
    if len(text) > LARGE:
        notes.append(f"the page is large: --samples with less than {samples} makes it smaller")
    return notes


def describe_with_blocks(
    run: RunRecord, key: str, limit: int, beside: Beside | None, notes: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the description of a run, and the data as elements of the page."""
    description = describe_run(run, key)
    blocks: list[str] = []
    accounts: dict[int, dict[str, float]] = {}
    lines = {int(line[names.STEP_NUMBER]): line for line in run.metrics}
    counts: dict[int, list[int]] = {}
    prompts: dict[str, list[list[float]]] = {}
    for step in run.sample_files:
        try:
            rows = read_samples(run.sample_files[step])
        except UserError as error:
            # the last file of a running or killed run may end in the middle of a line
            if not is_unfinished(run, step):
                raise
            notes.append(f"without the samples of step {step}, whose file is not complete: {error}")
            continue
        if not rows:
            continue
        name = f"step-{key}-{step}"
        small = make_step(rows, limit, step=step)
        blocks.append(data_element(name, pack(small)))
        counts[step] = [sum(len(group["samples"]) for group in small["groups"]), len(rows)]
        accounts[step] = account_tokens(lines.get(step, {}), rows)
        for prompt, group, reward in average_groups(rows):
            prompts.setdefault(prompt, []).append([step, group, reward])
        # the page itself holds every sample of a small step
        if beside and counts[step][0] < len(rows):
            beside.write(name, make_whole_step(rows, step=step))
    for step, line in lines.items():
        # a step without a sample file has its numbers in the log all the same
        accounts.setdefault(step, account_tokens(line, []))
    description["sample_counts"] = counts
    description["captured"] = [*add_captured(run, key, limit, beside, blocks)]
    blocks.append(data_element(f"prompts-{key}", pack({p: seen for p, seen in prompts.items() if len(seen) > 1})))
    blocks.append(data_element(f"metrics-{key}", pack(to_columns(run, accounts))))
    return description, blocks


def add_captured(
    run: RunRecord, key: str, limit: int, beside: Beside | None, blocks: list[str]
) -> Iterator[dict[str, Any]]:
    """Add the captured steps to the blocks, and yield the page's entry for each step."""
    for step in captured_steps(run.folder):
        every = read_captured_step(run.folder, step)
        kept = select_captured(every, limit, step=step)
        name = f"tokens-{key}-{step}"
        blocks.append(data_element(name, pack(kept)))
        if beside and len(kept) < len(every):
            beside.write(name, every)
        yield {"step": step, "kept": [[one["group"], one["sample"]] for one in kept], "all": len(every)}


def to_columns(run: RunRecord, accounts: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Return the run's metrics by name, with None for values that a step does not log, and the token account.

    An evaluation's step is that of its weights. After training there is one that no step has: `trained` has the others.
    """
    trained = {int(line[names.STEP_NUMBER]): line for line in run.metrics}
    steps = sorted({*trained, *run.evaluations})
    lines = {step: trained.get(step, {}) | run.evaluations.get(step, {}) for step in steps}
    logged = dict.fromkeys(name for line in lines.values() for name in line)
    return {
        "steps": steps,
        "trained": [*trained],
        "values": {name: [line.get(name) for line in lines.values()] for name in logged if name != names.STEP_NUMBER},
        "tokens": {part: [accounts.get(step, {}).get(part) for step in lines] for part in PARTS},
    }


def assemble_script() -> str:
    """Return uPlot and our own files as a single script."""
    return join_scripts(SCRIPTS, library=(UPLOT / "uPlot.iife.min.js").read_text(encoding="utf-8"))
