"""An adapter beside its model: what is refused, in whole sentences, and the merged numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from configs.eval_schema import EvalModelConfig
from core.errors import UserError
from modeling.merge import check_adapter, check_base, is_adapter, load_merged, merge_adapter
from modeling.saved_model import SavedModelWrong, check_saved

TINY: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
BY_HAND = "model.layers.0.self_attn.q_proj"
FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def folders(tmp_path) -> tuple[str, str]:
    """A model, and an adapter of its queries with random numbers."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY), dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped = get_peft_model(base, config)
    for name, p in wrapped.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(p)
    wrapped.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    wrapped.save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "base"), str(tmp_path / "adapter")


def refusal(call: Any, *args: Any, **given: Any) -> str:
    with pytest.raises(UserError) as refused:
        call(*args, **given)
    return str(refused.value)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_model_has_the_numbers_by_hand(folders, tmp_path, dtype):
    path, adapter = folders
    merged = load_merged(path, adapter, dtype=dtype, key="model.adapter")
    base = load_file(Path(path, "model.safetensors"))
    own = load_file(Path(adapter, FILES[1]))
    [a], [b] = ([t for name, t in own.items() if f"lora_{kind}" in name] for kind in "AB")
    wanted = base | {f"{BY_HAND}.weight": base[f"{BY_HAND}.weight"] + 3.0 * b @ a}
    found = dict(merged.named_parameters())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor.to(getattr(torch, dtype)), atol=1e-6, rtol=1e-2)
    merge_adapter(EvalModelConfig(path=path, dtype=dtype), adapter, tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], found[name]) for name in wanted)


def test_a_folder_that_is_no_adapter_is_refused(folders):
    _, adapter = folders
    check_adapter(adapter, key="k")
    assert is_adapter(adapter) and not is_adapter("x" * 5000)
    for content in ("[]", '"text"'):
        Path(adapter, FILES[0]).write_text(content)
        told = f"k: {adapter}/{FILES[0]} must hold an object: save the adapter again"
        assert refusal(check_adapter, adapter, key="k") == told
    for name in reversed(FILES):
        Path(adapter, name).unlink()
        told = f"k={adapter} has no {name}: name the folder of an adapter in PEFT's format"
        assert refusal(check_adapter, adapter, key="k") == told
    assert not is_adapter(adapter)


def test_an_adapter_of_another_model_is_refused(folders, tmp_path):
    path, adapter = folders
    config = Path(adapter, FILES[0])
    check_base(adapter, path, key="k")
    (tmp_path / "link").symlink_to(path)
    check_base(adapter, str(tmp_path / "link"), key="k")
    told = (
        f"k={adapter} is an adapter of {{}}, and model.path is {path}: name an adapter of model.path; if both are the "
        f"same model, correct base_model_name_or_path in {config}"
    )
    for other in (str(tmp_path), "some/model"):
        edit(config, base_model_name_or_path=other)
        assert refusal(check_base, adapter, path, key="k") == told.format(other)
    for none in ("", None, 3):
        edit(config, base_model_name_or_path=none)
        assert refusal(check_base, adapter, path, key="k") == (
            f"k={adapter}: {FILES[0]} names no base_model_name_or_path, the model that it was trained on: add it"
        )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop(sorted(t)[0]), "{} is missing in its file"),
        (lambda t: t.update({"z": torch.zeros(1)}), "z is in its file only"),
        (
            lambda t: t.update({sorted(t)[0]: torch.zeros(3, 4)}),
            "{} has shape [3, 4] in its file, and [2, 8] is expected",
        ),
    ],
)
def test_tensors_that_are_not_the_adapters_are_refused(folders, change, told):
    path, adapter = folders
    file = Path(adapter, FILES[1])
    tensors = load_file(file)
    first = sorted(tensors)[0]
    assert check_saved(Path(adapter), dtype="float32") == 2
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    whole = (
        f"k={adapter} cannot be merged into model.path={path} ({told.format(first)}): name the model that it was "
        "trained on"
    )
    assert refusal(check_base, adapter, path, key="k") == whole
    if "shape" not in told:  # of which PEFT raises an error of its own
        assert refusal(load_merged, path, adapter, dtype="float32", key="k") == whole
    with pytest.raises(SavedModelWrong) as wrong:
        check_saved(Path(adapter), dtype="float32")
    assert str(wrong.value) == (
        f"the model was saved wrongly: {told.format(first)}; what was written is left in {adapter}"
    )


def test_an_adapter_that_is_not_finite_is_not_merged(folders):
    path, adapter = folders
    file = Path(adapter, FILES[1])
    save_file({name: t * torch.nan for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    said = refusal(load_merged, path, adapter, dtype="float32", key="k")
    assert said.startswith(f"k={adapter} cannot be merged into model.path={path} (NaNs detected in the merged weights")
    with pytest.raises(SavedModelWrong) as wrong:
        check_saved(Path(adapter), dtype="float16")
    first = min(load_file(file))
    assert f"{first} has dtype float32, and float16 is expected" in str(wrong.value)


def test_a_merged_model_is_read_back(folders, tmp_path, monkeypatch):
    path, adapter = folders
    monkeypatch.setattr("modeling.merge.save_whole", lambda model, folder: model.double().save_pretrained(folder))
    with pytest.raises(SavedModelWrong, match="has dtype float64, and float32 is expected"):
        merge_adapter(EvalModelConfig(path=path, dtype="float32"), adapter, tmp_path / "out")
