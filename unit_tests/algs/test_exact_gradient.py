"""Every estimator against a gradient known exactly: its mean over all groups that can be drawn, by their chances."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from algs.base import Algorithm
from algs.grpo import GRPO
from algs.rloo import RLOO
from algs.terms import KL, Correction
from tools.benchmarks.estimator_bias import EXACT, Setting, estimates, measure, samples_of, step_gradients
from tools.benchmarks.exact_gradient import Case, listed
from tools.benchmarks.toy_task import (
    entropy_gradient,
    forward_kl_gradient,
    make_toy,
    sequence_kl_gradient,
    token_kl_gradient,
)

TOY = make_toy()  # 64 completions of 3 tokens
IDLE = replace(TOY, rewards=torch.zeros_like(TOY.rewards))
SHORT = make_toy(vocab=3, longest=2)  # 9 completions
PRODUCT = Correction(level="sequence", high=math.inf)
BITES = 1e-3

CLAIMS = [(table.setting, case) for table in listed(vocab=3) for case in table.cases()]


def mean_of(alg: Algorithm, setting: Setting) -> Tensor:
    gradients, probability = estimates(alg, setting)
    return torch.einsum("s,snv->nv", probability, gradients)


@pytest.mark.verify
@pytest.mark.parametrize(("setting", "case"), CLAIMS, ids=[f"{case.claim}-{case.name}" for _, case in CLAIMS])
def test_an_estimator_is_as_biased_as_the_benchmark_claims(setting: Setting, case: Case):
    got = measure(case.alg, setting)
    match case.claim:
        case "unbiased":
            assert got.bias < EXACT
        case "biased in length":
            assert got.bias > BITES and got.aside < EXACT
        case "biased":
            assert got.aside > BITES


@pytest.mark.parametrize("ends", [False, True])
def test_rloo_is_the_gradient_of_the_expected_reward(ends: bool):
    got = measure(RLOO(), Setting(toy=make_toy(ends=ends)))
    assert got.bias < EXACT
    assert got.spread > 1, "a single group of two is mostly noise"


@pytest.mark.parametrize(("toy", "group"), [(TOY, 2), (SHORT, 2), (SHORT, 3), (SHORT, 4)])
def test_a_sample_in_its_own_baseline_loses_one_in_g_of_the_gradient(toy, group: int):
    at = Setting(toy=toy, group=group)
    whole, centred = mean_of(RLOO(), at), mean_of(GRPO(loss_norm="sequence_sum"), at)
    torch.testing.assert_close(centred, whole * (group - 1) / group, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("alg", [RLOO, GRPO])
def test_the_product_of_the_ratios_makes_another_policys_samples_good(alg: type[Algorithm]):
    settings = {"loss_norm": "sequence_sum", "leave_one_out": True}
    at = Setting(toy=TOY, source="engine")
    assert measure(alg(**settings, correction=PRODUCT), at).bias < EXACT
    assert measure(alg(**settings, correction=Correction(level="sequence")), at).aside > BITES, "bounded by 2"


@pytest.mark.parametrize("estimator", ["unbiased", "k2", "k3plus", "k3"])
@pytest.mark.parametrize("source", ["pi", "engine"])
def test_the_kl_in_the_loss_is_that_of_each_token(estimator, source):
    """k3 is another divergence's; samples of mu want the ratio that only `unbiased` has."""
    alg = RLOO(kl=KL(coef=0.7, estimator=estimator))
    at = Setting(toy=IDLE, group=1, source=source)
    meant = 0.7 * token_kl_gradient(IDLE, source)
    gap = ((mean_of(alg, at) - meant).norm() / meant.norm()).item()
    assert gap < EXACT if estimator == "unbiased" or (source == "pi" and estimator != "k3") else gap > BITES
    if source == "pi" and estimator == "k3":
        assert measure(RLOO(kl=KL(coef=1, estimator="k3")), replace(at, target=forward_kl_gradient)).bias < EXACT


def test_the_kl_in_the_reward_is_that_of_completions_but_not_in_the_loss():
    at = Setting(toy=IDLE, target=sequence_kl_gradient)
    assert measure(RLOO(kl=KL(coef=1, place="reward")), at).bias < EXACT
    assert measure(RLOO(kl=KL(coef=1)), replace(at, group=1)).aside > BITES


def test_reward_and_kl_add_up():
    """The policy term is corrected and the KL's is not, yet both are right for samples of mu."""
    at = Setting(toy=TOY, source="engine")
    both = mean_of(RLOO(correction=PRODUCT, kl=KL(coef=0.3)), at)
    meant = at.target(TOY, "engine") + 0.3 * token_kl_gradient(TOY, "engine")
    torch.testing.assert_close(both, meant, rtol=1e-9, atol=1e-12)


def test_the_entropy_bonus_adds_the_entropys_gradient():
    assert measure(RLOO(entropy_coef=1), Setting(toy=IDLE, group=1, target=entropy_gradient)).bias < EXACT


def test_the_gradients_that_are_meant_are_difference_quotients():
    """Written out over completions in plain Python, without the tensor the exact gradients are taken from."""
    toy, h = make_toy(vocab=3, ends=True), 1e-5

    def worth(pi: Tensor) -> tuple[float, float]:
        logp, ref = pi.log_softmax(-1).tolist(), toy.ref.log_softmax(-1).tolist()
        reward = kl = 0.0
        for completion, r in zip(toy.completions, toy.rewards.tolist(), strict=True):
            prefix, ours, theirs = 0, 0.0, 0.0
            for v in completion:
                ours, theirs = ours + logp[prefix][v], theirs + ref[prefix][v]
                prefix = int(toy.following[prefix, v])
            chance = math.exp(ours)
            reward, kl = reward + chance * r, kl + chance * (ours - theirs)
        return reward, kl

    reward, kl = Setting(toy=toy).target(toy, "pi"), -sequence_kl_gradient(toy, "pi")
    for n, v in [(0, 0), (0, 2), (1, 1), (2, 0)]:
        step = torch.zeros_like(toy.pi)
        step[n, v] = h
        above, below = worth(toy.pi + step), worth(toy.pi - step)
        assert reward[n, v].item() == pytest.approx((above[0] - below[0]) / 2 / h, abs=1e-6)
        assert kl[n, v].item() == pytest.approx((above[1] - below[1]) / 2 / h, abs=1e-6)


@pytest.mark.parametrize("alg", [RLOO(), GRPO(scale_rewards="group", whiten=True)])
def test_a_group_is_the_same_in_any_order(alg: Algorithm):
    """It is why only one order of each group is computed."""
    a, b, c = samples_of(alg, Setting(toy=TOY))[10:13]
    one, other = step_gradients(TOY, alg, [[[a, b, c]], [[c, a, b]]])
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    assert one.norm() > 0


def test_drawn_groups_tell_what_listed_ones_do():
    """64 completions, groups of 2: the drawn mean lies within three standard errors of the exact one."""
    alg, exact = GRPO(scale_rewards="group"), Setting(toy=TOY)
    some = replace(exact, draws=1000)
    error = measure(alg, some).error * exact.target(TOY, "pi").norm()
    assert (mean_of(alg, some) - mean_of(alg, exact)).norm() < 3 * error
