"""Compiled blocks: updates as without, no length is compiled again, and what cannot be compiled is refused."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from algs.grpo import GRPO
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.errors import UserError
from data_feeds.packing.batches import micro_batches
from trainers.compiled import CompileMetrics, check_compile
from unit_tests.helpers.examples import families, some_groups, with_values
from unit_tests.helpers.local_trainers import trainer_of

HAS_COMPILER = shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").is_file()
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="torch.compile needs g++ and Python.h")


@pytest.mark.parametrize(
    ("trainer", "model", "how", "sentence"),
    [
        ({}, {}, {"is_sharded": True}, "has not been tried with backend: ray: leave one of them out"),
        ({"gradient_checkpointing": True}, {}, {}, "has not been tried with trainer.gradient_checkpointing"),
        ({}, {"lora": {}}, {}, "has not been tried with model.lora"),
        ({}, {"quantization": "nf4", "lora": {"merge_on_save": True}}, {}, "the layers of model.quantization=nf4"),
        ({}, {}, {"replays_routes": True}, "rollout.router_replay reads choices inside of the blocks"),
        ({}, {}, {}, "requires a C.. compiler, and there is no no-such-compiler: install it, name another"),
    ],
)
def test_what_cannot_be_compiled_is_refused(monkeypatch, trainer, model, how, sentence):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=f"^trainer.compile=true.*{sentence}"):
        check_compile(
            TrainerConfig.model_validate(trainer),
            ModelConfig.model_validate({"path": "here"} | model),
            **{"is_sharded": False, "replays_routes": False} | how,
        )


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
def test_compiled_blocks_make_the_same_update_for_every_length(tiny_path):
    check_compiled(tiny_path, GRPO())
