"""Rollouts in eight bits: rounding follows every sync, its proof is of what was sent, and the loss corrects for it."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import RLConfig
from configs.sync_schema import QUANTIZED_TOLERANCE
from core.errors import UserError
from driver.checks.engine import check_rounded
from driver.load_recipe import load_recipe
from rollouts.engines.base import Engine
from rollouts.engines.hf import HfEngine
from rollouts.engines.hf_support.quantized import RoundedLinears, round_rows
from rollouts.engines.vllm_support import quantized
from trainers.weight_sync.fingerprint import fingerprint
from unit_tests.helpers.engines import engine_of, several
from unit_tests.helpers.models import make_mixture
from unit_tests.helpers.runs import LEARN, SEVENS, file_of, metrics_of

pytestmark = pytest.mark.one_core

EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.0.mlp.down_proj.weight"


def change(path: str, by: float) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * by)
    return model


def load(engine: HfEngine, version: int, model: torch.nn.Module) -> None:
    asyncio.run(engine.load_weights(version, [[(name, p.detach()) for name, p in model.named_parameters()]]))


def levels(row: torch.Tensor) -> int:
    return len(row.unique())


@pytest.mark.parametrize(("kind", "bits"), [("int8", 256), ("fp8", 256)])
def test_rows_keep_their_largest_number_and_at_most_256_levels(kind, bits):
    values = torch.randn(4, 4000, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-3], [1.0], [9e4], [0]]
    )
    rounded = round_rows(values, kind)
    assert all(20 < levels(row) <= bits for row in rounded[:3])
    assert torch.allclose(rounded.abs().amax(-1), values.abs().amax(-1)) and not rounded[3].any()
    # half a step: of 127 in int8, and of 3 bits after the first one in fp8
    step = values.abs().amax(-1, keepdim=True) / 127 if kind == "int8" else values.abs() / 8
    smallest = values.abs().amax(-1, keepdim=True) / 448 * 2**-9
    assert ((rounded - values).abs() <= 0.5001 * torch.maximum(step, smallest)).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_are_rounded_after_each_sync_and_proved_before(kind, tiny_path):
    engine, moved = engine_of(tiny_path, quantization=kind), change(tiny_path, 0.05)
    load(engine, 1, moved)
    assert asyncio.run(engine.read_fingerprint()) == [fingerprint(moved.named_parameters())]
    weights = dict(engine.model.named_parameters())
    assert levels(weights[LAYER][0]) < levels(dict(moved.named_parameters())[LAYER][0]) <= weights[LAYER].shape[1]
    assert torch.equal(
        weights["model.embed_tokens.weight"], dict(moved.named_parameters())["model.embed_tokens.weight"]
    )
    exact = engine_of(tiny_path)
    load(exact, 1, moved)
    ids = [5, 6, 7, 8, 9, 10, 11]
    gaps = [abs(a - b) for a, b in zip(*(asyncio.run(e.probe(ids)) for e in (engine, exact)), strict=True)]
    assert 1e-4 < sum(gaps) / len(gaps) < QUANTIZED_TOLERANCE / 5
    # from the second sync on, too: nothing of the rounding stays behind
    for version, by in ((2, 0.0), (3, 0.05)):
        load(engine, version, change(tiny_path, by))
    [done] = asyncio.run(several(engine, [ids], [0]))
    [again] = asyncio.run(several(fresh(tiny_path, kind, moved), [ids], [0]))
    assert (done.token_ids, done.logp) == (again.token_ids, again.logp)


def fresh(path: str, kind: str, model: torch.nn.Module) -> HfEngine:
    engine = engine_of(path, quantization=kind)
    load(engine, 1, model)
    return engine


@pytest.mark.slow
def test_a_run_learns_from_rounded_rollouts_and_counts_their_gap(trained, tmp_path, sums):
    reward = file_of(tmp_path / "sevens.py", SEVENS)
    folder = trained(
        LEARN | {"reward.function": reward, "data.eval": str(sums / "eval.parquet"), "rollout.quantization": "int8"}
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["before"]["reward/mean"] < 0.2 and summary["after"]["reward/mean"] > 0.9
    # without rounding it stays below 1e-6, in float32
    assert max(line["train/mismatch/abs_logp"] for line in metrics_of(folder)) > 1e-3


def test_rounding_without_its_correction_is_refused(recipe):
    given = {"rollout.quantization": "int8"}
    with pytest.raises(UserError, match=r"alg\.correction\.level is none: set it to token"):
        load_recipe(RLConfig, recipe(given | {"alg.correction": {"level": "none"}}), [])
    load_recipe(RLConfig, recipe(given), [])
    with pytest.raises(UserError, match=r"does not round its linear layers"):
        Engine.check_quantization(load_recipe(RLConfig, recipe(given), []).cfg.rollout, dtype="float32", on_gpu=False)


def test_a_mixture_of_experts_is_refused_before_the_start(recipe, refused, tmp_path):
    make_mixture(tmp_path)
    refused({"model.path": str(tmp_path), "rollout.quantization": "int8"}, "hf rounds no experts")
    cfg = load_recipe(RLConfig, recipe({"model.path": str(tmp_path), "rollout.quantization": "int8"}), []).cfg
    for engine, why in (("vllm", "of a mixture: leave it out, or on a GPU"), ("hf", "hf rounds no experts")):
        with pytest.raises(UserError, match=why):
            check_rounded(cfg.model, cfg.rollout.model_copy(update={"engine": engine}))
    fp8 = cfg.rollout.model_copy(update={"engine": "vllm", "quantization": "fp8"})
    check_rounded(cfg.model, fp8)
    with pytest.raises(UserError, match="rounds no experts"):
        RoundedLinears(AutoModelForCausalLM.from_pretrained(tmp_path), "int8")


def test_float32_is_refused_where_vllms_kernels_return_none(monkeypatch):
    rollout = load_recipe(RLConfig, "configs/tiny.yaml", ["rollout.quantization=int8"]).cfg.rollout
    monkeypatch.setattr(quantized, "has_int8_products", lambda: True)
    for on_gpu, has_amx in ((True, False), (False, True)):
        monkeypatch.setattr(quantized, "has_tiles", lambda has_amx=has_amx: has_amx)
        with pytest.raises(UserError, match=r"return no float32 on a .PU.*: set model\.dtype to bfloat16"):
            quantized.check_quantization(rollout, dtype="float32", on_gpu=on_gpu)
        quantized.check_quantization(rollout, dtype="bfloat16", on_gpu=on_gpu)
    monkeypatch.setattr(quantized, "has_tiles", lambda: False)
    quantized.check_quantization(rollout, dtype="float32", on_gpu=False)


def test_int8_is_refused_where_the_cpus_products_overflow(monkeypatch):
    rollout = load_recipe(RLConfig, "configs/tiny.yaml", ["rollout.quantization=int8"]).cfg.rollout
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "avx2": True})
    with pytest.raises(UserError, match="without VNNI vLLM's products of eight bits overflow"):
        quantized.check_quantization(rollout, dtype="bfloat16", on_gpu=False)
    quantized.check_quantization(rollout, dtype="bfloat16", on_gpu=True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "avx512_vnni": True})
    quantized.check_quantization(rollout, dtype="bfloat16", on_gpu=False)


@pytest.mark.parametrize(
    ("found", "dtype", "advice"),
    [
        ({"avx512_vnni": True}, "float32", "set it to int8, or rollout.engine to hf"),
        ({"avx2": True}, "bfloat16", "leave it out, or set rollout.engine to hf"),
        ({"avx512_vnni": True, "amx_tile": True}, "float32", "leave it out, or set rollout.engine to hf"),
        ({"avx512_vnni": True, "amx_tile": True}, "bfloat16", "set it to int8, or rollout.engine to hf"),
    ],
)
def test_fp8_is_refused_on_a_cpu_with_advice_that_works_on_it(monkeypatch, found, dtype, advice):
    given = load_recipe(RLConfig, "configs/tiny.yaml", ["rollout.quantization=fp8"]).cfg.rollout
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **found})
    with pytest.raises(UserError, match=f"does not have on a CPU: {advice}$"):
        quantized.check_quantization(given, dtype=dtype, on_gpu=False)
    if "int8" in advice:
        int8 = given.model_copy(update={"quantization": "int8"})
        quantized.check_quantization(int8, dtype=dtype, on_gpu=False)


@pytest.mark.parametrize(
    ("found", "has_products"),
    [
        ({"architecture": "aarch64"}, True),
        ({"architecture": "x86_64", "avx2": True, "avx512_vnni": False}, False),
        *(({"architecture": "x86_64", name: True}, True) for name in ("avx512_vnni", "avx_vnni", "amx_int8")),
    ],
)
def test_products_of_eight_bits_overflow_on_an_old_x86_only(monkeypatch, found, has_products):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert quantized.has_int8_products() is has_products
