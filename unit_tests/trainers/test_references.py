"""Teachers with weights of the policy that move: averages, resets and their state."""

from __future__ import annotations

import asyncio

import pytest
import torch

from algs.grpo import GRPO
from algs.teachers import Teacher
from algs.terms import KL
from configs.trainer_schema import LoraConfig, TrainerConfig
from core.errors import UserError
from data_feeds.packing.batches import micro_batches
from modeling.load import load_model
from trainers.deepspeed import DeepSpeedLearner
from trainers.offload.offloaded_trainer import OffloadedTrainer
from trainers.optimizer_probe import check_optimizer
from trainers.references import Reference
from trainers.trainer import Trainer
from unit_tests.helpers.examples import columns_of, fill_batch, some_groups
from unit_tests.helpers.golden2 import GOLDEN2
from unit_tests.helpers.local_trainers import trainer_of
from unit_tests.helpers.ray_trainers import FSDP2, OFFLOADED, SMALL, plan_of, sharded, trainers_of

pytestmark = pytest.mark.usefixtures("one_thread")
REFERENCE = GOLDEN2["state"]["reference"]
ADAM = {"optimizer": "adamw", "lr": 1e-2}


class OnlyWeights:
    """A policy of one tensor."""

    def __init__(self, weights: list[float]):
        self.weights = torch.tensor(weights, dtype=torch.float64)

    def list_masters(self) -> list[torch.Tensor]:
        return [self.weights]

    def show_masters(self) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "teacher"),
    [
        ("reset_every_3", Teacher("start", reset_every=3)),
        ("ema_rate_0.05", Teacher("start", ema=0.05)),
        ("trl_sync_alpha_0.6_every_2", Teacher("start", ema=0.6, ema_every=2)),
    ],
)
def test_references_are_those_of_the_oracle(name, teacher):
    thetas = REFERENCE["theta_by_step"]
    policy = OnlyWeights(thetas[0])
    reference = Reference(policy)
    for step, want in enumerate(REFERENCE[name]):
        assert reference.weights[0].tolist() == pytest.approx(want, abs=1e-12)
        policy.weights.copy_(torch.tensor(thetas[min(step + 1, 6)], dtype=torch.float64))
        if rate := teacher.rate_after(step + 1, {}):
            reference.move(policy, rate)


@pytest.mark.parametrize("parts", [2, 4, 7])
def test_shards_move_to_the_bit_as_the_whole_does(parts):
    start, end = torch.randn(2, 1001, generator=torch.Generator().manual_seed(0))

    def move(tensors: list[torch.Tensor], ends: list[torch.Tensor]) -> torch.Tensor:
        policy = OnlyWeights([])
        policy.list_masters = lambda: tensors
        reference = Reference(policy)
        policy.list_masters = lambda: ends
        for rate in (0.05, 0.6, 0.05):
            reference.move(policy, rate)
        return torch.cat(reference.weights)

    assert torch.equal(move([*start.chunk(parts)], [*end.chunk(parts)]), move([start], [end]))


def test_a_condition_on_the_state_resets():
    teacher = Teacher("start", ema=0.1, when=lambda state: state["kl"] > 0.3)
    assert [teacher.rate_after(1, {"kl": kl}) for kl in (0.2, 0.4)] == [0.1, 1.0]


def a_batch(trainer: Trainer):
    """Return a micro-batch with the reference's column."""
    [batch] = micro_batches(some_groups(2, 2), "token", 10_000)[0]
    [columns] = trainer.compute_columns([batch], frozenset({"ref_logp"}))
    return fill_batch(batch, columns)


def distance(trainer: Trainer) -> float:
    """Return the largest difference between policy and reference."""
    [batch] = micro_batches(some_groups(2, 2), "token", 10_000)[0]
    [got] = columns_of(trainer, [batch], "ref_logp", "prox_logp")
    return float((got["ref_logp"] - got["prox_logp"]).abs().max())


def train(trainer: Trainer, steps: int, *, first: int = 0) -> dict[str, float]:
    """Make steps as a run does, and return the metrics of the last."""
    for step in range(first, first + steps):
        metrics = trainer.step([[a_batch(trainer)]])
        teacher = trainer.alg.teachers["ref_logp"]
        if rate := teacher.rate_after(step + 1, {}):
            trainer.move_teachers({"ref_logp": rate})
    return metrics


@pytest.mark.parametrize("lora", [None, LoraConfig(r=4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kl_is_zero_on_the_step_after_a_reset_and_not_before(tiny_path, dtype, lora):
    alg = GRPO(kl=KL(coef=0.1, reset_every=2))
    trainer = trainer_of(tiny_path, alg, dtype=dtype, lora=lora, **ADAM)
    assert distance(trainer) == 0
    assert train(trainer, 1)["kl_ref"] == 0
    assert distance(trainer) > 1e-3
    assert train(trainer, 1, first=1)["kl_ref"] > 1e-6
    assert distance(trainer) == 0, "to the bit"
    assert train(trainer, 1, first=2)["kl_ref"] == 0


def test_scoring_a_reference_leaves_the_policy_as_it_was(tiny_path):
    trainer = trainer_of(tiny_path, GRPO(kl=KL(coef=0.1, ema=0.1)), dtype="bfloat16", **ADAM)
    train(trainer, 2)
    before = trainer.flatten_weights()
    masters = [m.clone() for m in trainer.policy.list_masters()]
    distance(trainer)
    assert torch.equal(before, trainer.flatten_weights())
    assert all(torch.equal(a, b) for a, b in zip(masters, trainer.policy.list_masters(), strict=True))


def test_an_average_in_bfloat16_moves_by_less_than_its_rounding(tiny_path):
    """2^-8 is the precision of bfloat16, and 0.01 x 2^-6 is far below it."""
    trainer = trainer_of(tiny_path, GRPO(kl=KL(coef=0.1, ema=0.01)), dtype="bfloat16", **ADAM)
    reference = trainer.references["ref_logp"]
    start = [w.clone() for w in reference.weights]
    for master in trainer.policy.list_masters():
        master.data.mul_(1 + 2**-6)
    trainer.move_teachers({"ref_logp": 0.01})
    for own, old in zip(reference.weights, start, strict=True):
        torch.testing.assert_close(own, old * (1 + 0.01 * 2**-6), rtol=1e-6, atol=0)


def test_a_reset_may_clear_the_moments_of_the_optimizer(tiny_path):
    alg = GRPO(kl=KL(coef=0.1, reset_every=1, reset_optimizer=True))
    trainer, kept = trainer_of(tiny_path, alg, **ADAM), trainer_of(tiny_path, GRPO(kl=KL(coef=0.1)), **ADAM)
    batch = a_batch(trainer)
    for each in (trainer, kept):
        each.step([[batch]])
    trainer.move_teachers({"ref_logp": 1.0})
    before = [each.flatten_weights() for each in (trainer, kept)]
    for each in (trainer, kept):
        each.step([[batch]])
    moved = [(each.flatten_weights() - old).abs() for each, old in zip((trainer, kept), before, strict=True)]
    # the first update of AdamW is the sign of the gradient times the learning rate
    assert float(moved[0].max()) == pytest.approx(1e-2, rel=1e-3)
    assert not torch.equal(moved[0], moved[1])


@pytest.mark.parametrize(
    ("resets", "rate", "stays"), [(True, 1.0, False), (True, 0.5, True), (False, 1.0, True), (False, 0.5, True)]
)
def test_the_moments_stay_unless_a_reset_is_to_clear_them(tiny_path, resets, rate, stays):
    alg = GRPO(kl=KL(coef=0.1, ema=0.5, reset_every=2, reset_optimizer=resets))
    trainer = trainer_of(tiny_path, alg, **ADAM)
    trainer.step([[a_batch(trainer)]])
    trainer.move_teachers({"ref_logp": rate})
    moments = [state["exp_avg"] for state in trainer.policy.optimizer.state.values()]
    assert moments and any(moment.any() for moment in moments) is stays


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_resumed_run_goes_on_with_the_same_reference(tiny_path, tmp_path, after):
    alg = GRPO(kl=KL(coef=0.1, ema=0.3, reset_every=3, reset_optimizer=True))
    whole = trainer_of(tiny_path, alg, **ADAM)
    want = train(whole, 5)
    first = trainer_of(tiny_path, alg, **ADAM)
    train(first, after)
    tmp_path.joinpath("state").mkdir()
    first.save_state(tmp_path / "state")
    again = trainer_of(tiny_path, alg, **ADAM)
    again.load_state(tmp_path / "state")
    assert train(again, 5 - after, first=after) == want
    assert torch.equal(again.flatten_weights(), whole.flatten_weights())
    assert distance(again) == distance(whole)


def test_the_average_of_a_run_is_saved_beside_the_model_and_comes_back(tiny_path, tmp_path):
    batch = a_batch(trainer_of(tiny_path, GRPO(kl=KL(coef=0.1)), **ADAM))

    def make() -> Trainer:
        return trainer_of(tiny_path, GRPO(), dtype="bfloat16", ema=0.75, **ADAM)

    trainer = make()
    want = [m.clone() for m in trainer.policy.list_masters()]
    for step in range(4):
        if step == 2:
            (state := tmp_path / "state").mkdir()
            trainer.save_state(state)
            trainer = make()
            trainer.load_state(state)
        trainer.step([[batch]])
        want = [0.75 * w + 0.25 * m for w, m in zip(want, trainer.policy.list_masters(), strict=True)]
    policy = trainer.flatten_weights()
    trainer.save_model(tmp_path / "model")
    trainer.save_model(tmp_path / "model_ema", "ema")
    assert torch.equal(trainer.flatten_weights(), policy)
    for name, theirs in (("model", trainer.policy.list_masters()), ("model_ema", want)):
        saved = load_model(str(tmp_path / name), dtype="bfloat16", attention="auto").parameters()
        for own, other in zip(saved, theirs, strict=True):
            torch.testing.assert_close(own.float(), other, rtol=2**-8, atol=1e-30)
    assert not torch.equal(want[0], trainer.policy.list_masters()[0])


def test_an_average_is_refused_where_deepspeed_keeps_the_weights_elsewhere():
    cfg = TrainerConfig(ema=0.9, deepspeed={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    with pytest.raises(UserError, match=r"offload_optimizer is set, and trainer.ema is set: .*strategy=fsdp2"):
        check_optimizer(cfg, is_sharded=True)
    check_optimizer(cfg, is_sharded=False)


def test_a_copy_that_follows_is_refused_where_deepspeed_offloads():
    learner = DeepSpeedLearner.__new__(DeepSpeedLearner)  # without an engine, which this does not ask
    learner.cfg = TrainerConfig(deepspeed={"zero_optimization": {"offload_param": {"device": "cpu"}}})
    with pytest.raises(UserError, match=r"offload_param is set, and a teacher of alg moves, or trainer.ema is set"):
        learner.list_masters()


def test_a_reference_leaves_the_device_and_comes_back(tiny_path):
    trainer = trainer_of(tiny_path, GRPO(kl=KL(coef=0.1, ema=0.3)), **ADAM)
    train(trainer, 2)
    want, away = distance(trainer), OffloadedTrainer(trainer)
    states = away.offload_states()
    held = sum(w.numel() * 4 for w in trainer.policy.model.parameters())
    assert states >= 3 * held, "two moments of the optimizer and the reference"
    assert all(w.untyped_storage().nbytes() == 0 for w in trainer.references["ref_logp"].weights)
    away.offload_weights()
    away.reload_states()
    assert distance(trainer) == want


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        *((stage, "float32") for stage in (FSDP2, 3)),
        *(pytest.param(stage, "bfloat16", marks=pytest.mark.verify) for stage in (FSDP2, OFFLOADED, 1, 2, 3)),
        *(pytest.param(stage, "float32", marks=pytest.mark.verify) for stage in (OFFLOADED, 0, 1, 2)),
    ],
)
def test_two_ranks_move_a_reference_as_one_does(ranks, tiny_path, tmp_path, stage, dtype):
    alg = {"name": "grpo", "kl": {"coef": 0.1, "ema": 0.3, "reset_every": 3, "reset_optimizer": True}}
    groups = some_groups()

    async def make_step(trainers, per_rank, rate):
        scored = await trainers.scatter(Trainer.compute_columns, per_rank, frozenset({"ref_logp"}))
        filled = [
            [fill_batch(b, c) for b, c in zip(micro, columns, strict=True)]
            for micro, columns in zip(per_rank, scored, strict=True)
        ]
        metrics, *_ = await trainers.scatter(Trainer.step, [[micro] for micro in filled])
        await trainers.call_all(Trainer.move_teachers, {"ref_logp": rate})
        return metrics["kl_ref"]

    async def learn(where, plan, max_tokens):
        trainers = await trainers_of(where, plan)
        per_rank = micro_batches(groups, "token", max_tokens, ranks=len(trainers))
        seen = [await make_step(trainers, per_rank, rate) for rate in (0.3, 0.3, 1.0, 0.3)]
        if where is not None:
            await trainers.call_all(Trainer.save_state, tmp_path)
        seen.append(await make_step(trainers, per_rank, 0.3))
        weights, *_ = await trainers.call_all(Trainer.flatten_weights)
        if where is not None:  # from the middle again, to the bit
            trainers = await trainers_of(where, plan)
            await trainers.call_all(Trainer.load_state, tmp_path)
            assert await make_step(trainers, per_rank, 0.3) == seen[-1]
            again, *_ = await trainers.call_all(Trainer.flatten_weights)
            assert torch.equal(weights, again)
        return seen, weights

    same = {"alg": alg, "dtype": dtype, "lr": 1e-3}
    want, weights = asyncio.run(learn(None, plan_of(tiny_path, **same), 10_000))
    plan = plan_of(tiny_path, **same, **sharded(stage), ranks=2, deepspeed=SMALL if stage == 3 else {})
    got, sharded_weights = asyncio.run(learn(ranks, plan, 60))
    assert got[0] == 0 and got[3] == 0 and min(got[1], got[2], got[4]) > 1e-8
    exact = dtype == "float32"
    assert got == pytest.approx(want, rel=1e-2 if exact else 0.5, abs=1e-9)
    assert (sharded_weights - weights).norm() < (1e-4 if exact else 1e-2) * weights.norm()
