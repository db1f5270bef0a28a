"""QAE, TOPR and ERC against numbers computed by hand from their papers' formulas."""

import math

import pytest
import torch

from algs.erc import ERC
from algs.grpo import GRPO
from algs.qae import QAE
from algs.topr import TOPR
from core.types.samples import Policy, Tokens
from unit_tests.helpers.examples import sample_of


@pytest.mark.parametrize(
    ("right", "teaching"),
    [(1, "right"), (5, "right"), (6, "right"), (7, "wrong"), (9, "wrong")],  # K = 0.4: up to 6 of 10 is hard
)
def test_qae_teaches_by_the_rare_kind_of_reply_alone(right: int, teaching: str):
    rewards = [1.0] * right + [0.0] * (10 - right)
    got = QAE(quantile=0.4).compare([sample_of([1, 2], [False, True], reward=r) for r in rewards])
    std = math.sqrt(10 / 9 * (right / 10) * (1 - right / 10)) + 1e-6
    want = [
        1.0 / std if r and teaching == "right" else -1.0 / std if not r and teaching == "wrong" else 0.0
        for r in rewards
    ]
    assert got == pytest.approx(want)


def test_a_failed_sample_is_in_no_quantile_and_equal_rewards_teach_nothing():
    assert QAE().compare([sample_of([1, 2], [False, True], reward=r) for r in (1.0, 1.0)]) == [0.0, 0.0]
    with_failed = QAE(quantile=0.6).compare([sample_of([1, 2], [False, True], reward=r) for r in (1.0, 0.0, None)])
    assert with_failed == pytest.approx([0.0, -1 / (math.sqrt(0.5) + 1e-6), 0.0])


def test_topr_imitates_good_replies_and_tapers_the_bad_ones():
    """Four sequences of two tokens: good and bad, each less and more likely than when it was sampled."""
    advantage = torch.tensor([1.0, 1.0, 2.0, 2.0, -1.0, -1.0, -2.0, -2.0], dtype=torch.float64)
    drift = torch.tensor([-0.5, -0.25, 0.25, 0.5, -0.5, -0.25, 0.25, 0.5], dtype=torch.float64)
    logp = torch.full((8,), -1.0, dtype=torch.float64, requires_grad=True)
    tokens = Tokens(
        weight=torch.ones(8, dtype=torch.float64),
        seq_ids=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
        advantage=advantage,
        rollout_logp=logp.detach() - drift,
        prox_logp=logp.detach() + 3.0,  # read by nobody
    )
    loss, metrics = TOPR().loss(Policy(logp=logp), tokens)
    loss.sum().backward()
    weight = torch.tensor([1.0] * 4 + [math.exp(-0.75)] * 2 + [1.0] * 2, dtype=torch.float64)
    torch.testing.assert_close(metrics["sequence_weight"], weight)
    torch.testing.assert_close(logp.grad, -weight * advantage)


def test_erc_leaves_tokens_out_whose_entropy_has_moved():
    before = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    now = torch.tensor([0.89, 0.91, 1.29, 1.31, 0.0, 0.1], dtype=torch.float64)
    logp = torch.linspace(-1.1, -0.9, 6, dtype=torch.float64).requires_grad_()
    tokens = Tokens(
        weight=torch.ones(6, dtype=torch.float64),
        advantage=torch.tensor([1.0, -1.0] * 3, dtype=torch.float64),
        rollout_logp=torch.full((6,), -1.0, dtype=torch.float64),
        prox_logp=torch.full((6,), -1.0, dtype=torch.float64),
        columns={"prox.spread_before": before},
    )
    policy = Policy(logp=logp, measures={"spread": now})
    loss, metrics = ERC(beta_low=0.1, beta_high=0.3).loss(policy, tokens)
    plain, _ = GRPO().loss(policy, tokens)
    masked = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(metrics["masked"], masked)
    torch.testing.assert_close(loss, plain * (1 - masked))
