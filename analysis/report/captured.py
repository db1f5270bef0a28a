"""Captured samples, token by token, as the page keeps them: a selection of each captured step."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np

from analysis.capture.tokens import captured_steps, read_captured
from analysis.report.selection import Entry, choose_samples


def list_captured(folder: Path) -> list[int]:
    """Return the steps of a run that were captured."""
    return captured_steps(folder)


def read_captured_step(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the samples of a captured step, each with its tokens' texts and columns, as JSON can hold them."""
    return [make_captured_record(one) for one in read_captured(folder, step)]


def make_captured_record(sample: Any) -> dict[str, Any]:
    return {
        "group": sample.group,
        "sample": sample.sample,
        "reward": sample.reward if math.isfinite(sample.reward) else None,
        "pieces": list(sample.pieces),
        "columns": {str(name): encode_column(values) for name, values in sample.columns.items()},
    }


def encode_column(values: Any) -> str:
    """Return float32 numbers in base64, little-endian: bit by bit what was captured, NaN included."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


def select_captured(samples: list[dict[str, Any]], limit: int, *, step: int) -> list[dict[str, Any]]:
    """Return those of a step's samples that the page keeps, chosen as for the sample files."""
    entries = [Entry(one["group"], one["reward"]) for one in samples]
    kept = {i for group in choose_samples(entries, limit, step=step) for i in group.samples}
    return [one for i, one in enumerate(samples) if i in kept]
