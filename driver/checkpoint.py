"""Checkpoints: write, keep and find those in <run folder>/checkpoints.

    step_00010/            the run after ten steps: complete, because it has this name
        policy/, critic/   a learner's weights and optimizer, one file per rank
        rank_0.pt ...      the rest of every rank: counters and random state
        progress.json      steps, metrics, data position, and the recipe it belongs to
        COMPLETE
    last -> step_00010     and best, if data.eval was measured
    step_00015.partial/    being written or removed, maybe by a run that was killed: never read

Nothing here reads a learner's files: see trainers/checkpoint_state.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.errors import RunStopped, UserError
from core.metrics import EVAL_LOSS
from core.workers import Workers
from trainers.checkpoint_state import rank_file
from trainers.trainer import Trainer

COMPLETE = "COMPLETE"
PARTIAL = ".partial"
BEST_BY = EVAL_LOSS
"""Metric of `best`; lower is better. Checkpoints of steps that did not measure it are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Step, metrics and data position saved with a checkpoint."""

    steps_done: int
    metrics: dict[str, float]
    """Metrics of the last of these steps."""
    position: dict[str, Any]
    """State of the replay buffer in RL; empty in supervised runs, where the step is enough."""
    recipe: dict[str, Any]
    """Settings and file hashes of the run; see driver/resume.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Complete checkpoint on disk."""

    folder: Path
    state: RunState


async def write_checkpoint(home: Path, trainers: Workers[Trainer], state: RunState) -> Path:
    """Let every rank write its share; rename the folder to its final name when all of it is on the disk."""
    final = home / f"step_{state.steps_done:05d}"
    partial = final.with_name(final.name + PARTIAL)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    await trainers.call_all(Trainer.save_state, partial)
    if unseen := [rank for rank in range(len(trainers)) if not (partial / rank_file(rank)).is_file()]:
        raise RunStopped(
            f"trainer rank {unseen[0]} wrote its share of the checkpoint where this process does not see it: with "
            "checkpoint.every, run_dir must be a folder that every machine of the run shares"
        )
    (partial / "progress.json").write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    _flush_folder(partial)
    (partial / COMPLETE).touch()
    _flush_folder(partial)
    os.replace(partial, final)
    _flush_path(home)
    return final


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint in a folder; None for anything but a complete one."""
    folder = folder.resolve()  # `best` and `last` are links
    if not re.fullmatch(r"step_\d{5,}", folder.name) or not (folder / COMPLETE).is_file():
        return None
    progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    return Checkpoint(folder=folder, state=RunState(**progress))


def list_checkpoints(home: Path) -> list[Checkpoint]:
    """Return the complete checkpoints below `home`, oldest first."""
    found = [read_checkpoint(path) for path in home.glob("step_*")]
    return sorted((c for c in found if c is not None), key=lambda c: c.state.steps_done)


def find_best(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the one with the lowest held-out loss, of equal ones the older; None where nothing was measured."""
    measured = [c for c in checkpoints if BEST_BY in c.state.metrics]
    return min(measured, key=lambda c: c.state.metrics[BEST_BY], default=None)


def remove_old_checkpoints(home: Path, keep: int) -> None:
    """Remove all but the newest `keep` and the best, and point `last` and `best` at theirs."""
    found = list_checkpoints(home)
    best = find_best(found)
    _set_link(home / "last", found[-1])
    if best is not None:
        _set_link(home / "best", best)
    for checkpoint in found[:-keep]:
        if checkpoint is not best:
            doomed = checkpoint.folder.with_name(checkpoint.folder.name + PARTIAL)
            os.replace(checkpoint.folder, doomed)  # atomic: a half removed folder must not look complete
            shutil.rmtree(doomed)


def find_checkpoint(resume: str) -> Checkpoint:
    """Return the newest complete checkpoint of a run folder, or the checkpoint that `resume` names itself."""
    named = Path(resume).expanduser()
    if not named.is_dir():
        raise UserError(f"resume={resume}: there is no such folder: name a run folder, or one of its checkpoints")
    if (itself := read_checkpoint(named)) is not None:
        return itself
    found = list_checkpoints(named / "checkpoints")
    if not found:
        raise UserError(
            f"resume={resume} has no complete checkpoint: name a run that made one (checkpoint.every), or remove "
            "resume to start again"
        )
    return found[-1]


def _set_link(link: Path, checkpoint: Checkpoint) -> None:
    new = link.with_name(link.name + PARTIAL)
    new.unlink(missing_ok=True)
    new.symlink_to(checkpoint.folder.name)
    os.replace(new, link)


def _flush_folder(folder: Path) -> None:
    """Write everything below `folder` to the disk, folders last."""
    for path in [*_walk(folder), folder]:
        _flush_path(path)


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _walk(path)
        yield path


def _flush_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_due(steps_done: int, *, every: int, steps: int) -> bool:
    """Tell whether to write one now: every `every` steps, and at the end; never where `every` is 0."""
    return every > 0 and (steps_done % every == 0 or steps_done == steps)
