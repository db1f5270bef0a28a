"""Groups that share prefixes, laid out in every way, and the check that a model treats them alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from core.types.samples import Batch, Group
from data_feeds.packing.batches import micro_batches, pack
from modeling.forward import compute_values, forward


def laid_out(groups: list[Group], how: str, *, max_tokens: int = 10_000) -> list[Batch]:
    """Micro-batches of an update: shared, packed or padded; or one sample each."""
    if how == "alone":
        return [pack([s], [1.0]) for g in groups for s in g]
    cut = {"padded": how == "padded", "share_prefixes": how == "shared"}
    return [b for rank in micro_batches(groups, "sequence_sum", max_tokens, **cut) for b in rank]


def values_of(model: nn.Module, batches: list[Batch], layout: str, score) -> torch.Tensor:
    """The value of every trained token, in an order that does not depend on the cut."""
    found = {}
    for batch in batches:
        value = score(model, batch, layout)
        for i in range(len(batch.at)):
            found[float(batch.tokens.rollout_logp[i]), int(batch.labels[i])] = value[i]
    return torch.stack([found[key] for key in sorted(found)])


def logp_of(model: nn.Module, batch: Batch, layout: str) -> torch.Tensor:
    return forward(model, model, batch, layout=layout, temperature=0.7).logp


def gradient(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Of a loss in which every token counts differently."""
    weights = torch.linspace(0.5, 1.5, len(values), dtype=values.dtype)
    learnt = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((weights * values.square()).sum(), learnt, allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip(learnt, found, strict=True)]
    return torch.cat([g.flatten() for g in grads])


def check_alike(model: nn.Module, groups: list[Group], *, score=logp_of, tolerance=1e-7, max_tokens=10_000) -> None:
    """Values and gradients of shared rows are those of packed and padded ones, and of each sample alone."""
    groups = marked(groups)
    shared = laid_out(groups, "shared", max_tokens=max_tokens)
    assert any((b.parents >= 0).any() for b in shared)
    got = values_of(model, shared, "packed", score)
    slope = gradient(model, got)
    for how in ("alone", "packed", "padded"):
        layout = "padded" if how == "padded" else "packed"
        want = values_of(model, laid_out(groups, how), layout, score)
        assert (got - want).norm() <= tolerance * want.norm(), how
        expected = gradient(model, want)
        assert (slope - expected).norm() <= tolerance * expected.norm(), how


def value_of(model: nn.Module, batch: Batch, layout: str) -> torch.Tensor:
    return compute_values(model, batch, layout=layout, model=model)[0]


def marked(groups: list[Group]) -> list[Group]:
    """The same samples, with a number of its own in rollout_logp at every token, which tells the tokens apart."""
    first, done = 0, []
    for group in groups:
        done.append([])
        for s in group:
            n = len(s.token_ids)
            done[-1].append(replace(s, rollout_logp=np.arange(first, first + n, dtype=np.float32)))
            first += n
    return done
