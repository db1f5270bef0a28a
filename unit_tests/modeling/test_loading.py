"""How a model is loaded: without dropout, with the asked head, kernel and adapter; and what is refused, in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from core.errors import UserError
from core.patches import read_attention
from modeling.hf_config import meta_model
from modeling.load import load_model, load_scalar_model
from modeling.lora import check_lora, is_plain_linear, linear_names, name_lora_targets, with_adapter
from modeling.sequence_parallel import SequenceGroup
from unit_tests.helpers.models import random_model
from unit_tests.helpers.seeing import make_model

TINY: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}


def save(folder: Path, auto: Any = AutoModelForCausalLM, **more: Any) -> str:
    torch.manual_seed(0)
    auto.from_config(AutoConfig.for_model("llama", **TINY | more), dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def refusal(call: Any, *args: Any, **given: Any) -> str:
    with pytest.raises(UserError) as refused:
        call(*args, **given)
    return str(refused.value)


@pytest.mark.parametrize("name", ["attention_dropout", "attn_pdrop", "hidden_dropout"])
def test_dropout_that_the_config_has_is_refused(tmp_path, name):
    path = save(tmp_path, **{name: 0.1})
    told = f"k={path} has dropout in its config.json: set it to 0"
    assert refusal(load_model, path, dtype="float32", attention="eager", key="k") == told


def test_dropout_of_a_module_is_set_to_0(tmp_path):
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2, vocab_size=16, attn_pdrop=0.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model: Any = load_model(str(tmp_path), dtype="float32", attention="sdpa")
    found = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert found and {*found} == {0.0} and model.training


@pytest.mark.parametrize(
    ("attention", "found"),
    [("auto", "by_sequence"), ("sdpa", "sdpa"), ("eager", "eager"), ("fixed_order", "fixed_order")],
)
def test_a_model_has_the_asked_dtype_attention_and_checkpoints(tmp_path, attention, found):
    path = save(tmp_path)
    for dtype, checkpointing in (("float32", False), ("bfloat16", True)):
        model: Any = load_model(path, dtype=dtype, attention=attention, gradient_checkpointing=checkpointing)
        assert read_attention(model.config) == found and model.dtype == getattr(torch, dtype)
        assert model.is_gradient_checkpointing == checkpointing and model.training
        assert type(model.get_output_embeddings()).__name__ == "ScoringHead"


def test_a_new_scalar_head_is_zero_and_a_saved_one_is_kept(tmp_path):
    settings: dict[str, Any] = {"dtype": "float32", "attention": "eager"}
    path = save(tmp_path / "lm")
    for labels, pad in ((1, 0), (3, 5)):
        config = tmp_path / "lm" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": pad or None}))
        model: Any = load_scalar_model(path, n_labels=labels, gradient_checkpointing=True, **settings)
        assert model.score.weight.shape == (labels, 8) and not model.score.weight.any()
        assert model.config.pad_token_id == pad and model.is_gradient_checkpointing and model.training
        assert model.score.bias is None
    saved = save(tmp_path / "reward", AutoModelForSequenceClassification, num_labels=2, pad_token_id=None)
    kept: Any = load_scalar_model(saved, n_labels=2, **settings)
    wanted = AutoModelForSequenceClassification.from_pretrained(saved)
    assert torch.equal(kept.score.weight, wanted.score.weight) and kept.score.weight.any()
    assert kept.config.pad_token_id == 0
    told = (
        f"k={saved}: score.weight has shape [2, 8] in its files, and [1, 8] by its config.json: save model and "
        "config.json together again"
    )
    assert refusal(load_scalar_model, saved, key="k", **settings) == told


ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_an_adapter_has_the_settings_of_the_recipe():
    cases: list[tuple[LoraConfig, dict[str, Any]]] = [
        (LoraConfig(), {"target_modules": {*ALL}}),
        (
            LoraConfig(r=3, alpha=7, targets=["q_proj", "mlp.down_proj"], rslora=True),
            {"r": 3, "lora_alpha": 7, "target_modules": {"q_proj", "mlp.down_proj"}, "use_rslora": True},
        ),
        (LoraConfig(r=2, dora=True), {"r": 2, "target_modules": {*ALL}, "use_dora": True}),
    ]
    for lora, changes in cases:
        model = with_adapter(random_model("llama").bfloat16(), lora, path="there")
        found = model.peft_config["default"]
        own = {"r": lora.r, "lora_alpha": lora.alpha, "use_rslora": False, "use_dora": False} | changes
        fixed = {"lora_dropout": 0.0, "target_parameters": None}
        fixed |= {"exclude_modules": None, "bias": "none"}
        assert {name: getattr(found, name) for name in own | fixed} == own | fixed
        assert getattr(found.task_type, "value", found.task_type) == "CAUSAL_LM" and model.training
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl"])
def test_an_adapter_reaches_the_tower_where_it_is_asked_to(family):
    language = "model.text_model." if family == "idefics3" else "model.language_model."
    for vision in (False, True):
        lora = LoraConfig(r=2, vision=vision)
        model = with_adapter(make_model(family), lora, path="there")
        adapted = {n.removeprefix("base_model.model.") for n, p in model.named_parameters() if p.requires_grad}
        outside = [name for name in adapted if not name.startswith(language)]
        assert bool(outside) == vision and len(adapted) > len(outside)
        assert not any("lm_head" in name for name in adapted)


def test_the_rank_is_at_most_the_width_of_the_narrowest_layer(tmp_path):
    path = save(tmp_path)
    trainer = TrainerConfig()
    for targets, width in ((["q_proj"], 8), (["k_proj"], 4), (["q_proj", "v_proj"], 4), ("all-linear", 4)):
        check_lora(ModelConfig(path=path, lora=LoraConfig(r=width, targets=targets)), trainer)
        wide = ModelConfig(path=path, lora=LoraConfig(r=width + 1, targets=targets))
        assert refusal(check_lora, wide, trainer) == (
            f"model.lora.r={width + 1} is above {width}, the width of the narrowest layer that gets an adapter: a rank "
            f"above it adds nothing, so lower it to {width} or less"
        )
    check_lora(ModelConfig(path="none"), trainer)
    for target in ("lm_head", "embed_tokens", "proj", "self_attn"):
        wrong = ModelConfig(path=path, lora=LoraConfig(targets=["q_proj", target]))
        assert refusal(check_lora, wrong, trainer) == (
            f"model.lora.targets names {target!r}, which is no linear layer below the head of model.path={path}, or "
            f"one whose weight a fused kernel reads: take some of {', '.join(ALL)}, or all-linear"
        )
    experts = ModelConfig(path=path, lora=LoraConfig(r=2, experts=True))
    assert refusal(check_lora, experts, trainer) == (
        f"model.lora.experts is true, and model.path={path} has no experts in tensors of three dimensions: leave it out"
    )
    sharded = TrainerConfig(strategy="deepspeed", zero_stage=3)
    assert refusal(check_lora, experts, sharded) == (
        "model.lora.experts is true, and with trainer.zero_stage=3 PEFT finds the experts sharded: set it to 2 or "
        "less, or trainer.strategy to fsdp2"
    )
    assert name_lora_targets(LoraConfig(r=3), path) == LoraConfig(r=3, targets=ALL)
    given = LoraConfig(targets=["q_proj"])
    assert name_lora_targets(given, path) is given


def test_all_linear_is_no_head_router_or_gate_of_one_output(tmp_path):
    model = meta_model(save(tmp_path))
    model.model.layers[0].mlp.gate = nn.Linear(8, 1, device="meta")
    model.model.layers[0].mlp.wide = nn.Linear(8, 2, device="meta")
    model.model.layers[0].other = nn.Module()
    model.model.layers[0].other.up_proj = nn.Embedding(2, 8, device="meta")
    assert linear_names(model, LoraConfig()) == sorted({*ALL, "mlp.up_proj", "wide"} - {"up_proj"})
    names = ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.wide", "model.norm"]
    assert [is_plain_linear(model, name) for name in names] == [False, False, True, False]


@pytest.fixture
def alone(tmp_path):
    """A process group of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield SequenceGroup(place=0, size=1, group=distributed.group.WORLD)
    distributed.destroy_process_group()


def test_a_group_of_one_rank_exchanges_with_itself(alone):
    q, k, v = (torch.randn(1, heads, 5, 3, requires_grad=True) for heads in (4, 2, 2))
    got = alone.to_heads(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(got, (q, k, v), strict=True))
    attended = q.transpose(1, 2)
    assert torch.equal(alone.to_positions(attended), attended)
    slopes = [torch.randn_like(x) for x in (q, k, v)]
    found = torch.autograd.grad(got, (q, k, v), slopes)
    assert all(torch.equal(a, b) for a, b in zip(found, slopes, strict=True))
    values = torch.tensor([1.0, 2.0])
    assert alone.sum(values).tolist() == [1.0, 2.0] and alone.sum(values) is not values


def test_values_of_a_rank_are_placed_among_those_of_all_tokens(alone):
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    mine = torch.tensor([False, True, False, True])
    whole = alone.gather(own, mine)
    assert whole.tolist() == [[0.0, 1.0, 0.0, 2.0], [0.0, 3.0, 0.0, 4.0]]
    [slope] = torch.autograd.grad(whole, own, torch.arange(8.0).view(2, 4))
    assert slope.tolist() == [[1.0, 3.0], [5.0, 7.0]]
    assert alone.gather(torch.zeros(2, 0), torch.zeros(0, dtype=torch.bool)).shape == (2, 0)
