"""Compiled blocks: updates as without, no length is compiled again, and what cannot be compiled is refused."""

from __future__ import annotations

import asyncio
import shutil
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from algs.grpo import GRPO
from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from core.cluster.ray_workers import Cluster
from core.errors import UserError
from data_feeds.packing.batches import micro_batches
from modeling.attention import BY_SEQUENCE
from trainers.compiled import CompileMetrics, check_compile, compile_blocks, count_compilations
from trainers.trainer import Trainer
from unit_tests.helpers.examples import families, some_groups, with_values
from unit_tests.helpers.local_trainers import trainer_of
from unit_tests.helpers.models import random_model
from unit_tests.helpers.ray_trainers import FSDP2, SMALL, plan_of, sharded, start_of, start_ranks, trainers_of

HAS_COMPILER = shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").is_file()
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="torch.compile needs g++ and Python.h")


@pytest.mark.parametrize(
    ("trainer", "model", "replays_routes", "sentence"),
    [
        ({"gradient_checkpointing": True}, {}, False, "not been compared .* for trainer.gradient_checkpointing"),
        ({"zero_stage": 3}, {"lora": {}}, False, "not been compared .* for model.lora and trainer.zero_stage=3"),
        (
            {"deepspeed": {"zero_optimization": {"offload_param": {"device": "cpu"}}}},
            {},
            False,
            "not been compared .* for trainer.deepspeed.zero_optimization.offload_param",
        ),
        ({}, {"quantization": "nf4", "lora": {"merge_on_save": True}}, False, "the layers of model.quantization=nf4"),
        ({}, {}, True, "rollout.router_replay reads choices inside of the blocks"),
        (
            {"zero_stage": 3},
            {},
            False,
            "requires a C.. compiler, and there is no no-such-compiler: install it, name another",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(monkeypatch, trainer, model, replays_routes, sentence):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=f"^trainer.compile=true.*{sentence}"):
        check_compile(
            TrainerConfig.model_validate(trainer),
            ModelConfig.model_validate({"path": "here"} | model),
            is_sharded=True,
            replays_routes=replays_routes,
        )


@needs_compiler
def test_a_model_that_is_listed_twice_is_compiled_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled.append(forward) or forward)
    model = random_model("llama", BY_SEQUENCE)
    compile_blocks([model, model])
    assert compiled == [block.forward for block in model.model.layers]


def test_compilations_before_a_trainer_are_not_counted_in_it():
    from torch._dynamo.callback import callback_handler

    rank, seen, watchers = SimpleNamespace(device="cpu", find_largest=lambda value: value), [], set[int]()
    for _ in range(2):
        metrics = CompileMetrics(rank)
        watchers.add(len(callback_handler.start_callbacks))
        began = time.perf_counter()
        callback_handler.run_start_callbacks(None)
        callback_handler.run_end_callbacks(None)
        found = metrics.finish()
        assert 0 <= found["compile/seconds"] <= time.perf_counter() - began
        seen += [found["compile/count"], metrics.finish()["compile/count"]]
    assert seen == [1, 0, 1, 0]
    assert len(watchers) == 1, "a watcher stays for good, and would keep its trainer"


def learn(path: str, alg, *, compile: bool, **how):
    """Two steps with rows of other lengths; return the weights, the metrics, and those of the compilation."""
    torch.manual_seed(0)
    settings = {"observers": {"compile": CompileMetrics}} if compile else {}
    trainer = trainer_of(path, alg, attention="auto", lr=0.5, compile=compile, settings=settings, **how)
    said, padded = [], how.get("layout") == "padded"
    for groups in (some_groups(), families(), some_groups(5, 3)):
        [micro] = micro_batches(with_values(groups), "token", 60, padded=padded, share_prefixes=not padded)
        said.append(trainer.step([micro]))
    own = [(metrics.pop("compile/count", 0), metrics.pop("compile/seconds", 0)) for metrics in said]
    return trainer, said, own


def check_compiled(path: str, alg, **how) -> None:
    usual, want, _ = learn(path, alg, compile=False, **how)
    ours, got, compiled = learn(path, alg, compile=True, **how)
    assert [*map(str, dict(ours.model.named_parameters()))] == [*map(str, dict(usual.model.named_parameters()))]
    for one, other in zip(got, want, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    start = trainer_of(path, alg, attention="auto", **how).flatten_weights()
    weights = usual.flatten_weights()
    assert 0 < (ours.flatten_weights() - weights).norm() < 1e-4 * (weights - start).norm()
    (count, seconds), *later = compiled
    assert count > 0 and seconds > 0 and later == [(0, 0), (0, 0)], compiled


@needs_compiler
@pytest.mark.verify
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"lora": LoraConfig(r=4)},
        {"gradient_checkpointing": True},
        {"layout": "padded"},
    ],
)
def test_compiled_blocks_make_the_same_update_for_every_length(tiny_path, how):
    torch.compiler.reset()  # code of another case would be used again, and not counted
    count_compilations.cache_clear()  # and the reset has forgotten who counts
    check_compiled(tiny_path, GRPO(), **how)


@pytest.fixture
def ranks():
    """New processes for each case, whose compiled code is not there yet."""
    cluster = Cluster(None)
    yield {n: start_ranks(cluster, n) for n in (1, 2)}
    cluster.close()


async def learn_with(ranks, plan):
    """Three steps; return the weights and the metrics of the steps."""
    trainers, said = await trainers_of(ranks, plan), []
    for groups in (some_groups(), families(), some_groups(5, 3)):
        micros = micro_batches(groups, "token", 60, ranks=len(trainers), padded=False, share_prefixes=True)
        said.append((await trainers.scatter(Trainer.step, [[micro] for micro in micros]))[0])
    return (await trainers.call_all(Trainer.flatten_weights))[0], said


@needs_compiler
@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stage", "n", "more"),
    [
        *((stage, 2, {}) for stage in (0, 1, 2, 3, FSDP2)),
        *((stage, 1, {}) for stage in (1, 3, FSDP2)),
        (FSDP2, 2, {"lora": LoraConfig(r=4)}),
    ],
)
def test_ranks_compile_blocks_and_learn_as_one_process_without(ranks, tiny_path, stage, n, more):
    same = {"lr": 0.01, "eps": 1e-3, "attention": "auto", "lora": more.get("lora")}
    want, usual = asyncio.run(learn_with(None, plan_of(tiny_path, **same)))
    small = {"deepspeed": SMALL} if stage == 3 else {}
    plan = plan_of(tiny_path, **same | more | small | sharded(stage), ranks=n, compile=True)
    got, said = asyncio.run(learn_with(ranks, replace(plan, observers={"compile": CompileMetrics})))
    counts = [metrics.pop("compile/count") for metrics in said]
    assert 0 < counts[0] < 10 and counts[1:] == [0, 0], f"neither in pieces, nor for each length: {counts}"
    for ours, theirs in zip(said, usual, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert 0 < (got - want).norm() < 1e-4 * (want - start_of(tiny_path)).norm()
