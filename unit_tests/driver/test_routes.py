"""A run on a mixture of experts with rollout.router_replay, and the checks before it starts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import main_eval
import main_rl
from algs.base import Algorithm
from algs.grpo import GRPO
from analysis.capture.batch_file import read_batch, write_batch
from configs.schema import RLConfig, SLConfig
from configs.trainer_schema import LoraConfig
from core.types.routes import UNKNOWN
from data_feeds.packing.batches import pack
from driver.checks.models import check_router_replay, check_trainer
from driver.load_recipe import load_recipe
from unit_tests.helpers.examples import run_here, sample_of, some_groups, through_checkpoint
from unit_tests.helpers.local_trainers import trainer_of
from unit_tests.helpers.models import random_model
from unit_tests.helpers.runs import folder_of, metrics_of, numbers_of
from unit_tests.helpers.sentences import tell

pytestmark = [pytest.mark.one_core, pytest.mark.usefixtures("one_thread")]

ADAPTERS = {
    "whole": None,
    "attention": LoraConfig(r=2, targets=["q_proj", "o_proj"]),
    "experts": LoraConfig(r=2, targets=["q_proj"], experts=True),
}


def routed_group():
    """Samples with routes of their own in two blocks, the second with more experts than a byte holds."""
    rng = np.random.default_rng(0)
    return [
        replace(s, routes=rng.integers(0, 8, (len(s.token_ids), 2, 2)).astype(dtype))
        for s, dtype in zip(some_groups()[0], (np.uint8, np.uint16), strict=False)
    ]


@pytest.mark.slow
def test_a_run_replays_its_engines_choices_and_so_does_its_resume(recipe, tmp_path, mixture_path):
    changes = {"model.path": mixture_path, "rollout.router_replay": "replay", "steps": 3, "checkpoint": {"every": 2}}
    path = recipe(changes)
    assert run_here(main_rl, "--config", path, "name=whole") == (0, "")
    whole = folder_of(tmp_path, "whole")
    for line in metrics_of(whole):
        assert line["train/moe/missing_routes"] == 0 and line["train/moe/changed_choices"] < 0.01
        assert line["train/moe/load_max"] >= 1 and 0 < line["train/moe/router_entropy"] <= 1
        assert line["train/mismatch/abs_logp"] < 1e-5
    assert "routes" not in json.loads((whole / "samples/step_00000.jsonl").read_text().splitlines()[0])
    at = whole / "checkpoints/step_00002"
    assert run_here(main_rl, "--config", path, "name=again", f"resume={at}") == (0, "")
    assert numbers_of(folder_of(tmp_path, "again")) == numbers_of(whole)[-1:]


@pytest.mark.parametrize("kind", ADAPTERS)
def test_training_and_prox_logp_are_forced_and_the_reference_is_not(mixture_path, kind):
    """The reference of an adapter is the model in training without it, whose routers the same hooks watch."""
    alg, replays = {"name": "grpo", "kl": {"coef": 0.1}}, {"router_replay": "replay"}
    trainer = trainer_of(mixture_path, GRPO(**alg), lora=ADAPTERS[kind], settings=replays)
    start = trainer_of(mixture_path, Algorithm())
    own = pack([sample_of([5, 6, 7, 8, 9, 10, 11], [0, 0, 1, 1, 1, 1, 1])], [1.0])
    want = start.forward(own, measures={}).logp
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(p.requires_grad * 0.05 * torch.randn_like(p))
    blocks, k = len(trainer.routes.hook.blocks), trainer.routes.hook.k
    with trainer.routes.hook.recording() as found:
        of_policy = trainer.forward(own, measures={}).logp
    assert (of_policy - want).abs().max() > 1e-3
    other = (found.stack().to(torch.int16) + 1) % 4
    forced = replace(own, routes=other)
    of_forced = trainer.forward(forced, measures={}).logp
    assert (of_policy - of_forced).abs().max() > 1e-4
    [columns] = trainer.compute_columns([forced], frozenset({"prox_logp", "ref_logp"}))
    assert np.array_equal(columns["prox_logp"], of_forced.detach().numpy())
    assert np.allclose(columns["ref_logp"], want.detach().numpy(), atol=1e-6, rtol=0)
    assert other.shape == (6, blocks, k) and UNKNOWN not in other


def test_routes_survive_a_checkpoint_and_a_capture(tmp_path):
    group = routed_group()
    _, _, buffer = through_checkpoint(group)
    again = buffer.waiting[0].group
    write_batch(tmp_path, [group])
    for restored in (again, read_batch(tmp_path)[0]):
        assert [s.routes.dtype for s in restored] == [np.uint8, np.uint16]
        assert all(np.array_equal(a.routes, b.routes) for a, b in zip(group, restored, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "rollout.router_replay=replay, and model.path={} has no experts: leave it out"),
        ({"rollout.engine": "vllm"}, "vLLM returns routes on a GPU only"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_the_start(recipe, tiny_path, changes, message):
    code, err = run_here(main_rl, "--config", recipe({"rollout.router_replay": "replay"} | changes))
    assert code == 2 and message.format(tiny_path) in err


def test_experts_not_chosen_by_one_top_k_are_refused_at_the_start(recipe, mixture_path, tmp_path):
    random_model("phimoe", num_local_experts=4, num_experts_per_tok=2).config.save_pretrained(tmp_path / "phimoe")

    def check(path: str) -> None:
        changes = {"model.path": path, "rollout.router_replay": "replay"}
        check_router_replay(load_recipe(RLConfig, recipe(changes), []).cfg)

    check(mixture_path)
    assert tell(lambda: check(f"{tmp_path}/phimoe")) == (
        "rollout.router_replay=replay, which needs blocks that choose by one top-k over their experts, and "
        "model.layers.0.mlp (PhimoeSparseMoeBlock) makes 0 such choices: leave it out"
    )


@pytest.mark.parametrize("kind", [RLConfig, SLConfig])
def test_compiling_without_replay_needs_no_more_than_a_compiler(recipe, kind, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    path = recipe({"trainer.compile": True}, kind="rl" if kind is RLConfig else "sl")
    loaded = load_recipe(kind, path, [])
    assert tell(lambda: check_trainer(loaded.cfg, loaded.alg)).startswith(
        "trainer.compile=true requires a C++ compiler, and there is no no-such-compiler: "
    )


def test_an_evaluation_with_the_rollout_section_of_a_run_needs_no_routes(tmp_path, mixture_path, sums):
    raw = {
        **{"name": "eval", "backend": "local", "run_dir": str(tmp_path / "runs"), "samples": 1, "resamples": 100},
        "model": {"path": mixture_path, "dtype": "float32"},
        "data": {"sets": [{"path": str(sums / "eval.parquet"), "name": "sums"}], "max_prompt_tokens": 32},
        "reward": {"function": "arithmetic", "workers": 1},
        "rollout": {"engine": "hf", "max_new_tokens": 4, "router_replay": "replay"},
    }
    path = tmp_path / "eval.json"
    path.write_text(json.dumps(raw))
    assert run_here(main_eval, "--config", str(path)) == (0, "")
