"""Edges of losses by hand: bounds themselves, tokens without an advantage, certain tokens, and far margins."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from algs.base import Algorithm
from algs.cispo import CISPO
from algs.divergences import Divergence, kl_on_support
from algs.dpo import DPO
from algs.dppo import DPPO
from algs.gmpo import GMPO
from algs.ipo_rl import IPORL
from algs.kto import KTO
from algs.offline_dro import OfflineDRO
from algs.preference import Divergence as PairDivergence
from algs.preference import f_divergence
from algs.sapo import SAPO
from algs.terms import Correction
from algs.topr import TOPR
from algs.vespo import VESPO
from core.types.samples import Policy, Tokens

HALF, QUARTER = math.log(0.5), math.log(0.25)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(
    alg: Algorithm, logp: list[float], old: list[float], advantage: list[float]
) -> tuple[list[float], dict[str, list[float]]]:
    """Loss and metrics of tokens in a sequence each; engine and proximal policy are one."""
    n, before = len(logp), tensor(*old)
    given: dict[str, Any] = {"rollout_logp": before, "prox_logp": before, "seq_ids": torch.arange(n)}
    tokens = Tokens(weight=torch.full((n,), 1 / n), advantage=tensor(*advantage), **given)
    loss, told = alg.loss(Policy(logp=tensor(*logp)), tokens)
    return loss.tolist(), {name: values.tolist() for name, values in told.items()}


def test_a_token_without_an_advantage_is_bounded_on_no_side():
    """Its probability went from 1/2 to almost 1, and to almost 0; nothing pushed it."""
    moved: list[list[float]] = [[-0.01, -5.0], [HALF] * 2, [0.0, 0.0]]
    for alg, metric in ((DPPO(), "masked"), (DPPO(divergence="kl"), "masked"), (GMPO(), "clip_frac")):
        loss, told = run(alg, *moved)
        assert told[metric] == [0.0, 0.0], alg
        assert not any(loss)


def test_a_token_without_an_advantage_has_the_weight_of_its_side():
    """At W = 1/2: TOPR and VESPO count A = 0 with A > 0, SAPO with A < 0."""
    at_zero: list[list[float]] = [[QUARTER], [HALF], [0.0]]
    assert run(TOPR(), *at_zero)[1]["sequence_weight"] == [1.0]
    assert run(VESPO(), *at_zero)[1]["sequence_weight"] == pytest.approx([0.5**2 * math.exp(3 * 0.5)])
    gate = 1 / (1 + math.exp(-2.0 * (0.5 - 1)))
    assert run(SAPO(tau_pos=0.5, tau_neg=2.0), *at_zero)[1]["gate"] == pytest.approx([4 * gate * (1 - gate)])
    ids = torch.zeros(3, dtype=torch.int64)
    tokens = Tokens(weight=torch.ones(3), rollout_logp=tensor(0, 0, 0), seq_ids=ids, advantage=tensor(0, 1, -1))
    drifted = Correction(level="none", max_drift=0.1).find_drifted(tensor(-1, -1, -1), tokens)
    assert drifted.tolist() == [False, False, True]


def test_the_weight_of_a_sequence_that_is_lost_stays_above_0():
    """VESPO keeps log W at log 1e-8 or more, so the weight is (1e-8)^2 exp(3 - 3e-8)."""
    weight = run(VESPO(), [-60.0], [0.0], [1.0])[1]["sequence_weight"]
    assert weight == pytest.approx([1e-16 * math.exp(3 - 3e-8)], rel=1e-9, abs=0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_probability_that_has_moved_by_delta_is_inside(advantage: float):
    pair = (tensor(HALF), tensor(QUARTER)) if advantage > 0 else (tensor(QUARTER), tensor(HALF))
    new, old = (x.tolist() for x in pair)
    moved = float((pair[0].exp() - pair[1].exp()).abs())
    for delta, masked in ((moved, 0.0), (moved - 1e-9, 1.0)):
        for alg in (DPPO(delta_low=delta, delta_high=delta), IPORL(delta=delta)):
            assert run(alg, new, old, [advantage])[1]["masked"] == [masked], (alg, delta)
    side = {"delta_low": 0.01} if advantage > 0 else {"delta_high": 0.01}
    assert run(DPPO(**{"delta_low": 9.0, "delta_high": 9.0} | side), new, old, [advantage])[1]["masked"] == [0.0]


def test_dppo_masks_only_what_moves_further_away():
    """From 1/2 up with A < 0, and down with A > 0: the update brings the token back."""
    assert run(DPPO(), [-0.01, -5.0], [HALF] * 2, [-1.0, 1.0])[1]["masked"] == [0.0, 0.0]
    assert run(IPORL(), [-0.01, -5.0], [HALF] * 2, [-1.0, 1.0])[1]["masked"] == [1.0, 1.0], "either way"


def test_a_token_that_was_certain_has_a_finite_divergence():
    """KL(q || p) at q = 1 is -log p: log 2 at p = 1/2, and 0 at p = 1."""
    for delta, masked in ((0.69, 1.0), (0.70, 0.0)):
        loss, told = run(DPPO(divergence="kl", delta_low=delta), [HALF, 0.0], [0.0, 0.0], [-1.0, -1.0])
        assert told["masked"] == [masked, 0.0]
        assert loss == pytest.approx([0.0 if masked else 0.5 * HALF, 0.0])


def test_a_weight_at_its_cap_is_not_told_as_capped():
    ratio = float(tensor(math.log(2)).exp())
    for cap, capped in ((ratio, 0.0), (ratio - 1e-9, 1.0)):
        loss, told = run(CISPO(max_weight=cap), [math.log(2)], [0.0], [1.0])
        assert told["capped"] == [capped] and loss == pytest.approx([-2 * math.log(2)])
    for logp, advantage, clipped in ((0.4, 1.0, 0.0), (0.41, 1.0, 1.0), (-0.4, -1.0, 0.0), (-0.41, -1.0, 1.0)):
        assert run(GMPO(clip=0.4), [logp], [0.0], [advantage])[1]["clip_frac"] == [clipped]
    assert run(GMPO(clip=0.4), [-0.9, 0.9], [0.0] * 2, [1.0, -1.0])[1]["clip_frac"] == [0.0, 0.0], "they come back"


FAR: list[tuple[PairDivergence, list[float]]] = [
    ("reverse_kl", [-50.0, -2.0, 4.0]),
    ("forward_kl", [-math.exp(20), -math.exp(2), -math.exp(-4)]),
    ("js", [-50.0, -math.log1p(math.exp(2)), -math.log1p(math.exp(-4))]),
    ("alpha", [-2 * math.exp(20), -2 * math.e, -2 * math.exp(-2)]),
]


@pytest.mark.parametrize(("divergence", "want"), FAR)
def test_a_divergence_of_pairs_is_bounded_far_below(divergence: PairDivergence, want: list[float]):
    assert f_divergence(tensor(-50, -2, 4), divergence).tolist() == pytest.approx(want)


def test_discopop_is_finite_at_any_margin():
    """Log-sigmoid below a margin of 0, an exponential above, and half of each at 0."""
    loss = DPO(form="discopop", beta=1.0).compare(tensor(-800, -1, 0, 1, 800), tensor(0, 0, 0, 0, 0))
    want = [800.0, math.log1p(math.e), (math.log(2) + 1) / 2, math.exp(-1), 0.0]
    assert loss.tolist() == pytest.approx(want, abs=1e-7)


def test_replies_of_unequal_length_count_once_in_their_rows_mean():
    """Log-ratios 1 (of two tokens) and 0, rewards 1 and 0: errors 1/2 and 0; then a reply alone."""
    tokens = Tokens(
        weight=torch.ones(5),
        advantage=tensor(1, 1, 0, 7, 7),
        ref_logp=tensor(-1, -1, -1, -1, -1),
        seq_ids=torch.tensor([0, 0, 1, 2, 2]),
        group_ids=torch.tensor([0, 0, 0, 1, 1]),
    )
    loss, told = OfflineDRO(beta=0.5).loss(Policy(logp=tensor(-0.75, -0.25, -1, 2, 2)), tokens)
    assert loss.tolist() == pytest.approx([1 / 32] * 3 + [0.0] * 2)
    assert told["offline_dro/accuracy"].tolist() == [1.0] * 3 + [0.0] * 2
    wrong, told = OfflineDRO(beta=0.5).loss(Policy(logp=tensor(-1.75, -1.25, -1, -1, -1)), tokens)
    assert wrong.tolist() == pytest.approx([0.75**2 / 2] * 3 + [0.0] * 2)
    assert told["offline_dro/accuracy"].tolist() == [0.0] * 5


def test_a_completion_at_the_reference_point_is_not_right():
    tokens = Tokens(
        weight=torch.ones(3),
        advantage=tensor(2, 2, -3),
        ref_logp=tensor(-1, -1, -1),
        reference_point=tensor(0.5, 0.5, 0.5),
        seq_ids=torch.arange(3),
    )
    loss, told = KTO(beta=1.0).loss(Policy(logp=tensor(-0.5, -0.25, -1)), tokens)
    assert told["kto/accuracy"].tolist() == [0.0, 1.0, 1.0]
    assert loss.tolist() == pytest.approx([2 / (1 + math.exp(x)) for x in (0, 0.25)] + [3 / (1 + math.exp(0.5))])


def test_a_support_of_more_tokens_than_there_are_is_all_of_them():
    s, t = tensor(0.5, 0.25, 0.25).log()[None], tensor(0.25, 0.25, 0.5).log()[None]
    for beta in (0.0, 1.0):
        for support in ("teacher", "student"):
            distance = Divergence(beta=beta, topk=9, support=support, rest="drop").compute(s, t)
            assert distance.tolist() == pytest.approx([0.25 * math.log(2)]), "either way 1/4 log 2"


def test_rounded_probabilities_of_more_than_1_leave_a_finite_tail():
    """0.6 and 0.5 leave nothing: 1e-12 is taken; 0.5 and 0.25 leave a quarter. A third slot is empty."""
    q, p = tensor(0.6, 0.5, 1).log()[None], tensor(0.5, 0.25, 1).log()[None]
    want = 0.6 * math.log(1.2) + 0.5 * math.log(2) + 1e-12 * math.log(4e-12)
    live = torch.tensor([[True, True, False]])
    assert kl_on_support(q, p, "tail", live=live).tolist() == pytest.approx([want], rel=1e-12)
    assert kl_on_support(q[:, :2], p[:, :2], "tail").tolist() == pytest.approx([want], rel=1e-12)
    assert kl_on_support(q, p, "drop", live=live).tolist() == pytest.approx([want], abs=1e-9)
    renormalised = 6 / 11 * math.log(6 / 11 / (2 / 3)) + 5 / 11 * math.log(5 / 11 / (1 / 3))
    assert kl_on_support(q, p, "renormalise", live=live).tolist() == pytest.approx([renormalised])
