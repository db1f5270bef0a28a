"""Trainers whose rows share prefixes learn what they learn from rows that do not: loss, metrics and weights."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn

from algs.base import Algorithm, assign_advantages
from algs.dpo import DPO
from algs.dppo import DPPO
from algs.grpo import GRPO
from algs.gspo import GSPO
from algs.kto import KTO
from algs.orpo import ORPO
from algs.p3o import P3O
from algs.ppo import PPO
from algs.reward_model import RewardModel
from algs.sft import SFT
from algs.terms import KL
from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from core.cluster.workers import Local
from core.types.batch import RowLayout
from core.types.samples import Group
from data_feeds.packing.batches import plan_update
from driver.rl.scoring import compute_columns
from trainers.local import LocalTrainer
from unit_tests.helpers import local_trainers
from unit_tests.helpers.examples import families, shared_of, some_answers, with_values

pytestmark = pytest.mark.usefixtures("one_thread")
SHARED = RowLayout(padded=False, shares_prefixes=True)


def trainer_of(path: str, alg: Algorithm, *, share: str = "auto", **changes):
    torch.manual_seed(0)
    attention = "sdpa" if changes.get("layout") == "padded" else "auto"
    trainer = local_trainers.trainer_of(path, alg, attention=attention, lr=0.5, share_prefixes=share, **changes)
    if trainer.critic is not None:  # else all values are 0
        nn.init.normal_(trainer.critic.model.score.weight)
    return trainer


def learn(path: str, alg: Algorithm, groups: list[Group], *, max_tokens: int = 10_000, **how):
    """Score, credit and train twice, as a run does; return layout, weights, metrics, columns, what was shared."""
    trainer = trainer_of(path, alg, **how)
    layout = trainer.describe_layout()
    cut = {"padded": layout.padded, "share_prefixes": layout.shares_prefixes, "whole_groups": alg.whole_groups}
    said, scored, saved = [], [], []
    groups = alg.prepare_groups(groups)
    for _ in range(2):
        plan = plan_update(groups, alg.loss_norm, max_tokens, horizon=10, **cut)
        saved.append(shared_of(plan))
        filled = asyncio.run(compute_columns(Local(trainer), groups, plan, alg.required_columns))
        scored += [torch.tensor(s.columns[c]) for g in filled for s in g for c in sorted(alg.required_columns)]
        plan = plan_update(assign_advantages(alg, filled), alg.loss_norm, max_tokens, horizon=10, **cut)
        said.append(trainer.step(plan.batches()))
    return layout, trainer.flatten_weights(), said, torch.cat([*scored, torch.zeros(1)]), max(saved)


def check_learns_the_same(path: str, alg: Algorithm, groups: list[Group], *, max_tokens: int = 10_000, **how) -> None:
    start = trainer_of(path, alg, **how).flatten_weights()
    layout, got, metrics, columns, saved = learn(path, alg, groups, max_tokens=max_tokens, **how)
    assert layout == SHARED and saved > 0.05
    for other in ({"share": "off"}, {"layout": "padded"}):
        _, want, expected, wanted, saved = learn(path, alg, groups, **how | other)
        assert saved == 0
        torch.testing.assert_close(columns, wanted, atol=1e-4, rtol=1e-4)
        assert (got - want).norm() < 1e-4 * (want - start).norm() > 0
        for ours, theirs in zip(metrics, expected, strict=True):
            for said in (ours, theirs):  # policy and reference begin as one: which side of z0 = 0 is rounding
                said.pop("kto/accuracy", None)
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


SAMPLED = [
    GRPO(),
    GRPO(loss_norm="prompt", entropy_coef=0.01, kl=KL(coef=0.1)),
    GSPO(),
    DPPO(),
    P3O(),
    PPO(value_clip=0.2),
]


@pytest.mark.parametrize("alg", SAMPLED, ids=lambda a: f"{type(a).__name__}-{a.loss_norm}")
def test_groups_of_samples(tiny_path, alg):
    check_learns_the_same(tiny_path, alg, with_values(families()), max_tokens=45)


@pytest.mark.parametrize("alg", [SFT(), DPO(), ORPO(), KTO(), RewardModel()], ids=lambda a: type(a).__name__)
def test_given_rows(tiny_path, alg):
    """Chosen and rejected have their prompt in common; KTO scores each prompt with another row's completion too."""
    groups = families() if alg.rows == "conversations" else some_answers(alg.rows, 5)
    check_learns_the_same(tiny_path, alg, groups, max_tokens=60)


def test_adapters_and_their_reference(tiny_path):
    alg = GRPO(kl=KL(coef=0.1))
    check_learns_the_same(tiny_path, alg, families(), lora=LoraConfig(r=4), max_tokens=45)


def test_layers_that_are_computed_again(tiny_path):
    check_learns_the_same(tiny_path, PPO(), with_values(families()), gradient_checkpointing=True)


def test_rows_are_shared_where_every_model_can(tiny_path):
    def layout(attention="auto", **changes) -> RowLayout:
        model = ModelConfig(path=tiny_path, dtype="float32", attention=attention)
        alg = GRPO(kl=KL(coef=0.1))
        return LocalTrainer(model, TrainerConfig(**changes), alg, temperature=1.0, total_updates=1).describe_layout()

    assert layout() == SHARED
    assert layout(share_prefixes="off") == RowLayout(padded=False, shares_prefixes=False)
    assert layout(layout="padded") == RowLayout(padded=True, shares_prefixes=False)
    assert layout("sdpa", layout="packed") == RowLayout(padded=False, shares_prefixes=False), "a mask of torch's"
    assert layout("sdpa") == RowLayout(padded=True, shares_prefixes=False)


def test_a_reference_of_another_kind_keeps_all_rows_apart(tiny_path):
    trainer = trainer_of(tiny_path, GRPO(kl=KL(coef=0.1)))
    [reference] = trainer.frozen.values()
    reference.set_attn_implementation("eager")
    assert trainer.describe_layout() == RowLayout(padded=True, shares_prefixes=False)
