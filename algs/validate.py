"""Validation of the values that an algorithm's methods return; anyone may write an algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from core.errors import RunStopped, UserError
from core.reserved_metrics import LOSS_NAMES
from core.types.samples import Group, Tokens

Metrics = dict[str, Tensor]
"""Per-token values, [M] each. The framework averages them with the token weights, over micro-batches and ranks."""


def check_advantages(
    alg: object, given: list[Group], groups: list[Group], *, method: str = "compute_advantages"
) -> None:
    """Raise RunStopped unless groups and samples are unchanged and advantages are finite."""
    check_samples(alg, given, groups, method=method)
    for sample in (s for g in groups for s in g):
        if sample.advantage is None or np.isfinite(sample.advantage).all():
            continue
        trained = sample.advantage[sample.loss_mask]
        if len(bad := trained[~np.isfinite(trained)]):
            raise RunStopped(
                f"{type(alg).__name__}.{method} gave the advantage {float(bad[0])} to a sample of "
                f"{sample.prompt.id} with the reward {sample.reward}: advantages must be finite"
            )


def check_samples(alg: object, given: list[Group], groups: list[Group], *, method: str = "compute_advantages") -> None:
    """Raise RunStopped unless the samples are the given ones, in the same groups and order."""
    if not _have_same_tokens(given, groups):
        sizes = f"{len(given)} groups of {sum(map(len, given))} samples"
        raise RunStopped(
            f"{type(alg).__name__}.{method} was given {sizes} and returned {len(groups)} groups of "
            f"{sum(map(len, groups))}, or others: return every sample in its group and order, and leave one out by its "
            "`excluded`"
        )


def _have_same_tokens(given: list[Group], groups: list[Group]) -> bool:
    if [len(g) for g in given] != [len(g) for g in groups]:
        return False
    pairs = ((a.token_ids, b.token_ids) for g, h in zip(given, groups, strict=True) for a, b in zip(g, h, strict=True))
    return all(a is b or np.array_equal(a, b) for a, b in pairs)


def check_per_token(alg: object, returned: Any, tokens: Tokens) -> tuple[Tensor, Metrics]:
    """Return the loss and metrics of an algorithm's method, checked.

    Raises UserError for anything but floats [M] on the tokens' device. A reduced loss, or a value per sequence, would
    silently broadcast.
    """
    who, expected = type(alg).__name__, list(tokens.weight.shape)
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise UserError(f"{who}: its loss must return (loss, metrics), a tensor and a dict, found {returned!r:.60}")
    loss, metrics = returned
    if clash := sorted(LOSS_NAMES & metrics.keys()):
        raise UserError(f"{who}: its loss returns a metric {clash[0]!r}, which the framework logs: rename it")
    # Metrics too: a reduced metric would be averaged with the token weights as if every token had its value.
    for name, value in {"the loss": loss, **metrics}.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{who}: {name} is {type(value).__name__}, expected a tensor with one value per token")
        if value.shape != tokens.weight.shape:
            raise UserError(
                f"{who}: {name} has shape {list(value.shape)}, expected one value per token, {expected}: return it "
                "unreduced, the framework weights and sums"
            )
        if value.device != tokens.weight.device:
            raise UserError(f"{who}: {name} is on {value.device}, expected {tokens.weight.device}, where its input is")
    if not loss.is_floating_point():
        raise UserError(f"{who}: the loss has dtype {loss.dtype}, expected the float32 of policy.logp")
    return loss, metrics
