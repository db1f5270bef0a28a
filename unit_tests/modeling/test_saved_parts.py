"""What is exported and written, part by part: tensors by name, an adapter beside its model, and the text of configs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from configs.trainer_schema import LoraConfig
from modeling.export import ExportedTensor, export_adapter, exported_tensors, get_weight, saved_buffers
from modeling.file_names import WeightExport
from modeling.lora import with_adapter
from modeling.saved_model import check_saved, save_exported, save_whole, write_stop_tokens
from unit_tests.helpers.models import random_model

TINY: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False, "pad_token_id": 0}


def make_tiny(auto: Any = AutoModelForCausalLM, **more: Any) -> Any:
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model("llama", **TINY | more), dtype=torch.float32)


def make_adapted(path: Path, **lora: Any) -> Any:
    """A saved model with an adapter of random numbers."""
    make_tiny().save_pretrained(path)
    model = with_adapter(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), LoraConfig(**lora), path="p")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    return model


def compute(tensors: list[ExportedTensor]) -> dict[str, Tensor]:
    return {t.name: t.compute() for t in tensors}


def test_a_stop_token_is_corrected_in_its_line_alone(tmp_path):
    make_tiny(eos_token_id=3).save_pretrained(tmp_path)
    before = {file.name: file.read_text().splitlines() for file in tmp_path.glob("*.json")}
    write_stop_tokens(tmp_path, eos=5, stops=[5])
    for name, lines in before.items():
        after = (tmp_path / name).read_text()
        changed = [(old, new) for old, new in zip(lines, after.splitlines(), strict=True) if old != new]
        assert changed == [('  "eos_token_id": 3,', '  "eos_token_id": 5,')] and after.endswith("}\n"), name
    assert before.keys() == {"config.json", "generation_config.json"}


def test_an_exported_tensor_has_the_shape_and_dtype_of_files():
    p = torch.arange(6.0).view(2, 3).requires_grad_()
    made = ExportedTensor(name="a", dtype=torch.bfloat16, parameters=[p, torch.ones(1)], make=lambda a, b: a + b)
    assert (made.shape, made.nbytes) == ((2, 3), 12)
    found = made.compute()
    assert found.dtype == torch.bfloat16 and found.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert not found.requires_grad
    assert made.compute(lambda x: 2 * x).tolist() == [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]]
    packed = ExportedTensor(name="a", dtype=torch.float32, parameters=[p], make=lambda a: a, unpacked=(4, 4))
    assert (packed.shape, packed.nbytes) == ((4, 4), 64)
    sharded: Any = SimpleNamespace(shape=(0,), ds_shape=torch.Size([5]))
    assert ExportedTensor(name="a", dtype=torch.float32, parameters=[sharded], make=lambda a: a).shape == (5,)


def test_buffers_of_files_are_exported_beside_the_parameters():
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "plain": nn.Linear(2, 2)})
    model.register_buffer("rope", torch.ones(2), persistent=False)
    buffers = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert [name for name, _ in saved_buffers(model)] == buffers
    exported = exported_tensors(model)
    assert exported.keys() == {"whole"}
    assert [t.name for t in exported["whole"]] == [name for name, _ in model.named_parameters()] + buffers
    assert all(t.compute().data_ptr() == t.parameters[0].data_ptr() for t in exported["whole"]), "no copies"


@pytest.mark.parametrize(
    "lora",
    [
        {"r": 2, "alpha": 6.0, "targets": ["q_proj", "down_proj"]},
        {"r": 4, "alpha": 6.0, "targets": ["q_proj"], "rslora": True},
        {"r": 2, "alpha": 6.0, "targets": ["q_proj"], "dora": True},
    ],
    ids=["lora", "rslora", "dora"],
)
def test_a_model_with_an_adapter_is_exported_merged_and_apart(tmp_path, lora):
    model = make_adapted(tmp_path / "base", **lora)
    if lora.get("dora"):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "magnitude" in name:
                    p.mul_(torch.linspace(0.5, 2.0, len(p)))
    exported = exported_tensors(model)
    merged, base = compute(exported["whole"]), load_file(tmp_path / "base" / "model.safetensors")
    assert {name: t.shape for name, t in merged.items()} == {name: t.shape for name, t in base.items()}
    own = compute(exported["adapter"])
    assert own.keys() == get_peft_model_state_dict(model).keys() == {t.name for t in export_adapter(model)}
    assert all(torch.equal(own[name], t) for name, t in get_peft_model_state_dict(model).items())
    scale = 6.0 / (2.0 if lora.get("rslora") else lora["r"])
    for name, tensor in base.items():
        layer = name.removesuffix(".weight")
        if name.split(".")[-2] not in lora["targets"]:
            assert torch.equal(merged[name], tensor), name
            continue
        a, b = (own[f"base_model.model.{layer}.lora_{kind}.weight"] for kind in "AB")
        want = tensor + scale * b @ a
        if lora.get("dora"):
            want *= (own[f"base_model.model.{layer}.lora_magnitude_vector"] / want.norm(dim=1))[:, None]
        torch.testing.assert_close(merged[name], want)
        adapted = model.get_submodule(f"base_model.model.{layer}")
        assert get_weight(adapted) is adapted.base_layer.weight
    of_base = [name for name, p in model.get_base_model().named_parameters() if not p.requires_grad]
    assert [*merged] == [name.replace(".base_layer", "") for name in of_base]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_saved_beside_a_merged_model_or_alone(tmp_path, dtype):
    model = make_adapted(tmp_path / "base", r=2, targets=["q_proj"])
    parts: Any = {scope: compute(tensors) for scope, tensors in exported_tensors(model).items()}
    parts = {scope: {name: t.to(dtype) for name, t in own.items()} for scope, own in parts.items()}
    umask = os.umask(0o027)
    try:
        assert save_exported(model, tmp_path / "both", parts) == []
        for _ in range(2):  # the second replaces the first
            assert save_exported(model, tmp_path / "runs" / "alone", {"adapter": parts["adapter"]}) == []
        assert os.umask(0o027) == 0o027, "it is as it was"
    finally:
        os.umask(umask)
    files = {str(p.relative_to(tmp_path)) for name in ("both", "runs") for p in (tmp_path / name).rglob("*.*")}
    of_adapter = ("adapter_config.json", "adapter_model.safetensors")
    whole = ("config.json", "generation_config.json", "model.safetensors")
    homes = {"both": whole, "both/adapter": of_adapter, "runs/alone": of_adapter}
    wanted = {f"{home}/{name}" for home, names in homes.items() for name in names}
    assert {name for name in files if not name.endswith(".md")} == wanted
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in files} == {0o640}
    config = json.loads((tmp_path / "both" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    for folder, scope, file in (
        ("both", "whole", "model"),
        ("both/adapter", "adapter", "adapter_model"),
        ("runs/alone", "adapter", "adapter_model"),
    ):
        with safe_open(tmp_path / folder / f"{file}.safetensors", framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        saved = load_file(tmp_path / folder / f"{file}.safetensors")
        assert saved.keys() == parts[scope].keys()
        assert all(torch.equal(saved[name], t) for name, t in parts[scope].items())
    name = str(dtype).removeprefix("torch.")
    assert [check_saved(tmp_path / n, dtype=name) for n in ("both", "runs/alone")] == [12 + 2, 2]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    again = PeftModel.from_pretrained(base, str(tmp_path / "both" / "adapter"))
    assert again.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")


def test_a_model_that_does_not_generate_has_no_generation_config(tmp_path):
    scalar = make_tiny(AutoModelForSequenceClassification, num_labels=1)
    tensors = {name: t + 1 for name, t in scalar.state_dict().items()}
    assert save_whole(scalar, tmp_path, tensors) == []
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], t) for name, t in tensors.items())
    assert not (tmp_path / "generation_config.json").exists()
    whole = make_tiny()
    whole.generation_config.temperature = 0.5
    [said] = save_whole(whole, tmp_path / "whole")
    assert said.endswith("(temperature=0.5): it is saved with do_sample=true")
    assert (tmp_path / "whole" / "generation_config.json").exists()


@pytest.mark.parametrize("lora", [None, {}, {"targets": ["q_proj"], "experts": True}], ids=str)
def test_experts_are_sent_under_the_names_of_files(tmp_path, lora):
    """A tensor in memory has the matrices of all experts, and the files have a tensor for each."""
    model = random_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    export = WeightExport(model if lora is None else with_adapter(model, LoraConfig(r=2, **lora), path="p"))
    groups = [group for bucket in export.split("files", 2**30) for group in bucket]
    sent = dict(pair for group in groups for pair in group.compute(lambda t: t.compute()))
    assert sent.keys() == files.keys() and any(".experts.3.up_proj" in name for name in sent)
    for name, tensor in files.items():
        torch.testing.assert_close(sent[name], tensor)
    assert [len(bucket) for bucket in export.split("files", 1)] == [1] * len(groups)
    whole = {t.name for t in export.tensors["whole"]}
    assert {t.name for group in groups for t in group.tensors} == whole and len(whole) < len(files)
    sizes = [group.nbytes for group in groups]
    assert sizes == [sum(t.nbytes for t in group.tensors) for group in groups]
    assert sum(sizes) == sum(t.nbytes for t in files.values())
