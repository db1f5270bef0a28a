"""The calls of one RL step on made-up groups, with the real trainer in this process and no engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import main_rl
from configs.schema import RLConfig
from core.cluster.workers import Local
from core.errors import RunStopped
from core.timing.clock import ActivityTimer, Clock
from core.timing.phases import TRAINER_ACTIVITIES
from core.types.samples import Group, Prompt
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.load_recipe import load_recipe
from driver.records.engine_timers import EngineTimers
from driver.records.time_account import TimeBreakdown
from driver.rl.observers import RunObservers
from driver.rl.run import Run
from driver.start.rollouts import plan_rollouts
from driver.start.trainers import build_trainer, plan_trainer
from rollouts.scheduling.availability import EngineAvailability
from unit_tests.helpers.examples import families, run_here, sample_of, some_groups
from unit_tests.helpers.runs import SEVENS, file_of, folder_of, metrics_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Timed(ActivityTimer):
    """Timer that counts how often it is read."""

    reads = 0

    def read_seconds(self) -> dict[str, float]:
        self.reads += 1
        return super().read_seconds()


async def step_of(path: str, groups: list[Group], tokenizer: ChatTokenizer | None = None) -> SimpleNamespace:
    """Score, credit and train as main_rl.py does; return the run, the groups of each stage and the metrics."""
    loaded = load_recipe(RLConfig, path, [])
    cfg = loaded.cfg
    trainer = build_trainer(None, plan_trainer(cfg, loaded.alg))
    trainer.timer = of_trainer = Timed(*TRAINER_ACTIVITIES)
    clock = Clock()
    parts: dict[str, Any] = dict.fromkeys(Run.__dataclass_fields__)  # a step asks for none of the others
    parts |= {"cfg": cfg, "alg": loaded.alg, "trainers": Local(trainer), "tokenizer": tokenizer}
    parts |= {
        "context": SimpleNamespace(clock=clock),
        "layout": trainer.describe_layout(),
        "steps_done": 0,
        "observers": RunObservers(),
    }
    engines = cast(Any, Local(SimpleNamespace(timer=Timed())))
    parts["time"] = await TimeBreakdown.start(
        clock, trainers=parts["trainers"], engines=EngineTimers(engines, EngineAvailability(1))
    )
    run = Run(**parts)
    scored = await run.compute_columns(groups)
    credited = run.compute_advantages(scored)
    metrics = await run.train(credited)
    for _ in range(3):  # turns of the loop, in which nobody waits for a device
        await asyncio.sleep(0)
    reads = (engines.worker.timer.reads, of_trainer.reads)
    return SimpleNamespace(run=run, trainer=trainer, scored=scored, credited=credited, metrics=metrics, reads=reads)


def step(path: str, groups: list[Group], tokenizer: ChatTokenizer | None = None) -> SimpleNamespace:
    return asyncio.run(step_of(path, groups, tokenizer))


def trained_tokens(groups: list[Group]) -> int:
    return sum(s.n_trained for g in groups for s in g)


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_the_groups_of_a_step_are_dealt_over_its_updates_without_repeats(recipe, updates):
    groups = some_groups(4, 3)
    done = step(recipe({"updates_per_step": updates}), groups)
    assert done.metrics["train/tokens"] == trained_tokens(groups)
    assert done.trainer.updates_done == updates


def test_devices_are_asked_for_their_seconds_with_the_updates_of_a_step(recipe):
    assert step(recipe(), some_groups(2, 3)).reads == (2, 2), "at the start of the run, and for this step"


def test_more_than_one_update_has_the_policy_of_the_beginning_scored_first(recipe):
    groups = some_groups(4, 3)
    one, two = (step(recipe({"updates_per_step": n, "trainer.lr": 0.01}), groups) for n in (1, 2))
    assert all("prox_logp" not in s.columns for g in one.scored for s in g), "it is the policy in training"
    assert one.metrics["train/approx_kl"] == 0
    assert all(np.array_equal(s.columns["prox_logp"] != 0, s.loss_mask) for g in two.scored for s in g)
    assert two.metrics["train/approx_kl"] > 1e-6, "the second update is no longer on policy"


def test_a_reference_is_scored_where_the_algorithm_asks_for_one(recipe):
    done = step(recipe({"alg.kl": {"coef": 0.1}}), some_groups(2, 3))
    assert all("ref_logp" in s.columns for g in done.scored for s in g)
    assert done.metrics["train/kl_ref"] == pytest.approx(0, abs=1e-6), "nothing was trained before"


TOGETHER = """
from algs.grpo import GRPO
from algs.teachers import Teacher


class Together(GRPO):
    @property
    def whole_groups(self):
        return True

    @property
    def required_columns(self):
        return super().required_columns | {"told"}

    @property
    def teachers(self):
        return super().teachers | {"told": Teacher("live", prompt=self.hint)}

    def hint(self, sample, group):
        return [{"role": "user", "content": "1" * 30}]
"""


def test_a_teacher_reads_one_by_one_the_samples_that_a_loss_compares(recipe, tmp_path, tiny_path):
    """The three samples fit into one micro-batch, but not with the long prompt of the teacher, 105 tokens."""
    tokenizer, asked = ChatTokenizer(tiny_path, "chat"), Prompt(id="0", messages=[{"role": "user", "content": "1+2="}])
    ids = tokenizer.render(asked.messages)
    mask, more = [False] * len(ids) + [True] * 4, {"prompt": asked, "rollout_logp": [-4.0] * (len(ids) + 4)}
    group = [sample_of([*ids, 9, 8, 7, n], mask, reward=float(n == 5), **more) for n in (5, 6, 7)]
    changes = {"trainer.micro_batch_tokens": 48, "trainer.share_prefixes": "off"}
    path = recipe(changes | {"alg": {"file": file_of(tmp_path / "together.py", TOGETHER)}})
    [scored] = step(path, [group], tokenizer).scored
    assert all(np.array_equal(s.columns["told"] != 0, s.loss_mask) for s in scored)


def test_the_constant_norm_is_the_new_token_budget_not_the_longest_sample(recipe):
    """Worked out by hand: each of six samples, each token of it 1 / 8 of rollout.max_new_tokens."""
    run = step(recipe({"alg.loss_norm": "constant", "rollout.max_new_tokens": 8}), some_groups(2, 3)).run
    assert run._plan(some_groups(2, 3)).weights == [1 / (6 * 8)] * 6


def test_advantages_are_those_of_the_whole_step(recipe):
    """The standard deviation of a batch is that of all groups, whichever update they are in."""
    groups = [[replace(s, reward=float(i + n)) for n, s in enumerate(g)] for i, g in enumerate(some_groups(4, 2))]
    done = step(recipe({"alg.scale_rewards": "batch", "updates_per_step": 2}), groups)
    rewards = torch.tensor([float(i + n) for i in range(4) for n in range(2)], dtype=torch.float64)
    for group in done.credited:
        for sample, sign in zip(group, (-1, 1), strict=True):
            [advantage] = {a for a, yes in zip(sample.advantage, sample.loss_mask, strict=True) if yes}
            assert advantage == pytest.approx(sign * 0.5 / rewards.std().item(), rel=1e-5)


@pytest.mark.parametrize(("teaching", "made"), [((0, 2), 2), ((2,), 1), ((), 2)])
def test_scalerl_makes_the_updates_that_have_a_group_that_teaches(recipe, teaching, made):
    """Groups 0 and 2 would be in one update. Without any group that teaches, all are trained at advantage 0."""
    groups = [
        [replace(s, reward=float(n == 0 and i in teaching)) for n, s in enumerate(g)]
        for i, g in enumerate(some_groups(4, 3))
    ]
    done = step(recipe({"alg": {"name": "scalerl"}, "updates_per_step": 2}), groups)
    assert done.metrics["train/updates_skipped"] == 2 - made
    assert done.trainer.updates_done == 2, "the learning rate goes on"
    assert done.metrics["train/tokens"] == trained_tokens([groups[i] for i in teaching] or groups)


HALVES = """
import numpy as np
from dataclasses import replace
from algs.grpo import GRPO


class Halves(GRPO):
    def prepare_update(self, groups):
        if len(groups) != 2:
            raise AssertionError(len(groups))
        RESULT

    def loss(self, policy, tokens):
        return -tokens.advantage * policy.logp, {"given": tokens.advantage}
"""


def test_what_an_update_is_prepared_with_reaches_its_loss(recipe, tmp_path):
    """Two updates of two groups: every advantage becomes the number of samples of its update, 2 x 3."""
    change = "return [[s.with_advantage(float(sum(map(len, groups)))) for s in g] for g in groups]"
    file = file_of(tmp_path / "halves.py", HALVES.replace("RESULT", change))
    done = step(recipe({"alg": {"file": file}, "updates_per_step": 2}), some_groups(4, 3))
    assert done.metrics["train/given"] == 6.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("return groups[:1]", "Halves.prepare_update was given 2 groups of 6 samples and returned 1 groups of 3"),
        (
            "return [[s.with_advantage(np.nan) for s in g] for g in groups]",
            "Halves.prepare_update gave the advantage nan",
        ),
        (
            "return [[replace(s, excluded=s.action_mask) for s in g] for g in groups]",
            "prepare_update left no token to train on",
        ),
    ],
)
def test_an_update_is_prepared_within_its_bounds(recipe, tmp_path, change, says):
    file = file_of(tmp_path / "halves.py", HALVES.replace("RESULT", change))
    with pytest.raises(RunStopped, match=says):
        step(recipe({"alg": {"file": file}, "updates_per_step": 2}), some_groups(4, 3))


WRONG = """
import numpy as np
from algs.grpo import GRPO


class Wrong(GRPO):
    def compute_advantages(self, groups):
        RESULT
"""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("return groups[:1]", "Wrong.compute_advantages was given 2 groups of 6 samples and returned 1 groups of 3"),
        (
            "return [[s.with_advantage(np.nan) for s in g] for g in groups]",
            "Wrong.compute_advantages gave the advantage nan",
        ),
    ],
)
def test_advantages_are_finite_and_of_the_samples_given(recipe, tmp_path, change, says):
    file = file_of(tmp_path / "wrong.py", WRONG.replace("RESULT", change))
    with pytest.raises(RunStopped, match=says):
        step(recipe({"alg": {"file": file}}), some_groups(2, 3))


def test_the_padding_of_a_step_is_the_mean_over_its_updates(recipe):
    groups = some_groups(4, 3)
    done = step(recipe({"updates_per_step": 2, "model.attention": "sdpa"}), groups)
    each = [done.run._plan(groups[i::2]).padding for i in range(2)]
    assert done.metrics["train/padding"] == pytest.approx(sum(each) / 2) and min(each) > 0
    assert step(recipe({"updates_per_step": 2}), groups).metrics["train/padding"] == 0


def test_a_prompt_is_computed_once_for_its_group(recipe):
    groups = families()
    shared, apart = (step(recipe({"trainer.share_prefixes": how}), groups) for how in ("auto", "off"))
    saved = [s.token_ids[:-1] for g in groups for s in g]
    different = sum(len({tuple(s.token_ids[: t + 1]) for s in g for t in range(len(s.token_ids) - 1)}) for g in groups)
    assert shared.metrics["train/shared"] == pytest.approx(1 - different / sum(map(len, saved)))
    assert apart.metrics["train/shared"] == 0
    assert shared.metrics["train/tokens"] == apart.metrics["train/tokens"] == trained_tokens(groups)
    assert shared.metrics["train/grad_norm"] == pytest.approx(apart.metrics["train/grad_norm"], rel=1e-4)


def test_engine_and_trainer_take_the_recipes_temperature(recipe, tmp_path):
    """Were it another one on either side, the log-probabilities of sampled tokens would differ."""
    sevens = file_of(tmp_path / "sevens.py", SEVENS)
    path = recipe({"rollout.temperature": 0.5, "steps": 1, "group_size": 2, "reward.function": sevens})
    assert plan_rollouts(load_recipe(RLConfig, path, []).cfg).engine.temperature == 0.5
    assert run_here(main_rl, "--config", path) == (0, "")
    [metrics] = metrics_of(folder_of(tmp_path))
    assert metrics["train/mismatch/abs_logp"] < 1e-4


def test_the_seed_of_the_recipe_decides_a_new_adapter(recipe):
    def adapter(seed: int) -> torch.Tensor:
        loaded = load_recipe(RLConfig, recipe({"model.lora": {"r": 2}}), [f"seed={seed}"])
        trainer = build_trainer(None, plan_trainer(loaded.cfg, loaded.alg))
        return torch.cat([t.flatten() for bucket in trainer.export_weights(2**20, "adapter") for _, t in bucket])

    assert torch.equal(adapter(3), adapter(3)) and not torch.equal(adapter(3), adapter(4))
