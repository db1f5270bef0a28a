"""Real DeepSpeed and FSDP2 on real Ray actors equal the reference trainer, for every ZeRO stage and number of ranks."""

import asyncio
import contextlib
import gc
import os
import pickle
import re
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from algs.base import assign_advantages
from configs.trainer_schema import LoraConfig
from core.allocator import return_freed_memory
from core.errors import RunStopped, UserError
from data_feeds.packing.batches import micro_batches, plan_update
from driver.rl.scoring import compute_columns
from driver.start.trainers import TrainerPlan, build_trainer
from modeling.head import choose_chunk
from modeling.load import load_model
from modeling.saved_model import check_saved
from trainers.checkpoint.saved_policy import load_policy
from trainers.deepspeed import DeepSpeedTrainer
from trainers.fsdp2 import FsdpTrainer
from trainers.offload.offloaded_trainer import OffloadedTrainer
from trainers.trainer import Trainer
from unit_tests.helpers.examples import (
    Malicious,
    a_changed,
    families,
    fill_batch,
    some_answers,
    some_groups,
    with_routes,
    with_values,
)
from unit_tests.helpers.models import random_model
from unit_tests.helpers.ray_trainers import (
    FSDP2,
    LATER,
    OFFLOADED,
    SGD,
    SMALL,
    alg_of,
    check_update,
    plan_of,
    run,
    sharded,
    start_of,
    start_ranks,
    trainers_of,
)
from unit_tests.helpers.seeing import save_model

SLOW_BLOCK = {"lr_scales": {"model.layers.0": 0.25}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def three(cluster, ranks):
    return ranks | {3: start_ranks(cluster, 3)}


@pytest.mark.parametrize(
    ("stage", "n", "max_tokens", "layout"),
    [
        *((stage, 2, 60, "packed") for stage in (0, 1, 2, 3, FSDP2, OFFLOADED)),
        *((stage, 1, 10_000, "padded") for stage in (0, 3, FSDP2)),
        *(pytest.param(stage, 1, 10_000, "padded", marks=LATER) for stage in (1, 2, OFFLOADED)),
    ],
)
def test_one_gradient_however_it_is_cut(ranks, tiny_path, stage, n, max_tokens, layout):
    how = sharded(stage) | {"ranks": n, "layout": layout}
    check_update(ranks, tiny_path, some_groups(), max_tokens=max_tokens, same={}, **how)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("max_tokens", [25, 60, 10_000])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", ["grpo", "ppo", "p3o"])
@pytest.mark.verify
def test_fsdp2_makes_one_gradient_of_every_cut(three, tiny_path, name, n, max_tokens, layout):
    how = {"strategy": FSDP2, "ranks": n, "layout": layout}
    check_update(three, tiny_path, with_values(some_groups()), max_tokens=max_tokens, same={"alg": alg_of(name)}, **how)


@pytest.mark.parametrize(
    ("stage", "freeze", "dtype"),
    [
        *((FSDP2, [], "float32"), (FSDP2, ["router", "model.layers.0"], "bfloat16")),
        pytest.param(2, [], "float32", marks=LATER),
        *(pytest.param(stage, ["router", "model.layers.0"], "float32", marks=LATER) for stage in (0, 2, 3, FSDP2)),
    ],
)
def test_a_mixture_of_experts_is_sharded_like_any_other_model(ranks, tmp_path, stage, freeze, dtype):
    """Frozen in part, too: a block then holds weights of the model's dtype beside float32."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    random_model("qwen3_moe", **sizes).save_pretrained(path := str(tmp_path))
    same = {"freeze": freeze, "dtype": dtype}
    exact = 1e-5 if dtype == "float32" else 0.05
    got, _ = check_update(
        ranks, path, some_groups(), max_tokens=60, same=same, tolerance=exact, **sharded(stage), ranks=2
    )
    start = build_trainer(None, plan_of(path, **SGD | same)).model
    sizes = [p.numel() for p in start.parameters()]
    moved = (got - torch.cat([p.detach().flatten() for p in start.parameters()])).split(sizes)
    fixed = [not by.any() for p, by in zip(start.parameters(), moved, strict=True) if not p.requires_grad]
    assert all(fixed) and bool(fixed) == bool(freeze)


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (FSDP2, {"gradient_checkpointing": True}),
        (FSDP2, {"sequence_parallel": 2}),
        *(pytest.param(stage, {"gradient_checkpointing": True}, marks=LATER) for stage in (2, 3)),
    ],
)
def test_recorded_routes_are_forced_on_every_rank(ranks, tmp_path, stage, more):
    """By rows, and by slices of a row; the counts of the routers are those of one process, too."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    random_model("qwen3_moe", **sizes).save_pretrained(path := str(tmp_path))
    groups = with_routes(some_groups(), layers=2, experts=4, k=2)
    same = {"attention": "auto", "layout": "packed", "router_replay": "replay"}
    got, metrics = check_update(ranks, path, groups, max_tokens=60, same=same, **sharded(stage), **more, ranks=2)
    assert metrics["moe/changed_choices"] > 0.3 and 0 < metrics["moe/missing_routes"] < 0.5
    own, _ = asyncio.run(run(None, plan_of(path, attention="auto", layout="packed", **SGD), groups, max_tokens=10_000))
    assert (got - own).norm() > 1e-3, "without a replay"


@pytest.mark.parametrize("stage", [3, FSDP2])
def test_recurrent_layers_of_sharded_models_run_by_path(ranks, tmp_path, stage):
    delta = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
    delta |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    random_model("qwen3_5_text", **delta).save_pretrained(path := str(tmp_path))
    same = {"attention": "auto", "layout": "packed", "gradient_checkpointing": True}
    check_update(ranks, path, some_groups(), max_tokens=60, same=same, **sharded(stage), ranks=2)
    trainer = build_trainer(None, plan_of(path, **same))
    assert "by path" in trainer.describe_layout().measured and trainer.describe_layout().shares_prefixes


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stage", [0, 3, FSDP2])
def test_the_head_in_chunks_gives_the_same_update(ranks, tmp_path, stage, n, tied):
    """With two ranks, one cuts while the other need not, and ZeRO-3 gathers the head on both all the same."""
    model = random_model("llama", vocab_size=4096, tie_word_embeddings=tied)
    model.save_pretrained(path := str(tmp_path))
    groups = some_groups(4, 3)
    per_rank = micro_batches(groups, "token", 60, ranks=n)
    chunks = [[choose_chunk(model, len(batch.labels), 1) for batch in rank] for rank in per_rank]
    assert chunks == ([[12, 12, 12, None]] if n == 1 else [[12, None], [12, 12]])
    how = sharded(stage) | {"ranks": n, "gradient_checkpointing": tied, "deepspeed": SMALL if stage == 3 else {}}
    check_update(ranks, path, groups, max_tokens=60, same={"logits_mib": 0}, logits_mib=1, **how)


@pytest.mark.parametrize("stage", [0, 1, 2, 3, FSDP2])
@pytest.mark.parametrize(
    ("n", "max_tokens", "name"), [pytest.param(1, 10_000, "grpo", marks=LATER), (1, 30, "ppo"), (2, 25, "ppo")]
)
def test_what_samples_share_is_learnt_as_if_they_shared_nothing(ranks, tiny_path, stage, n, max_tokens, name):
    """A group is cut over two ranks too; and layers are computed again in one of the cases."""
    how = {"attention": "auto", "layout": "packed", "gradient_checkpointing": max_tokens == 30, "ranks": n}
    groups, same = with_values(families()), {"alg": alg_of(name)}
    check_update(ranks, tiny_path, groups, max_tokens=max_tokens, same=same, **sharded(stage), **how)


@pytest.mark.parametrize("stage", [0, 1, 2, 3, FSDP2, OFFLOADED])
@pytest.mark.parametrize("name", ["ppo", "p3o"])
def test_a_value_model_and_sums_over_the_update_agree_too(ranks, tiny_path, stage, name):
    """PPO has a second model with an optimizer of its own; P3O an effective sample size of the whole update."""
    how, same = sharded(stage) | {"ranks": 2}, {"alg": alg_of(name)}
    _, metrics = check_update(ranks, tiny_path, with_values(some_groups()), max_tokens=60, same=same, **how)
    assert ("value/loss" in metrics) == (name == "ppo")


async def learn_rows(ranks, plan: TrainerPlan, *, max_tokens: int):
    """Two updates as main_sl.py makes them: arrange, score, credit, step. Weights and metrics of both."""
    trainers = await trainers_of(ranks, plan)
    alg = plan.alg
    said = []
    for seed in (0, 1):
        groups = alg.prepare_groups(some_answers(alg.rows, 5, seed=seed))
        cut = {"ranks": len(trainers), "whole_groups": alg.whole_groups}
        scored = plan_update(groups, alg.loss_norm, max_tokens, **cut)
        groups = assign_advantages(alg, await compute_columns(trainers, groups, scored, alg.required_columns))
        per_rank = plan_update(groups, alg.loss_norm, max_tokens, **cut).batches()
        said.append((await trainers.scatter(Trainer.step, [[micro] for micro in per_rank]))[0])
    return (await trainers.call_all(Trainer.flatten_weights))[0], said


@cache
def learn_alone(path: str, name: str):
    """Return the weights before and after the updates of one process, and its metrics."""
    plan = plan_of(path, alg={"name": name}, **SGD | {"lr": 0.1})
    return start_of(path, {"name": name}), *asyncio.run(learn_rows(None, plan, max_tokens=10_000))


@pytest.mark.parametrize("stage", [1, 3, FSDP2])
@pytest.mark.parametrize("name", ["sft", "dpo", "orpo", "kto", "reward_model"])
def test_two_ranks_learn_from_rows_as_one_does(ranks, tiny_path, stage, name):
    """Loss, metrics and weights; the second update has moved away from the reference."""
    alg = {"name": name}
    start, want, metrics = learn_alone(tiny_path, name)
    plan = plan_of(tiny_path, alg=alg, **SGD | {"lr": 0.1}, **sharded(stage), ranks=2)
    got, got_metrics = asyncio.run(learn_rows(ranks, plan, max_tokens=80))
    assert (got - want).norm() < 1e-5 * (want - start).norm()
    for said in (got_metrics[0], metrics[0]):  # policy and reference are one: which side of z0 = 0 is rounding
        said.pop("kto/accuracy", None)
    for ours, theirs in zip(got_metrics, metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3, FSDP2])
def test_a_rank_without_tokens_takes_part(ranks, tiny_path, stage):
    check_update(ranks, tiny_path, some_groups(1, 1), max_tokens=100, same={}, **sharded(stage), ranks=2)


@pytest.mark.parametrize(
    ("stage", "dtype", "more"),
    [
        *((stage, "float32", SLOW_BLOCK) for stage in (1, 3, FSDP2)),
        *((stage, "bfloat16", {}) for stage in (1, 3, FSDP2, OFFLOADED)),
        *((stage, "float32", {"optimizer": "muon"} | SLOW_BLOCK) for stage in (FSDP2, OFFLOADED)),
    ],
)
def test_five_steps_of_an_optimizer_agree(ranks, tiny_path, stage, dtype, more):
    groups = some_groups()
    settings = {"lr": 1e-3, "max_grad_norm": 0.5, "weight_decay": 0.01, **more}
    want, _ = asyncio.run(run(None, plan_of(tiny_path, dtype=dtype, **settings), groups, max_tokens=10_000, steps=5))
    plan = plan_of(tiny_path, dtype=dtype, **settings, **sharded(stage), ranks=2)
    got, _ = asyncio.run(run(ranks, plan, groups, max_tokens=60, steps=5))
    moved = (want - start_of(tiny_path)).norm()
    assert (got - want).norm() < (1e-3 if dtype == "float32" else 0.2) * moved


@pytest.mark.parametrize(
    ("stage", "n", "dora", "dtype"),
    [
        *((stage, 2, False, "float32") for stage in (0, 1, 2, 3, FSDP2)),
        *((stage, 2, True, "float32") for stage in (3, FSDP2)),
        *((stage, 2, False, "bfloat16") for stage in (3, OFFLOADED)),
        *(pytest.param(stage, 2, False, "bfloat16", marks=LATER) for stage in (1, FSDP2)),
        *(pytest.param(stage, n, True, "float32", marks=LATER) for stage, n in ((1, 1), (2, 2))),
        pytest.param(FSDP2, 1, False, "bfloat16", marks=LATER),
    ],
)
def test_an_adapter_trains_and_is_saved_alike_everywhere(ranks, tiny_path, tmp_path, stage, n, dora, dtype):
    """With a KL to the reference, which is the same model with its adapter off, asked for between the updates."""
    alg = {"name": "grpo", "kl": {"coef": 0.1}}
    lora = LoraConfig(r=4, dora=dora, merge_on_save=True)
    same = {"alg": alg, "lora": lora, "dtype": dtype, "lr": 1e-2}

    async def learn(where, plan, max_tokens):
        trainers = await trainers_of(where, plan)
        per_rank = micro_batches(some_groups(), "token", max_tokens, ranks=len(trainers))
        for _ in range(3):
            scored = await trainers.scatter(Trainer.compute_columns, per_rank, frozenset({"ref_logp"}))
            filled = [
                [fill_batch(b, c) for b, c in zip(micro, columns, strict=True)]
                for micro, columns in zip(per_rank, scored, strict=True)
            ]
            metrics = await trainers.scatter(Trainer.step, [[micro] for micro in filled])
        folder = tmp_path / type(trainers).__name__
        await trainers.call_all(Trainer.save_model, folder)
        state, *_ = await trainers.call_all(Trainer.flatten_weights)
        adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
        return state, torch.cat([t.float().flatten() for t in adapter.values()]), metrics[0]

    want, want_adapter, metrics = asyncio.run(learn(None, plan_of(tiny_path, **same), 10_000))
    start = start_of(tiny_path, alg, dtype)
    plan = plan_of(tiny_path, **same, **sharded(stage), ranks=n, deepspeed=SMALL if stage == 3 else {})
    got, got_adapter, got_metrics = asyncio.run(learn(ranks, plan, 60))
    exact = dtype == "float32"
    assert (got - want).norm() < (1e-3 if exact else 0.2) * (want - start).norm()
    assert (got_adapter - want_adapter).norm() < (1e-3 if exact else 0.2) * want_adapter.norm()
    if exact:
        assert got_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-4)
    assert metrics["kl_ref"] > 0
    saved = load_file(tmp_path / "Remote" / "model.safetensors")
    assert sum(t.numel() for t in saved.values()) == len(start), "the whole model, gathered"
    check_saved(tmp_path / "Remote", dtype=dtype)


@pytest.mark.verify
@pytest.mark.parametrize("stage", [0, 1, 2, FSDP2])
def test_an_adapter_of_experts_is_trained_alike_everywhere(ranks, tmp_path, stage):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    random_model("qwen3_moe", **sizes).save_pretrained(path := str(tmp_path))
    lora = LoraConfig(r=4, experts=True, merge_on_save=True)
    check_update(
        ranks, path, some_groups(), max_tokens=60, same={"lora": lora}, tolerance=1e-4, **sharded(stage), ranks=2
    )


@pytest.mark.parametrize(
    "stage", [*(pytest.param(stage, marks=LATER) for stage in (1, 2, FSDP2, OFFLOADED)), pytest.param(3)]
)
def test_an_adapter_of_four_bits_is_trained_alike_everywhere(ranks, tiny_path, stage):
    pytest.importorskip("bitsandbytes")
    same = {"lora": LoraConfig(r=4, merge_on_save=True), "quantization": "nf4"}
    check_update(ranks, tiny_path, some_groups(), max_tokens=60, same=same, tolerance=1e-4, **sharded(stage), ranks=2)


UNEVEN = """
import os
from algs.grpo import GRPO

class Uneven(GRPO):
    def loss(self, policy, tokens):
        loss, metrics = super().loss(policy, tokens)
        return loss, metrics | ({"of_rank_0": policy.logp} if os.environ["RANK"] == "0" else {})
"""
INFINITE = """
from algs.sft import SFT
class Infinite(SFT):
    def loss(self, policy, tokens):
        bad = (tokens.rollout_logp < -1e8).float()     # planted in one sample, so on one rank only
        return -policy.logp * (1 + bad * float("inf")).nan_to_num(nan=1.0), {}
"""


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        *((0, "float32"), (1, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16"), (3, "float32")),
        *((FSDP2, "float32"), (FSDP2, "bfloat16")),
    ],
)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks, tiny_path, tmp_path, stage, dtype):
    file = tmp_path / "infinite.py"
    file.write_text(INFINITE)
    groups = some_groups()
    plan = plan_of(tiny_path, alg={"file": str(file)}, dtype=dtype, **sharded(stage), ranks=2, lr=0.01)
    planted = a_changed(groups[0][0], rollout_logp=[-1e9] * len(groups[0][0].action_mask))
    bad = [[planted, *groups[0][1:]], *groups[1:]]

    async def go():
        trainers = await trainers_of(ranks, plan)
        before = (await trainers.call_all(Trainer.flatten_weights))[0]
        bad_batches = [[m] for m in micro_batches(bad, "token", 60, ranks=2)]
        metrics = await trainers.scatter(Trainer.step, bad_batches)
        assert [m["updates_skipped"] for m in metrics] == [1.0, 1.0]
        assert torch.equal((await trainers.call_all(Trainer.flatten_weights))[0], before), "nothing changed"
        good = await trainers.scatter(Trainer.step, [[m] for m in micro_batches(groups, "token", 60, ranks=2)])
        after = (await trainers.call_all(Trainer.flatten_weights))[0]
        assert good[0]["updates_skipped"] == 0 and torch.isfinite(after).all() and not torch.equal(after, before)
        with pytest.raises(RunStopped, match="updates in a row"):
            for _ in range(3):
                await trainers.scatter(Trainer.step, bad_batches)

    asyncio.run(go())


BAD_VALUES = """
from algs.ppo import PPO
class BadValues(PPO):
    def value_loss(self, values, tokens):
        loss, metrics = super().value_loss(values, tokens)
        return loss * float("inf"), metrics
"""


@pytest.mark.parametrize(
    ("stage", "dtype"), [(1, "float32"), (1, "bfloat16"), (2, "float32"), (3, "bfloat16"), (FSDP2, "float32")]
)
def test_an_update_that_is_skipped_for_its_critic_leaves_the_policy(ranks, tiny_path, tmp_path, stage, dtype):
    file = tmp_path / "bad_values.py"
    file.write_text(BAD_VALUES)
    plan = plan_of(tiny_path, alg={"file": str(file)}, dtype=dtype, **sharded(stage), ranks=2, lr=0.01)

    async def go():
        trainers = await trainers_of(ranks, plan)
        before = (await trainers.call_all(Trainer.flatten_weights))[0]
        batches = [[m] for m in micro_batches(with_values(some_groups()), "token", 60, ranks=2)]
        assert [m["updates_skipped"] for m in await trainers.scatter(Trainer.step, batches)] == [1.0, 1.0]
        assert torch.equal((await trainers.call_all(Trainer.flatten_weights))[0], before)

    asyncio.run(go())


def test_a_metric_that_one_rank_lacks_ends_the_run_with_a_sentence(ranks, tiny_path, tmp_path):
    """Ranks that sum tensors of two lengths hang, or end without a word."""
    (tmp_path / "uneven.py").write_text(UNEVEN)
    plan = plan_of(tiny_path, alg={"file": str(tmp_path / "uneven.py")}, ranks=2, timeout_s=30.0)

    async def go():
        trainers = await trainers_of(ranks, plan)
        with pytest.raises(RunStopped, match=r"not all of them have .*same names for every micro-batch"):
            await trainers.scatter(Trainer.step, [[m] for m in micro_batches(some_groups(), "token", 60, ranks=2)])

    asyncio.run(go())


@pytest.mark.parametrize(
    ("stage", "dtype", "name"),
    [
        *((0, "float32", "ppo"), (2, "bfloat16", "ppo"), (3, "bfloat16", "ppo"), (FSDP2, "bfloat16", "ppo")),
        (OFFLOADED, "bfloat16", "ppo"),
        *(pytest.param(1, "bfloat16", name, marks=LATER) for name in ("ppo", "grpo")),
        *(pytest.param(stage, "float32", "sft", marks=LATER) for stage in (3, FSDP2)),
        pytest.param(FSDP2, "float32", "ppo", marks=LATER),
    ],
)
def test_saved_and_loaded_ranks_go_on_to_the_bit(ranks, tiny_path, tmp_path, stage, dtype, name):
    """Against ranks that saved nothing: neither saving nor loading moves a bit."""
    settings = {"lr": 1e-2, "lr_schedule": "cosine", "warmup_updates": 3, "weight_decay": 0.1, **SLOW_BLOCK}
    plan = plan_of(tiny_path, alg={"name": name}, dtype=dtype, **settings, **sharded(stage), ranks=2)
    shards = [[m] for m in micro_batches(with_values(some_groups()), "token", 60, ranks=2, padded=True)]

    async def go(kept: Path | None, found: Path | None, steps: int):
        trainers = await trainers_of(ranks, plan)
        if found:
            await trainers.call_all(Trainer.load_state, found)
        metrics = [(await trainers.scatter(Trainer.step, shards))[0] for _ in range(steps)]
        if kept:
            await trainers.call_all(Trainer.save_state, kept)
            metrics += [(await trainers.scatter(Trainer.step, shards))[0] for _ in range(2)]
        return metrics, (await trainers.call_all(Trainer.flatten_weights))[0]

    want, weights = asyncio.run(go(None, None, 4))
    saved, after = asyncio.run(go(tmp_path, None, 2))
    assert saved == want and torch.equal(after, weights)
    resumed, after = asyncio.run(go(None, tmp_path, 2))
    assert resumed == want[2:] and torch.equal(after, weights)


def test_a_checkpoint_fits_its_own_ranks_and_stage_only(ranks, tiny_path, tmp_path):
    async def go():
        two = await trainers_of(ranks, plan_of(tiny_path, zero_stage=2, ranks=2))
        await two.call_all(Trainer.save_state, tmp_path)
        others = {
            "trainer.ranks is 1 and .* made with 2, .* set trainer.ranks=2": plan_of(tiny_path, zero_stage=2, ranks=1),
            "trainer.zero_stage is 3 and .* made with 2": plan_of(tiny_path, zero_stage=3, ranks=2),
            "trainer.strategy is fsdp2 and .* made with deepspeed": plan_of(tiny_path, strategy=FSDP2, ranks=2),
        }
        for words, plan in others.items():
            trainers = await trainers_of(ranks, plan)
            with pytest.raises(UserError, match=words):
                await trainers.call_all(Trainer.load_state, tmp_path)

    asyncio.run(go())


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=LATER)])
@pytest.mark.parametrize("name", ["ppo", pytest.param("grpo", marks=LATER)])
def test_with_fsdp2_another_number_of_ranks_goes_on(request, tiny_path, tmp_path, n, name):
    """Weights and both models' optimizers come back; the update after them is the one that two ranks make."""
    ranks = request.getfixturevalue("three" if n == 3 else "ranks")
    lora = LoraConfig(r=4) if name == "grpo" else None
    groups = with_values(some_groups())

    async def go(count: int, found: Path | None, kept: Path | None):
        plan = plan_of(tiny_path, alg={"name": name}, lora=lora, lr=1e-2, weight_decay=0.1, strategy=FSDP2, ranks=count)
        trainers = await trainers_of(ranks, plan)
        shards = [[m] for m in micro_batches(groups, "token", 60, ranks=count, padded=True)]
        if found:
            await trainers.call_all(Trainer.load_state, found)
        for _ in range(1 if found else 3):
            await trainers.scatter(Trainer.step, shards)
        if kept:
            await trainers.call_all(Trainer.save_state, kept)
            await trainers.scatter(Trainer.step, shards)
        return (await trainers.call_all(Trainer.flatten_weights))[0]

    want = asyncio.run(go(2, None, tmp_path))
    got = asyncio.run(go(n, tmp_path, None))
    assert (got - want).norm() < 1e-4 * (want - start_of(tiny_path, {"name": name})).norm()


def build_changed(place, plan, change):
    """As build_trainer does, with a class made of `change` and the trainer's."""
    import trainers.deepspeed
    import trainers.fsdp2

    homes = {FSDP2: (trainers.fsdp2, "FsdpTrainer"), "deepspeed": (trainers.deepspeed, "DeepSpeedTrainer")}
    home, name = homes[plan.trainer.strategy]
    ours = getattr(home, name)
    setattr(home, name, type(name, (change, ours), {}))
    try:
        return build_trainer(place, plan)
    finally:
        setattr(home, name, ours)


class HeadOnly:
    """Trains the last layer; it stands for adapters."""

    def make_learner(self, model):
        for name, p in model.named_parameters():
            p.requires_grad_(".layers.1." in name)
        return super().make_learner(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3, FSDP2])
def test_what_is_frozen_is_in_no_checkpoint(ranks, tiny_path, tmp_path, stage):
    plan = plan_of(tiny_path, lr=1e-2, **sharded(stage), ranks=2)
    shards = [[m] for m in micro_batches(some_groups(), "token", 60, ranks=2, padded=True)]

    async def go():
        workers = ranks[2]
        await workers.build_workers(build_changed, plan, HeadOnly)
        await workers.scatter(Trainer.step, shards)
        await workers.call_all(Trainer.save_state, tmp_path)
        saved = (await workers.call_all(Trainer.flatten_weights))[0]
        want, weights = (
            (await workers.scatter(Trainer.step, shards))[0],
            (await workers.call_all(Trainer.flatten_weights))[0],
        )
        await workers.build_workers(build_changed, plan, HeadOnly)
        await workers.call_all(Trainer.load_state, tmp_path)
        assert (await workers.scatter(Trainer.step, shards))[0] == want
        assert torch.equal((await workers.call_all(Trainer.flatten_weights))[0], weights)
        return saved

    saved = asyncio.run(go())
    alone = load_model(tiny_path, dtype=plan.model.dtype, attention="sdpa")
    for name, parameter in alone.named_parameters():
        parameter.requires_grad_(".layers.1." in name)
    load_policy(alone, tmp_path)
    assert torch.equal(torch.cat([p.detach().flatten().float() for p in alone.parameters()]), saved), "in one process"
    fits = torch.load(tmp_path / "rank_0.pt", weights_only=True)["fits"]["model"]
    assert fits and all(name.startswith("policy.model.layers.1.") for name in fits)
    if stage == FSDP2:
        held = [name for file in (tmp_path / "policy").iterdir() for name in load_file(file)]
    else:
        [model, *_] = (tmp_path / "policy").glob("*model_states.pt")
        held = torch.load(model, weights_only=False)["module"]
    assert (held or stage == 3) and all(".layers.1." in name for name in held), "ZeRO-3 keeps its weights elsewhere"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_deepspeeds_files_are_read_as_data(ranks, tiny_path, tmp_path, stage):
    """Change one file of each kind: what it would run does not run, and the sentence names the checkpoint."""
    plan = plan_of(tiny_path, **sharded(stage))
    mark = tmp_path / "ran"

    async def go():
        workers = await trainers_of(ranks, plan)
        await workers.call_all(Trainer.save_state, tmp_path)
        await workers.call_all(Trainer.load_state, tmp_path)
        for file in (tmp_path / "policy").glob("*_states.pt"):
            good = torch.load(file, weights_only=False)
            torch.save(good | {"more": Malicious(mark)}, file)
            with pytest.raises(UserError, match=r"^resume: .*policy is refused, because"):
                await workers.call_all(Trainer.load_state, tmp_path)
            assert not mark.exists()
            torch.save(good, file)

    asyncio.run(go())


def test_what_is_no_shard_of_fsdp2_is_refused(ranks, tiny_path, tmp_path):
    """A file that would run code is not read at all, and a cut one is damaged."""
    plan = plan_of(tiny_path, strategy=FSDP2)
    mark = tmp_path / "ran"

    async def go():
        workers = await trainers_of(ranks, plan)
        await workers.call_all(Trainer.save_state, tmp_path)
        await workers.call_all(Trainer.load_state, tmp_path)
        [file] = (tmp_path / "policy").iterdir()
        good = file.read_bytes()
        for bad in (pickle.dumps(Malicious(mark)), good[:-8]):
            file.write_bytes(bad)
            with pytest.raises(UserError, match=r"^resume: .*policy cannot be read"):
                await workers.call_all(Trainer.load_state, tmp_path)
            assert not mark.exists()

    asyncio.run(go())


class PeakOfMemory:
    """Watches what this process has for itself; pages of files, which all processes share, do not count."""

    def __init__(self):
        gc.collect()
        return_freed_memory()  # or what is loaded now would fit into what earlier tests have left
        self.start = self.peak = self.read()
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def read(self) -> int:
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024

    def watch(self) -> None:
        while not self.ends.wait(0.002):
            self.peak = max(self.peak, self.read())

    def stop(self) -> int:
        self.ends.set()
        self.thread.join()
        return max(self.peak, self.read()) - self.start


class Loaded:
    """Loads a policy as a trainer of the plan does, and measures it."""

    def __init__(self, place, plan, whole):
        kind = FsdpTrainer if plan.trainer.strategy == FSDP2 else DeepSpeedTrainer

        class Measured(kind):
            def make_loader(self, model, alg):
                self.watched = PeakOfMemory()
                return Trainer.make_loader(self, model, alg) if whole else super().make_loader(model, alg)

            def make_learner(self, model):
                if kind is DeepSpeedTrainer:
                    self.partition(model)
                self.peak = self.watched.stop()
                raise InterruptedError  # what follows is the same whichever way it was loaded

        os.environ |= {"LOCAL_RANK": "0", "RANK": str(place.rank), "WORLD_SIZE": str(place.size)}
        os.environ |= {"MASTER_ADDR": place.address, "MASTER_PORT": str(place.port)}
        trainer = Measured.__new__(Measured)
        with contextlib.suppress(InterruptedError):
            settings = {"timeout_s": plan.timeout_s, "temperature": 1.0, "total_updates": 1}
            trainer.__init__(plan.model, plan.trainer, plan.alg, **settings)
        self.peak = trainer.peak

    def get_peak(self) -> int:
        return self.peak


@pytest.mark.parametrize("layers", [8, pytest.param(32, marks=LATER)])
@pytest.mark.parametrize("stage", [3, FSDP2])
def test_no_rank_holds_the_whole_model_while_it_loads(ranks, tmp_path, stage, layers):
    """100 MB and 400 MB, with a quarter as room for what passes by. The files hold another dtype: else they stand for
    it.
    """
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": layers, "vocab_size": 512}
    model = random_model("llama", **shape)
    size = sum(p.nbytes for p in model.parameters())
    model.bfloat16().save_pretrained(tmp_path)
    del model
    plan = plan_of(str(tmp_path), **sharded(stage), ranks=2)

    async def measure(whole):
        await ranks[2].build_workers(Loaded, plan, whole)
        return await ranks[2].call_all(Loaded.get_peak)

    assert max(asyncio.run(measure(False))) < 0.75 * size
    assert min(asyncio.run(measure(True))) > 0.9 * size, "or this measures nothing"


# bytes of a parameter: a half of the float32 master weight and of AdamW's two moments; and its bfloat16 weight, a half
# of that with ZeRO-3, none with FSDP2, whose master weights are the weights
OF_LIBRARY = {"1": ({"zero_stage": 1}, 8), "2": ({"zero_stage": 2}, 8), "3": ({"zero_stage": 3}, 7)}
OF_LIBRARY |= {FSDP2: ({"strategy": FSDP2}, 6)}


@pytest.mark.parametrize("library", [pytest.param("1", marks=LATER), "2", "3", FSDP2])
def test_two_ranks_of_every_library_leave_and_return_to_the_bit(ranks, tiny_path, library):
    """The second of three steps ends with the trainers away; a value model is trained as well."""
    settings, each = OF_LIBRARY[library]
    per_rank = micro_batches(with_values(some_groups()), "token", 60, ranks=2, padded=True)

    async def learn(leaves: bool) -> tuple[torch.Tensor, list[int]]:
        how = {"dtype": "bfloat16", "ranks": 2, "lr": 1e-2}
        plan = plan_of(tiny_path, alg={"name": "ppo"}, **how, **settings)
        trainers = await trainers_of(ranks, replace(plan, shares_device=True))
        away, freed = trainers.attribute("offloaded"), [0, 0]
        for step in range(3):
            await trainers.scatter(Trainer.step, [[micro] for micro in per_rank])
            if step == 1 and leaves:
                first = await away.call_all(OffloadedTrainer.offload_states)
                assert len((await trainers.call_all(Trainer.probe, [5, 6, 7]))[0]) == 2
                second = await away.call_all(OffloadedTrainer.offload_weights)
                with pytest.raises(RunStopped, match="while it was away"):
                    await trainers.scatter(Trainer.step, [[micro] for micro in per_rank])
                freed = [a + b for a, b in zip(first, second, strict=True)]
                await away.call_all(OffloadedTrainer.reload_states)
        return (await trainers.call_all(Trainer.flatten_weights))[0], freed

    n = 2 * sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny_path).parameters())
    weights, _ = asyncio.run(learn(leaves=False))
    same, freed = asyncio.run(learn(leaves=True))
    assert torch.equal(weights, same)
    assert all(0.95 * each * n < nbytes for nbytes in freed), (freed, each * n)


class Noting:
    """Notes of every model in training whether this rank read its rows only."""

    def make_learner(self, model):
        by_rows = any(isinstance(p, DTensor) for p in model.parameters())
        self.noted = [*getattr(self, "noted", []), by_rows]
        return super().make_learner(model)

    def list_read_by_rows(self) -> list[bool]:
        return self.noted


EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}  # rows of 16 bytes, for torch
LOADED = {
    "tied": (("llama", {"vocab_size": 63, "tie_word_embeddings": True}), {}, [True]),
    "experts": (("qwen3_moe", EXPERTS), {"dtype": "bfloat16"}, [True]),
    "adapter": (("llama", {}), {"lora": LoraConfig(r=4), "dtype": "bfloat16"}, [True]),
    "dora": (("llama", {}), {"lora": LoraConfig(r=4, dora=True)}, [False]),
    "values": (("llama", {}), {"alg": {"name": "ppo"}, "dtype": "bfloat16"}, [True, True]),
    "sees": (None, {"alg": {"name": "ppo"}, "attention": "auto"}, [True, False]),
}
"""Shape and settings of a model, and which of its models in training are read by rows."""


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        *((3, kind) for kind in ("tied", "experts", "adapter", "values")),
        *(pytest.param(3, kind, marks=LATER) for kind in ("dora", "sees")),
        *((FSDP2, kind) for kind in LOADED),
    ],
)
def test_ranks_begin_with_what_the_files_hold(ranks, tmp_path, stage, kind):
    """To the bit, with numbers of rows that the ranks cannot share evenly."""
    shape, settings, by_rows = LOADED[kind]
    if shape is None:
        save_model(tmp_path, "qwen2_5_vl")
    else:
        random_model(shape[0], **shape[1]).save_pretrained(tmp_path)
    plan = plan_of(str(tmp_path), **settings, **sharded(stage), ranks=2)
    want = build_trainer(None, plan).flatten_weights()

    async def go():
        await ranks[2].build_workers(build_changed, plan, Noting)
        for got in await ranks[2].call_all(Trainer.flatten_weights):
            assert torch.equal(got, want)
        assert await ranks[2].call_all(Noting.list_read_by_rows) == [by_rows] * 2

    asyncio.run(go())
