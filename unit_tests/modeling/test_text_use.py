"""Models that also read images, of families that are not known here, are trained on text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma4AudioConfig

from algs.sft import SFT
from configs.data_schema import TemplateConfig
from configs.schema import RLConfig
from configs.trainer_schema import LoraConfig, ModelConfig
from core.errors import UserError
from data_feeds.chat.template_args import make_tokenizer
from driver.checks.engine import check_images
from driver.load_recipe import load_recipe
from modeling.attention import BY_SEQUENCE, set_attention
from modeling.forward import forward
from modeling.hf_config import is_text_use, needs_images, read_config
from modeling.layout_probe import find_probe
from modeling.load import check_weights, load_model
from modeling.model_inputs import Layout
from modeling.probe_rows import make_batch
from modeling.text_use import leave_out, list_unused
from rollouts.engines.base import EngineConfig
from rollouts.engines.vllm_support.architectures import can_import
from rollouts.engines.vllm_support.settings import engine_args, find_use
from tools.zoo.models import make_model
from unit_tests.helpers import seeing
from unit_tests.helpers.examples import families
from unit_tests.helpers.local_trainers import trainer_of
from unit_tests.helpers.seeing import SOFT, draw_image, make_config, save_model
from unit_tests.helpers.shared_prefixes import check_alike, laid_out

pytestmark = pytest.mark.one_core

TEXT: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL_IMAGES = {"image_size": 28, "patch_size": 14}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": VISION | SMALL_IMAGES | {"head_dim": 16},
    },
    "qwen3_5_moe": {
        "text_config": TEXT | DELTA | EXPERTS,
        "vision_config": QWEN | {"num_position_embeddings": 16},
    },
}
WHOLE = ["mistral3"]
"""Families that transformers loads whole."""


def save(folder: Path, family: str) -> str:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_they_load_and_give_what_each_sample_has_alone(tmp_path, family):
    path = save(tmp_path, family)
    assert is_text_use(read_config(path)) and not needs_images(path)
    check_weights(path)
    model: Any = load_model(path, dtype="float32", attention="auto")
    assert find_probe(model).level == "shared", find_probe(model).describe()
    unused = list_unused(model)
    assert bool(unused) == (family in WHOLE)
    for name, p in model.named_parameters():
        p.requires_grad_(name not in unused)
    check_alike(model, families(), tolerance=5e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_trains_the_language_part_alone_and_the_model_loads_again(tmp_path, family):
    path = save(tmp_path / "start", family)
    trainer = trainer_of(path, SFT(), attention="auto")
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.step([laid_out(families(), "shared")])
    unused = {*list_unused(trainer.model)}
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and not changed & unused
    sent = {name for bucket in trainer.export_weights(2**20) for name, _ in bucket}
    assert changed <= sent and not sent & unused
    trainer.save_model(tmp_path / "model")
    check_weights(str(tmp_path / "model"))
    again = dict(load_model(str(tmp_path / "model"), dtype="float32", attention="auto").named_parameters())
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], p) for name, p in trainer.model.named_parameters())


def test_an_adapter_is_of_the_language_part(tmp_path):
    model = load_model(save(tmp_path, "mistral3"), dtype="float32", attention="auto", lora=LoraConfig(r=4))
    adapted = [name for name, p in model.named_parameters() if p.requires_grad]
    assert adapted and all("language_model" in name for name in adapted)


def test_a_model_that_reads_images_does_not_train_its_part_for_sound():
    config = make_config("gemma4")
    config.audio_config = Gemma4AudioConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    unused = list_unused(model)
    assert {name.split(".")[1] for name in unused} == {"audio_tower", "embed_audio"}
    config.audio_config = None
    assert list_unused(model) == []


@pytest.mark.parametrize(
    ("images", "parts"), [("auto", {"vision_tower", "embed_vision", "language_model"}), ("off", {"language_model"})]
)
def test_engines_get_no_tensor_of_a_part_that_nothing_reaches(images, parts):
    """The towers of small models of Gemma 4 have bounds of activations, which are no parameters."""
    model = seeing.make_small_gemma4()
    [sent] = leave_out([[*model.state_dict().items()]], list_unused(model, images))
    assert {name.split(".")[1] for name, _ in sent if name != "lm_head.weight"} == parts
    assert any(name.endswith("layer_scalar") for name, _ in sent)


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma4", marks=pytest.mark.slow)])
def test_a_known_family_may_be_used_for_text(tmp_path, family):
    path = save_model(tmp_path, family)
    trainer = trainer_of(path, SFT(), attention="auto", images="off")
    unused = {*list_unused(trainer.model, "off")}
    assert unused and not list_unused(trainer.model)
    assert not any(p.requires_grad for name, p in trainer.model.named_parameters() if name in unused)
    sent = {name for bucket in trainer.export_weights(2**20) for name, _ in bucket}
    assert sent and not sent & unused
    assert trainer.media.images is None and "used for text only" in trainer.describe_layout().measured
    data = TemplateConfig(chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for images in ("auto", "off"):
        reads = make_tokenizer(ModelConfig(path=path, images=images), data).images is not None
        config = EngineConfig(model_path=path, temperature=1.0, max_model_len=8, stop_token_ids=(), images=images)
        without_tower = find_use(config)[1]
        args = engine_args(config, on_cpu=True, sees=reads, text_only=without_tower)
        assert args.get("language_model_only", False) == without_tower
        assert (reads, without_tower) == ((True, False) if images == "auto" else (False, True))


@pytest.mark.parametrize("family", SOFT)
def test_image_tokens_without_images_attend_causally(family):
    """A policy used for text may sample them, and no engine knows an image then."""
    model = seeing.make_model(family)
    batch = make_batch([torch.tensor([40, SOFT[family], SOFT[family], SOFT[family], 41])])
    batch = replace(batch, has_bare_images=False)
    with torch.no_grad():
        logits = model(batch.input_ids[None]).logits[0, :-1]
        want = logits.float().log_softmax(-1).gather(-1, batch.labels[:, None])[:, 0]
        for attention in ("sdpa", BY_SEQUENCE):
            set_attention(model, attention)
            for layout in get_args(Layout):
                got = forward(model, model, batch, layout=layout, temperature=1.0).logp
                torch.testing.assert_close(got, want, msg=f"{attention}, {layout}")


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5_text"])
def test_vllm_without_torchvision_is_refused_before_the_start(tmp_path, recipe, family):
    if family == "qwen3_5_text":  # a folder of the text model alone
        make_model(family, tmp_path / "text")
    path = str(tmp_path / "text") if family == "qwen3_5_text" else save(tmp_path, family)
    cfg = load_recipe(RLConfig, recipe({"model.path": path, "rollout.engine": "vllm"}), []).cfg
    if not can_import("torchvision"):
        with pytest.raises(UserError, match=rf"is a {family} model, which vLLM loads only with torchvision"):
            check_images(cfg)
    else:
        check_images(cfg)


def test_names_of_files_are_left_out_too():
    one, other = torch.zeros(1), torch.ones(1)
    buckets = [[("vision.w", one), ("model.text.w", other)], [("model.vision.w", one)]]
    assert [*leave_out(buckets, ["model.vision.w"])] == [[("model.text.w", other)]]


def test_a_sample_with_an_image_is_refused(tmp_path):
    trainer = trainer_of(save(tmp_path, "mistral3"), SFT(), attention="auto")
    [batch] = laid_out(families(), "packed")
    with pytest.raises(UserError, match="is a text model, or used as one here, and a sample has images"):
        trainer.load(replace(batch, images=(draw_image(0),)))
