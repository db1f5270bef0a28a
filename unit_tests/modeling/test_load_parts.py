"""Parts of loading by themselves: the terminal, placing, ties, classifiers, names of the hub, and a missing part."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.utils import logging as hf_logging

from configs.trainer_schema import LoraConfig
from core.errors import UserError
from core.hub import describe_hub
from core.patches import read_attention
from modeling.hf_config import check_model_folder, choose_class, needs_images, read_config, vision_family
from modeling.layout_forecast import build_small, forecast_layout
from modeling.load import check_weights, count_labels, load_model, load_scalar_model
from modeling.model_files import explain_gap, find_model_file, find_own_head, read_headers
from modeling.pretrained import find_written_class, joins_rows, runs_own_code
from tools.zoo.models import BASE, ZOO
from unit_tests.helpers import seeing

TINY: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False, "pad_token_id": 0}
KIND: dict[str, Any] = {"dtype": "float32", "attention": "sdpa"}


def save(folder: Path, auto: Any = AutoModelForCausalLM, **more: Any) -> str:
    torch.manual_seed(0)
    auto.from_config(AutoConfig.for_model("llama", **TINY | more), dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(call: Any, *args: Any, **given: Any) -> str:
    with pytest.raises(UserError) as refused:
        call(*args, **given)
    return str(refused.value)


def test_loading_a_model_writes_nothing_to_the_terminal(tmp_path, capsys):
    path = save(tmp_path)
    hf_logging.enable_progress_bar()
    hf_logging.set_verbosity_warning()
    capsys.readouterr()
    load_scalar_model(path, **KIND)  # whose head is not in the files
    assert capsys.readouterr() == ("", "")
    assert not hf_logging.is_progress_bar_enabled() and hf_logging.get_verbosity() == logging.ERROR


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"attention": "none_such"}, 'Specified `attn_implementation="none_such"` is not supported.'),
        ({"content": b"no tensors"}, "Error while deserializing header:"),
        ({"content": None}, "Error no file named model.safetensors"),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_told_by_key_and_path(tmp_path, broken, told):
    path, file = save(tmp_path), tmp_path / "model.safetensors"
    if "content" in broken:
        file.unlink()
    if broken.get("content"):
        file.write_bytes(broken["content"])
    said = refusal(load_model, path, dtype="float32", attention=broken.get("attention", "sdpa"), key="k")
    assert said.startswith(f"k={path} cannot be loaded: {told}") and said.endswith(": save or download it again")


def test_a_model_is_placed_while_it_is_empty_and_then_filled(tmp_path):
    path, seen = save(tmp_path), list[tuple[str, bool]]()

    def place(model: Any) -> None:
        seen.append((type(model.get_output_embeddings()).__name__, all(p.is_meta for p in model.parameters())))

    plain, placed = (load_model(path, dtype="bfloat16", attention="eager", place=p) for p in (None, place))
    assert seen == [("ScoringHead", True)]
    for (name, p), other in zip(plain.named_parameters(), placed.parameters(), strict=True):
        assert torch.equal(p, other) and other.dtype == torch.bfloat16, name
    model: Any = placed
    assert not hasattr(model.config, "distributed_config") and model.config._attn_implementation == "eager"
    assert (type(placed).__name__, type(placed).__module__) == (type(plain).__name__, type(plain).__module__)
    assert not runs_own_code(placed) and find_written_class(plain) is type(plain)
    load_model(path, dtype="float32", attention="sdpa", place=place, lora=LoraConfig(r=2))
    assert len(seen) == 2
    load_model(path, dtype="float32", attention="sdpa", place=place, lora=LoraConfig(r=2, dora=True))
    assert len(seen) == 2, "the magnitudes of DoRA are norms of whole weights"
    load_scalar_model(path, place=place, **KIND)
    assert seen[2:] == [("NoneType", True)]


def test_a_tie_stays_only_where_the_files_have_no_head_of_their_own(tmp_path):
    tied, own = save(tmp_path / "tied", tie_word_embeddings=True), save(tmp_path / "own")
    edit(tmp_path / "own" / "config.json", tie_word_embeddings=True)
    for path, is_tied in ((tied, True), (own, False)):
        model: Any = load_model(path, **KIND)
        assert model.config.tie_word_embeddings == is_tied
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    assert torch.equal(model.lm_head.weight, load_file(tmp_path / "own" / "model.safetensors")["lm_head.weight"])


def test_a_classifier_of_text_is_the_class_of_transformers(tmp_path):
    saved = save(tmp_path / "saved", AutoModelForSequenceClassification, num_labels=1)
    for path in (save(tmp_path / "new"), saved):
        model = load_scalar_model(path, **KIND)
        assert type(model).__module__ == "transformers.models.llama.modeling_llama"
    check_weights(saved)


def test_a_name_of_the_hub_is_checked_when_it_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    check_weights("nobody/none")
    for read in (read_config, check_model_folder, needs_images):
        said = refusal(read, "nobody/none", key="k")
        assert said.startswith("k=nobody/none is no folder here, and no model that the hub or its cache gives (")
        assert said.endswith(f"); {describe_hub()}")
    Path("nobody/none").mkdir(parents=True)
    assert refusal(check_model_folder, "nobody/none", key="k") == (
        "k=nobody/none has no config.json: it is not a Hugging Face model folder"
    )


def test_a_clone_without_the_part_for_images_says_which_model_needs_it(tmp_path, monkeypatch):
    path = str(tmp_path)
    AutoConfig.for_model("qwen2_vl").save_pretrained(path)
    config = read_config(path)
    monkeypatch.setitem(sys.modules, "modeling.images.vision", None)
    lacks = "needs modeling/images/vision, which this clone lacks: restore it, or take a text model"
    assert refusal(vision_family, config) == f"model.path={path} {lacks}"
    assert refusal(vision_family, config, who="judge.model=m") == f"judge.model=m {lacks}"
    assert refusal(choose_class, config, path="p", key="k") == f"k=p {lacks}"
    assert refusal(needs_images, path, key="k") == f"k={path} {lacks}"
    assert not needs_images(path, key="k", images="off")
    assert vision_family(AutoConfig.for_model("llama")) is None


def test_a_forecast_names_the_key_of_the_model(tmp_path):
    path = str(tmp_path)
    settings = {"attention": "sdpa", "layout": "padded", "key": "k"}
    config = AutoConfig.for_model("gemma2", **TINY, head_dim=8, attn_logit_softcapping=0.01)
    config.save_pretrained(path)
    assert refusal(forecast_layout, path, **settings).startswith("k: padded rows (sdpa attention) differ by ")
    (tmp_path / "config.json").write_text("{")
    assert refusal(forecast_layout, path, **settings).startswith(f"k: {path}/config.json cannot be read")
    AutoConfig.for_model("clip").save_pretrained(path)
    for call in (forecast_layout, build_small):
        given = settings if call is forecast_layout else {"attention": "sdpa", "key": "k"}
        assert refusal(call, path, **given).startswith(f"k={path} is a clip model, and transformers has no class that ")


def test_the_small_model_of_one_that_sees_has_few_layers_of_text_alone(tmp_path):
    config = seeing.make_config("idefics3")
    config.text_config.num_hidden_layers, config.text_config.intermediate_size = 3, 200
    config.save_pretrained(tmp_path)
    model: Any = build_small(str(tmp_path), attention="auto")
    text = model.config.text_config
    assert (text.num_hidden_layers, text.intermediate_size, text.hidden_size) == (2, 64, 64)
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "image_size", "patch_size")
    assert all(getattr(model.config.vision_config, n) == getattr(config.vision_config, n) for n in kept)
    assert text._attn_implementation == "by_sequence" and model.config.image_token_id == config.image_token_id


def test_two_heads_stay_as_wide_as_they_are(tmp_path):
    AutoConfig.for_model("llama", **TINY | {"hidden_size": 72}).save_pretrained(tmp_path)
    model: Any = build_small(str(tmp_path), attention="sdpa")
    assert (model.config.hidden_size, model.config.num_attention_heads, model.config.num_key_value_heads) == (72, 2, 1)


def test_the_hub_is_asked_for_names_that_are_no_folders(tmp_path, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("modeling.hf_config.prepare_hub", asked.append)
    path = str(tmp_path)
    AutoConfig.for_model("llama", **TINY).save_pretrained(path)
    read_config(path, key="k")
    assert asked == []
    refusal(read_config, "nobody/none", key="k")
    assert asked == ["k=nobody/none"]


def test_a_model_that_sees_has_the_asked_attention_in_both_parts(tmp_path):
    path = seeing.save_model(tmp_path, "idefics3")
    for attention, of_text, of_tower in (("eager", "eager", "eager"), ("auto", "by_sequence", "sdpa")):
        model: Any = load_model(path, dtype="float32", attention=attention)
        parts = (model.config.get_text_config(), model.config.vision_config)
        assert [read_attention(part) for part in parts] == [of_text, of_tower]
    scalar: Any = load_scalar_model(path, dtype="bfloat16", attention="auto", gradient_checkpointing=True)
    assert type(scalar).__name__ == "Idefics3ForSequenceClassification" and scalar.training
    assert scalar.is_gradient_checkpointing and not scalar.score.weight.any() and scalar.score.out_features == 1
    assert scalar.score.weight.dtype == scalar.dtype == torch.bfloat16
    scalar.save_pretrained(tmp_path / "scalar")
    again: Any = load_scalar_model(str(tmp_path / "scalar"), dtype="bfloat16", attention="auto")
    assert type(again) is type(scalar) and count_labels(str(tmp_path / "scalar")) == 1
    check_weights(str(tmp_path / "scalar"))


def test_only_a_tensor_of_several_one_below_the_other_joins_rows():
    with torch.device("meta"):
        joined = AutoModelForCausalLM.from_config(AutoConfig.for_model("kimi_linear", **BASE | ZOO["kimi_linear"]))
        experts = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **BASE | ZOO["qwen3_moe"]))
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    assert [joins_rows(model) for model in (joined, experts, plain)] == [True, False, False]


def test_the_dtype_of_a_tensor_is_read_from_its_file(tmp_path):
    floats = {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    }
    for dtype in (*floats, torch.int8, torch.bool):
        save_file({"a": torch.zeros(2, 3, dtype=dtype)}, tmp_path / "x.safetensors")
        [(name, header)] = read_headers(tmp_path).items()
        assert (name, header.shape, header.dtype) == ("a", (2, 3), dtype if dtype in floats else None)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_a_mixture_is_one_by_any_name_of_its_number_of_experts(tmp_path, name):
    for number, is_mixture in ((0, False), (1, False), (2, True)):
        AutoConfig.for_model("llama", **TINY, **{name: number}).save_pretrained(tmp_path)
        assert explain_gap(str(tmp_path)).startswith("the model is a mixture of experts") == is_mixture


def test_a_file_of_a_model_of_the_hub_is_the_one_in_the_cache(monkeypatch):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda path, name: f"/cache/{path}/{name}")
    assert find_model_file("nobody/some", "config.json") == Path("/cache/nobody/some/config.json")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda path, name: None)
    assert find_model_file("nobody/some", "config.json") is None and find_own_head("nobody/some") is None


def test_a_reward_model_without_a_readable_config_is_told_by_its_key(tmp_path):
    (tmp_path / "config.json").write_text("{")
    for load in (load_model, load_scalar_model):
        assert refusal(load, str(tmp_path), key="k", **KIND).startswith(f"k: {tmp_path}/config.json cannot be read as")


def test_the_language_part_of_another_model_is_placed_too(tmp_path):
    """transformers has a class of the language part alone for it, which reads the config of the text."""
    text = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    text |= {"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text |= {"shared_expert_intermediate_size": 16, "linear_num_value_heads": 2, "linear_num_key_heads": 1}
    text |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
    text |= {"layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    placed: list[str] = []

    def place(model: Any) -> None:
        placed.append(type(model).__name__)

    plain, other = (load_model(str(tmp_path), **KIND, place=p) for p in (None, place))
    assert placed == [type(plain).__name__] == [type(other).__name__]
    for (name, p), q in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
