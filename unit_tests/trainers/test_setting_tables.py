"""Operations, compilations and DeepSpeed's settings of a trainer, in exact numbers and sentences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from configs.trainer_schema import ModelConfig, TrainerConfig
from core.errors import UserError
from core.patches import read_attention
from modeling.attention import BY_SEQUENCE
from modeling.flops import TrainingFlops
from modeling.layout_probe import LayoutProbe
from trainers import compiled, utilization
from trainers.compiled import CompileMetrics, check_compile, check_compiler, count_compilations
from trainers.deepspeed import deepspeed_config
from trainers.deepspeed_masters import find_offload, list_masters, show_masters
from trainers.layouts import combine_layouts
from trainers.utilization import Utilization, measure_peak
from unit_tests.helpers.models import random_model
from unit_tests.helpers.seeing import make_model


def test_operations_are_counted_by_kind_and_averaged_by_nobody():
    flops = TrainingFlops(per_token=1e12, per_label=10e12, per_pair=100e12, per_near_pair=1000e12, window=2)
    learner = SimpleNamespace(model=None)
    rank: Any = SimpleNamespace(
        device="cpu",
        critic=None,
        policy=learner,
        alg=SimpleNamespace(trains_policy=True),
        sum_over_rows=lambda values: 2 * values,
    )
    seen: Any = SimpleNamespace(batch=SimpleNamespace(position_ids=torch.tensor([0, 1, 2, 0]), labels=torch.zeros(2)))
    counter = Utilization(rank)
    counter.flops = [flops, flops]
    for trains_policy, share in ((True, 1), (False, 1 / 3)):
        rank.alg.trains_policy = trains_policy
        counter.begin_step()
        counter.on_batch(seen)
        counter.on_batch(seen)
        assert counter.finish() == {}
        # 4 tokens, 2 labels, 1 + 2 + 3 + 1 pairs, 1 + 2 + 2 + 1 of them in the window; two batches on two ranks
        assert counter.counts.tolist() == [4.0 * n for n in (4, 2, 7, 6, 6)]
        once = 4 * (4 + 20 + 700 + 6000)
        assert counter.read_tflops() == pytest.approx(once * share + once)
    rank.device = "meta"
    counter.begin_step()
    assert (counter.counts.device.type, counter.counts.dtype) == ("meta", torch.float64)


class Matrix:
    """Square matrix that counts its products, and when they are read."""

    def __init__(self) -> None:
        self.products, self.read = 0, list[Any]()

    def __matmul__(self, other: Any) -> Matrix:
        self.products += 1
        return self

    def __getitem__(self, at: Any) -> float:
        self.read.append((at, self.products))
        return 1.0


@pytest.mark.parametrize(("device", "size", "products"), [("cpu", 512, 2), ("cuda", 4096, 50)])
def test_the_peak_is_that_of_the_fastest_of_three(device, size, products, monkeypatch):
    made, matrix = list[Any](), Matrix()
    ticks = iter([0.0, 4.0, 10.0, 10.5, 20.0, 22.0])
    monkeypatch.setattr(torch, "ones", lambda *shape, **how: made.append((shape, how)) or matrix)
    monkeypatch.setattr(utilization.time, "perf_counter", lambda: next(ticks))
    assert measure_peak.__wrapped__(device, torch.float16) == products * 2 * size**3 / 0.5 / 1e12
    assert next(ticks, None) is None and made == [((size, size), {"device": device, "dtype": torch.float16})]
    # a product before each measurement, and the last one, are waited for
    done = [n * (1 + products) for n in range(3)]
    assert matrix.read == [((0, 0), n) for before in done for n in (before + 1, before + 1 + products)]


def test_compilations_are_those_of_the_rank_with_the_most(monkeypatch):
    counter = count_compilations()
    rank: Any = SimpleNamespace(device="cpu", find_largest=lambda own: own + torch.tensor([2.0, 0.5]))
    metrics = CompileMetrics(rank)
    ticks = iter([1.0, 3.5, 10.0, 10.25])
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: next(ticks))
    for _ in range(2):
        counter.begin(None)
        counter.end(None)
    assert metrics.finish() == {"compile/count": 4.0, "compile/seconds": 2.75 + 0.5}
    assert metrics.finish() == {"compile/count": 2.0, "compile/seconds": 0.5}


def test_compilations_are_compared_on_the_device_of_the_ranks():
    seen: list[Any] = []

    def find_largest(own: torch.Tensor) -> torch.Tensor:
        seen.append((own.device.type, own.dtype, own.shape))
        return torch.tensor([3.0, 0.5])

    rank: Any = SimpleNamespace(device="meta", find_largest=find_largest)
    assert CompileMetrics(rank).finish() == {"compile/count": 3.0, "compile/seconds": 0.5}
    assert seen == [("meta", torch.float64, (2,))]


NOT_COMPARED = (
    "trainer.compile=true with backend: ray has not been compared with an uncompiled run for {}: leave one of the two "
    "out"
)
OFFLOADS = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("trainer", "model", "key"),
    [
        *(({key: value}, {}, f"trainer.{key}") for key, value in (("gradient_checkpointing", True),)),
        ({"sequence_parallel": 2, "ranks": 2}, {}, "trainer.sequence_parallel"),
        ({"strategy": "fsdp2", "offload": True}, {}, "trainer.offload"),
        ({"zero_stage": 3}, {"lora": {}}, "model.lora and trainer.zero_stage=3"),
        ({"deepspeed": OFFLOADS}, {}, "trainer.deepspeed.zero_optimization.offload_optimizer"),
        *(({"zero_stage": 2}, {"lora": {}}, None), ({"zero_stage": 3}, {}, None)),
        *(({"strategy": "fsdp2"}, {"lora": {}}, None), ({}, {}, None)),
    ],
)
def test_what_was_not_compared_on_ray_is_named(trainer, model, key):
    cfg, of_model = TrainerConfig.model_validate(trainer), ModelConfig.model_validate({"path": "here"} | model)
    check_compile(cfg, of_model, is_sharded=False, replays_routes=False)
    if key is None:
        check_compile(cfg, of_model, is_sharded=True, replays_routes=False)
        return
    with pytest.raises(UserError) as raised:
        check_compile(cfg, of_model, is_sharded=True, replays_routes=False)
    assert str(raised.value) == NOT_COMPARED.format(key)


def test_what_a_compiler_needs_is_named(monkeypatch, tmp_path):
    def refused(**more: Any) -> str:
        with pytest.raises(UserError) as raised:
            if more:
                of_model = ModelConfig(path="here", **more.pop("model", {}))
                check_compile(TrainerConfig(), of_model, **{"is_sharded": True, "replays_routes": False} | more)
            else:
                check_compiler()
        return str(raised.value)

    assert refused(model={"quantization": "nf4", "lora": {"merge_on_save": True}}) == (
        "trainer.compile=true, and the layers of model.quantization=nf4 dequantise weights by calls that cannot be "
        "compiled: leave it out"
    )
    assert refused(replays_routes=True) == (
        "trainer.compile=true, and rollout.router_replay reads choices inside of the blocks: leave one of them out"
    )
    lacks = "trainer.compile=true requires a C++ compiler, and there is no {}: install it, name another in the "
    lacks += "environment variable CXX, or leave it out"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for platform, name in (("linux", "g++"), ("darwin", "clang++")):
        monkeypatch.setattr(compiled.sys, "platform", platform)
        assert refused() == lacks.format(name)
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setattr(compiled.sys, "platform", "linux")
    monkeypatch.setattr(compiled.sysconfig, "get_path", lambda name: f"{tmp_path}/{name}")
    assert refused() == (
        f"trainer.compile=true requires Python's headers, and {tmp_path}/include has no Python.h: install them "
        "(python3-dev), or leave it out"
    )
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").write_text("")
    check_compiler()
    monkeypatch.setenv("CXX", "other")
    assert refused() == lacks.format("other")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_settings_of_deepspeed_are_those_of_the_recipe(stage):
    added = {"zero_optimization": {"reduce_bucket_size": 7}, "comms_logger": {"enabled": True}}
    cfg = TrainerConfig(max_grad_norm=0.25, zero_stage=stage, deepspeed=added)
    assert deepspeed_config(cfg, "bfloat16") == {
        **{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1},
        **{"managed_gradient_accumulation": False, "gradient_clipping": 0.25 if stage else 0.0},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 7} | ({"overlap_comm": False} if stage < 2 else {}),
        **{"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False},
        **{"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "steps_per_print": 10**9},
        "comms_logger": {"enabled": True},
    }
    assert deepspeed_config(cfg, "float32")["bf16"] == {"enabled": False}


def test_the_float32_weights_of_deepspeed_are_where_the_stage_has_them():
    weights = [torch.zeros(1), torch.ones(2)]
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    for name in names:
        assert all(a is b for a, b in zip(list_masters(SimpleNamespace(**{name: weights})), weights, strict=True))
    both = SimpleNamespace(**{names[0]: None, names[1]: weights[:1], names[2]: weights})
    assert len(list_masters(both)) == 1
    groups = [{"params": weights[:1]}, {"params": weights[1:]}]
    assert [id(p) for p in list_masters(SimpleNamespace(param_groups=groups))] == [*map(id, weights)]
    told: list[str] = []
    show_masters(SimpleNamespace(update_lp_params=lambda: told.append("shown")))
    show_masters(SimpleNamespace())
    assert told == ["shown"]
    key = "trainer.deepspeed.zero_optimization.offload_{}"
    for set_keys, found in ((["param", "optimizer"], "param"), (["optimizer"], "optimizer"), ([], None)):
        own = {"zero_optimization": {f"offload_{name}": {} for name in set_keys}}
        assert find_offload(TrainerConfig(deepspeed=own)) == (found and key.format(found))
    assert find_offload(TrainerConfig()) is None


def probed(level: str, *, family: str = "llama") -> Any:
    """Return a model whose probe has found this layout."""
    model: Any = random_model(family, BY_SEQUENCE)
    attention = read_attention(model.config)
    model.layout_probe = LayoutProbe(level=cast(Any, level), attention=attention, error=1e-7, bound=1e-5, seconds=2.0)
    return model


@pytest.mark.parametrize(
    ("levels", "settings", "padded", "shares"),
    [
        (["shared"], {}, False, True),
        (["shared", "shared"], {}, False, True),
        (["shared", "packed"], {}, False, False),
        (["packed"], {}, False, False),
        (["shared", "padded"], {}, True, False),
        (["padded", "shared"], {}, True, False),
        (["shared"], {"share_prefixes": "off"}, False, False),
        (["shared"], {"layout": "padded"}, True, False),
        (["shared", "shared"], {"layout": "packed"}, False, True),
    ],
)
def test_rows_have_the_layout_that_all_models_support(levels, settings, padded, shares):
    policy, *others = [probed(level) for level in levels]
    found = combine_layouts(policy, others, TrainerConfig(**settings), images="auto")
    assert (found.padded, found.shares_prefixes) == (padded, shares)
    assert found.measured == policy.layout_probe.describe()


def test_a_model_that_also_sees_says_that_it_is_used_for_text():
    model: Any = make_model("qwen2_5_vl")
    attention = read_attention(model.config.get_text_config())
    model.layout_probe = LayoutProbe(level="padded", attention=attention, error=1e-7, bound=1e-5, seconds=2.0)
    told = model.layout_probe.describe()
    cfg = TrainerConfig(layout="padded")
    assert combine_layouts(model, [], cfg, images="auto").measured == told
    text = "used for text only, all other parts of the model are frozen"
    assert combine_layouts(model, [], cfg, images="off").measured == f"{told}; {text}"


def test_the_float32_weights_of_zero_reach_the_model_as_the_stage_does_it():
    """ZeRO-3 frees what was gathered, takes its shards anew, and gathers the parameters that stay whole."""
    told: list[Any] = []
    zero_1 = SimpleNamespace(single_partition_of_fp32_groups=[], update_lp_params=lambda: told.append("shown"))
    show_masters(zero_1)
    assert told == ["shown"]
    told.clear()
    whole = SimpleNamespace(all_gather=lambda parameters: told.append(("gather", len(parameters))))
    zero_3 = SimpleNamespace(
        fp32_partitioned_groups_flat=[],
        fp16_partitioned_groups_flat=["first", "second"],
        persistent_parameters=[whole, whole],
        update_lp_params=lambda: told.append("shown"),
        invalidate_secondary_tensor=lambda: told.append("invalidate"),
        _partition_all_parameters=lambda: told.append("partition"),
        _reassign_or_swap_out_partitioned_parameters=lambda number: told.append(("reassign", number)),
    )
    show_masters(zero_3)
    assert told == ["partition", ("reassign", 0), ("reassign", 1), ("gather", 2), "invalidate"]


def test_the_peak_is_the_recipes_or_that_of_the_ranks_device(monkeypatch):
    rank: Any = SimpleNamespace(device="cuda:1", cfg=SimpleNamespace(peak_tflops=989.0))
    monkeypatch.setattr(utilization, "measure_peak", lambda *asked: {("cuda", torch.bfloat16): 0.5}[asked])
    assert Utilization(rank).find_peak("bfloat16") == 989.0
    rank.cfg.peak_tflops = None
    assert Utilization(rank).find_peak("bfloat16") == 0.5
