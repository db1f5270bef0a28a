"""Stored distributions: the likeliest tokens of another model, kept with the rows of a data set.

A row holds, for each trained token in order, `NAME_tokens` (the id), `NAME_ids` and `NAME_logp` (lists of the likeliest
ids and their log-probabilities, of any length). They become the columns NAME_ids and NAME_logp, [L, K] each, that
`at.stored(NAME)` reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from core.errors import UserError
from core.types.samples import Sample


def with_stored(sample: Sample, name: str) -> Sample:
    """Return the sample with the stored distributions of the row. Raises UserError unless they fit its tokens."""
    if not sample.n_trained:
        return sample
    extra, where = sample.prompt.extra, f"the row {sample.prompt.id}"
    if lacking := [key for key in ("tokens", "ids", "logp") if f"{name}_{key}" not in extra]:
        raise UserError(f"{where} has no {name}_{lacking[0]}: write it with python -m data_prep.distill")
    tokens, ids, logp = (extra[f"{name}_{key}"] for key in ("tokens", "ids", "logp"))
    mask = sample.loss_mask
    if list(tokens) != sample.token_ids[mask].tolist():
        raise UserError(
            f"{where}: {name}_tokens are not the {sample.n_trained} tokens that are trained on here: write it with "
            "this run's tokenizer, chat template and system prompt"
        )
    counts = [len(own) for own in ids]
    if counts != [len(own) for own in logp] or len(counts) != len(tokens) or not all(counts):
        raise UserError(f"{where}: {name}_ids and {name}_logp must be lists of one length, and not empty, per token")
    columns = {f"{name}_ids": _lay_out(ids, sample), f"{name}_logp": _lay_out(logp, sample)}
    return sample.replace(columns=sample.columns | columns)


def _lay_out(rows: list[Any], sample: Sample) -> np.ndarray[Any, Any]:
    """Return the lists of the trained tokens as an array [L, K]; -1 in empty slots."""
    each = np.full((len(sample.token_ids), max(map(len, rows))), -1, dtype=sample.float_dtype)
    for at, row in zip(np.flatnonzero(sample.loss_mask), rows, strict=True):
        each[at, : len(row)] = row
    return each
