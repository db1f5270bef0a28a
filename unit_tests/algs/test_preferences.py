"""Preference losses against the numbers of the independent oracle, and the identities that they obey."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from algs.base import Algorithm
from algs.dpo import DPO
from algs.kto import KTO
from algs.orpo import ORPO, log1mexp
from algs.preference import pair_metrics
from algs.reward_model import RewardModel
from core.types.samples import Batch, Group, Policy, Tokens
from data_feeds.packing.batches import plan_update
from unit_tests.helpers.examples import a_changed
from unit_tests.helpers.golden import GOLDEN, PREF, TOLERANCES, live
from unit_tests.helpers.golden_pairs import answer, first_pairs

KTO_CASE = KTO(undesirable_weight=1.33)

CASES: dict[str, Algorithm] = {
    "dpo/sigmoid": DPO(),
    "dpo/sigmoid_length_norm": DPO(length_norm=True),
    "dpo/cdpo": DPO(label_smoothing=0.1),
    "dpo/robust": DPO(form="robust", label_smoothing=0.1),
    "dpo/hinge": DPO(form="hinge", beta=2.0),
    "dpo/ipo_sum": DPO(form="ipo"),
    "dpo/ipo_token_mean": DPO(form="ipo", length_norm=True),
    "dpo/simpo": DPO(reference_free=True, length_norm=True, beta=2.0, target_margin=1.0),
    "dpo/orpo": ORPO(),
    "dpo/kto": KTO_CASE,
    "dpo/kto_clamped_kl": KTO_CASE,
}


def plan_batches(alg: Algorithm, groups: list[Group], dtype: torch.dtype, max_tokens: int = 1000) -> list[Batch]:
    credited = alg.compute_advantages(groups)
    return plan_update(credited, alg.loss_norm, max_tokens, whole_groups=alg.whole_groups).batches(dtype)[0]


@pytest.mark.parametrize("name", [name for name in GOLDEN["cases"] if name.startswith("dpo/")])
@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCES)
@pytest.mark.parametrize("poison", [0.0, float("nan"), 1e6])
def test_loss_and_gradient_are_the_oracles(name, dtype, rtol, poison):
    case, alg = GOLDEN["cases"][name], CASES[name]
    [batch] = plan_batches(alg, first_pairs(name, poison), dtype)
    # packing may lay the sequences in another order: each is known by its length and its reference
    tokens = batch.tokens
    order = row_order(alg, first_pairs(name))
    flat = live(PREF["logp"], dtype, fixture=PREF)
    starts = torch.tensor([sum(map(sum, PREF["mask"][:b])) for b in range(4)])
    at = torch.cat([starts[b] + torch.arange(sum(PREF["mask"][b])) for b in order])
    logp = flat[at].requires_grad_()
    loss, metrics = alg.objective(Policy(logp=logp), tokens)
    total = (loss * tokens.weight).sum()
    total.backward()
    torch.testing.assert_close(total.detach(), torch.tensor(case["loss"], dtype=dtype), rtol=rtol, atol=rtol / 100)
    want = live(case["grad"]["logp"], dtype, fixture=PREF)[at]
    torch.testing.assert_close(logp.grad, want, rtol=rtol, atol=rtol / 100)
    if "extra" in case:
        means = {key: float((value * tokens.weight).sum()) for key, value in metrics.items()}
        assert means["pair/accuracy"] == pytest.approx(case["extra"]["accuracy"], rel=1e-4)
        assert means["pair/margin"] == pytest.approx(sum(case["extra"]["margin"]) / 2, rel=1e-4)


def row_order(alg: Algorithm, groups: list[Group]) -> list[int]:
    """Rows of the fixture in the order in which packing laid them."""
    plan = plan_update(alg.compute_advantages(groups), alg.loss_norm, 1000, whole_groups=alg.whole_groups)
    return [int(plan.samples[i].prompt.id) for i in plan.bins[0][0]]


@pytest.mark.parametrize("alg", [DPO(), DPO(label_smoothing=0.2), DPO(length_norm=True, beta=5.0)])
def test_dpo_of_the_reference_itself_is_log_two(alg):
    [batch] = plan_batches(alg, first_pairs("dpo/sigmoid"), torch.float64)
    loss, _ = alg.objective(Policy(logp=batch.tokens.ref_logp), batch.tokens)
    assert float((loss * batch.tokens.weight).sum()) == pytest.approx(math.log(2), abs=1e-12)


def test_a_pair_is_never_split():
    groups = [[answer(0), answer(1)], [answer(2), answer(3)]] * 5
    for batch in plan_batches(DPO(), groups, torch.float64, max_tokens=12):
        assert batch.tokens.group_ids is not None and batch.tokens.advantage is not None
        for pair in batch.tokens.group_ids.unique():
            signs = batch.tokens.advantage[batch.tokens.group_ids == pair].sign()
            assert set(signs.tolist()) == {1.0, -1.0}


def test_half_a_pair_teaches_nothing():
    groups = [[answer(0), answer(1)], [answer(2), replace(answer(3), reward=None, failure="timeout")]]
    [batch] = plan_batches(DPO(), groups, torch.float64)
    assert len(batch.labels) == sum(map(sum, PREF["mask"][:2]))


def test_ktos_mismatched_answers_are_the_next_rows():
    rows = [a_changed(answer(b), token_ids=[10 * b + t for t in range(len(answer(b).action_mask))]) for b in range(3)]
    arranged = KTO().prepare_groups([[row] for row in rows])
    assert [g[0] for g in arranged] == rows
    # row 2's prompt, row 0's answer and what follows it
    assert arranged[2][1].token_ids.tolist() == [20, 21, 2, 3, 4, 5]
    assert arranged[2][1].action_mask.tolist() == [False, False, True, True, True, False]
    assert arranged[2][1].reward is None


def test_the_reference_point_is_not_negative_and_the_same_for_all():
    [batch] = plan_batches(KTO_CASE, first_pairs("dpo/kto"), torch.float64)
    z0 = GOLDEN["cases"]["dpo/kto"]["hyperparameters"]["z0"]
    assert batch.tokens.reference_point is not None
    torch.testing.assert_close(batch.tokens.reference_point, torch.full_like(batch.tokens.reference_point, z0))
    [clamped] = plan_batches(KTO_CASE, first_pairs("dpo/kto_clamped_kl"), torch.float64)
    assert clamped.tokens.reference_point is not None and clamped.tokens.reference_point.abs().max() == 0


def test_a_reward_model_is_read_at_the_last_token():
    alg = RewardModel()
    pair = [replace(answer(b), columns={}) for b in (0, 1)]
    [batch] = plan_batches(alg, alg.prepare_groups([pair]), torch.float64)
    assert len(batch.labels) == 2
    ends = [len(s.token_ids) for s in pair]  # inputs hold all of the answer, and one position each is read
    assert sorted(batch.position_ids[batch.at].tolist()) == sorted(n - 1 for n in ends)
    assert len(batch.input_ids) == sum(ends)


def test_a_reward_models_loss_is_bradley_terrys():
    alg = RewardModel(target_margin=0.5, center=0.1)
    pair = [replace(answer(b), columns={}) for b in (0, 1)]
    [batch] = plan_batches(alg, alg.prepare_groups([pair]), torch.float64)
    assert batch.tokens.advantage is not None
    values = torch.where(batch.tokens.advantage > 0, 1.5, 0.25).double()
    loss, _ = alg.value_loss(values, batch.tokens)
    want = math.log(1 + math.exp(-(1.5 - 0.25 - 0.5))) + 0.1 * (1.5 + 0.25) ** 2
    assert float((loss * batch.tokens.weight).sum()) == pytest.approx(want, abs=1e-12)


def test_log1mexp_keeps_its_digits():
    x = torch.tensor([-1e-6, -0.1, -0.6931, -5.0, -40.0], dtype=torch.float64)
    want = [math.log(-math.expm1(v)) for v in x.tolist()]
    torch.testing.assert_close(log1mexp(x), torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    "settings",
    [
        {"form": "hinge", "label_smoothing": 0.1},
        {"form": "ipo", "target_margin": 1.0},
        {"label_smoothing": 0.5},
        {"loss_norm": "token"},
    ],
)
def test_settings_that_would_do_nothing_or_harm_are_refused(settings):
    with pytest.raises(ValidationError):
        DPO(**settings)


def test_what_is_told_of_pairs_by_hand():
    """Two pairs of one token each: the chosen gains 3 and the rejected 1; then both nothing."""
    signed = torch.tensor([3.0, -1.0, 0.0, 0.0])
    tokens = Tokens(
        seq_ids=torch.arange(4),
        group_ids=torch.tensor([0, 0, 1, 1]),
        weight=torch.full((4,), 0.25),
        advantage=torch.tensor([1.0, -1.0, 1.0, -1.0]),
    )
    told = {name.removeprefix("pair/"): values.tolist() for name, values in pair_metrics(signed, tokens).items()}
    assert told == {
        "chosen": [3.0, 3.0, 0.0, 0.0],
        "rejected": [1.0, 1.0, 0.0, 0.0],
        "margin": [2.0, 2.0, 0.0, 0.0],
        "accuracy": [1.0, 1.0, 0.0, 0.0],  # a tie is not right
    }


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.0, 0.0)])
def test_a_pair_without_a_preference_teaches_nothing(rewards):
    pair = [replace(answer(b), reward=r) for b, r in zip((0, 1), rewards, strict=True)]
    [[one, other]] = DPO().compute_advantages([pair])
    assert not any(one.loss_mask) and not any(other.loss_mask)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_likelihood_of_the_chosen_reply_is_of_all_its_tokens(decay):
    """Three tokens of log-probability -1, -2 and -3, of which the third is beyond the rejected reply's two."""
    ids, logp = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
    tokens = Tokens(
        weight=torch.ones(5),
        advantage=torch.tensor([1, 1, decay, -1, -1]),
        seq_ids=ids,
        group_ids=torch.zeros_like(ids),
    )
    with_it, without = (
        DPO(reference_free=True, length_decay=decay, nll_coef=coef).loss(Policy(logp=logp), tokens)[0]
        for coef in (1.0, 0.0)
    )
    assert (with_it - without).tolist() == pytest.approx([2.0] * 5)
