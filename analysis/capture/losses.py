"""Compared losses, in a run or in a replay, computed on the samples of the run's loss.

Each is given by a name of algs/, by the path of a file, or by settings like the section `alg`, with a new name:

    grpo        my_loss.py        {as: dr_grpo, name: grpo, loss_norm: constant}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from algs import find_algorithm
from algs.base import PolicyGradient, assign_advantages
from algs.validate import check_advantages
from configs.load import validate
from core.errors import UserError
from core.types.samples import TOKEN_REWARDS, Column, Group, Sample
from driver.load_recipe import with_length_limit

# no slash: a label is one part of the names of metrics
LABEL = r"[\w.+-]{1,60}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLoss:
    """Algorithm with settings, and a name for the log."""

    name: str
    alg: PolicyGradient


def parse_losses(given: Sequence[str | Mapping[str, Any]], *, key: str, max_new_tokens: int) -> list[NamedLoss]:
    """Return the losses that a recipe or a command line names. Raises UserError, which begins with `key`."""
    losses = [parse_loss(one, key=key, max_new_tokens=max_new_tokens) for one in given]
    names = [loss.name for loss in losses]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise UserError(f"{key}: two losses are called {twice[0]}: give one of them another name, by the setting as")
    return losses


def parse_loss(given: str | Mapping[str, Any], *, key: str, max_new_tokens: int) -> NamedLoss:
    """Return a compared loss; see parse_losses."""
    settings = dict(given) if isinstance(given, Mapping) else {_kind_of(given): given}
    label = settings.pop("as", None)
    try:
        _, cls = find_algorithm(settings)
        alg = with_length_limit(validate(cls, settings, prefix=""), max_new_tokens)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    if not isinstance(alg, PolicyGradient):
        raise UserError(f"{key}: {given!r:.100} trains on given text, and only losses of sampled text can be compared")
    name = label if label is not None else settings.get("name") or Path(settings["file"]).stem
    if not isinstance(name, str) or not re.fullmatch(LABEL, name):
        raise UserError(f"{key}: the name {name!r:.100} (as) must be up to 60 letters, digits and . _ + -")
    return NamedLoss(name=name, alg=alg)


def _kind_of(given: str) -> str:
    return "file" if given.endswith(".py") or "/" in given else "name"


def credit_groups(loss: NamedLoss, groups: list[Group], *, stale: bool) -> list[Group]:
    """Return the groups with this loss's advantages, from the columns that it requires alone.

    stale: with several updates per step there is the proximal policy's column too.
    """
    required: set[Column] = {*loss.alg.required_columns}
    if stale:
        required.add("prox_logp")
    plain = [[_without_credit(s, required) for s in g] for g in groups]
    credited = assign_advantages(loss.alg, plain)
    check_advantages(loss.alg, plain, credited)
    return credited


def _without_credit(sample: Sample, required: Collection[Column]) -> Sample:
    # advantages and exclusions of the run's own algorithm must not leak into another one; rewards per token are earned,
    # whatever the algorithm
    own = {name: values for name, values in sample.columns.items() if name in {*required, TOKEN_REWARDS}}
    # a sample without a teacher has no column, and is trained on by no loss that reads it
    excluded = None if own.keys() >= {*required} else np.ones_like(sample.action_mask)
    return sample.replace(advantage=None, excluded=excluded, columns=own)
