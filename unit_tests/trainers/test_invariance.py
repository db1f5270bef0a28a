"""One gradient, however it is cut: micro-batches, layouts and order are matters of memory and speed."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from algs.gmpo import GMPO
from algs.grpo import GRPO
from algs.gspo import GSPO
from algs.kl_cov import KLCov
from algs.p3o import P3O
from algs.p4o import P4O
from algs.ppo import PPO
from algs.sft import SFT
from algs.terms import KL, Correction
from algs.top_entropy import TopEntropy
from core.errors import UserError
from core.types.samples import Group
from data_feeds.packing.batches import micro_batches
from unit_tests.helpers.examples import columns_of, families, some_groups, with_values
from unit_tests.helpers.local_trainers import change, trainer_of

ALGS = [
    GRPO(),
    GRPO(loss_norm="sequence", entropy_coef=0.01),
    GRPO(loss_norm="constant"),
    GRPO(loss_norm="prompt", kl=KL(coef=0.0)),
    SFT(),
    GSPO(),
    GMPO(correction=Correction(level="sequence")),
    P3O(),
    P4O(),
    KLCov(fraction=0.3),
    TopEntropy(quantile=0.5),
    PPO(value_clip=0.2),
]


@pytest.fixture(scope="module")
def in_one_piece(tiny_path) -> Callable[..., tuple[int, torch.Tensor, dict[str, float]]]:
    """Tokens of a step in one piece, its gradient and metrics, computed once for all ways to cut it."""

    @cache
    def step(make_groups: Callable[[], list[Group]], alg: int) -> tuple[int, torch.Tensor, dict[str, float]]:
        [whole] = micro_batches(with_values(make_groups()), ALGS[alg].loss_norm, 10_000, horizon=30)
        return sum(len(batch.input_ids) for batch in whole), *change(tiny_path, ALGS[alg], whole)

    return step


each_algorithm = pytest.mark.parametrize(
    "alg", range(len(ALGS)), ids=lambda i: f"{type(ALGS[i]).__name__}-{ALGS[i].loss_norm}"
)


@each_algorithm
@pytest.mark.parametrize(("max_tokens", "ranks", "layout"), [(40, 1, "padded"), (64, 3, "packed"), (23, 7, "padded")])
def test_a_step_does_not_depend_on_how_it_is_cut(tiny_path, in_one_piece, alg, max_tokens, ranks, layout):
    groups = with_values(some_groups())
    per_rank = micro_batches(groups[::-1], ALGS[alg].loss_norm, max_tokens, ranks=ranks, horizon=30)
    pieces = [batch for rank in per_rank for batch in rank]
    assert len(pieces) > 1
    _, expected, metrics = in_one_piece(some_groups, alg)
    got, cut_metrics = change(tiny_path, ALGS[alg], pieces, layout=layout)
    assert (got - expected).norm() < 1e-5 * expected.norm()
    assert cut_metrics == pytest.approx(metrics, abs=1e-5)


@each_algorithm
@pytest.mark.parametrize(("max_tokens", "ranks"), [(10_000, 1), (40, 1), (25, 3)])
def test_a_step_does_not_depend_on_what_samples_share(tiny_path, in_one_piece, alg, max_tokens, ranks):
    groups = with_values(families())
    cut = {"ranks": ranks, "padded": False, "share_prefixes": True, "horizon": 30}
    pieces = [b for rank in micro_batches(groups[::-1], ALGS[alg].loss_norm, max_tokens, **cut) for b in rank]
    tokens, expected, metrics = in_one_piece(families, alg)
    assert sum(len(b.input_ids) for b in pieces) < 0.8 * tokens
    got, cut_metrics = change(tiny_path, ALGS[alg], pieces, layout="packed", attention="auto")
    assert (got - expected).norm() < 1e-5 * expected.norm()
    assert cut_metrics == pytest.approx(metrics, abs=1e-5)


def test_the_gradient_is_the_one_written_down_in_plain_torch(tiny_path):
    """Independent of our packing, forward and step: one sequence at a time, token mean, -log p."""
    groups = some_groups()
    trainer = trainer_of(tiny_path, SFT())
    total = sum(s.n_trained for g in groups for s in g)
    loss = 0.0
    for s in (s for g in groups for s in g):
        logp = (trainer.model(input_ids=torch.tensor(s.token_ids[None])).logits[0] / 0.9).log_softmax(-1)
        for t in range(1, len(s.token_ids)):
            if s.action_mask[t]:
                loss = loss - logp[t - 1, s.token_ids[t]] / total
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(trainer.model.parameters()))])
    got, metrics = change(tiny_path, SFT(), micro_batches(groups, "token", 50)[0])
    assert (got - expected).norm() < 1e-5 * expected.norm()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["tokens"] == total


class MeanLoss(SFT):
    def loss(self, policy, tokens):
        return -policy.logp.mean(), {}


class MeanPolicyGradient(GRPO):
    def loss(self, policy, tokens):
        return -policy.logp.mean(), {}


@pytest.mark.parametrize("alg", [MeanLoss(), MeanPolicyGradient()])
def test_a_loss_that_reduces_is_refused(tiny_path, alg):
    with pytest.raises(UserError, match="one value per token"):
        change(tiny_path, alg, micro_batches(some_groups(), "token", 1000)[0])


def test_a_value_model_begins_at_zero_and_learns_the_returns(tiny_path):
    groups = with_values(some_groups(2))
    trainer = trainer_of(tiny_path, PPO(critic_lr=1e-2), optimizer="adamw", lr=1e-5)
    [micro] = micro_batches(groups, "token", 10_000)
    [first] = columns_of(trainer, micro, "values")
    assert first["values"].abs().max() == 0
    losses = [trainer.step([micro])["value/loss"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_second_update_of_a_step_is_no_longer_on_policy(tiny_path):
    """prox_logp is scored before the first update; the ratio of the second is not 1 any more."""
    groups = some_groups(2)
    trainer = trainer_of(tiny_path, GRPO(clip_low=1e-6, clip_high=1e-6), lr=0.1)
    [micro] = micro_batches(groups, "token", 10_000)
    [scored] = columns_of(trainer, micro, "prox_logp")
    micro[0].tokens.prox_logp = scored["prox_logp"]
    first = trainer.step([micro])
    second = trainer.step([micro])
    assert first["clip_frac_high"] + first["clip_frac_low"] < 0.05
    assert second["clip_frac_high"] + second["clip_frac_low"] > 0.5
