"""Ranks that compute rows together make the update of one process, on Ray, for every library."""

from __future__ import annotations

import asyncio
import random

import pytest
import ray
import torch

from algs.base import assign_advantages
from configs.trainer_schema import LoraConfig
from core.cluster.workers import Local, copy_to_groups
from core.errors import UserError
from core.types.samples import Group
from data_feeds.packing.batches import micro_batches, plan_update
from driver.rl.scoring import compute_columns
from driver.start.trainers import TrainerPlan, build_trainer
from modeling.segments import Segments
from modeling.sequence_parallel import RowSlice
from trainers.trainer import Trainer
from unit_tests.helpers import ray_trainers
from unit_tests.helpers.examples import families, siblings, some_answers, with_kept
from unit_tests.helpers.models import random_model
from unit_tests.helpers.runs import rows_of, start


def find_tokens_apart(batch, size: int) -> int:
    """Count segments whose first token is learnt and stands in another slice than the position that predicts it."""
    ends = Segments.of_batch(batch).lengths
    first = [sum(ends[:i]) for i in range(len(ends))]
    own = RowSlice(place=0, size=size, total=len(batch.input_ids))
    found = 0
    for i, parent in enumerate(batch.parents.tolist()):
        predicts = first[parent] + ends[parent] - 1
        learnt = parent >= 0 and ((batch.at == predicts) & (batch.labels == batch.input_ids[first[i]])).any()
        found += bool(learnt) and predicts // own.width != first[i] // own.width
    return found


RANKS = 4


@pytest.fixture(scope="module")
def ranks(cluster):
    """Four ranks on the folder's cluster, which end with this file."""
    started = ray_trainers.start_ranks(cluster, RANKS)
    yield started
    for actor in started.actors:
        ray.kill(actor)
    cluster.groups.remove(started)


SGD = {"optimizer": "sgd", "lr": 0.3, "max_grad_norm": 0.0}
PPO = {"name": "ppo", "critic_lr": 0.5, "entropy_coef": 0.01}
KL_GRPO = {"name": "grpo", "kl": {"coef": 0.1}}
WINDOW = {"sliding_window": 5}
CASES: dict[str, tuple] = {
    # library or ZeRO stage, ranks of a group, algorithm, family, what else its config has, what else the trainer
    "fsdp2_windows_values": ("fsdp2", 2, PPO, "mistral", WINDOW, {"gradient_checkpointing": True}),
    "fsdp2_copied_keys": ("fsdp2", 4, KL_GRPO, "gemma3_text", WINDOW, {}),
    "fsdp2_pairs": ("fsdp2", 2, {"name": "dpo"}, "qwen3", {}, {}),
    "fsdp2_measures": (
        *("fsdp2", 2, {"name": "otb", "kl": {"coef": 0.1, "estimator": "full"}}, "llama"),
        *({"vocab_size": 16_384}, {"logits_mib": 1, "lr": 30.0}),
    ),
    "fsdp2_adapter": ("fsdp2", 2, KL_GRPO, "llama", {}, {"lora": True}),
    "zero0_totals": (0, 2, {"name": "p3o"}, "qwen2", {}, {}),
    "zero1_windows": (1, 4, KL_GRPO, "mistral", WINDOW, {}),
    "zero2_values": (2, 2, PPO, "mistral", WINDOW, {}),
    # a small gradient, which rounding of the weights would hide at a small learning rate
    "zero3_chunks": (3, 2, {"name": "grpo"}, "llama", {"vocab_size": 16_384}, {"logits_mib": 1, "lr": 30.0}),
    "zero3_windows": (3, 4, KL_GRPO, "gemma3_text", WINDOW, {"gradient_checkpointing": True}),
}


LATER = ("fsdp2_adapter", "fsdp2_copied_keys", "zero0_totals", "zero2_values", "zero3_windows")


def plan_of(path: str, alg: dict, *, lora: bool = False, **trainer) -> TrainerPlan:
    adapter = LoraConfig(r=4) if lora else None
    return ray_trainers.plan_of(path, alg=alg, attention="auto", lora=adapter, **SGD | trainer)


async def learn(trainers, plan: TrainerPlan, groups: list[Group], *, max_tokens: int):
    """Make two updates as the programs do; return the weights before and after each, and the metrics of each."""
    alg = plan.alg
    layout = await trainers.call_one(0, Trainer.describe_layout)
    assert layout.shares_prefixes and not layout.padded
    cut = {"ranks": plan.trainer.data_parallel_size, "padded": False, "share_prefixes": True}
    cut |= {"whole_groups": alg.whole_groups, "whole_episodes": alg.whole_episodes}
    states, said = [await weights_of(trainers)], []
    for _ in range(2):
        made = alg.prepare_groups(groups)
        made = await compute_columns(
            trainers, made, plan_update(made, alg.loss_norm, max_tokens, **cut), alg.required_columns
        )
        batches = plan_update(assign_advantages(alg, made), alg.loss_norm, max_tokens, **cut).batches()
        shards = copy_to_groups([[of_group] for of_group in batches], len(trainers))
        measured = await trainers.scatter(Trainer.step, shards)
        assert all(m == measured[0] for m in measured), f"every rank reports the same: {measured}"
        said.append(measured[0])
        states.append(await weights_of(trainers))
    return states, said


async def weights_of(trainers) -> torch.Tensor:
    states = await trainers.call_all(Trainer.flatten_weights)
    assert all(torch.equal(s, states[0]) for s in states), "every rank holds the same weights"
    return states[0]


def far_prompts() -> list[Group]:
    """A long prompt with short replies: with two ranks, the first tokens of replies are far from what predicts them."""
    return [siblings(random.Random(1), 17, [1, 1, 9, 11, 2], group=3, turns=False)]


def check_alike(ranks, plan: TrainerPlan, one: TrainerPlan, groups: list[Group], *, max_tokens: int) -> None:
    """Gradient, weights after two updates and metrics are those of one process, to 1e-5."""
    want, metrics = asyncio.run(learn(Local(build_trainer(None, one)), one, groups, max_tokens=10_000))

    async def go():
        await ranks.build_workers(build_trainer, plan)
        return await learn(ranks, plan, groups, max_tokens=max_tokens)

    got, got_metrics = asyncio.run(go())
    assert torch.equal(got[0], want[0])
    assert (got[1] - want[1]).norm() < 1e-5 * (want[1] - want[0]).norm(), "the gradient"
    assert (got[2] - want[2]).norm() < 1e-5 * (want[2] - want[0]).norm(), "the weights after two updates"
    for ours, theirs in zip(got_metrics, metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.verify if name in LATER else pytest.mark.slow) for name in CASES]
)
def test_ranks_that_share_rows_make_the_updates_of_one_process(ranks, tmp_path, case):
    library, size, alg, family, more, trainer = CASES[case]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    random_model(family, **heads | more).save_pretrained(path := str(tmp_path))
    groups = some_answers("pairs", 5) if alg["name"] == "dpo" else [*families(), *far_prompts()]
    if alg["name"] != "dpo":
        [[batch]] = micro_batches(far_prompts(), "token", 1000, padded=False, share_prefixes=True)
        assert find_tokens_apart(batch, 2), "a learnt token whose logits come from another rank's slice"
    if case == "zero3_chunks":
        groups = with_kept(groups)
    sharded = {"strategy": library} if library == "fsdp2" else {"zero_stage": library}
    plan = plan_of(path, alg, ranks=RANKS, sequence_parallel=size, **sharded, **trainer)
    one = plan_of(path, alg, **{key: value for key, value in trainer.items() if key in ("lora", "lr")})
    check_alike(ranks, plan, one, groups, max_tokens=60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_that_reads_whole_sequences_is_refused_where_it_was_loaded(ranks, tmp_path):
    random_model("lfm2", layer_types=["conv", "full_attention"]).save_pretrained(path := str(tmp_path))
    plan = plan_of(path, {"name": "grpo"}, strategy="fsdp2", ranks=RANKS, sequence_parallel=2)
    with pytest.raises(UserError, match=r"trainer\.sequence_parallel=2: .* read whole sequences"):
        asyncio.run(ranks.build_workers(build_trainer, plan))


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", ["fsdp2", "deepspeed"])
def test_a_run_whose_ranks_share_rows_logs_what_one_with_a_rank_logs(recipe, tmp_path, library):
    """A run with weight syncs, a checkpoint and snapshots; the engine samples the same from the same weights."""
    changes = {"backend": "ray", "trainer.strategy": library, "model.dtype": "float32", "trainer.lr": 1e-3, "steps": 2}
    changes |= {"capture.every": 1, "checkpoint.every": 1, "updates_per_step": 2}
    made = {}
    for name, own in {"one": {}, "two": {"trainer.ranks": 2, "trainer.sequence_parallel": 2}}.items():
        run = start(recipe(changes | own), tmp_path / name)
        out, err = run.communicate()
        assert run.returncode == 0, out + err
        [folder] = (tmp_path / name).iterdir()
        made[name] = rows_of(folder)
        assert (folder / "snapshots").is_dir()
    check_rows(made["one"], made["two"])


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_supervised_ranks_that_share_rows_log_what_a_single_rank_logs(recipe, sums, tmp_path):
    changes = {"backend": "ray", "trainer.zero_stage": 3, "alg": {"name": "sft"}, "eval_every": 1}
    changes |= {"data.eval": str(sums / "sft.parquet")}
    made = []
    for own in ({}, {"trainer.ranks": 2, "trainer.sequence_parallel": 2}):
        into = tmp_path / f"{len(made)}"
        run = start(recipe(changes | own, kind="sl"), into, program="main_sl.py")  # this process has a cluster already
        out, err = run.communicate()
        assert (run.returncode, err) == (0, b""), out + err
        [folder] = into.iterdir()
        made.append(rows_of(folder))
    assert "eval/loss" in made[0][1]
    check_rows(*made)


def check_rows(one: dict[int, dict], two: dict[int, dict]) -> None:
    """What was logged of training and held-out rows is the same."""
    assert [*one] == [*two] == [0, 1]
    for step, row in one.items():
        same = {key: value for key, value in row.items() if key.startswith(("train/", "eval/"))}
        assert same and {key: two[step][key] for key in same} == pytest.approx(same, rel=1e-4, abs=1e-6)
