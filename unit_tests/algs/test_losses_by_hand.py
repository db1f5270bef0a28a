"""Losses by hand where an oracle's case has equal bounds, a coefficient of 1, or no metric."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from algs.base import PolicyGradient
from algs.bco import BCO
from algs.chord import CHORD
from algs.divergences import jensen_shannon, kl_divergence
from algs.dpo import DPO
from algs.dpo_nll import DPOWithNLL, find_chosen
from algs.dro import DRO
from algs.echo import ECHO
from algs.gpg import GPG
from algs.grpo import GRPO
from algs.gspo import GSPO
from algs.kl_cov import KLCov, covariance
from algs.luffy import LUFFY
from algs.opo import OPO
from algs.orpo import log1mexp
from algs.otb import OTB
from algs.passk import PassK
from algs.positive_nll import PositiveNLL
from algs.ppo import PPO
from algs.qae import QAE
from algs.rae import RAE
from algs.raft import RAFT
from algs.reinforce_pp import ReinforcePP
from algs.rloo import RLOO
from algs.scalerl import ScaleRL
from algs.sdpo import SDPO
from algs.sft import SFT
from algs.terms import KL, Correction
from algs.tilted import Tilted
from algs.top_entropy import TopEntropy
from algs.wpo import WPO
from core.types.samples import Policy, Tokens
from unit_tests.helpers.examples import sample_of


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens_of(advantage: Tensor, **columns: Any) -> Tokens:
    """Tokens of a sequence each, all in one group."""
    ids = torch.arange(len(advantage))
    given = {"seq_ids": ids, "group_ids": torch.zeros_like(ids)} | columns
    return Tokens(weight=torch.ones_like(advantage), advantage=advantage, **given)


BOUNDS: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.5}
CLIPPED: list[PolicyGradient] = [
    GRPO(**BOUNDS),
    PPO(**BOUNDS),
    ReinforcePP(**BOUNDS),
    PassK(**BOUNDS),
    QAE(**BOUNDS),
    GSPO(**BOUNDS, ratio="product"),
    GSPO(**BOUNDS, ratio="product", form="token"),
]


@pytest.mark.parametrize("alg", CLIPPED)
def test_a_ratio_is_clipped_below_and_above_by_its_own_bound(alg: PolicyGradient):
    ratio, advantage = tensor(0.85, 0.95, 1.2, 1.6), tensor(-1, -1, 1, 1)
    logp = ratio.log().requires_grad_()
    loss, told = alg.loss(Policy(logp=logp), tokens_of(advantage, prox_logp=torch.zeros(4)))
    assert loss.tolist() == pytest.approx([0.9, 0.95, -1.2, -1.5])
    assert told["clip_frac_low"].tolist() == [1, 0, 0, 0] and told["clip_frac_high"].tolist() == [0, 0, 0, 1]
    assert told["approx_kl"].tolist() == pytest.approx((ratio - 1 - ratio.log()).tolist())
    [slope] = torch.autograd.grad(loss.sum(), logp)
    assert slope.tolist() == pytest.approx([0, 0.95, -1.2, 0])


def test_the_clip_of_raft_is_the_same_on_both_sides():
    ratio = tensor(0.8, 1.2, 1.4)
    tokens = tokens_of(tensor(1, 1, -1), prox_logp=torch.zeros(3))
    loss, told = RAFT(clip=0.25).loss(Policy(logp=ratio.log()), tokens)
    assert loss.tolist() == pytest.approx([-0.8, -1.2, 1.4])
    assert not told["clip_frac_low"].any() and not told["clip_frac_high"].any()
    loss, told = RAFT(clip=0.1).loss(Policy(logp=ratio.log()), tokens.replace(advantage=tensor(-1, 1, 1)))
    assert loss.tolist() == pytest.approx([0.9, -1.1, -1.1])
    assert told["clip_frac_low"].tolist() == [1, 0, 0] and told["clip_frac_high"].tolist() == [0, 1, 1]
    plain, nothing = RAFT().loss(Policy(logp=tensor(-2, -3)), tokens_of(tensor(0.5, 2)))
    assert (plain.tolist(), nothing) == ([1, 6], {})


@pytest.mark.parametrize("alg", [GRPO(dual_clip=3.0), PPO(dual_clip=3.0)])
def test_a_dual_clip_bounds_the_loss_of_bad_tokens(alg: PolicyGradient):
    tokens = tokens_of(tensor(-2, -2, 2), prox_logp=torch.zeros(3))
    loss, _ = alg.loss(Policy(logp=tensor(4, 2, 0.5).log()), tokens)
    assert loss.tolist() == pytest.approx([6, 4, -1])


@pytest.mark.parametrize("alg", [GPG(), OPO(), OTB(), RAE(), RLOO()])
def test_reinforce_multiplies_advantage_and_log_probability(alg: PolicyGradient):
    loss, told = alg.loss(Policy(logp=tensor(-0.5, -1.5)), tokens_of(tensor(2, -3)))
    assert (loss.tolist(), told) == ([1, -4.5], {})


def test_imitation_is_minus_the_log_probability():
    quarter = math.log(0.25)
    policy, tokens = Policy(logp=tensor(quarter)), tokens_of(tensor(2))
    for imitate in (DPOWithNLL().imitate, ECHO().predict_answer, PositiveNLL().imitate, SFT().loss):
        loss, told = imitate(policy, tokens)
        assert (loss.tolist(), told) == ([pytest.approx(-quarter)], {})
    for phi, want in ((True, -0.1875 * quarter), (False, -quarter)):
        loss, told = CHORD(phi=phi).imitate(policy, tokens)
        assert (loss.tolist(), told["p"].tolist()) == ([pytest.approx(want)], [pytest.approx(0.25)])
    assert SFT(dft=True).loss(policy, tokens)[0].tolist() == pytest.approx([-0.25 * quarter])
    loss, told = LUFFY(gamma=0.15).shaped(policy, tokens)
    assert (loss.tolist(), told["p"].tolist()) == ([pytest.approx(-1.25)], [pytest.approx(0.25)])
    chosen, rejected = (sample_of([1, 2, 3], [False, True, True], reward=r) for r in (1.0, 0.0))
    assert find_chosen(chosen).tolist() == [False, True, True] and not find_chosen(rejected).any()


def test_the_penalty_of_kl_cov_has_its_coefficient():
    """Covariances 6 and 7 about means of 2 and -1; only the second token is penalised."""
    t = {"n": tensor(2)[0], "advantage": tensor(4)[0], "logp": tensor(-2)[0]}
    cov = covariance(tensor(1, -8), tensor(5, 1), t)
    assert cov.tolist() == [6, 7]
    tokens = tokens_of(tensor(5, 1), prox_logp=tensor(1, -7.5), first={"cov": cov}, totals={"cov": tensor(7)[0]})
    loss, told = KLCov(coef=3.0).loss(Policy(logp=tensor(1.2, -8)), tokens)
    assert loss.tolist() == pytest.approx([-5 * math.exp(0.2), -math.exp(-0.5) + 1.5])
    assert told["penalised"].tolist() == [0, 1]


def test_a_completion_is_good_above_the_running_mean_of_bco():
    alg = BCO(beta=2.0).with_state({"delta": 0.5, "completions": 3})
    tokens = tokens_of(tensor(1, 1, -1, 1), ref_logp=tensor(-1, -1, -1, -1), seq_ids=torch.tensor([0, 0, 1, 2]))
    loss, told = alg.loss(Policy(logp=tensor(-0.5, -0.75, -1.1, -0.75)), tokens)
    assert told["bco/reward"].tolist() == pytest.approx([1.5, 1.5, -0.2, 0.5])
    assert told["bco/accuracy"].tolist() == [1, 1, 1, 0], "at the mean itself it is not"
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-x)) for x in (1, 1, 0.7, 0)])


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


W, L = 1.4, -0.6
"""The two sums of a pair; with beta 0.5 the margin is 1."""
FORMS: list[tuple[dict[str, Any], float]] = [
    ({}, softplus(-1)),
    ({"label_smoothing": 0.2}, 0.8 * softplus(-1) + 0.2 * softplus(1)),
    ({"target_margin": 3.0}, softplus(2)),
    ({"form": "robust", "label_smoothing": 0.2}, (0.8 * softplus(-1) - 0.2 * softplus(1)) / 0.6),
    ({"form": "hinge"}, 0.0),
    ({"form": "ipo"}, 1.0),
    (
        {"form": "exo", "label_smoothing": 0.2},
        sigmoid(1) * (-softplus(-1) - math.log(0.8)) + sigmoid(-1) * (-softplus(1) - math.log(0.2)),
    ),
    ({"form": "apo_zero"}, 1 - sigmoid(0.7) + sigmoid(-0.3)),
    ({"form": "apo_down"}, 1 - sigmoid(1) + sigmoid(0.7)),
    ({"form": "nca"}, softplus(-0.7) + (softplus(0.7) + softplus(-0.3)) / 2),
    ({"form": "bco"}, softplus(-0.7) + softplus(-0.3)),
    ({"form": "sppo"}, (W - 1) ** 2 + (L + 1) ** 2),
]


@pytest.mark.parametrize(("settings", "want"), FORMS)
def test_forms_of_dpo_compare_two_sums(settings: dict[str, Any], want: float):
    loss = DPO(beta=0.5, **settings).compare(tensor(W), tensor(L))
    assert loss.tolist() == [pytest.approx(want, abs=1e-12)]


def test_a_hinge_is_0_from_a_margin_of_1_on():
    assert DPO(form="hinge", beta=2.0).compare(tensor(1, 0.5, 0.25, -1), torch.zeros(4)).tolist() == [0, 0, 0.5, 3]


def test_a_likely_pair_weighs_more_in_wpo():
    """Mean excesses of log 2 (of two tokens) and of log 3, so the weight is 6."""
    logp = tensor(-1, -2, -3)
    collision = (logp - tensor(math.log(4), 0, math.log(3))).exp()
    tokens = tokens_of(tensor(1, 1, -1), seq_ids=torch.tensor([0, 0, 1]), group_ids=torch.zeros(3, dtype=torch.int64))
    alg = WPO(reference_free=True, beta=0.5)
    loss, told = alg.loss(Policy(logp=logp, measures={"collision": collision}), tokens)
    assert told["pair/weight"].tolist() == pytest.approx([6] * 3)
    assert loss.tolist() == pytest.approx([6 * math.log(2)] * 3), "both sums are -3"
    far = alg.loss(Policy(logp=logp, measures={"collision": collision * math.exp(-90)}), tokens)[1]["pair/weight"]
    assert far.tolist() == pytest.approx([math.exp(20)] * 3)
    near = alg.loss(Policy(logp=logp, measures={"collision": collision * math.exp(90)}), tokens)[1]["pair/weight"]
    assert near.tolist() == pytest.approx([math.exp(-20)] * 3)


def test_the_log_of_a_rest_has_a_gradient_on_either_side():
    """d/dx log(1 - exp x) is -exp x / (1 - exp x); at 0 and above x counts as -1e-7."""
    x = tensor(-0.1, -5.0, 0.0, 0.5).requires_grad_()
    found = log1mexp(x)
    [slope] = torch.autograd.grad(found.sum(), x)
    want = [-math.exp(v) / (1 - math.exp(v)) for v in (-0.1, -5.0)]
    assert slope.tolist() == pytest.approx([*want, 0, 0])
    assert found.tolist()[2:] == pytest.approx([math.log(1e-7)] * 2, abs=1e-6)


def test_a_weight_of_sdpo_is_bounded_and_its_distance_told():
    tokens = tokens_of(tensor(0, 0), prox_logp=tensor(-3, -1), teacher_logp=tensor(-2, -0.5))
    loss, told = SDPO(max_weight=1.5).loss(Policy(logp=tensor(-1, -1.5)), tokens)
    assert told["teacher_kl"].tolist() == [1, -1]
    assert loss.tolist() == pytest.approx([-1.5, 1.5 * math.exp(-0.5)])


def test_a_tilt_is_told_as_the_weight_of_each_token():
    """Losses 1 and -1, beta log 2 / 2: exponentials 1 and 1/2 below the largest, mean 3/4."""
    totals = {"n": tensor(2)[0], "worst": tensor(1)[0], "tilt": tensor(1.5)[0]}
    tokens = tokens_of(tensor(-1, 1), prox_logp=torch.zeros(2), totals=totals)
    beta = math.log(2) / 2
    loss, told = Tilted(beta=beta).loss(Policy(logp=torch.zeros(2, dtype=torch.float64)), tokens)
    assert told["tilt"].tolist() == pytest.approx([4 / 3, 2 / 3])
    assert loss.tolist() == pytest.approx([1 + math.log(0.75) / beta] * 2)


def test_tokens_of_high_entropy_alone_have_a_loss():
    first, totals = {"entropy": tensor(0.4, 0.5, 0.6)}, {"entropy": tensor(0.5)[0]}
    tokens = tokens_of(tensor(1, 1, 1), prox_logp=torch.zeros(3), first=first, totals=totals)
    loss, told = TopEntropy().loss(Policy(logp=torch.zeros(3, dtype=torch.float64)), tokens)
    assert loss.tolist() == [0, -1, -1] and told["high_entropy"].tolist() == [0, 1, 1]


def test_dro_pulls_a_sequence_by_the_square_of_its_whole_drift():
    """Drifts 1, 2 and 3, of which the first two are one sequence: 9 over its two tokens, and 9 over one."""
    tokens = tokens_of(tensor(1, 1, 2), seq_ids=torch.tensor([0, 0, 1]), ref_logp=tensor(-2, -3, -4))
    tokens = tokens.replace(prox_logp=tensor(-1, -1, -1), rollout_logp=tensor(-3, -2, -1))
    policy = Policy(logp=tensor(-1, -1, -1))
    whole = DRO(tau=0.5, level="sequence", loss_norm="sequence_sum", anchor="ref").loss(policy, tokens)[0]
    assert whole.tolist() == pytest.approx([0.25 * 4.5 + 1, 0.25 * 4.5 + 1, 0.25 * 9 + 2])
    for anchor, drift in (("ref", [1, 2, 3]), ("prox", [0, 0, 0]), ("rollout", [2, 1, 0])):
        settings: dict[str, Any] = {"anchor": anchor, "correction": Correction(level="none")}
        loss, told = DRO(tau=0.5, **settings).loss(policy, tokens)
        assert told["drift"].tolist() == drift
        assert loss.tolist() == pytest.approx([0.25 * d * d + a for d, a in zip(drift, (1, 1, 2), strict=True)])


def test_scalerl_caps_the_ratio_to_the_engine():
    tokens = tokens_of(tensor(2, 2), rollout_logp=tensor(-3, -1), prox_logp=tensor(9, 9))
    loss, told = ScaleRL(max_weight=1.5).loss(Policy(logp=tensor(-1, -1.5)), tokens)
    assert loss.tolist() == pytest.approx([3, 3 * math.exp(-0.5)]) and told["capped"].tolist() == [1, 0]


def test_a_distance_of_two_distributions_has_a_side():
    s, t = tensor(0.75, 0.25).log()[None], tensor(0.5, 0.5).log()[None]
    student = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    teacher = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert kl_divergence(s, t).tolist() == [pytest.approx(student)]
    assert [jensen_shannon(s, t, beta).tolist() for beta in (0.0, 1.0)] == [
        [pytest.approx(teacher)],
        [pytest.approx(student)],
    ]
    mix = [0.2 * 0.5 + 0.8 * 0.75, 0.2 * 0.5 + 0.8 * 0.25]
    want = 0.2 * sum(0.5 * math.log(0.5 / m) for m in mix)
    want += 0.8 * sum(p * math.log(p / m) for p, m in zip((0.75, 0.25), mix, strict=True))
    assert jensen_shannon(s, t, 0.2).tolist() == [pytest.approx(want)]


def test_terms_of_the_objective_are_added_and_told():
    """A loss of -2, an engine's weight of 1.5, a KL of 0.5 x k2 and an entropy bonus of 0.25."""
    logp = tensor(-1.0)
    tokens = tokens_of(tensor(2), prox_logp=logp, rollout_logp=logp - math.log(1.5), ref_logp=tensor(-3))
    alg = GRPO(kl=KL(coef=0.5, estimator="k2"), entropy_coef=0.25)
    loss, told = alg.objective(Policy(logp=logp, entropy=tensor(0.8)), tokens)
    assert loss.tolist() == [pytest.approx(-2 * 1.5 + 0.5 * 2 - 0.25 * 0.8)]
    gap = math.log(1.5)
    want = {
        "mismatch/kl": 1.5 - 1 - gap,
        "mismatch/abs_logp": gap,
        "mismatch/clamped": 0,
        "mismatch/ratio": 1.5,
        "mismatch/ratio_sq": 2.25,
        "mismatch/weight": 1.5,
        "kl_ref": math.exp(-2) - 1 + 2,
        "kl_ref_capped": 0,
        "entropy": 0.8,
    }
    assert {name: told[name].item() for name in want} == pytest.approx(want)
    bare = GRPO(correction=Correction(level="none")).objective(Policy(logp=logp), tokens.replace(ref_logp=None))[1]
    assert told.keys() - bare.keys() == {"mismatch/weight", "kl_ref", "kl_ref_capped", "entropy"}
    far = tokens.replace(ref_logp=tensor(10), rollout_logp=tensor(-22))
    told = alg.objective(Policy(logp=logp, entropy=tensor(0.8)), far)[1]
    assert told["kl_ref_capped"].item() == told["mismatch/clamped"].item() == 1
