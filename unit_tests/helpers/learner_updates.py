"""Updates of a learner beside those of plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainers.learner import Learner
from trainers.local import TorchLearner


def expect_equal_updates(plain: TorchLearner, ours: Learner, *, after_update: Callable[[], None]) -> None:
    """Make four updates of two micro-batches on both sides, of which one is not finite; compare norms and weights."""
    ids = torch.arange(12).reshape(2, 6)
    norms: list[tuple[float, float]] = []
    for scale in (1.0, 100.0, float("inf"), 1.0):
        for learner in (plain, ours):
            for _ in range(2):
                learner.backward(learner.module(ids).logits.square().mean() * scale)
        finite = plain.has_finite_gradients(), ours.has_finite_gradients()
        assert finite == (scale != float("inf"),) * 2
        norms.append((plain.update(lr=0.5, apply=finite[0]), ours.update(lr=0.5, apply=finite[1])))
        after_update()
    assert [one for one, _ in norms] == pytest.approx([other for _, other in norms], rel=1e-4)
    assert norms[2] == (float("inf"),) * 2 and norms[0][0] > 0.25
    exported = {name: t for bucket in ours.export_weights(1000) for name, t in bucket}
    for bucket in plain.export_weights(10**9):
        for name, tensor in bucket:
            torch.testing.assert_close(exported[name], tensor, rtol=1e-5, atol=1e-6)
