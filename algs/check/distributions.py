"""Made-up distributions of tokens, of which the measures of an algorithm are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from algs.base import Algorithm
from algs.measures import plan_measures
from core.types.measures import Measure, list_teachers
from core.types.samples import Policy, ScoredColumn, Tokens
from modeling.softmax import NO_COLUMNS, Softmax

SIZE = 7
"""Tokens of the made-up vocabulary, of which token t of a step is number t modulo SIZE."""
NOW, FROZEN = "logits", "frozen_logits"
"""Tables of logits [N, SIZE]: the policy's, and those of every frozen model."""


def draw_distributions(n: int) -> dict[str, Tensor]:
    """Draw the distributions of n tokens; always the same."""
    draw = torch.Generator().manual_seed(1)
    now = torch.randn(n, SIZE, generator=draw, dtype=torch.float64)
    return {NOW: now, FROZEN: now + torch.randn(n, SIZE, generator=draw, dtype=torch.float64)}


def draw_stored(tokens: list[int]) -> dict[str, Any]:
    """Draw the stored part of a teacher's distributions at these tokens, of one to three ids each."""
    draw = torch.Generator().manual_seed(len(tokens))
    logits = torch.randn(len(tokens), SIZE, generator=draw, dtype=torch.float64)
    logp, ids = logits.log_softmax(-1).topk(3)
    counts = [1 + token % 3 for token in tokens]
    own = {"ids": ids.tolist(), "logp": logp.tolist()}
    cut = {f"topk_{key}": [row[:n] for row, n in zip(rows, counts, strict=True)] for key, rows in own.items()}
    return {"topk_tokens": tokens, **cut}


def make_softmax(
    measures: Mapping[str, Measure],
    tables: Mapping[str, Tensor],
    ids: Tensor,
    *,
    read_column: Callable[[str], Tensor] = NO_COLUMNS,
) -> Softmax:
    """Return the softmax at the tokens of these ids, [M], as a trainer makes it."""
    frozen = tables[FROZEN][ids].detach()
    return Softmax(
        labels=ids % tables[NOW].shape[-1],
        temperature=1.0,
        measures=measures,
        read_column=read_column,
        teachers={name: lambda rows: frozen[rows] for name in list_teachers(measures)},
    )


def measure_policy(alg: Algorithm, tokens: Tokens, ids: Tensor, tables: Mapping[str, Tensor]) -> Policy:
    """Return the policy at the tokens of these ids, [M]: log-probability, entropy if needed, and measures."""
    entropy = tables["entropy"][ids] if alg.needs_entropy else None
    live = {name: m for name, m in plan_measures(alg).live.items() if name != "entropy"}
    if not live:
        return Policy(logp=tables["logp"][ids], entropy=entropy)
    softmax = make_softmax(live, tables, ids, read_column=tokens.column)
    measured = softmax.name_rows(softmax.compute(tables[NOW][ids], slice(None))).measures
    # logp and entropy are tables of their own, so that their gradients are told apart
    return Policy(logp=tables["logp"][ids], entropy=entropy, measures=measured)


def measure_columns(alg: Algorithm, tables: Mapping[str, Tensor]) -> dict[ScoredColumn, Tensor]:
    """Return the columns that are measures, of every token of the tables, [N] each."""
    n, found = len(tables[NOW]), dict[ScoredColumn, Tensor]()
    for model, measures in plan_measures(alg).columns.items():
        softmax = make_softmax(measures, tables, torch.arange(n))
        logits = tables[NOW if model == "prox" else FROZEN].detach()
        found |= softmax.name_rows(softmax.compute(logits, slice(None))).measures
    return found
