"""Captured tokens of a step, with text and the numbers that the trainer computed.

A run with `capture` keeps them in RUN/snapshots/step_00010/, and `read_captured` reads them again:

    snapshot.json    written last, by a rename: a folder without it is incomplete, and is never read
    samples.jsonl   a line per sample: group number, number in the group, reward, text of each token
    tokens.npz      `lengths` of the samples, and each column end to end, float32

A token that is not trained on has NaN in every column. This module needs numpy and nothing else, so that a viewer
starts quickly.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from core.errors import UserError, first_line, writing

FloatArray = NDArray[np.float32]
TokenColumn = Literal[
    "advantage",  # of the algorithm
    "weight",  # share of the token in the update's loss: the loss of an update is the sum of weight x loss
    "logp",  # log-probability under the trainer's policy, before the update
    "rollout_logp",  # log-probability under the engine that sampled the token
    "logp_difference",  # logp - rollout_logp: the mismatch of trainer and engine, and staleness
    "ratio",  # exp(logp - prox_logp), the ratio that a clip looks at; 1 in the first update of a step
    "clipped",  # 1 where the loss says that it clipped, capped or masked the token (step_recorder.py), else 0
    "entropy",  # of the distribution that the token was drawn from, in nats
    "kl",  # k3 estimate of the divergence from the reference model at the token
    "loss",  # of the token, before its weight
]
"""Columns that a snapshot may have. Columns that the run does not compute are absent."""
TOKEN_COLUMNS: tuple[TokenColumn, ...] = get_args(TokenColumn)

SNAPSHOTS = "snapshots"
"""Folder of the snapshots, in the run folder."""
MANIFEST, SAMPLES, TOKENS = "snapshot.json", "samples.jsonl", "tokens.npz"
_LENGTHS = "lengths"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, zipfile.BadZipFile)
"""Errors of reading a damaged file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedSample:
    """Sample of a captured step, token by token."""

    step: int
    group: int
    """Group number in the step."""
    sample: int
    """Number in the group."""
    reward: float
    """NaN if reward or environment failed."""
    pieces: list[str]
    """Text of each token of the whole sequence, prompt included. Joined they are the text of the sequence; a character
    of several tokens stands at the last of them."""
    columns: dict[TokenColumn, FloatArray]
    """[len(pieces)] each, NaN where a token is not trained on."""


def snapshot_folder(run_folder: Path, step: int) -> Path:
    """Return the folder of a step's snapshot."""
    return run_folder / SNAPSHOTS / f"step_{step:05d}"


def captured_steps(run_folder: Path) -> list[int]:
    """Return the steps with a complete snapshot, in order."""
    # five digits are the least width: from step 100000 on there are more
    named = (re.fullmatch(r"step_(\d{5,})", p.name) for p in (run_folder / SNAPSHOTS).glob("step_*"))
    steps = sorted(int(found[1]) for found in named if found)
    return [step for step in steps if (snapshot_folder(run_folder, step) / MANIFEST).is_file()]


def read_captured(run_folder: Path, step: int) -> list[CapturedSample]:
    """Return the samples of a captured step, in the order of their groups. Raises UserError if there are none."""
    folder = snapshot_folder(run_folder, step)
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{run_folder} has no complete snapshot of step {step}: there is no {folder / MANIFEST}")
    return read_snapshot_samples(folder, step)


def read_snapshot_samples(folder: Path, step: int) -> list[CapturedSample]:
    """Return the samples in the folder of a complete snapshot. Raises UserError for a damaged one."""
    try:
        return _read_samples(folder, step)
    except UNREADABLE as error:
        raise UserError(f"the snapshot {folder} is damaged: {first_line(error)}") from error


def _read_samples(folder: Path, step: int) -> list[CapturedSample]:
    lines = [json.loads(line) for line in (folder / SAMPLES).read_text(encoding="utf-8").splitlines()]
    with np.load(folder / TOKENS, allow_pickle=False) as arrays:
        ends = np.cumsum(arrays[_LENGTHS])[:-1]
        names: list[TokenColumn] = [name for name in TOKEN_COLUMNS if name in arrays]
        parts: dict[TokenColumn, list[FloatArray]] = {
            name: [part.astype(np.float32, copy=False) for part in np.split(arrays[name], ends)] for name in names
        }

    samples = [
        CapturedSample(
            step=step,
            group=line["group"],
            sample=line["sample"],
            reward=float("nan") if line["reward"] is None else line["reward"],
            pieces=line["pieces"],
            columns={name: column[i] for name, column in parts.items()},
        )
        for i, line in enumerate(lines)
    ]
    if wrong := [s for s in samples if any(len(column) != len(s.pieces) for column in s.columns.values())]:
        raise ValueError(f"{SAMPLES} and {TOKENS} have other lengths for sample {wrong[0].sample}")
    return samples


def write_captured(folder: Path, samples: Iterable[CapturedSample]) -> None:
    """Write SAMPLES and TOKENS into a snapshot's folder. All samples have the same columns."""
    listed = list(samples)
    arrays: dict[str, NDArray[np.generic]] = {_LENGTHS: np.array([len(s.pieces) for s in listed], dtype=np.int64)}
    for name in listed[0].columns:
        arrays[name] = np.concatenate([s.columns[name] for s in listed]).astype(np.float32, copy=False)
    with writing(folder):
        with (folder / SAMPLES).open("w", encoding="utf-8") as file:
            for s in listed:
                # JSON has no NaN
                reward = None if np.isnan(s.reward) else s.reward
                record = {"group": s.group, "sample": s.sample, "reward": reward, "pieces": s.pieces}
                file.write(json.dumps(record) + "\n")
        np.savez(folder / TOKENS, **arrays)  # pyright: ignore[reportArgumentType]
