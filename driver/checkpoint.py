"""Checkpoints: what lies in <run folder>/checkpoints, what of it stays, and which one a run goes on from.

    step_00010/            the run after ten steps: complete, because it has this name
        policy/, critic/   a learner's weights and optimizer, one file per rank
        rank_0.pt ...      the rest of every rank: counters and random state
        progress.json      steps, metrics, data position, and the recipe it belongs to
        COMPLETE
    last -> step_00010     and best, where there is a measurement
    step_00015.partial/    being written, or removed, or what a killed run left of either: never read

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
from core.workers import Workers
from trainers.checkpoint_state import rank_file

COMPLETE = "COMPLETE"
PARTIAL = ".partial"
BEST_BY = "eval/loss"
"""The held-out measure; lower is better. A checkpoint of a step that did not measure it competes with none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where a run stood."""

    steps_done: int
    metrics: dict[str, float]
    """Of the last of these steps."""
    position: dict[str, Any]
    """What is under way in an RL run (see rollouts/buffer.py); nothing for given rows, a function of the step."""
    recipe: dict[str, Any]
    """See driver/resume.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete one."""

    folder: Path
    stand: Stand


async def write_checkpoint(home: Path, trainers: Workers, stand: Stand) -> Path:
    """Let every rank write its share, and give the folder its name when all of it is on the disk."""
    final = home / f"step_{stand.steps_done:05d}"
    partial = final.with_name(final.name + PARTIAL)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    await trainers.all("save_state", partial)
    if unseen := [rank for rank in range(len(trainers)) if not (partial / rank_file(rank)).is_file()]:
        raise RunStopped(
            f"trainer rank {unseen[0]} wrote its share of the checkpoint where this process does not see it: with "
            "checkpoint.every, run_dir must be a folder that every machine of the run shares"
        )
    (partial / "progress.json").write_text(json.dumps(asdict(stand), indent=1) + "\n")
    _flush(partial)
    (partial / COMPLETE).touch()
    _flush(partial)
    os.replace(partial, final)
    _fsync(home)
    return final


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """None for whatever is not a complete checkpoint."""
    folder = folder.resolve()  # `best` and `last` are links
    if not re.fullmatch(r"step_\d{5,}", folder.name) or not (folder / COMPLETE).is_file():
        return None
    return Checkpoint(folder=folder, stand=Stand(**json.loads((folder / "progress.json").read_text())))


def checkpoints_in(home: Path) -> list[Checkpoint]:
    """The complete ones, oldest first."""
    found = [read_checkpoint(path) for path in home.glob("step_*")]
    return sorted((c for c in found if c is not None), key=lambda c: c.stand.steps_done)


def best_of(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The lowest held-out loss, of equal ones the older; None where nothing was measured."""
    measured = [c for c in checkpoints if BEST_BY in c.stand.metrics]
    return min(measured, key=lambda c: c.stand.metrics[BEST_BY], default=None)


def retain(home: Path, keep: int) -> None:
    """Remove all but the newest `keep` and the best, and point `last` and `best` at theirs."""
    found = checkpoints_in(home)
    best = best_of(found)
    _point(home / "last", found[-1])
    if best is not None:
        _point(home / "best", best)
    for checkpoint in found[:-keep]:
        if checkpoint is not best:
            doomed = checkpoint.folder.with_name(checkpoint.folder.name + PARTIAL)
            os.replace(checkpoint.folder, doomed)  # at once: half of it must not pass for a whole one
            shutil.rmtree(doomed)


def find_checkpoint(resume: str) -> Checkpoint:
    """The newest complete checkpoint of a run folder, or the one that is named itself."""
    named = Path(resume).expanduser()
    if not named.is_dir():
        raise UserError(f"resume={resume}: there is no such folder: name a run folder, or one of its checkpoints")
    if (itself := read_checkpoint(named)) is not None:
        return itself
    found = checkpoints_in(named / "checkpoints")
    if not found:
        raise UserError(
            f"resume={resume} has no complete checkpoint: name a run that made one (checkpoint.every), or leave resume "
            "out to start anew"
        )
    return found[-1]


def _point(link: Path, checkpoint: Checkpoint) -> None:
    new = link.with_name(link.name + PARTIAL)
    new.unlink(missing_ok=True)
    new.symlink_to(checkpoint.folder.name)
    os.replace(new, link)


def _flush(folder: Path) -> None:
    """Everything below `folder` to the disk, the names last."""
    for path in [*_below(folder), folder]:
        _fsync(path)


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _below(path)
        yield path


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_due(steps_done: int, *, every: int, steps: int) -> bool:
    """At every so many steps, and at the end; never where `every` is 0."""
    return every > 0 and (steps_done % every == 0 or steps_done == steps)
