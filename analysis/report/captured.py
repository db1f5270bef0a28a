"""Captured samples of a step, token by token, as data of the page."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np

from analysis.capture.tokens import read_captured
from analysis.report.selection import Entry, choose_samples


def read_captured_step(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the samples of a captured step, with the text and the columns of every token, as JSON."""
    return [
        {
            "group": sample.group,
            "sample": sample.sample,
            "reward": sample.reward if math.isfinite(sample.reward) else None,
            "pieces": sample.pieces,
            "columns": {name: encode_column(values) for name, values in sample.columns.items()},
        }
        for sample in read_captured(folder, step)
    ]


def encode_column(values: Any) -> str:
    """Return numbers as little-endian float32 in base64; the bits are unchanged, NaN included."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


def select_captured(samples: list[dict[str, Any]], limit: int, *, step: int) -> list[dict[str, Any]]:
    """Return the samples of a step for the page, chosen as for the sample files."""
    entries = [Entry(one["group"], one["reward"]) for one in samples]
    kept = {i for group in choose_samples(entries, limit, step=step) for i in group.samples}
    return [one for i, one in enumerate(samples) if i in kept]
