"""Rewards per token, and the value model's own lambda and warm-up."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import main_rl
from algs.base import assign_advantages
from algs.grpo import GRPO
from algs.ppo import PPO
from algs.reinforce_pp import ReinforcePP
from core.types.arrays import DOUBLE
from core.types.samples import Prompt, Sample, make_sample
from data_feeds.packing.batches import micro_batches, pack
from rollouts.scheduling.buffer import FinishedGroup, ReplayBuffer, Schedule
from unit_tests.helpers.examples import run_here, some_groups, with_values
from unit_tests.helpers.local_trainers import trainer_of

PROMPT = Prompt(id="p", messages=[])


def rewarded(reward: float, shares: list[float] | None, *, values: tuple[float, ...] = (0.0, 0.0, 0.0)) -> Sample:
    """Return a sample of two turns, of one and two tokens, with a token of the environment between them."""
    mask = [False, True, False, True, True]
    columns = {"values": [9.0, values[0], 9.0, *values[1:]]}
    if shares is not None:
        columns["token_rewards"] = [7.0, shares[0], 7.0, *shares[1:]]  # elsewhere they are of no meaning
    return make_sample(
        prompt=PROMPT,
        dtype=DOUBLE,
        token_ids=[1, 2, 3, 4, 5],
        action_mask=mask,
        rollout_logp=[0.0] * 5,
        versions=[-1] * 5,
        reward=reward,
        columns=columns,
    )


def credit(alg, sample: Sample) -> list[float]:
    [[done]] = alg.compute_advantages([[sample]])
    return done.advantage[done.loss_mask].tolist()


def test_gae_gives_each_token_its_reward_and_the_last_one_the_rest():
    """Rewards (0.25, 0, -0.5 + 1.25): the shares are -0.25 of 1 together, so 1.25 is left."""
    sample = rewarded(1.0, [0.25, 0.0, -0.5])
    assert credit(PPO(lam=1.0, whiten=False), sample) == pytest.approx([1.0, 0.75, 0.75])
    assert credit(PPO(lam=1.0, gamma=0.5, whiten=False), sample) == pytest.approx([0.25 + 0.75 / 4, 0.375, 0.75])
    assert credit(PPO(lam=0.0, whiten=False), sample) == pytest.approx([0.25, 0.0, 0.75])
    assert credit(PPO(lam=0.0, whiten=False), rewarded(1.0, None)) == [0.0, 0.0, 1.0]


def test_a_turn_earns_what_its_tokens_earned():
    """Turns (0.25) and (0.5 + 0.25 left): of a reward of 1, with 0.25 and 0.5 given to tokens."""
    sample = rewarded(1.0, [0.25, 0.5, 0.0])
    turns = PPO(credit="turn", lam=0.0, whiten=False)
    assert credit(turns, sample) == pytest.approx([0.25, 0.75, 0.75])
    other = rewarded(0.0, None)
    [[first, second]] = GRPO(credit="turn", turn_discount=0.5).compute_advantages([[sample, other]])
    # returns (0.25 + 0.375, 0.75) and (0, 0): minus their means
    assert first.advantage[first.loss_mask].tolist() == pytest.approx([0.3125, 0.375, 0.375])
    assert second.advantage[second.loss_mask].tolist() == pytest.approx([-0.3125, -0.375, -0.375])


def test_returns_of_tokens_are_discounted_from_where_they_were_earned():
    """With gamma 0.5 the returns are (0.5 + 0.5 / 4, 0.25, 0.5) and (0, 0, 0), whitened over all six."""
    groups = [[rewarded(1.0, [0.5, 0.0, 0.0]), rewarded(0.0, None)]]
    [[one, other]] = ReinforcePP(gamma=0.5).compute_advantages(groups)
    returns = np.array([0.625, 0.25, 0.5, 0, 0, 0])
    want = (returns - returns.mean()) / returns.std()
    got = [*one.advantage[one.loss_mask], *other.advantage[other.loss_mask]]
    assert got == pytest.approx(want.tolist(), rel=1e-6)


def test_the_value_model_has_a_lambda_of_its_own():
    """Lambda 0 for the policy: r + V' - V. Lambda 1 for the targets: the returns, all 1."""
    sample = rewarded(1.0, None, values=(0.2, 0.4, 0.8))
    [[done]] = PPO(lam=0.0, critic_lam=1.0, whiten=False).compute_advantages([[sample]])
    assert done.advantage[done.loss_mask].tolist() == pytest.approx([0.2, 0.4, 0.2])
    assert done.columns["returns"][done.loss_mask].tolist() == pytest.approx([1.0, 1.0, 1.0])
    [[same]] = PPO(lam=0.0, whiten=False).compute_advantages([[sample]])
    assert same.columns["returns"][same.loss_mask].tolist() == pytest.approx([0.4, 0.8, 1.0])


def test_a_branch_without_token_rewards_earned_nothing_at_its_tokens():
    """Two branches of one episode, one token each: 0.25 of a reward of 1 in the first, so 0.75 in the second."""

    def branch(token: int, **columns: list[float]) -> Sample:
        return make_sample(
            prompt=PROMPT,
            dtype=DOUBLE,
            token_ids=[1, token],
            action_mask=[False, True],
            rollout_logp=[0.0, 0.0],
            versions=[-1, 0],
            reward=1.0,
            episode=0,
            columns={"values": [0.0, 0.0], **columns},
        )

    group = [branch(2, token_rewards=[0.0, 0.25]), branch(3)]
    for order in (group, [replace(group[1], turn_numbers=(1,)), replace(group[0], turn_numbers=(0,))]):
        [done] = assign_advantages(PPO(lam=0.0, whiten=False), [order])
        assert {int(s.token_ids[1]): float(s.advantage[1]) for s in done} == {2: 0.25, 3: 0.75}


def test_token_rewards_pass_the_buffer_and_reach_no_loss():
    group = [rewarded(1.0, [0.25, 0.0, -0.5]), rewarded(0.0, None)]
    group = [make_sample(**{**{n: getattr(s, n) for n in s.__slots__}, "dtype": np.dtype(np.float32)}) for s in group]
    schedule = Schedule(steps=2, per_step=1)
    buffer = ReplayBuffer(schedule)
    buffer.started, buffer.ticket = {0}, 1
    buffer.add_group(FinishedGroup(ticket=0, group=group, accepted=True, seconds=1.0))
    state = json.loads(json.dumps(buffer.get_state()))
    restored = ReplayBuffer.from_state(state, schedule, lambda _: PROMPT, step=0).ready[0].group
    assert restored == group and restored[0].columns["token_rewards"][1] == 0.25
    assert not pack(restored, [1.0, 1.0]).tokens.has("token_rewards"), "one of them has none, and both are packed"


def test_in_the_critics_warm_up_the_policy_stays_as_it_is(tiny_path):
    alg = PPO(critic_warmup=2, critic_lr=1e-2, entropy_coef=0.1)
    trainer = trainer_of(tiny_path, alg, optimizer="adamw", lr=1e-2)
    [micro] = micro_batches(with_values(some_groups()), "token", 60, ranks=1, padded=True)
    parts = [dict(trainer.policy.model.named_parameters()), dict(trainer.critic.model.named_parameters())]
    for step, expected in enumerate([(True, False), (True, False), (False, False)]):
        before = [{name: p.detach().clone() for name, p in part.items()} for part in parts]
        trainer.set_algorithm(alg.with_state({}, step=step))
        metrics = trainer.step([micro])
        same = tuple(
            all(torch.equal(old[name], p) for name, p in part.items()) for old, part in zip(before, parts, strict=True)
        )
        assert same == expected, step
        assert ("grad_norm" in metrics) == (step == 2) and metrics["updates_skipped"] == 0
        assert metrics["value/grad_norm"] > 0 and "entropy" in metrics


def test_a_warm_up_as_long_as_the_run_is_refused(recipe):
    path = recipe({"alg": {"name": "ppo", "critic_warmup": 2}, "steps": 2})
    code, err = run_here(main_rl, "--config", path)
    assert code == 2 and "steps=2 are over before the policy is trained: raise steps, or lower critic_warmup" in err
