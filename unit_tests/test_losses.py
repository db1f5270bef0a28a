"""Every loss against the numbers of an independent oracle (numpy, float64, finite differences)."""

import json
from pathlib import Path

import pytest
import torch

from algs.base import KL, Correction
from algs.grpo import GRPO
from algs.ops import group_advantages, k3, spread
from algs.sft import SFT
from core.types import Policy, Prompt, Sample
from data_feeds.packing import pack, token_weights

GOLDEN = json.loads((Path(__file__).parent / "golden_losses.json").read_text())
RL = GOLDEN["fixtures"]["rl"]
NORMS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
    "prompt-mean-token-mean": "prompt",
}
OFF = Correction(level="none")
CASES = {
    "sft/token_mean": SFT(),
    "grpo/no_kl": GRPO(loss_norm="sequence", clip_high=0.2, correction=OFF),
    "grpo/seq_mean_k3": GRPO(loss_norm="sequence", clip_high=0.2, correction=OFF, kl=KL(coef=0.04, estimator="k3")),
    "ppo/clip_kl_in_loss_k2": GRPO(clip_high=0.2, correction=OFF, kl=KL(coef=0.1, estimator="k2")),
    "ppo/clip_kl_in_loss_k3": GRPO(clip_high=0.2, correction=OFF, kl=KL(coef=0.1, estimator="k3")),
    "grpo/unbiased_kl_v32": GRPO(
        loss_norm="sequence", clip_high=0.2, correction=OFF, kl=KL(coef=0.1, estimator="unbiased")
    ),
    "ppo/clip": GRPO(clip_high=0.2, correction=OFF),
    "dr_grpo/sum_over_const": GRPO(loss_norm="constant", clip_high=0.2, correction=OFF),
    "dapo/token_mean": GRPO(correction=OFF),
    "mismatch/token_tis": GRPO(correction=Correction(high=2.0)),
    "mismatch/token_icepop": GRPO(correction=Correction(mode="mask", low=0.5, high=5.0)),
}


def golden_batch(case: dict, alg, dtype, *, poison: float | None = None):
    """The fixture as Samples (two prompt tokens before each response), packed by the real packing."""
    hyper = case["hyperparameters"]
    groups: dict[int, list[Sample]] = {}
    for b, mask in enumerate(RL["mask"]):
        live = [t for t, m in enumerate(mask) if m]
        bad = poison if poison is not None else 0.0

        def column(name: str, b=b, live=live, bad=bad) -> list[float]:
            return [bad, bad, *(RL[name][b][t] for t in live), bad]

        anchor = "beh" if case["source"] and "mismatch" in case["name"] else "old"
        sample = Sample(
            prompt=Prompt(id=str(RL["prompt"][b]), messages=[]),
            token_ids=[5] * (len(live) + 3),
            mask=[False, False, *[True] * len(live), False],
            rollout_logp=column(anchor),
            versions=[-1] * (len(live) + 3),
            advantage=column(hyper.get("advantages", "adv")),
            columns={"prox_logp": column("old"), "ref_logp": column("ref")},
        )
        groups.setdefault(RL["prompt"][b], []).append(sample)
    norm = NORMS[case["aggregation"]]
    assert alg.loss_norm == norm, "the recipe of the case"
    horizon = hyper.get("C", hyper.get("loss_const", hyper.get("const", 1)))
    weights = token_weights(list(groups.values()), norm, horizon=int(horizon))
    return pack([s for g in groups.values() for s in g], weights, dtype=dtype)


def golden_logp(dtype) -> torch.Tensor:
    live = [RL["logp"][b][t] for b, mask in enumerate(RL["mask"]) for t, m in enumerate(mask) if m]
    return torch.tensor(live, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
@pytest.mark.parametrize("poison", [None, float("nan"), 1e6])
def test_loss_and_gradient_are_the_oracles(name, dtype, rtol, poison):
    case = GOLDEN["cases"][name] | {"name": name}
    alg = CASES[name]
    batch = golden_batch(case, alg, dtype, poison=poison)
    logp = golden_logp(dtype)
    loss, _ = alg.objective(Policy(logp=logp), batch.tokens)
    total = (loss * batch.tokens.weight).sum()
    total.backward()
    want = [
        g
        for row, mask in zip(case["grad"]["logp"], RL["mask"], strict=True)
        for g, m in zip(row, mask, strict=True)
        if m
    ]
    torch.testing.assert_close(total.detach(), torch.tensor(case["loss"], dtype=dtype), rtol=rtol, atol=rtol / 100)
    torch.testing.assert_close(logp.grad, torch.tensor(want, dtype=dtype), rtol=rtol, atol=rtol / 100)


@pytest.mark.parametrize("name", GOLDEN["advantages"]["groups"])
def test_group_advantages_are_the_oracles(name):
    rewards, expected = GOLDEN["advantages"]["groups"][name], GOLDEN["advantages"]["estimators"]
    assert group_advantages(rewards) == pytest.approx(expected["dr_grpo"][name], abs=1e-12)
    assert group_advantages(rewards, scale=spread(rewards)) == pytest.approx(expected["grpo_ddof1"][name], abs=1e-9)


def test_equal_rewards_and_single_samples_give_exactly_zero():
    assert group_advantages([0.9] * 8, scale=spread([0.9] * 8)) == [0.0] * 8
    assert group_advantages([0.7]) == [0.0]


def test_a_failed_sample_is_no_part_of_the_mean():
    # mean of 1 and 0 is 0.5; counting the failure as 0 would give 1/3
    assert group_advantages([1.0, None, 0.0]) == [0.5, 0.0, -0.5]


@pytest.mark.parametrize("d", [-30.0, -12.0, -1.0, 1.0, 12.0, 30.0])
def test_k3_pulls_towards_the_reference_however_far_away(d):
    logp = torch.tensor([d], requires_grad=True)
    k3(logp, torch.zeros(1)).sum().backward()
    assert torch.isfinite(logp.grad).all()
    assert logp.grad.sign().item() == (1 if d > 0 else -1)


def test_on_policy_gradient_is_minus_weight_times_advantage():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = golden_batch(GOLDEN["cases"]["dapo/token_mean"] | {"name": "dapo"}, GRPO(), torch.float32)
    tokens = batch.tokens
    tokens.advantage, tokens.weight = torch.tensor([1.5, -2.0]), torch.tensor([0.5, 0.25])
    tokens.rollout_logp, tokens.prox_logp, tokens.ref_logp = logp.detach(), None, None
    loss, _ = GRPO().objective(Policy(logp=logp), tokens)
    (loss * tokens.weight).sum().backward()
    assert logp.grad.tolist() == [-0.75, 0.5]
