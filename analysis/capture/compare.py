"""Compare the gradients of two losses on the same samples and weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.capture.gradient import Computed, Gradient, inner

OPPOSITE, ONE_SILENT = 1, 2
"""Kinds of disagreement on a token: the two slopes have opposite signs; exactly one slope is zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of a loss with the run's own."""

    name: str
    loss: float
    grad_norm: float
    cosine: float | None
    """Cosine with the gradient of the run's loss; None if either gradient is zero."""
    layers: dict[str, float]
    """The same for each layer that has a gradient, the worst first."""
    opposite: float
    """Share of the tokens, of all that either loss trains on, where one raises the log-probability and the other lowers
    it."""
    one_silent: float
    """Share of these tokens with a gradient of only one of the two losses."""
    silent: float
    """Share of the loss's trained tokens without a gradient."""
    clipped: float | None
    """Share of the loss's trained tokens reported as clipped; None if the loss does not report clipping."""
    kl_change: float
    """First-order change of the KL per unit length of a step against the loss's gradient."""
    metrics: dict[str, float]


def compare_losses(name: str, one: Computed, own: Computed, of_kl: Gradient) -> Comparison:
    """Compare a loss with the run's own. of_kl: gradient of the KL."""
    layers = {
        layer: cosine
        for layer, names in group_by_layer(list(one.gradient)).items()
        if (cosine := compute_cosine(pick(one.gradient, names), pick(own.gradient, names))) is not None
    }
    # tokens that neither loss trains on would dilute every share
    judged = judge_tokens(one, own)[one.trained | own.trained]
    return Comparison(
        name=name,
        loss=one.loss,
        grad_norm=one.grad_norm,
        cosine=compute_cosine(one.gradient, own.gradient),
        layers=dict(sorted(layers.items(), key=lambda item: item[1])),
        opposite=float((judged == OPPOSITE).mean()),
        one_silent=float((judged == ONE_SILENT).mean()),
        silent=float((one.slopes[one.trained] == 0).mean()),
        clipped=one.clipped_share,
        kl_change=change_per_step(one.gradient, of_kl),
        metrics=one.metrics,
    )


def judge_tokens(one: Computed, own: Computed) -> NDArray[np.int8]:
    """Return for every token whether two losses disagree on it: OPPOSITE, ONE_SILENT, or 0."""
    # signs only: the size of a slope depends on how each loss scales its advantages
    signs = np.sign(one.slopes), np.sign(own.slopes)
    judged = np.zeros(len(one.slopes), dtype=np.int8)
    judged[(signs[0] == 0) != (signs[1] == 0)] = ONE_SILENT
    judged[signs[0] * signs[1] < 0] = OPPOSITE
    return judged


def compute_cosine(one: Gradient, other: Gradient) -> float | None:
    """Return the cosine between two gradients of the same parameters; None if either is zero."""
    a, b = list(one.values()), list(other.values())
    lengths = math.sqrt(inner(a, a)), math.sqrt(inner(b, b))
    # rounding can push the cosine of parallel gradients beyond 1
    return max(-1.0, min(1.0, inner(a, b) / (lengths[0] * lengths[1]))) if all(lengths) else None


def change_per_step(gradient: Gradient, of_kl: Gradient) -> float:
    """Return the derivative of the KL along the step of length 1 against a gradient; 0 for a gradient of zero."""
    step = list(gradient.values())
    length = math.sqrt(inner(step, step))
    # minus, because gradient descent steps against the gradient
    return -inner(step, list(of_kl.values())) / length if length else 0.0


def pick(gradient: Gradient, names: list[str]) -> Gradient:
    return {name: gradient[name] for name in names}


def group_by_layer(names: list[str]) -> dict[str, list[str]]:
    """Return the parameter names by layer; modules outside numbered layers form separate layers.

    >>> group_by_layer(["model.embed.weight", "model.layers.0.up.weight", "model.layers.0.norm.weight"])
    {'embed': ['model.embed.weight'], 'layers.0': ['model.layers.0.up.weight', 'model.layers.0.norm.weight']}
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        # the first number in a name is the layer's: experts and other lists inside a layer have theirs behind it
        found = re.search(r"(?:^|\.)(\w+\.\d+)\.", name)
        plain = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        layers.setdefault(found[1] if found else plain, []).append(name)
    return layers
