"""One training step of the trainer itself: what is skipped, what is logged, and at which temperature."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from transformers import AutoModelForCausalLM

from algs.grpo import GRPO
from algs.objective import Objective
from algs.opd import OPD
from algs.ppo import PPO
from algs.sft import SFT
from algs.terms import KL
from configs.trainer_schema import TrainerConfig
from core.cluster.workers import Local
from core.errors import RunStopped, UserError
from core.types.samples import Batch, Prompt, Sample
from data_feeds.packing.batches import micro_batches, pack, plan_update
from driver.rl.scoring import add_ref_logp, compute_columns, hash_sample, index_reference
from trainers.deepspeed import DeepSpeedLearner, deepspeed_config
from trainers.local import LocalTrainer
from trainers.meter import SourceLosses, StepMetrics
from trainers.observers import BatchSeen, Observers
from trainers.optimizer import make_optimizer
from trainers.references import AVERAGE
from unit_tests.helpers.examples import a_changed, columns_of, sample_of, some_groups, with_values
from unit_tests.helpers.local_trainers import TEMPERATURE, trainer_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Planted(SFT):
    """Its loss is infinite for a token that the engine found impossible."""

    def loss(self, policy, tokens):
        bad = tokens.rollout_logp < -1e8
        return -policy.logp * torch.where(bad, torch.inf, 1.0), {"bad": bad.float()}


def an_update(*, good: bool, seed: int = 0) -> list[Batch]:
    groups = some_groups(2, 2, seed=seed)
    if not good:
        groups = [[a_changed(s, rollout_logp=[-1e9] * len(s.rollout_logp)) for s in g] for g in groups]
    return micro_batches(groups, "token", 10_000)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_is_not_applied(tiny_path, dtype):
    trainer = trainer_of(tiny_path, Planted(), dtype=dtype)
    before = trainer.flatten_weights()
    metrics = trainer.step([an_update(good=False)])
    assert metrics["updates_skipped"] == 1 and "grad_norm" not in metrics
    assert torch.equal(trainer.flatten_weights(), before)
    trainer.step([an_update(good=True)])
    assert not torch.equal(trainer.flatten_weights(), before) and torch.isfinite(trainer.flatten_weights()).all()


class BadValues(PPO):
    """Its value loss is infinite."""

    def value_loss(self, values, tokens):
        loss, metrics = super().value_loss(values, tokens)
        return loss * torch.inf, metrics


def check_that_both_are_left(trainer: LocalTrainer) -> None:
    """Check that an update is skipped, and changes neither policy nor critic."""
    before = trainer.flatten_weights()
    update = micro_batches(with_values(some_groups(2, 2)), "token", 10_000)[0]
    assert trainer.step([update])["updates_skipped"] == 1
    assert torch.equal(trainer.flatten_weights(), before)


def test_an_update_that_is_skipped_for_its_critic_leaves_the_policy_too(tiny_path):
    check_that_both_are_left(trainer_of(tiny_path, BadValues(critic_lr=0.5)))


class TooLarge(PPO):
    """Every number of its policy's gradient is finite, and the squares of none."""

    def loss(self, policy, tokens):
        loss, metrics = super().loss(policy, tokens)
        return loss * 1e30, metrics


def test_an_update_whose_norm_overflows_leaves_the_critic_too(tiny_path):
    check_that_both_are_left(trainer_of(tiny_path, TooLarge(critic_lr=0.5)))


def test_a_skipped_update_does_not_move_the_average(tiny_path):
    trainer = trainer_of(tiny_path, Planted(), lr=0.1, ema=0.5)
    trainer.step([an_update(good=True)])
    average = [weight.clone() for weight in trainer.references[AVERAGE].weights]
    trainer.step([an_update(good=False)])
    assert all(map(torch.equal, trainer.references[AVERAGE].weights, average))
    trainer.step([an_update(good=True)])
    assert not all(map(torch.equal, trainer.references[AVERAGE].weights, average))


def test_in_its_warm_up_the_value_model_is_trained_alone(tiny_path):
    alg = PPO(critic_warmup=1, critic_lr=0.5)
    trainer = trainer_of(tiny_path, alg)
    update = micro_batches(with_values(some_groups(2, 2)), "token", 10_000)[0]
    for step, is_trained in enumerate([False, True]):
        before = [[p.detach().clone() for p in model.parameters()] for model in trainer.list_models()]
        trainer.set_algorithm(alg.with_state({}, step=step))
        metrics = trainer.step([update])
        found = zip(before, trainer.list_models(), strict=True)
        changed = [not all(map(torch.equal, old, model.parameters())) for old, model in found]
        assert changed == [is_trained, True] and ("grad_norm" in metrics) is is_trained
        assert metrics["updates_skipped"] == 0 and metrics["value/grad_norm"] > 0 and "loss" in metrics
        assert trainer.observers.utilization.trained is is_trained
    assert len(trainer.observers.utilization.flops) == 2, "of the policy and the value model"


def test_a_teachers_name_may_have_a_dot(tiny_path):
    """As that of a data set."""
    trainer = trainer_of(tiny_path, OPD(teacher={"math.v2": tiny_path}))
    [scored] = columns_of(trainer, an_update(good=True), "teacher of math.v2", "prox_logp")
    torch.testing.assert_close(scored["teacher of math.v2"], scored["prox_logp"])


def test_an_update_that_is_made_ends_a_row_of_skipped_ones(tiny_path):
    trainer = trainer_of(tiny_path, Planted(), max_skipped_updates=3)
    bad, good = an_update(good=False), an_update(good=True)
    assert [trainer.step([update])["updates_skipped"] for update in (bad, good, bad, bad)] == [1, 0, 1, 1]
    with pytest.raises(RunStopped) as stopped:
        trainer.step([bad])
    assert str(stopped.value) == (
        "3 updates in a row had a gradient that is not finite: the model or the loss diverged; lower trainer.lr, or "
        "allow more such updates with trainer.max_skipped_updates"
    )
    assert trainer.get_file_settings() == {"backend": "local", "trainer.ranks": 1}


class WithoutGradient(SFT):
    """Its loss is of detached numbers."""

    def loss(self, policy, tokens):
        return -policy.logp.detach(), {}


def test_a_loss_without_a_gradient_names_the_algorithm(tiny_path):
    with pytest.raises(UserError) as refused:
        trainer_of(tiny_path, WithoutGradient()).step([an_update(good=True)])
    assert str(refused.value) == (
        "WithoutGradient: the loss has no gradient: compute it from policy.logp (or values), without detach()"
    )


def test_updates_without_rows_count_for_the_schedule_and_the_critic(tiny_path):
    """Warm-up of four updates to 0.8; the value model's rate is half the policy's throughout."""
    trainer = trainer_of(tiny_path, PPO(critic_lr=0.4), lr=0.8, warmup_updates=4)
    update = micro_batches(with_values(some_groups(2, 2)), "token", 10_000)[0]
    seen = []
    for updates in ([update], [[], update], [[]]):
        metrics = trainer.step(updates)
        rates = [learner.optimizer.param_groups[0]["lr"] for learner in (trainer.policy, trainer.critic)]
        seen.append((metrics["lr"], *rates, trainer.updates_done))
    # the update after an empty one is made first, and the empty one counts at the end of the step
    want = [(0.2, 0.2, 0.1, 1), (0.6, 0.4, 0.2, 3), (0.8, 0.4, 0.2, 4)]
    assert [pytest.approx(one) for one in want] == seen
    assert "grad_norm" not in metrics and metrics["tokens"] == 0
    assert len(trainer.list_models()) == 2 and trainer.list_models()[0] is trainer.model


def test_what_was_measured_without_an_update_changes_nothing(tiny_path):
    trainer = trainer_of(tiny_path, SFT(), lr=0.1)
    before, batch = trainer.flatten_weights(), an_update(good=True)
    loss = trainer.measure_loss(batch)
    assert torch.equal(trainer.flatten_weights(), before) and trainer.updates_done == 0
    made = trainer.step([batch])
    assert loss["loss"] == pytest.approx(made["loss"], rel=1e-6) and loss["tokens"] == made["tokens"]
    assert trainer.measure_loss(batch)["loss"] < loss["loss"]


def test_what_is_logged_is_of_the_updates_that_were_made(tiny_path):
    alone = trainer_of(tiny_path, Planted()).step([an_update(good=True)])
    both = trainer_of(tiny_path, Planted()).step([an_update(good=True), an_update(good=False, seed=1)])
    assert both == alone | {"updates_skipped": 1.0}
    assert both["bad"] == 0.0


def test_norms_are_the_mean_over_the_updates_and_tokens_their_sum(tiny_path):
    updates = [an_update(good=True), an_update(good=True, seed=1)]
    trainer = trainer_of(tiny_path, SFT(), lr=0.1)
    apart = [trainer.step([update]) for update in updates]
    together = trainer_of(tiny_path, SFT(), lr=0.1).step(updates)
    assert together["tokens"] == apart[0]["tokens"] + apart[1]["tokens"]
    for name in ("grad_norm", "loss"):
        assert together[name] == pytest.approx((apart[0][name] + apart[1][name]) / 2, rel=1e-6)


def test_the_norm_is_unclipped_and_the_update_has_the_largest_norm_allowed(tiny_path):
    free, clipped = (trainer_of(tiny_path, SFT(), max_grad_norm=most) for most in (0.0, 0.01))
    start = free.flatten_weights()
    norm = free.step([an_update(good=True)])["grad_norm"]
    assert (start - free.flatten_weights()).norm().item() == pytest.approx(norm, rel=1e-3) and norm > 0.1
    assert clipped.step([an_update(good=True)])["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert (start - clipped.flatten_weights()).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_the_learning_rate_that_is_logged_is_the_one_that_was_used(tiny_path):
    trainer = trainer_of(tiny_path, SFT(), lr=0.8, warmup_updates=4)
    assert trainer.step([an_update(good=True)] * 2)["lr"] == pytest.approx(0.4)
    assert [group["lr"] for group in trainer.policy.optimizer.param_groups] == [pytest.approx(0.4)]
    assert trainer.step([an_update(good=True)])["lr"] == pytest.approx(0.6)


@pytest.mark.parametrize(("column", "alg"), [("ref_logp", GRPO(kl=KL(coef=0.1))), ("teacher_logp", None)])
def test_a_frozen_model_is_scored_at_the_sampling_temperature(tiny_path, column, alg):
    """It is the model itself, so it must say what the policy says."""
    trainer = trainer_of(tiny_path, alg or OPD(teacher=tiny_path))
    [scored] = columns_of(trainer, an_update(good=True), column, "prox_logp")
    torch.testing.assert_close(scored[column], scored["prox_logp"])
    plain = trainer.forward(an_update(good=True)[0], as_given=True).logp
    assert (scored["prox_logp"] - plain).abs().max() > 0.1, "the temperature matters here"


def test_the_probe_is_taken_at_temperature_one(tiny_path):
    ids = [5, 6, 7, 8, 9]
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    want = [float(logp[t, token]) for t, token in enumerate(ids[1:])]
    assert trainer_of(tiny_path, SFT()).probe(ids) == pytest.approx(want, abs=1e-5)


def test_columns_land_on_the_tokens_that_are_trained_on(tiny_path):
    """A sampled first token, which nothing predicts, and one that the algorithm excludes get none."""
    one = sample_of([5, 6, 7, 8], [True, False, True, True], excluded=[False, False, True, False])
    two = sample_of([9, 5, 6], [False, True, True])
    trainer = trainer_of(tiny_path, SFT())
    plan = plan_update([[one], [two]], "token", 100)
    [[got_one], [got_two]] = asyncio.run(
        compute_columns(Local(trainer), [[one], [two]], plan, frozenset({"prox_logp"}))
    )

    @torch.no_grad()
    def plainly(sample: Sample) -> list[float]:
        logits = trainer.model(input_ids=torch.tensor(sample.token_ids[None])).logits[0] / TEMPERATURE
        logp = logits.log_softmax(-1)
        return [float(logp[t - 1, sample.token_ids[t]]) if yes else 0.0 for t, yes in enumerate(sample.loss_mask)]

    assert got_one.columns["prox_logp"] == pytest.approx(plainly(one), abs=1e-5)
    assert got_two.columns["prox_logp"] == pytest.approx(plainly(two), abs=1e-5)
    assert [v != 0 for v in got_one.columns["prox_logp"]] == [False, False, False, True]


def test_a_precomputed_reference_is_found_by_tokens_and_what_is_trained_on():
    ids, last, both = [5, 6, 7], [False, False, True], [False, True, True]
    samples = [sample_of(ids, last), sample_of(ids, both), sample_of([5, 6, 8], last)]
    assert len({hash_sample(s) for s in samples}) == 3
    filled = [[a_changed(s, columns={"prox_logp": [0.0, -float(i), -9.0]})] for i, s in enumerate(samples, start=1)]
    reference = index_reference(filled)
    got = add_ref_logp([[replace(s, reward=1.0)] for s in samples], reference)
    assert [s.columns["ref_logp"].tolist() for [s] in got] == [[0.0, -1.0, -9.0], [0.0, -2.0, -9.0], [0.0, -3.0, -9.0]]


def test_a_gradient_is_finite_on_all_ranks_or_on_none():
    """Two ranks over gloo, of which one has seen a gradient that is not a number."""
    main, timeout = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), timedelta(seconds=20)

    def judge(rank: int, seen: list[float]) -> list[bool]:
        store = main if rank == 0 else TCPStore("127.0.0.1", main.port, is_master=False)
        group = ProcessGroupGloo(PrefixStore("ranks", store), rank, 2, timeout)

        def add_up(values: torch.Tensor) -> torch.Tensor:
            total = values.clone()
            group.allreduce([total]).wait()
            return total

        learner = DeepSpeedLearner.__new__(DeepSpeedLearner)  # without an engine, which this does not ask
        learner.sum_over_ranks, learner.gradient_sum = add_up, torch.zeros(())
        said = []
        for value in seen:
            learner._see_gradient(torch.tensor([1.0, value]))
            said.append(learner.has_finite_gradients())
        return said

    with ThreadPoolExecutor() as ranks:
        calls = [ranks.submit(judge, 0, [1.0, torch.nan, 1.0]), ranks.submit(judge, 1, [1.0, 1.0, 1.0])]
        assert [call.result() for call in calls] == [[True, False, True]] * 2


def test_the_number_of_skipped_updates_is_in_a_checkpoint(tiny_path, tmp_path):
    stopped, resumed = (trainer_of(tiny_path, Planted(), max_skipped_updates=3) for _ in range(2))
    bad = an_update(good=False)
    for _ in range(2):
        stopped.step([bad])
    stopped.save_state(tmp_path)
    resumed.load_state(tmp_path)
    with pytest.raises(RunStopped, match="3 updates in a row"):
        resumed.step([bad])


def test_gradients_of_half_precision_add_up_over_micro_batches(tiny_path):
    groups = some_groups(4, 3)
    whole, cut = (trainer_of(tiny_path, SFT(), dtype="bfloat16") for _ in range(2))
    start = whole.flatten_weights()
    whole.step([micro_batches(groups, "token", 10_000)[0]])
    pieces = micro_batches(groups, "token", 60)[0]
    assert len(pieces) > 2
    cut.step([pieces])
    moved = (whole.flatten_weights() - start).norm()
    assert (cut.flatten_weights() - whole.flatten_weights()).norm() < 0.05 * moved


def test_an_optimizer_has_the_settings_of_the_recipe():
    weight = torch.nn.Parameter(torch.ones(2))
    settings = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.0625}
    [group] = make_optimizer(TrainerConfig(**settings), [weight]).param_groups
    assert {name: group[name] for name in settings} == settings
    [group] = make_optimizer(TrainerConfig(optimizer="sgd", **settings), [weight]).param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.25, 0.0625, 0)


def test_deepspeed_clips_where_the_recipe_says_and_keeps_what_it_adds():
    added = {"zero_optimization": {"reduce_bucket_size": 7}, "comms_logger": {"enabled": True}}
    made = deepspeed_config(TrainerConfig(max_grad_norm=0.25, zero_stage=3, deepspeed=added), "bfloat16")
    assert made["gradient_clipping"] == 0.25 and made["bf16"]["enabled"]
    assert made["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 7}
    assert made["comms_logger"] == {"enabled": True}
    assert not deepspeed_config(TrainerConfig(), "float32")["bf16"]["enabled"]


def test_means_are_weighted_and_each_source_has_its_own():
    """Worked out by hand: weights 1/2, 1/4 and 1/4, losses 4, 2 and 8; the last is of source b. Two ranks are alike."""
    samples = [sample_of([5, 6], [False, True]) for _ in range(3)]
    samples[2] = replace(samples[2], prompt=Prompt(id="q", messages=[], source="b"))
    samples[:2] = [replace(s, prompt=Prompt(id="p", messages=[], source="a")) for s in samples[:2]]
    loss = torch.tensor([4.0, 2.0, 8.0])

    def batch_of(which: slice) -> Batch:
        return pack(samples[which], [0.5, 0.25, 0.25][which], sources=("a", "b"))

    class Ranks:
        def __init__(self, n: int):
            self.n = n

        def sum_over_rows(self, values: torch.Tensor) -> torch.Tensor:
            return self.n * values

    def observe(updates: list[list[slice]], ranks: int = 1) -> dict[str, float]:
        rank = Ranks(ranks)
        observers = Observers({"metrics": StepMetrics(rank), "sources": SourceLosses(rank, sources=("a", "b"))})
        observers.begin_step()
        for cut in updates:
            observers.begin_update()
            for which in cut:
                observers.on_batch(BatchSeen.detached(batch_of(which), None, Objective(loss=loss[which])))
            observers.on_update({"grad_norm": 3.0})
        return observers.finish()

    one, first, second = slice(0, 3), slice(0, 1), slice(1, 3)
    want = {"tokens": 3.0, "loss": 4.5, "loss/a": (2 + 0.5) / 0.75, "loss/b": 8.0}
    want |= {"grad_norm": 3.0, "updates_skipped": 0.0}
    assert observe([[one]]) == pytest.approx(want)
    assert observe([[first, second]]) == observe([[first], [second]]) == pytest.approx(want)
    assert observe([[one]], ranks=2) == pytest.approx(want | {"tokens": 6.0})
