"""Write, prune and find checkpoints in <run folder>/checkpoints.

    step_00010/            the run after ten steps: complete, because it has this name
        policy/, critic/   a learner's weights and optimizer, a file per rank
        rank_0.pt ...      other state of every rank: counters and random state
        progress.json      steps, metrics, data position, the algorithm's state, and the run's recipe
        COMPLETE           the size of every file, to detect damage before reading
    last -> step_00010     and best, if data.eval was measured
    step_00015.partial/    being written or removed, possibly by a killed run: never read

A learner's files are read and written by trainers/checkpoint/state.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from core.cluster.workers import Workers
from core.errors import RunStopped, UserError, first_line, writing
from core.text.atomic_write import PARTIAL, flush_folder, flush_path, measure_sizes
from core.text.json_text import decode_json
from core.text.plain_text import print_line
from trainers.checkpoint.state import rank_file
from trainers.trainer import Trainer

COMPLETE = "COMPLETE"
PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestBy:
    """Metric that selects `best`. Checkpoints without a value are not compared."""

    metric: str
    lower: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Step, metrics and data position, saved with a checkpoint."""

    steps_done: int
    metrics: dict[str, float]
    """Metrics of the last step."""
    position: dict[str, Any]
    """State of the replay buffer in RL; empty in supervised runs, where the step suffices."""
    recipe: dict[str, Any]
    """Settings and file hashes of the run; see driver/resume.py."""
    alg_state: dict[str, Any] = field(default_factory=dict[str, Any])
    """State of the algorithm for the next step, as JSON; empty for one without a state."""
    opponent_version: int = 0
    """Version of the snapshot that plays as opponent; 0 for that of model.path, or without one."""
    before: dict[str, float] = field(default_factory=dict[str, float])
    """Held-out metrics of the untrained model; empty if they were not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Complete checkpoint on disk."""

    folder: Path
    state: RunState


async def write_checkpoint(home: Path, trainers: Workers[Trainer], state: RunState) -> Path:
    """Write a checkpoint, a share per rank; rename the folder to its final name when it is complete on disk."""
    final = home / f"step_{state.steps_done:05d}"
    partial = final.with_name(final.name + PARTIAL)
    if partial.exists():
        shutil.rmtree(partial)
    try:
        await _write_partial(partial, trainers, state)
    except RunStopped:
        shutil.rmtree(partial, ignore_errors=True)  # it may be what filled the disk
        raise
    os.replace(partial, final)
    # A rename is durable only after the parent folder has been flushed.
    flush_path(home)
    return final


async def _write_partial(partial: Path, trainers: Workers[Trainer], state: RunState) -> None:
    with writing(partial):
        partial.mkdir(parents=True)
    await trainers.call_all(Trainer.save_state, partial)
    if unseen := [rank for rank in range(len(trainers)) if not (partial / rank_file(rank)).is_file()]:
        raise RunStopped(
            f"trainer rank {unseen[0]} wrote its share of the checkpoint where this process does not see it: with "
            "checkpoint.every, run_dir must be a folder that every machine of the run shares"
        )
    with writing(partial, meaning="the checkpoints before it are complete"):
        (partial / PROGRESS).write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
        flush_folder(partial)
        # Written after all other files are flushed: its presence means that they are on the disk.
        (partial / COMPLETE).write_text(json.dumps(measure_sizes(partial), indent=1) + "\n", encoding="utf-8")
        flush_folder(partial)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Read a checkpoint; None for a folder without a complete checkpoint. Raises UserError if it is damaged."""
    folder = folder.resolve()  # `best` and `last` are links
    if not re.fullmatch(r"step_\d{5,}", folder.name) or not (folder / COMPLETE).is_file():
        return None
    _check_sizes(folder)
    try:
        state = RunState(**decode_json((folder / PROGRESS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"the checkpoint {folder} is damaged: {PROGRESS}: {first_line(error)}") from error
    return Checkpoint(folder=folder, state=state)


def _check_sizes(folder: Path) -> None:
    """Raise UserError for a file that is missing or has another size than when the checkpoint was written."""
    try:
        then: dict[str, int] = dict(decode_json((folder / COMPLETE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"the checkpoint {folder} is damaged: {COMPLETE}: {first_line(error)}") from error
    # Sizes instead of hashes, because reading hundreds of GB again would take minutes.
    now = measure_sizes(folder)
    for name, size in then.items():
        if now.get(name) != size:
            found = f"has {now[name]} of {size} bytes" if name in now else "is missing"
            raise UserError(f"the checkpoint {folder} is damaged: {name} {found}")


def list_checkpoints(home: Path, *, say: Callable[[str], None] | None = None) -> list[Checkpoint]:
    """List complete, undamaged checkpoints below `home`, oldest first; report each damaged checkpoint to `say`."""
    found: list[Checkpoint] = []
    for path in sorted(home.glob("step_*")):
        try:
            checkpoint = read_checkpoint(path)
        except UserError as damage:
            if say is not None:
                say(f"{damage}: it is not used")
            continue
        if checkpoint is not None:
            found.append(checkpoint)
    # By number, because the name step_100000 sorts before step_99999.
    return sorted(found, key=lambda c: c.state.steps_done)


def find_best(checkpoints: Sequence[Checkpoint], by: BestBy) -> Checkpoint | None:
    """Return the checkpoint with the best finite value (the oldest of equals); None if no value was measured."""
    measured = [c for c in checkpoints if math.isfinite(c.state.metrics.get(by.metric, math.nan))]
    # min returns the first of equals, and the list is sorted: the oldest.
    sign = 1 if by.lower else -1
    return min(measured, key=lambda c: sign * c.state.metrics[by.metric], default=None)


def remove_old_checkpoints(home: Path, keep: int, by: BestBy) -> Checkpoint | None:
    """Remove all but the newest `keep` and the best checkpoint; update `last` and `best`; return the best."""
    found = list_checkpoints(home)
    best = find_best(found, by)
    _set_link(home / "last", found[-1])
    if best is not None:
        _set_link(home / "best", best)
    for checkpoint in found[:-keep]:
        if checkpoint is not best:
            doomed = checkpoint.folder.with_name(checkpoint.folder.name + PARTIAL)
            os.replace(checkpoint.folder, doomed)  # atomic: a half removed folder must not look complete
            shutil.rmtree(doomed)
    return best


def find_checkpoint(resume: str, *, say: Callable[[str], None] = print_line) -> Checkpoint:
    """Return the newest complete checkpoint of a run folder, or the checkpoint `resume` itself.

    say: receives a line per damaged checkpoint.
    """
    named = Path(resume).expanduser()
    if not named.is_dir():
        raise UserError(f"resume={resume}: there is no such folder: name a run folder, or one of its checkpoints")
    if (itself := read_checkpoint(named)) is not None:
        return itself
    found = list_checkpoints(named / "checkpoints", say=say)
    if not found:
        raise UserError(
            f"resume={resume} has no complete checkpoint: name a run that made one (checkpoint.every), or remove "
            "resume to start again"
        )
    return found[-1]


def _set_link(link: Path, checkpoint: Checkpoint) -> None:
    new = link.with_name(link.name + PARTIAL)
    new.unlink(missing_ok=True)
    # Relative, so that the run folder can be moved; replaced in one step, so that a reader always finds a link.
    new.symlink_to(checkpoint.folder.name)
    os.replace(new, link)


def is_due(steps_done: int, *, every: int, steps: int) -> bool:
    """Tell whether to write a checkpoint now: every `every` steps and at the end; never if `every` is 0."""
    return every > 0 and (steps_done % every == 0 or steps_done == steps)
