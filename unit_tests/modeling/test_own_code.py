"""A model with code of its own passes every door of this package where its code may run, and none where it may not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from configs.eval_schema import EvalModelConfig
from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from core.errors import UserError
from modeling.hf_config import check_model_folder, max_positions, meta_model, needs_images, read_config
from modeling.layout_forecast import build_small, forecast_layout
from modeling.load import check_weights, count_labels, load_empty, load_model, load_scalar_model
from modeling.lora import check_lora, name_lora_targets
from modeling.media import MediaLoader
from modeling.merge import check_base, load_merged, merge_adapter
from modeling.model_files import explain_gap, find_own_head
from modeling.nf4 import check_quantization
from modeling.pretrained import runs_own_code
from modeling.saved_model import check_saved
from unit_tests.helpers import seeing

CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
class Config(LlamaConfig):
    model_type = "own-llama"
class Model(LlamaForCausalLM):
    config_class = Config
class Scalar(LlamaPreTrainedModel):
    config_class = Config
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = torch.nn.Linear(config.hidden_size, 1, bias=False)
        self.post_init()
class Nameless(Scalar):
    def __init__(self, config):
        super().__init__(config)
        self.value = self.score
        del self.score
class Failing(Model):
    def __init__(self, config):
        from safetensors import SafetensorError
        raise {error}("kaput")
"""
NAMES = {
    "AutoConfig": "own.Config",
    "AutoModelForCausalLM": "own.Model",
    "AutoModelForSequenceClassification": "own.Scalar",
}
TINY: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
TINY |= {"max_position_embeddings": 64, "pad_token_id": 0}
TRUSTS: dict[str, Any] = {"trust_remote_code": True}
KIND: dict[str, Any] = {"dtype": "float32", "attention": "eager"}


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def save_own(folder: Path, *, error: str = "ValueError", **names: str) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY)).save_pretrained(folder)
    (folder / "own.py").write_text(CODE.format(error=error))
    edit(folder / "config.json", model_type="own-llama", architectures=["Model"], auto_map=NAMES | names)
    return str(folder)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> str:
    return save_own(tmp_path_factory.mktemp("own"))


def name(made: Any) -> str:
    return type(made).__name__


ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
DOORS: dict[str, tuple[Callable[..., Any], Any]] = {
    "config": (lambda path, **given: name(read_config(path, **given)), "Config"),
    "empty": (lambda path, **given: name(meta_model(path, **given)), "Model"),
    "folder": (check_model_folder, None),
    "positions": (max_positions, 64),
    "images": (needs_images, False),
    "labels": (count_labels, 0),
    "files": (check_weights, None),
    "empty with files": (lambda path, **given: name(load_empty(path, **given)), "Model"),
    "model": (lambda path, **given: name(load_model(path, **KIND, **given)), "Model"),
    "reward model": (lambda path, **given: name(load_scalar_model(path, **KIND, **given)), "Scalar"),
    "head": (find_own_head, None),
    "gap": (explain_gap, ""),
    "targets": (lambda path, **given: name_lora_targets(LoraConfig(), path, **given).targets, ALL),
    "adapter": (
        lambda path, **given: check_lora(ModelConfig(path=path, lora=LoraConfig(r=2), **given), TrainerConfig()),
        None,
    ),
    "four bits": (
        lambda path, **given: check_quantization(
            ModelConfig(path=path, lora=LoraConfig(merge_on_save=True), quantization="nf4", **given)
        ),
        None,
    ),
    "small": (lambda path, **given: name(build_small(path, attention="eager", **given)), "Model"),
    "forecast": (
        lambda path, **given: getattr(forecast_layout(path, attention="eager", layout="padded", **given), "level", ""),
        "padded",
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_door_runs_the_code_of_a_model_only_if_it_may(own, door):
    if door == "four bits":
        pytest.importorskip("bitsandbytes")
    enter, found = DOORS[door]
    assert enter(own, **TRUSTS) == found
    with pytest.raises(UserError) as refused:
        enter(own)
    assert str(refused.value) == (
        f"model.path={own} comes with code of its own, which does not run by default: read the code, then set "
        "model.trust_remote_code=true, or take another model"
    )


def test_the_key_that_lets_code_run_is_named(own):
    for key, section in (("reward.settings.model", "reward.settings"), ("judge.model", "model"), ("rewards", "model")):
        with pytest.raises(UserError) as refused:
            read_config(own, key=key)
        assert str(refused.value).startswith(f"{key}={own} comes with code of its own, which does not run by default")
        assert str(refused.value).endswith(f"then set {section}.trust_remote_code=true, or take another model")


def test_a_saved_model_with_its_own_code_is_read_back_and_merged(own, tmp_path):
    assert check_saved(Path(own), dtype="float32", **TRUSTS) == 12
    adapter, out = str(tmp_path / "adapter"), tmp_path / "out"
    wrapped: Any = load_model(own, lora=LoraConfig(r=2), **KIND, **TRUSTS)
    assert runs_own_code(wrapped) and runs_own_code(load_model(own, **KIND, **TRUSTS))
    wrapped.save_pretrained(adapter)
    assert check_saved(Path(adapter), dtype="float32", **TRUSTS) == 14
    check_base(adapter, own, key="k", **TRUSTS)
    assert name(load_merged(own, adapter, dtype="float32", key="k", **TRUSTS)) == "Model"
    merge_adapter(EvalModelConfig(path=own, dtype="float32", **TRUSTS), adapter, out)
    assert check_saved(out, dtype="float32", **TRUSTS) == 12 and (out / "own.py").is_file()
    for read in (
        partial(check_base, adapter, own, key="k"),
        partial(load_merged, own, adapter, dtype="float32", key="k"),
        partial(check_saved, Path(adapter), dtype="float32"),
    ):
        with pytest.raises(UserError, match="comes with code of its own"):
            read()


def test_a_head_that_its_config_ties_is_found_in_own_code_too(own, tmp_path):
    shutil.copytree(own, tmp_path / "tied")
    edit(tmp_path / "tied" / "config.json", tie_word_embeddings=True)
    path = str(tmp_path / "tied")
    assert find_own_head(path, **TRUSTS) == "lm_head.weight"
    assert explain_gap(path, **TRUSTS).startswith("the head is tied in the config and not in the file, which holds lm")


def test_a_model_with_its_own_code_is_loaded_whole(own):
    """Only classes of transformers can be sharded while they are empty."""
    placed: list[Any] = []
    model = load_model(own, place=placed.append, **KIND, **TRUSTS)
    assert placed == [] and name(model) == "Model" and not any(p.is_meta for p in model.parameters())


def test_a_known_config_beside_own_code_is_refused_by_key_and_path(tmp_path):
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", auto_map={"AutoModelForCausalLM": "own.Model"})
    with pytest.raises(UserError) as refused:
        load_model(str(tmp_path), key="k", **KIND)
    assert str(refused.value).startswith(
        f"k={tmp_path} comes with code of its own, which does not run by default: read"
    )


def test_own_code_without_a_layer_named_score_is_refused(tmp_path):
    path = save_own(tmp_path, AutoModelForSequenceClassification="own.Nameless")
    edit(tmp_path / "config.json", architectures=["Nameless"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors | {"value.weight": torch.zeros(1, 16)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as refused:
        load_scalar_model(path, key="k", **KIND, **TRUSTS)
    assert str(refused.value) == (
        f"k={path} comes with code whose sequence classifier has no linear layer named score, from which rewards and "
        "values are read: name it so"
    )


@pytest.mark.parametrize("error", ["OSError", "ValueError", "ImportError", "RuntimeError", "SafetensorError"])
def test_an_error_while_a_model_is_loaded_is_one_sentence(tmp_path, error):
    path = save_own(tmp_path, error=error, AutoModelForCausalLM="own.Failing")
    with pytest.raises(UserError) as refused:
        load_model(path, key="k", **KIND, **TRUSTS)
    assert str(refused.value) == f"k={path} cannot be loaded: kaput: save or download it again"


IMAGES = """
from transformers import Idefics3ImageProcessorPil
class Own(Idefics3ImageProcessorPil):
    pass
"""


def test_an_image_processor_with_its_own_code_runs_only_if_it_may(tmp_path):
    path = seeing.save_model(tmp_path, "idefics3")
    (tmp_path / "own.py").write_text(IMAGES)
    edit(
        tmp_path / "preprocessor_config.json",
        image_processor_type="Own",
        auto_map={"AutoImageProcessor": "own.Own"},
    )
    model: Any = SimpleNamespace(config=read_config(path), dtype=torch.float32)
    with pytest.raises(UserError) as refused:
        MediaLoader(model, path, device="cpu")
    assert str(refused.value) == (
        f"model.path={path} comes with code of its own, which does not run by default: read the code, then set "
        "model.trust_remote_code=true, or take another model"
    )
    loader = MediaLoader(model, path, device="cpu", **TRUSTS)
    assert loader.images is not None and name(loader.images.processor.images) == "Own"
