"""Parameters that `trainer.freeze` names are not trained, and are saved and sent with the others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from algs.ppo import PPO
from algs.reward_model import RewardModel
from algs.sft import SFT
from configs.schema import SLConfig
from configs.trainer_schema import LoraConfig
from core.cluster.workers import Local
from core.errors import UserError
from driver.checkpoint import write_checkpoint
from driver.checkpoint_model import find_checkpoint_model, write_checkpoint_model
from driver.checks.explain import GIB, estimate_memory
from driver.checks.models import check_freeze
from driver.load_recipe import load_recipe
from modeling.freeze import find_frozen
from modeling.load import load_model
from modeling.saved_model import check_saved
from unit_tests.helpers.checkpoints import stand
from unit_tests.helpers.examples import families, with_values
from unit_tests.helpers.local_trainers import trainer_of
from unit_tests.helpers.models import random_model
from unit_tests.helpers.seeing import save_model
from unit_tests.helpers.shared_prefixes import laid_out

SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
PATTERNS = {
    # pattern: what the frozen names have in common, and how many there are in two layers
    "model.embed_tokens": ("model.embed_tokens.weight", 1),
    "*.mlp.experts": (".mlp.experts.", 4),
    "model.layers.1": ("model.layers.1.", 11),
    "*norm*": ("norm", 9),
    "*.layers.[0]": ("model.layers.0.", 11),
    "router": (".mlp.gate.weight", 2),
}


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("moe")
    random_model("qwen3_moe", **SIZES).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_a_parameter_a_module_or_a_word(pattern):
    model = random_model("qwen3_moe", **SIZES)
    common, number = PATTERNS[pattern]
    frozen = find_frozen(model, [pattern], path="here")
    assert len(frozen) == number and all(common in name for name in frozen), frozen
    assert len(find_frozen(model, [pattern, "lm_head"])) == number + 1, "patterns add up"


def test_a_module_is_no_beginning_of_another_name():
    model = random_model("llama", num_hidden_layers=11)
    assert {name.split(".")[2] for name in find_frozen(model, ["model.layers.1"], path="here")} == {"1"}


def test_a_tied_parameter_is_frozen_by_either_name():
    model = random_model("llama", tie_word_embeddings=True)
    both = {"model.embed_tokens.weight", "lm_head.weight"}
    assert find_frozen(model, ["lm_head"], path="here") == find_frozen(model, ["*.embed_tokens"], path="here") == both


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rest_is_trained_and_all_is_sent_and_saved(moe_path, tmp_path, dtype):
    patterns = ["router", "model.layers.0"]
    trainer = trainer_of(moe_path, SFT(), dtype=dtype, attention="auto", freeze=patterns)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.step([laid_out(families(), "shared")])
    fixed = {name for name in before if ".gate." in name or ".layers.0." in name}
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == before.keys() - fixed
    sent = {name for bucket in trainer.export_weights(2**20) for name, _ in bucket}
    assert sent == before.keys()
    trainer.save_model(tmp_path)
    check_saved(tmp_path, dtype=dtype)
    again = dict(load_model(str(tmp_path), dtype=dtype, attention="auto").named_parameters())
    assert all(torch.equal(again[name], p) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize("kind", ["patterns", "text of a vision model"])
def test_a_checkpoint_without_frozen_parts_becomes_a_model(moe_path, tmp_path, kind):
    settings: dict[str, Any] = {"model.path": moe_path, "model.images": "auto", "trainer.freeze": ["model.layers.0"]}
    if kind != "patterns":
        path = save_model(tmp_path / "seeing", "idefics3")
        settings = {"model.path": path, "model.images": "off", "trainer.freeze": []}
    path, images = settings["model.path"], settings["model.images"]
    trainer = trainer_of(path, SFT(), attention="auto", images=images, freeze=settings["trainer.freeze"])
    trainer.step([laid_out(families(), "shared")])
    recipe = {"settings": settings | {"model.dtype": "float32"}}
    made = asyncio.run(write_checkpoint(tmp_path, Local(trainer), replace(stand(1), recipe=recipe)))
    found = find_checkpoint_model(str(made))
    assert found is not None
    write_checkpoint_model(found, tmp_path / "written", trust_remote_code=False)
    again = dict(load_model(str(tmp_path / "written"), dtype="float32", attention="auto").named_parameters())
    assert all(torch.equal(again[name], p) for name, p in trainer.model.named_parameters())
    start = load_model(path, dtype="float32", attention="auto").named_parameters()
    frozen = {name for name, p in start if torch.equal(again[name], p)}
    assert frozen == {name for name, p in trainer.model.named_parameters() if not p.requires_grad} != set()


@pytest.mark.parametrize("lora", [None, LoraConfig(r=4)], ids=["whole", "adapter"])
def test_a_value_model_is_frozen_in_the_same_parts(tiny_path, lora):
    patterns = ["model.layers.0", *([] if lora else ["lm_head"])]  # a value model has no lm_head
    trainer = trainer_of(tiny_path, PPO(critic_lr=0.5), attention="auto", lora=lora, freeze=patterns)
    assert trainer.critic is not None
    critic: Any = trainer.critic.model
    before = {name: p.detach().clone() for name, p in critic.named_parameters()}
    torch.nn.init.normal_(critic.score.weight, std=0.1)
    trainer.step([laid_out(with_values(families()), "shared")])
    changed = {name for name, p in critic.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".layers.0." not in name}
    adapted = {name for name, p in trainer.model.named_parameters() if p.requires_grad and ".layers.0." in name}
    assert bool(adapted) == (lora is not None), "an adapter is in every layer"


REFUSED = {
    "*.mpl.*": r"^trainer\.freeze: '\*\.mpl\.\*' matches no parameter of model\.path=.*such as .*mlp",
    "model.layers.7": r"matches no parameter .* such as model\.layers\.\*\.",
    "router": r"^trainer\.freeze names router, and model\.path=.* has no router of experts: leave it out$",
    "vision": r"^trainer\.freeze names vision, and model\.path=.* has no vision tower, or is used for text only",
    "*": r"^trainer\.freeze=\['\*'\] freezes every parameter of model\.path=.*: name fewer$",
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_matches_nothing_or_all_is_refused(tiny_path, recipe, pattern):
    loaded = load_recipe(SLConfig, recipe({"model.path": tiny_path, "trainer.freeze": [pattern]}, kind="sl"), [])
    for refuse in (
        lambda: check_freeze(loaded.cfg, loaded.alg),
        lambda: estimate_memory(loaded),
        lambda: trainer_of(tiny_path, SFT(), freeze=[pattern]),
    ):
        with pytest.raises(UserError, match=REFUSED[pattern]):
            refuse()


def test_a_reward_model_has_no_language_model_head_to_freeze(tiny_path):
    with pytest.raises(UserError, match="'lm_head' matches no parameter"):
        trainer_of(tiny_path, RewardModel(), freeze=["lm_head"])
    trainer = trainer_of(tiny_path, RewardModel(), freeze=["model"])
    assert [name for name, p in trainer.model.named_parameters() if p.requires_grad] == ["score.weight"]


def test_an_adapter_without_a_value_model_reads_no_freeze(recipe):
    changes = {"trainer.freeze": ["router"], "model.lora.r": 4}
    with pytest.raises(UserError, match=r"^trainer\.freeze is set and would not be read, because with model\.lora all"):
        load_recipe(SLConfig, recipe(changes, kind="sl"), [])


def test_the_plan_of_a_run_counts_no_gradient_of_what_is_frozen(moe_path, recipe):
    whole, part = (
        estimate_memory(load_recipe(SLConfig, recipe({"model.path": moe_path, **changes}, kind="sl"), []))
        for changes in ({}, {"trainer.freeze": ["*.experts"]})
    )
    experts = sum(p.numel() for name, p in random_model("qwen3_moe", **SIZES).named_parameters() if ".experts." in name)
    assert (whole.gradients - part.gradients) * GIB == pytest.approx(4 * experts)
    assert whole.parameters == part.parameters
