"""A base in four bits: the dequantised model and its adapter are the policy, in training, in engines and on disk."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from analysis.doctor.rescoring import load_in
from configs.schema import RLConfig
from configs.trainer_schema import LoraConfig, ModelConfig
from core.errors import UserError
from driver.checks.models import check_trainer
from driver.load_recipe import load_recipe
from modeling import nf4
from modeling.load import load_model
from modeling.nf4 import BYTES, Nf4Linear, check_quantization, list_quantized, quantize
from modeling.saved_model import check_saved
from trainers.checkpoint.saved_policy import load_policy
from trainers.checkpoint.state import estimate_bytes
from unit_tests.helpers.examples import columns_of
from unit_tests.helpers.models import random_model
from unit_tests.helpers.sentences import tell
from unit_tests.helpers.small_trained import batches, logits, trained, trainer_of

bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.usefixtures("one_thread")

LORA = LoraConfig(r=4, merge_on_save=True)
KINDS = {
    "lora": LORA,
    "dora": LORA.model_copy(update={"dora": True}),
    "one target": LORA.model_copy(update={"targets": ["q_proj"]}),
}


def sent_by(trainer) -> dict[str, Tensor]:
    return {name: tensor for bucket in trainer.export_weights(2**20) for name, tensor in bucket}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_with_its_dequantised_matrix(dtype):
    """To the bit, forward and backward; 150 x 130 fills neither the last block nor the last block of scales."""
    torch.manual_seed(0)
    plain = nn.Linear(150, 130, dtype=dtype).requires_grad_(False)
    layer = Nf4Linear(plain, device="cpu")
    packed, state = bitsandbytes.functional.quantize_4bit(plain.weight, quant_type="nf4", compress_statistics=True)
    assert torch.equal(layer.weight, bitsandbytes.functional.dequantize_4bit(packed, state))
    assert 0.02 < (layer.weight - plain.weight).abs().mean() / plain.weight.abs().mean() < 0.15

    x = torch.randn(3, 150, dtype=dtype, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(x)
    want = functional.linear(again, layer.weight, plain.bias)
    assert torch.equal(out, want)
    out.square().sum().backward()
    want.square().sum().backward()
    assert torch.equal(x.grad, again.grad)
    assert all(t.numel() < 150 * 130 for t in kept), "what is dequantised does not wait for the backward pass"


def test_four_bits_take_the_memory_that_is_estimated():
    layer = Nf4Linear(nn.Linear(512, 512, bias=False), device="cpu")
    held = sum(b.nbytes for name, b in layer.named_buffers() if name not in ("code", "offset"))
    assert held == BYTES * 512 * 512
    assert not list(layer.parameters()) and not layer.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_and_saved_is_the_policy(tiny_path, tmp_path, kind):
    trainer = trained(tiny_path, KINDS[kind], quantization="nf4")
    start = load_model(tiny_path, dtype="float32", attention="sdpa")
    quantised = trainer_of(tiny_path, KINDS[kind], quantization="nf4")
    assert (logits(trainer.model) - logits(quantised.model)).abs().max() > 0.1, "it was trained"
    sent = sent_by(trainer)
    assert {n: t.shape for n, t in sent.items()} == {n: p.shape for n, p in start.named_parameters()}
    engine = load_model(tiny_path, dtype="float32", attention="sdpa")
    engine.load_state_dict(sent, strict=True)
    want = logits(trainer.model)
    torch.testing.assert_close(logits(engine), want, atol=1e-4, rtol=0)

    trainer.save_model(tmp_path / "out")
    check_saved(tmp_path / "out", dtype="float32")
    assert not (tmp_path / "out" / "adapter").exists(), "it fits no model on disk"
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in sent.items())


def test_the_base_is_quantised_once_and_is_the_reference(tiny_path):
    alg = {"name": "grpo", "kl": {"coef": 0.1}}
    trainer = trainer_of(tiny_path, LORA, alg=alg, quantization="nf4")
    layers = [name for name, m in trainer.model.named_modules() if isinstance(m, Nf4Linear)]
    assert len(layers) == 2 * 7, "the linear layers of two blocks, and no head"
    before = torch.cat([s["ref_logp"] for s in columns_of(trainer, batches(), "ref_logp")])
    base = load_model(tiny_path, dtype="float32", attention="sdpa")
    plain = logits(base)
    quantize(base)
    torch.testing.assert_close(logits(trainer.model), logits(base), atol=0, rtol=0)
    assert (logits(base) - plain).abs().max() > 1e-2, "which is another model than that of the files"
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(p.requires_grad * 0.1)
    after = torch.cat([s["ref_logp"] for s in columns_of(trainer, batches(), "ref_logp")])
    assert torch.equal(before, after)


def test_a_weight_that_a_fused_kernel_reads_stays_as_it_is():
    sizes = {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1}
    ends = {name.rpartition(".")[2] for name in list_quantized(random_model("falcon_h1", **sizes))}
    assert ends == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj"}


def test_a_checkpoint_is_an_adapter_of_the_quantised_base(tiny_path, tmp_path):
    trainer = trained(tiny_path, LORA, quantization="nf4", dtype="bfloat16")
    trainer.save_state(tmp_path)
    model = load_model(tiny_path, dtype="bfloat16", attention="sdpa", lora=LORA, quantization="nf4")
    load_policy(model, tmp_path)
    torch.testing.assert_close(logits(model), logits(trainer.model), atol=0, rtol=0)


REFUSED = {
    "no adapter": ({}, "quantization=nf4 is of the frozen weights below an adapter"),
    "an adapter alone on disk": ({"model.lora": {}}, r"set lora\.merge_on_save to true"),
    "an adapter alone on the way": (
        {"model.lora": {"merge_on_save": True}, "weight_sync.lora": "adapter", "rollout.engine": "vllm"},
        r"would add it to the weights of model\.path: leave model\.quantization out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_combined_is_one_sentence(recipe, name):
    changes, words = REFUSED[name]
    with pytest.raises(UserError, match=words):
        load_recipe(RLConfig, recipe({"model.quantization": "nf4"} | changes), [])


def test_experts_in_one_tensor_and_a_missing_package_are_refused(recipe, tmp_path, tiny_path, monkeypatch):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    random_model("qwen3_moe", **sizes).save_pretrained(tmp_path)
    quantised = {"model.path": str(tmp_path), "model.quantization": "nf4", "model.lora": {"merge_on_save": True}}
    loaded = load_recipe(RLConfig, recipe(quantised), [])
    assert tell(lambda: check_trainer(loaded.cfg, loaded.alg)) == (
        f"model.quantization=nf4 is of linear layers, and the experts of model.path={tmp_path} are tensors of three "
        "dimensions, which would stay as they are: leave it out"
    )
    monkeypatch.setattr(nf4, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"bitsandbytes is not installed: pip install -c constraints\.txt bitsandb"):
        check_quantization(ModelConfig(path=tiny_path, lora=LORA, quantization="nf4"))


def test_a_second_model_in_float32_has_what_the_trainer_dequantises(tiny_path):
    trainer = trainer_of(tiny_path, LORA, dtype="bfloat16", quantization="nf4")
    cfg = ModelConfig(path=tiny_path, dtype="bfloat16", attention="sdpa", lora=LORA, quantization="nf4")
    bench: Any = SimpleNamespace(trainer=trainer, cfg=SimpleNamespace(model=cfg))
    wide = load_in(bench, "float32")
    layers = {name: m for name, m in trainer.model.named_modules() if isinstance(m, Nf4Linear)}
    for name, layer in layers.items():
        weight: Any = wide.get_submodule(name).weight
        assert weight.dtype == torch.float32 and torch.equal(weight, layer.weight.float())
    # a merged model on the disk has all of its weights in bfloat16
    n_packed = sum(layer.weight.numel() for layer in layers.values())
    parameters = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    assert estimate_bytes([trainer.policy]) == parameters + 2 * n_packed
