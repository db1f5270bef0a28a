"""Obligation (q): a measure is a function of one row, so it does not depend on the chunks of the head."""

from __future__ import annotations

import torch
from torch import Tensor

from algs.base import Algorithm
from algs.check import fixtures
from algs.check.distributions import NOW, make_softmax
from algs.check.update import NotApplicable, ObligationFailed, compute_advantages, plan_batches
from modeling.head import split_rows

CLOSE = 1e-12


def does_not_depend_on_the_chunk(alg: Algorithm) -> str:
    """Compare measures and their gradient in chunks of 1 and 3 tokens with those of all tokens at once."""
    if not alg.measures:
        raise NotApplicable("it has no measures")
    step = fixtures.made_up_step(alg)
    [batch] = plan_batches(alg, compute_advantages(alg, step.groups, stale=True), step.now)
    softmax = make_softmax(alg.measures, step.now, batch.labels, read_column=batch.tokens.column)

    def compute(size: int) -> tuple[Tensor, Tensor]:
        logits = step.now[NOW][batch.labels].clone().requires_grad_()
        rows = torch.cat([softmax.compute(logits[place], place) for place in split_rows(len(logits), size)], dim=-1)[1:]
        if not bool(rows.isfinite().all()):
            name = next(name for name, row in zip(alg.measures, rows, strict=True) if not bool(row.isfinite().all()))
            raise ObligationFailed(f"the measure {name} is not finite")
        # weights of every number, or errors of two rows could cancel
        [slope] = torch.autograd.grad((rows * torch.arange(1, rows.numel() + 1).view_as(rows)).sum(), logits)
        return rows.detach(), slope

    whole, slope = compute(len(batch.labels))
    for size in (1, 3):
        rows, own = compute(size)
        for name, got, want in zip(alg.measures, rows, whole, strict=True):
            if not torch.allclose(got, want, rtol=CLOSE, atol=CLOSE):
                at = int((got - want).abs().argmax())
                numbers = f"{got[at]:.6g} in chunks of {size} and {want[at]:.6g} at once"
                raise ObligationFailed(f"the measure {name} at token {at} is {numbers}: it may read its own row only")
        if not torch.allclose(own, slope, rtol=CLOSE, atol=CLOSE * float(slope.abs().max())):
            raise ObligationFailed(f"the gradient of the measures differs in chunks of {size}")
    return f"{', '.join(alg.measures)}: chunks of 1, 3 and {len(batch.labels)} tokens agree"
