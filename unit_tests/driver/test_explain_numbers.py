"""What --explain derives from a recipe, by hand: places, sizes of a step, and the memory of each kind of run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from configs.judge_schema import JudgeConfig
from configs.rollout_schema import EngineRange
from configs.schema import RLConfig, SLConfig
from driver.checks import explain, explain_devices
from driver.checks.memory_estimate import GIB, MemoryEstimate
from driver.checks.shared_memory import describe_turns
from driver.load_recipe import Loaded, load_recipe
from driver.start import devices

Recipe = Callable[..., str]
PARAMETERS = 144_576
"""Of the tiny model, whose head is tied to its embeddings."""
ON_VLLM = {"backend": "ray", "rollout.engine": "vllm"}
ON_RANKS = {"backend": "ray", "trainer.ranks": 4, "trainer.zero_stage": 2}


@pytest.fixture
def has_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def pretend(n: int) -> None:
        for module in (devices, explain, explain_devices):
            monkeypatch.setattr(module, "count_gpus", lambda: n)

    monkeypatch.setattr(explain, "describe_gpus", lambda: [])
    return pretend


def load(recipe: Recipe, changes: dict[str, Any], kind: str = "rl") -> Loaded[Any]:
    return load_recipe(RLConfig if kind == "rl" else SLConfig, recipe(changes, kind=kind), [])


def with_rollout(cfg: RLConfig, **keys: Any) -> RLConfig:
    return cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=keys)})


class Keys(BaseModel):
    later: list[str] = ["x"]
    first: int = 1


def test_an_explanation_is_the_configuration_then_its_facts_then_a_warning():
    facts = [("a step", "4 prompts"), ("a longer name than others", "5")]
    lines = [
        "# the configuration as it will run",
        *("later:", "- x", "first: 1", ""),
        "# what follows from it",
        "a step                 4 prompts",
        "a longer name than others 5",
    ]
    assert explain.format_explanation(Keys(), facts, None).split("\n") == lines
    assert explain.format_explanation(Keys(), facts, "no GPU").split("\n") == [*lines, "", "warning: no GPU"]


# Places ------------------------------------------------------------------------------------------------------


def place(cfg: Any) -> list[tuple[str, str]]:
    """Return the rows up to those of single processes."""
    rows = explain.describe_placement(cfg)
    return rows[: [name for name, _ in rows].index("this machine") + 1]


def test_one_process_holds_everything(recipe: Recipe, has_gpus: Callable[[int], None]):
    for n, device in ((0, "the CPU"), (2, "the GPU")):
        has_gpus(n)
        for kind, parts in (("rl", "local trainer and engine"), ("sl", "local trainer")):
            cfg = load(recipe, {}, kind).cfg
            assert explain.describe_placement(cfg) == [("this process", f"everything, on {device}: {parts}")]


def test_every_kind_of_process_is_counted(recipe: Recipe, has_gpus: Callable[[int], None]):
    has_gpus(0)
    cores = os.cpu_count()
    assert place(load(recipe, {"backend": "ray", "trainer.zero_stage": 2}).cfg) == [
        ("trainer", "1 Ray actors, DeepSpeed ZeRO-2, one share of the CPU each"),
        ("engines", "1 Ray actors (hf), 1 share of the CPU each"),
        ("rewards", "1 processes beside each engine"),
        ("this machine", f"0 GPUs, {cores} CPU cores"),
    ]
    assert [name for name, _ in place(load(recipe, {"backend": "ray"}, "sl").cfg)] == ["trainer", "this machine"]
    has_gpus(8)
    sharded = {"trainer.strategy": "fsdp2", "trainer.ranks": 4, "trainer.sequence_parallel": 2}
    sharded |= {"trainer.offload": True, "rollout.tensor_parallel_size": 2}
    varying = with_rollout(load(recipe, ON_VLLM | sharded).cfg, num_engines=EngineRange(min=1, max=3))
    assert place(varying) == [
        ("trainer", "4 Ray actors, FSDP2 with its state in the machine's memory, one GPU each"),
        ("rows", "each is computed by 2 ranks, which hold 1/2 of its activations each"),
        ("engines", "1 to 3 Ray actors (vllm), 2 GPU each"),
        ("rewards", "1 processes beside each engine"),
        ("this machine", f"8 GPUs, {cores} CPU cores"),
    ]


def test_a_judge_has_its_row_and_its_turns(recipe: Recipe, has_gpus: Callable[[int], None]):
    has_gpus(8)
    two, judge = {"trainer.ranks": 2, "rollout.num_engines": 2}, JudgeConfig(model="m", engine="hf", num_engines=2)
    in_turns = "1 GPU each and in turns with the trainers"
    for placement, own, engines, judged in (
        ("separate", None, "1 GPU each", "1 GPU each"),
        ("colocate", None, in_turns, in_turns),
        ("colocate", "separate", in_turns, "1 GPU each"),
    ):
        cfg = load(recipe, ON_VLLM | two | {"placement": placement}).cfg
        cfg = cfg.model_copy(update={"judge": judge.model_copy(update={"placement": own})})
        rows = dict(place(cfg))
        assert rows["engines"] == f"2 Ray actors (vllm), {engines}"
        assert rows["judge"] == f"2 Ray actors (hf), {judged}"
    policy = cfg.model_copy(update={"judge": JudgeConfig(model="policy")})
    assert "judge" not in dict(place(policy))


# Sizes -------------------------------------------------------------------------------------------------------


def test_micro_batches_are_counted_for_each_group_of_ranks():
    def describe(tokens: int, **keys: int) -> str:
        trainer: Any = SimpleNamespace(**{"micro_batch_tokens": 1000, "ranks": 6} | keys)
        return explain.describe_micro_batches(tokens, trainer)

    each = "at most 1,000 tokens each -> at most about"
    assert [describe(n, data_parallel_size=6, sequence_parallel=1) for n in (6000, 6001)] == [
        f"{each} {most} per rank and update, on 6 ranks" for most in (1, 2)
    ]
    for parts, groups in ((3, "3 such groups"), (1, "one such group")):
        assert describe(3000 * parts, data_parallel_size=parts, sequence_parallel=2) == (
            f"{each} 3 per group of 2 ranks and update, on {groups} (trainer.sequence_parallel)"
        )


def test_generation_is_as_far_ahead_as_the_schedule_permits(recipe: Recipe):
    rows: list[tuple[dict[str, Any], str]] = [
        ({}, "waits for every weight sync (max_staleness=0); weights are synced every step"),
        (
            {"max_staleness": 2, "weight_sync.every": 2},
            "runs up to 12 groups ahead of the trainer (max_staleness=2); weights are synced every 2 steps",
        ),
        (
            {"max_staleness": 5, "sample_reuse": 2, "weight_sync.every": 2, "weight_sync.max_kl": 0.5},
            "runs up to 12 groups ahead of the trainer (max_staleness=5); weights are synced every 2 steps, or earlier "
            "where train/mismatch/kl is above 0.5",
        ),
    ]
    for changes, said in rows:
        assert explain.describe_schedule(load(recipe, changes).cfg) == said


def test_a_step_of_rows_is_counted_by_its_kind(recipe: Recipe):
    sizes = {"data.max_tokens": 50, "rows_per_step": 7}
    assert dict(explain.describe_arithmetic(load(recipe, sizes | {"alg": {"name": "dpo"}}, "sl"))) == {
        "a step": "7 pairs -> at most 700 tokens -> 1 optimizer update",
        "micro-batches": "at most 16,384 tokens each -> at most about 1 per rank and update, on 1 ranks",
        "the run": "2 steps -> 14 rows -> 2 optimizer updates",
    }
    epochs = dict(explain.describe_arithmetic(load(recipe, sizes | {"steps": None, "epochs": 1.5}, "sl")))
    assert epochs["a step"].startswith("7 rows -> at most 350 tokens")
    assert epochs["the run"] == "1.5 epochs of data.train"


# Memory ------------------------------------------------------------------------------------------------------


def of_rank_and_files(said: MemoryEstimate) -> tuple[float, ...]:
    """Return weights, gradients, optimizer, frozen models, an engine, a checkpoint and the saved model in bytes."""
    on_rank = (said.weights, said.gradients, said.optimizer, said.frozen)
    return tuple(round(gib * GIB) for gib in (*on_rank, said.per_engine, said.checkpoint, said.saved))


BYTES: list[tuple[str, dict[str, Any], tuple[float, ...]]] = [
    # kind of run, changes; bytes per parameter, in the order of `of_rank_and_files`
    ("rl", {}, (4, 4, 8, 0, 4, 12, 4)),
    ("rl", {"model.dtype": "bfloat16"}, (2, 4, 12, 0, 2, 12, 2)),
    ("rl", {"trainer.optimizer": "sgd"}, (4, 4, 0, 0, 4, 4, 4)),
    # a value model is as large as the policy
    ("rl", {"alg": {"name": "ppo"}}, (8, 8, 16, 0, 4, 24, 8)),
    ("rl", {"alg.kl": {"coef": 0.1}}, (4, 4, 8, 4, 4, 12, 4)),
    ("rl", {"alg": {"name": "opd", "teacher": "TINY"}}, (4, 4, 8, 4, 4, 12, 4)),
    # an average is kept in a checkpoint, and saved beside the model
    ("rl", {"trainer.ema": 0.5}, (4, 4, 8, 4, 4, 16, 8)),
    ("rl", ON_RANKS | {"alg.kl": {"coef": 0.1}}, (4, 1, 2, 4, 4, 12, 4)),
    ("rl", ON_VLLM | {"rollout.tensor_parallel_size": 2}, (4, 4, 8, 0, 2, 12, 4)),
    ("sl", {}, (4, 4, 8, 0, 0, 12, 4)),
    ("sl", {"alg": {"name": "dpo"}}, (4, 4, 8, 4, 0, 12, 4)),
    ("sl", {"alg": {"name": "dpo"}, "precompute_ref_logp": True}, (4, 4, 8, 0, 0, 12, 4)),
]


def test_memory_is_the_bytes_of_every_parameter(recipe: Recipe, tiny_path: str):
    for kind, changes, each in BYTES:
        given = {**changes, **({"alg": {"name": "opd", "teacher": tiny_path}} if "TINY" in str(changes) else {})}
        said = explain.estimate_memory(load(recipe, given, kind))
        assert (said.parameters, said.adapter, said.quantized) == (PARAMETERS, 0, 0)
        assert of_rank_and_files(said) == tuple(PARAMETERS * one for one in each), changes


def test_an_adapter_alone_is_trained_kept_and_saved(recipe: Recipe):
    whole, own = 4 * PARAMETERS, 4 * 256  # two layers of q_proj, 64 -> 64: A and B have 64 numbers each
    for merges in (False, True):
        lora = {"r": 1, "targets": ["q_proj"], "merge_on_save": merges}
        said = explain.estimate_memory(load(recipe, {"model.lora": lora, "alg.kl": {"coef": 0.1}}))
        assert said.adapter == 256
        saved = whole + own if merges else own
        assert of_rank_and_files(said) == (whole + own, own, 2 * own, 0, whole, 3 * own, saved)


def test_the_rows_of_memory_say_what_each_number_is(
    recipe: Recipe, has_gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
):
    sizes = {"weights": 1.0, "gradients": 2.0, "optimizer": 4.0, "frozen": 0.5, "buckets": 1.86, "per_engine": 3.0}
    plain = MemoryEstimate(parameters=7_000_000, adapter=0, quantized=0, checkpoint=0.0, saved=0.0, **sizes)
    monkeypatch.setattr(explain, "estimate_memory", lambda loaded: plain)
    has_gpus(0)
    rank = "about 7.50 GiB: weights 1.00, gradients 2.00, optimizer 4.00, frozen models 0.50; activations come on top"
    engine = ("memory per engine", "about 3.00 GiB of weights per rank, and its cache")
    assert explain.describe_memory(load(recipe, {})) == [
        *(("parameters", "7,000,000"), ("memory per rank", rank), engine)
    ]
    assert explain.describe_memory(load(recipe, {}, "sl")) == [("parameters", "7,000,000"), ("memory per rank", rank)]
    rounded = replace(plain, adapter=1000, quantized=2000)
    monkeypatch.setattr(explain, "estimate_memory", lambda loaded: rounded)
    has_gpus(1)
    offloads = {"backend": "ray", "trainer.strategy": "fsdp2", "trainer.offload": True}
    rows = dict(explain.describe_memory(load(recipe, offloads)))
    assert rows["parameters"] == (
        "7,000,000, and 1,000 of the adapter, which alone are trained; 2,000 are kept in four bits"
    )
    assert rows["memory per rank"] == (
        f"{rank}, and are all that a GPU holds besides one block's weights, CUDA (0.75) and DeepSpeed's buckets (1.86)"
    )


def test_a_device_that_is_shared_has_a_row_for_each_need(recipe: Recipe, has_gpus: Callable[[int], None]):
    has_gpus(0)
    sizes = {"weights": 1.0, "gradients": 2.0, "optimizer": 4.0, "frozen": 0.5, "buckets": 0.0, "per_engine": 3.0}
    estimate = MemoryEstimate(parameters=0, adapter=0, quantized=0, checkpoint=0.0, saved=0.0, **sizes)
    cfg = load(recipe, {"backend": "ray"}).cfg
    assert describe_turns(cfg, estimate) == []
    turns, (name, need) = describe_turns(cfg.model_copy(update={"placement": "colocate"}), estimate)
    assert turns == ("turns", "the engines play all episodes of a step; the trainers train")
    assert name == "shared in turns"
    assert need.startswith("everything together takes 10.50 GiB (trainers 7.50 + weights of the engines 3.00) of the ")


def test_buckets_of_deepspeed_are_whole_whatever_the_models_size(recipe: Recipe):
    usual = 500_000_000
    small = {"reduce_bucket_size": 1000}
    rows: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        # changes, zero_optimization; bytes
        ({"trainer.zero_stage": 0}, {}, 0),
        ({"trainer.zero_stage": 1}, {}, 4 * usual),
        ({"trainer.zero_stage": 2}, {}, 4 * usual),
        ({"trainer.zero_stage": 1, "model.dtype": "bfloat16"}, small, 4000),
        ({"trainer.zero_stage": 2, "model.dtype": "bfloat16"}, small, 2000),
        ({"trainer.zero_stage": 2}, small | {"overlap_comm": True}, 8000),
        ({"trainer.zero_stage": 1}, small | {"overlap_comm": True}, 4000),
        ({"trainer.zero_stage": 2}, small | {"contiguous_gradients": False}, 0),
        ({"trainer.zero_stage": 2}, {"reduce_bucket_size": "auto"}, 0),
        ({"trainer.strategy": "fsdp2"}, {}, 0),
    ]
    for changes, given, nbytes in rows:
        cfg = load(recipe, {"backend": "ray"} | changes).cfg
        trainer = cfg.trainer.model_copy(update={"deepspeed": {"zero_optimization": given}})
        assert explain.count_buckets(cfg.model_copy(update={"trainer": trainer})) == nbytes
    assert explain.count_buckets(load(recipe, {}).cfg) == 0


def test_an_optimizer_has_as_many_states_as_it_keeps(recipe: Recipe):
    for optimizer, nbytes in (("adamw", 8), ("sgd", 0), ("torch.optim.Adagrad", 4), ("torch.optim.NAdam", 8)):
        assert explain.count_states(load(recipe, {"trainer.optimizer": optimizer}).cfg) == nbytes


def test_every_process_of_a_run_on_ray_has_a_place(recipe: Recipe, has_gpus: Callable[[int], None]):
    places = explain_devices.describe_processes
    has_gpus(0)
    assert places(load(recipe, {"backend": "ray"}).cfg) == []
    has_gpus(2)
    assert places(load(recipe, {}).cfg) == []
    changes = {"backend": "ray", "rollout.engine": "vllm", "trainer.ranks": 2, "reward.workers": 3}
    beside = ", and 3 processes of rewards on its CPU cores"
    assert places(load(recipe, changes).cfg) == [
        ("the driver", "this machine, no GPU"),
        ("trainer 0", "machine 1, GPU 0"),
        ("trainer 1", "machine 1, GPU 1"),
        ("engine 0", "no room on machines of 2 GPUs" + beside),
    ]
    assert places(load(recipe, changes | {"ray_address": "10.0.0.1:6379", "device": "cuda"}).cfg) == [
        ("the driver", "where it was started, no GPU"),
        ("trainer 0", "machine 1, GPU 0"),
        ("trainer 1", "machine 1, GPU 1"),
        ("engine 0", "machine 2, GPU 0" + beside),
    ]
    assert places(load(recipe, changes | {"placement": "colocate", "rollout.num_engines": 2}).cfg)[3:] == [
        ("engine 0", "machine 1, GPU 0" + beside),
        ("engine 1", "machine 1, GPU 1" + beside),
    ]
