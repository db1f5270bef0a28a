"""Tools of algs.check by hand: replay of detached values, bandits, finished steps, and off-policy measures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from algs.base import Metrics, with_advantages
from algs.bco import BCO
from algs.check.bandit import bandit_tables, train_bandit
from algs.check.checker import check, run
from algs.check.declared import collect_outputs
from algs.check.fixtures import made_up_step
from algs.check.instruments import OtherPath, ReplayDetached, Tape, list_variants, with_settings, with_terms
from algs.check.obligations import expect_no_effect_of_failures, list_sampled
from algs.check.off_policy import describe_side, measure_advantages, weigh_on_policy
from algs.check.replay import make_up_step_seen, see_step
from algs.check.update import (
    HORIZON,
    NotApplicable,
    compute_advantages,
    compute_losses,
    make_plan,
    plan_batches,
    run_update,
)
from algs.chord import CHORD
from algs.dpo import DPO
from algs.grpo import GRPO
from algs.ppo import PPO
from algs.reductions import Stages, count
from algs.reward_model import RewardModel
from algs.sft import SFT
from core.types.samples import Group, Policy, Sample, ScoredColumn, Tokens
from unit_tests.helpers.sentences import tell


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def replay(first: Callable[[Tensor], Tensor], again: Callable[[Tensor], Tensor], *at: float) -> Tensor:
    """Record what a function detaches at 2 and 3, and run another one at other numbers with it."""
    tape = Tape()
    with ReplayDetached(tape):
        first(tensor(2, 3).requires_grad_())
    tape.full = True
    with ReplayDetached(tape):
        return again(tensor(*at).requires_grad_())


def weigh_by_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        weight = x * x
    return weight * x


def detach_in_place(x: Tensor) -> Tensor:
    return (x * x).detach_() * x


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (lambda x: x.detach() * x, [10, 21]),
        (lambda x: (x * x).detach() * x + x.detach(), [22, 66]),
        (weigh_by_no_grad, [20, 63]),
        (detach_in_place, [20, 63]),
        (lambda x: x.data * x, [25, 49]),  # not on purpose
        (lambda x: x * x, [25, 49]),
    ],
)
def test_what_was_detached_keeps_its_values(function: Callable[[Tensor], Tensor], want: list[float]):
    assert replay(function, function, 5, 7).tolist() == want


def test_a_loss_that_detaches_something_else_has_branched():
    once: Callable[[Tensor], Tensor] = lambda x: x.detach() * x  # noqa: E731
    twice: Callable[[Tensor], Tensor] = lambda x: x.detach() * x.detach() * x  # noqa: E731
    with pytest.raises(OtherPath):
        replay(once, twice, 5, 7)
    with pytest.raises(OtherPath):
        replay(once, once, 5)
    assert replay(twice, once, 5, 7).tolist() == [10, 21]


def test_an_algorithm_has_the_terms_that_it_is_given():
    alg = CHORD(mu=0.25)
    first, second = alg.terms
    alone = with_terms(alg, (second,))
    assert alone.terms == (second,) and len(alg.terms) == 2 and isinstance(alone, CHORD) and alone.mu == 0.25
    assert first.coef == 0.75
    step = made_up_step(alg)
    [batch] = plan_batches(alg, compute_advantages(alg, step.groups, stale=False), step.now)
    [(coef, labels, tokens), (other, _, _)] = list_sampled(alg, batch)
    assert (coef, other) == (0.75, 0.25) and len(labels) == len(tokens.weight) < len(batch.labels)
    step = made_up_step(GRPO())
    [plain] = plan_batches(GRPO(), compute_advantages(GRPO(), step.groups, stale=False), step.now)
    [(coef, labels, tokens)] = list_sampled(GRPO(), plain)
    assert coef == 1 and labels is plain.labels and tokens is plain.tokens


def test_weights_of_a_plan_are_of_its_horizon():
    alg = GRPO(loss_norm="constant")
    step = made_up_step(alg)
    groups = compute_advantages(alg, step.groups, stale=False)
    n = sum(bool(sample.n_trained) for group in groups for sample in group)
    for given, horizon in (({}, HORIZON), ({"horizon": 14}, 14), ({"horizon": 1}, 1)):
        [batch] = plan_batches(alg, groups, step.now, **given)
        assert batch.tokens.weight.unique().tolist() == [pytest.approx(1 / (n * horizon))]
        [[planned]] = make_plan(alg, groups, **given).batches(torch.float64)
        assert torch.equal(planned.tokens.weight, batch.tokens.weight)


def test_variants_have_another_value_each_that_is_valid():
    assert [one.clip_low for one in list_variants(GRPO(clip_low=0.75), {}, "clip_low")] == [0.375]
    assert [one.phi for one in list_variants(CHORD(), {"mu": 0.5}, "phi")] == [False]
    assert [(one.mu, one.clip_high) for one in list_variants(CHORD(mu=0.5), {"clip_high": 0.4}, "mu")] == [
        (1.0, 0.4),
        (0.25, 0.4),
    ]
    assert with_settings(GRPO(), {"kl.coef": 0.5, "clip_low": 2.0}) is None


def test_tables_of_a_bandit_are_of_all_its_arms():
    p = [0.5, 0.25, 0.125, 0.125]
    tables = bandit_tables(tensor(*p).log() + 3.0, tensor(7))
    assert tables["logp"].exp().tolist() == pytest.approx(p)
    assert tables["entropy"].tolist() == pytest.approx([1.75 * math.log(2)] * 4)
    assert tables["values"].tolist() == [7] * 4
    assert [len(tables[name]) for name in ("logits", "frozen_logits")] == [4, 4]
    assert tables["frozen_logits"][2].exp().tolist() == pytest.approx([0.05, 0.05, 0.05, 0.85])


class Picky(GRPO):
    """Accepts no group."""

    def accept_group(self, group: Group) -> bool:
        return False


def test_without_groups_nothing_is_learnt_from_a_bandit():
    assert train_bandit(Picky(), engine_offset=0.0) == 0.25 == train_bandit(Picky(), engine_offset=0.4)
    assert train_bandit(GRPO(), engine_offset=0.0) > 0.5
    [failed] = check(Picky, letters="f")
    assert (failed.status, failed.detail) == (
        "FAILED",
        "in 40 updates the best arm's probability went from 0.25 to 0.25, expected 0.5 or more",
    )


def trained_ids(groups: list[Group]) -> list[int]:
    return [int(t) for g in groups for s in g for t in s.token_ids[s.loss_mask]]


def test_a_finished_step_has_means_over_its_tokens():
    alg = SFT()
    step = made_up_step(alg)
    groups = compute_advantages(alg, step.groups, stale=False)
    seen = see_step(alg, groups, step.now, number=3)
    ids = trained_ids(groups)
    assert seen.number == 3 and seen.groups == groups
    assert seen.means == {"loss": pytest.approx(-step.now["logp"][ids].mean().item())}
    [batch] = plan_batches(alg, groups, step.now)
    [loss] = compute_losses(alg, batch, step.now)
    assert loss.item() == pytest.approx(seen.means["loss"])


def test_a_step_with_a_value_model_has_both_losses():
    alg = PPO(whiten=False)
    step = made_up_step(alg)
    groups = compute_advantages(alg, step.groups, stale=True)
    [batch] = plan_batches(alg, groups, step.now)
    policy, value = (loss.item() for loss in compute_losses(alg, batch, step.now))
    means = see_step(alg, groups, step.now).means
    assert means["loss"] == pytest.approx((policy + value) / 2), "a metric of both"
    ids = trained_ids(groups)
    assert means["value/mean"] == pytest.approx(step.now["values"][ids].mean().item())
    outcome = run_update(alg, [batch], step.now)
    assert outcome.loss == pytest.approx(policy + value) and outcome.connected
    assert outcome.gradient["values"].abs().sum() > 0 and outcome.gradient["logp"].abs().sum() > 0
    rewards = RewardModel()
    step = made_up_step(rewards)
    groups = compute_advantages(rewards, step.groups, stale=False)
    means = see_step(rewards, groups, step.now).means
    assert {"loss", "pair/margin"} <= means.keys() and len(trained_ids(groups)) == 12
    [batch] = plan_batches(rewards, groups, step.now)
    assert len(compute_losses(rewards, batch, step.now)) == 1


def test_each_made_up_step_that_is_seen_lacks_another_group():
    alg = BCO()
    step = made_up_step(alg)
    for number in (0, 3):
        seen = make_up_step_seen(alg, step, number)
        ids = [g[0].prompt.id for g in step.groups]
        assert [g[0].prompt.id for g in seen.groups] == [one for i, one in enumerate(ids) if i != number]
        assert seen.number == number and "bco/reward" in seen.means
    assert len(make_up_step_seen(alg, step, 99).groups) == len(step.groups)


class Weighs(GRPO):
    """It weighs the advantages by a power of pi_prox / pi_rollout."""

    power: float = 1.0

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return frozenset({"prox_logp"})

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        def weigh(s: Sample) -> Sample:
            assert s.advantage is not None
            return replace(s, advantage=s.advantage * np.exp(self.power * (s.columns["prox_logp"] - s.rollout_logp)))

        return [[weigh(s) for s in g] for g in super().compute_advantages(groups)]


class Idle(GRPO):
    """Its gradient is 0 where the ratio is 1."""

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return (policy.logp - tokens.prox_logp).square() * tokens.advantage, {}


def test_the_power_of_the_engine_in_the_advantages_is_measured():
    for power, found in ((1.0, 1.0), (2.0, 2.0), (0.75, 0.75), (0.25, 0.0), (0.0, 0.0), (-1.0, 0.0)):
        assert measure_advantages(Weighs(power=power)) == pytest.approx(found, abs=1e-6), power
    assert weigh_on_policy(GRPO()).tolist() == pytest.approx([1, 1])
    assert tell(lambda: weigh_on_policy(Idle()), NotApplicable) == (
        "not examined off-policy: a single token has no gradient at ratio 1"
    )
    assert [describe_side(side) for side in (1, -1)] == ["above", "below"]
    for letter in "kl":
        [found] = check(Idle, letters=letter)
        assert found.status == "n/a", found


class Away(SFT):
    """It unlearns its rows."""

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return policy.logp, {}


class OnlyChosen(DPO):
    """It raises chosen replies, and leaves rejected ones as they are."""

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        held = torch.where(tokens.advantage > 0, policy.logp, policy.logp.detach())
        return super().loss(Policy(logp=held), tokens)


class Flipped(RewardModel):
    """It prefers what the rows reject."""

    def value_loss(self, values: Tensor, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return super().value_loss(-values, tokens)


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Away, r"the gradient at group 0, sample 0, token \d+ is 0\.\d+: a step downhill should have raised it"),
        (OnlyChosen, r"the gradient at group 0, sample 1, token \d+ is 0: a step downhill should have lowered it"),
        (Flipped, r"the gradient at group 0, sample 0, token \d+ is 0\.\d+: a step downhill should have raised it"),
    ],
)
def test_a_gradient_away_from_what_the_rows_prefer_is_named(cls: Any, said: str):
    [found] = check(cls, letters="i")
    assert found.status == "FAILED" and re.fullmatch(said, found.detail), found


@pytest.mark.parametrize("alg", [SFT(), DPO(), RewardModel()])
def test_the_tokens_that_rows_prefer_and_reject_are_counted(alg: Any):
    groups = made_up_step(alg).groups
    raised, lowered = (
        sum(s.n_trained for g in groups for s in g if (s.reward == 0 and not isinstance(alg, SFT)) == bad)
        for bad in (False, True)
    )
    [found] = check(type(alg), letters="i")
    assert found.status == "ok"
    assert found.detail == f"{raised} tokens raised" + (f", {lowered} tokens lowered" if lowered else "")
    assert (lowered == 0) == isinstance(alg, SFT)


def test_the_command_line_says_what_does_not_apply(capsys):
    assert run(["sft", "dft=true"]) == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    assert head == "SFT, supervised, so (d) (f) (h) (j) to (l) do not apply"
    assert [line[1] for line in lines] == [*"abcegimn"] and last.startswith("all obligations hold (")


class Fair(GRPO):
    """A constant advantage: nothing to learn from."""

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        return with_advantages(groups, [0.0 for g in groups for _ in g])


def test_a_loss_without_an_advantage_learns_no_bandit():
    assert train_bandit(Fair(), engine_offset=0.0) == 0.25


class PerToken(GRPO):
    """Its gradient is a share of the tokens of the update."""

    def totals(self, policy: Policy, tokens: Tokens) -> Stages:
        yield {"n": count(policy.logp)}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -tokens.advantage * policy.logp / tokens.totals["n"], {}


def test_the_weight_at_ratio_one_is_of_three_tokens_alone():
    """One of each advantage: 1, -1 and 0."""
    assert weigh_on_policy(PerToken()).tolist() == pytest.approx([1 / 3, 1 / 3])


class Noting(GRPO):
    """It notes the sizes of the groups that it credits, and how many of each have failed."""

    seen: ClassVar[list[tuple[int, int]]] = []

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        self.seen.extend((len(g), sum(bool(s.failure) for s in g)) for g in groups)
        return super().compute_advantages(groups)


def test_one_sample_fails_in_a_group_and_all_of_another():
    step = made_up_step(Noting())
    Noting.seen.clear()
    expect_no_effect_of_failures(Noting(), step, stale=False)
    sizes = [len(group) for group in step.groups]
    failed = [0, 1, sizes[2], *[0] * (len(sizes) - 3)]
    assert Noting.seen[: len(sizes)] == [*zip(sizes, failed, strict=True)]


def test_what_is_read_beside_the_loss_is_an_output_too():
    alg = PPO(critic_lr=0.25, critic_warmup=2)
    step, reads = made_up_step(alg), set[str]()
    outputs = collect_outputs(alg, step, reads)
    at = outputs.index(0.25)
    assert outputs[:2] == [alg.required_columns, alg.needs_entropy] and {"critic_lr", "critic_warmup"} <= reads
    assert outputs[at : at + 3] == [0.25, False, [alg.accept_group(group) for group in step.groups]]
