"""Losses on distributions against the numbers of the second independent oracle: value and gradient by the logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from algs.base import Algorithm
from algs.distill import Distill
from algs.divergences import Divergence, jensen_shannon, kl_divergence
from algs.gkd import GKD
from algs.grpo import GRPO
from algs.measures import plan_measures
from algs.minillm import MiniLLM
from algs.terms import KL, Correction
from core.errors import UserError
from core.types.measures import list_teachers
from modeling.softmax import Softmax
from unit_tests.helpers.golden import TOLERANCES
from unit_tests.helpers.golden2 import CASES2, batch_of_groups, logit_groups, table_of

OFF = Correction(level="none")


def gkd(**settings) -> GKD:
    return GKD(teacher="somewhere", divergence=Divergence(**settings))


class Penalty(GRPO):
    """The penalty alone, without a policy's loss."""

    def loss(self, policy, tokens):
        return 0.0 * policy.logp, {}


def penalty(estimator: str) -> Penalty:
    return Penalty(correction=OFF, kl=KL(coef=1.0, estimator=estimator))


CASES: dict[str, Algorithm] = {
    "kl/full_reverse": penalty("full"),
    "kl/full_forward": penalty("full_forward"),
    "gkd/jsd_beta0.1": gkd(beta=0.1),
    "gkd/jsd_beta0.5": gkd(),
    "gkd/jsd_beta0.9": gkd(beta=0.9),
    "gkd/jsd_beta0.5_T0.7": gkd(),
    "gkd/forward_full": gkd(beta=0),
    "gkd/reverse_full": gkd(beta=1),
    "topk/forward_truncated": gkd(beta=0, topk=2, rest="drop"),
    "topk/forward_renormalised": gkd(beta=0, topk=2, rest="renormalise"),
    "topk/forward_tail": gkd(beta=0, topk=2),
    "topk/reverse_tail": gkd(beta=1, topk=2),
    "topk/reverse_student_support_tail": gkd(beta=1, topk=2, support="student"),
    "ppo/exact_kl_penalty": GRPO(
        clip_low=0.2, clip_high=0.2, correction=OFF, kl=KL(coef=0.1, estimator="full"), loss_norm="token"
    ),
    "stored/forward_truncated": Distill(form="truncated"),
    "stored/forward_tail": Distill(),
    "stored/cross_entropy_renormalised": Distill(form="cross_entropy"),
    "minillm/paper": MiniLLM(teacher="somewhere"),
}
"""Of these the ratio of ppo/exact_kl_penalty is to the sampler, which is then the proximal policy too."""
FROZEN = {"ref_logp": "ref_logits", "teacher": "teacher_logits", "teacher_logp": "teacher_logits"}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCES)
@pytest.mark.parametrize("poison", [0.0, float("nan"), 1e6])
def test_loss_and_gradient_by_the_logits_are_the_oracles(name, dtype, rtol, poison):
    case, alg = CASES2[name], CASES[name]
    temperature = case["hyperparameters"].get("temperature", 1.0)
    groups = logit_groups(temperature, poison)
    if name == "minillm/paper":
        groups = alg.compute_advantages(groups)
    batch = batch_of_groups(alg, alg.prepare_groups(groups), dtype)
    tokens = batch.tokens
    if name == "ppo/exact_kl_penalty":
        tokens = tokens.replace(prox_logp=tokens.rollout_logp)
    measures = plan_measures(alg).live
    softmax = Softmax(
        labels=batch.labels,
        temperature=temperature,
        measures=measures,
        read_column=tokens.column,
        teachers={t: lambda rows, key=FROZEN[t]: table_of(key, dtype)[rows] for t in list_teachers(measures)},
    )
    logits = table_of("logits", dtype).requires_grad_()
    policy = softmax.name_rows(softmax.compute_at_once(logits))
    loss, _ = alg.objective(policy, tokens)
    total = (loss * tokens.weight).sum()
    total.backward()
    torch.testing.assert_close(total.detach(), torch.tensor(case["loss"], dtype=dtype), rtol=rtol, atol=rtol)
    want = torch.tensor(case["grad"]["logits"], dtype=dtype)
    live = want.abs().sum(-1) > 0
    assert int(live.sum()) == len(logits)
    torch.testing.assert_close(logits.grad, want[live], rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_model_beside_itself_has_no_distance_and_no_gradient(beta):
    s = torch.randn(5, 9, dtype=torch.float64).log_softmax(-1)
    live = s.clone().requires_grad_()
    found = jensen_shannon(live, s, beta)
    assert found.abs().max() < 1e-15


def test_a_tail_makes_it_a_divergence_below_that_of_the_whole_vocabulary():
    torch.manual_seed(0)
    s, t = torch.randn(2, 200, 12, dtype=torch.float64).log_softmax(-1)
    for beta, whole in ((0, kl_divergence(t, s)), (1, kl_divergence(s, t))):
        coarse = Divergence(beta=beta, topk=3).compute(s, t)
        assert (coarse >= 0).all() and (coarse <= whole + 1e-12).all()
        assert torch.allclose(Divergence(beta=beta, topk=12, rest="drop").compute(s, t), whole)
    assert (Divergence(beta=0, topk=3, rest="drop").compute(s, t) < 0).any(), "what a tail is for"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"topk": 5}, "set beta to 0 or 1"),
        ({"rest": "drop"}, "set topk"),
        ({"beta": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Divergence(**settings)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"topk_ids": None}, "has no topk_ids"),
        ({"topk_tokens": [0, 0, 0, 0]}, "topk_tokens are not the 4 tokens that are trained on here"),
        ({"topk_ids": [[0], [1], [2], []]}, "must be lists of one length, and not empty"),
    ],
)
def test_a_row_that_stores_something_else_is_refused(change, said):
    [[sample], _] = logit_groups(1.0, 0.0)
    extra = {name: value for name, value in {**sample.prompt.extra, **change}.items() if value is not None}
    with pytest.raises(UserError, match=said):
        Distill().prepare_groups([[replace(sample, prompt=replace(sample.prompt, extra=extra))]])
