"""Training of models that see: every loss has the gradient that transformers gives it, and parts are frozen by keys.

Keys whose effect is seen here: trainer.freeze, model.lora.vision.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoImageProcessor

import main_rl
from algs.base import Algorithm
from algs.dpo import DPO
from algs.grpo import GRPO
from algs.kto import KTO
from algs.ppo import PPO
from algs.reward_model import RewardModel, append_scored_token
from algs.sft import SFT
from configs.schema import SLConfig
from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from core.errors import RunStopped, UserError
from core.types.messages import Message
from core.types.samples import Batch, Group, Policy, Prompt, Sample
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.packing.batches import Plan, plan_update
from driver.checks.explain import GIB, describe_memory, estimate_memory
from driver.checks.explain_images import measure_vision
from driver.load_recipe import load_recipe
from modeling.export import saved_buffers
from modeling.images.processor import ImageProcessor
from modeling.images.vision import VISION_FAMILIES
from modeling.load import load_model, load_scalar_model
from modeling.saved_model import check_saved
from rewards import reward_model
from trainers.local import LocalTrainer
from unit_tests.helpers.examples import a_changed, run_here
from unit_tests.helpers.image_models import say
from unit_tests.helpers.plain_vision import draw, load_plain, make_seeing
from unit_tests.helpers.seeing import (
    MARKED,
    make_config,
    make_model,
    plain_inputs,
    plain_logp,
    save_model,
    seeing_groups,
)

pytestmark = [pytest.mark.one_core, pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).parent.parent.parent
SGD = {"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 0.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of saved models, by family."""
    made: dict[str, str] = {}

    def find(family: str) -> str:
        if family not in made:
            made[family] = save_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return find


def trainer_of(path: str, alg: Algorithm, *, lora: LoraConfig | None = None, **changes: Any) -> LocalTrainer:
    model = ModelConfig(path=path, dtype="float32", lora=lora)
    return LocalTrainer(model, TrainerConfig(**SGD | changes), alg, temperature=0.7, total_updates=10)


def credited(alg: Algorithm, groups: list[Group]) -> list[Group]:
    """Samples with the columns that the algorithm requires, by chance, and what it makes of them."""
    rng = np.random.default_rng(0)

    def fill(sample: Any) -> Any:
        columns = {name: rng.normal(-4, 0.3, len(sample.token_ids)).tolist() for name in sorted(alg.required_columns)}
        return a_changed(sample, columns=columns, advantage=None)

    return alg.compute_advantages([[fill(s) for s in group] for group in groups])


def groups_for(alg: Algorithm, processor: ImageProcessor) -> list[Group]:
    groups = seeing_groups(processor)
    if isinstance(alg, DPO | RewardModel):
        groups = [[replace(g[0], reward=1.0), replace(g[1], reward=0.0)] for g in groups]
    if isinstance(alg, KTO):
        groups = [[replace(g[0], reward=float(n != 1)), replace(g[1], reward=None)] for n, g in enumerate(groups)]
    if isinstance(alg, RewardModel):
        groups = [[append_scored_token(replace(s, advantage=None)) for s in g] for g in groups]
    return credited(alg, groups)


def plan_of(alg: Algorithm, groups: list[Group], max_tokens: int, *, shared: bool) -> Plan:
    whole = {"whole_groups": alg.whole_groups, "whole_episodes": alg.whole_episodes}
    return plan_update(groups, alg.loss_norm, max_tokens, padded=not shared, share_prefixes=shared, horizon=20, **whole)


def in_one_row(alg: Algorithm, groups: list[Group]) -> tuple[list[Sample], Batch]:
    """All samples in the order of the batch that holds them."""
    plan = plan_of(alg, groups, 10_000, shared=False)
    [[batch]], [[chosen]] = plan.batches(), plan.bins
    return [plan.samples[i] for i in chosen], batch


def in_pieces(alg: Algorithm, groups: list[Group]) -> list[Batch]:
    """The smallest micro-batches that hold all samples, with shared beginnings."""
    for max_tokens in range(50, 1000, 25):
        with suppress(RunStopped):
            pieces = plan_of(alg, groups, max_tokens, shared=True).batches()[0]
            assert len(pieces) > 1 and any(b.images for b in pieces)
            return pieces
    raise AssertionError("nothing fits")


ALGS = [SFT(), GRPO(), GRPO(loss_norm="sequence", entropy_coef=0.0), DPO(), KTO()]


@pytest.mark.slow
@pytest.mark.parametrize("family", MARKED)
@pytest.mark.parametrize("alg", ALGS, ids=lambda a: f"{type(a).__name__}-{a.loss_norm}")
def test_the_gradient_of_every_loss_is_that_of_transformers(folders, family, alg):
    """Independent of our rows, media and positions: transformers has one sequence at a time."""
    path = folders(family)
    processor = ImageProcessor(path)
    groups = groups_for(alg, processor)
    plain: Any = make_model(family, "eager")
    samples, whole = in_one_row(alg, groups)
    logp = torch.cat([plain_logp(plain, processor, s, 0.7) for s in samples]).float()
    loss, _ = alg.objective(Policy(logp=logp), whole.tokens)
    slopes = torch.autograd.grad((loss * whole.tokens.weight).sum(), list(plain.parameters()))
    expected = torch.cat([g.flatten() for g in slopes])

    pieces = in_pieces(alg, groups)
    trainer = trainer_of(path, alg)
    before = trainer.flatten_weights()
    metrics = trainer.step([pieces])
    changed = before - trainer.flatten_weights()
    got, of_buffers = changed[: len(expected)], changed[len(expected) :]
    assert (got - expected).norm() <= 1e-4 * expected.norm() and not of_buffers.any()
    assert metrics["loss"] == pytest.approx((loss * whole.tokens.weight).sum().item(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl"])
@pytest.mark.parametrize("alg", [PPO(critic_lr=0.5), RewardModel()], ids=lambda a: type(a).__name__)
def test_value_and_reward_models_learn_what_transformers_says(folders, family, alg):
    path = folders(family)
    processor = ImageProcessor(path)
    groups = groups_for(alg, processor)
    trainer = trainer_of(path, alg)
    learner = trainer.policy if trainer.critic is None else trainer.critic
    scalar: Any = learner.model
    nn.init.normal_(scalar.score.weight, std=0.1)
    plain: Any = make_model(family, "eager")
    head = scalar.score.weight.detach().clone().requires_grad_()
    values = []
    samples, whole = in_one_row(alg, groups)
    for s in samples:
        hidden = plain.model(**plain_inputs(plain, processor, s)).last_hidden_state[0]
        values += [(hidden[t - 1] @ head.T)[0] for t, yes in enumerate(s.loss_mask) if yes]
    loss, _ = alg.value_loss(torch.stack(values), whole.tokens)
    body = [p for n, p in plain.named_parameters() if n != "lm_head.weight"]
    slopes = torch.autograd.grad((loss * whole.tokens.weight).sum(), [*body, head])
    expected = torch.cat([g.flatten() for g in slopes])

    before = torch.cat([p.detach().flatten().clone() for p in scalar.parameters()])
    trainer.step([in_pieces(alg, groups)])
    got = before - torch.cat([p.detach().flatten() for p in scalar.parameters()])
    rate = 1.0 if alg.value_lr is None else alg.value_lr
    assert (got / rate - expected).norm() <= 1e-3 * expected.norm()


def changed_parts(trainer: LocalTrainer, before: dict[str, torch.Tensor]) -> set[str]:
    after = {name: tensor for bucket in trainer.export_weights(2**28) for name, tensor in bucket}
    return {name for name in after if not torch.equal(after[name], before[name])}


def weights_of(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in trainer.export_weights(2**28) for name, tensor in bucket}


@pytest.mark.parametrize("family", MARKED)
def test_a_frozen_tower_keeps_its_weights_and_the_connector_learns(folders, family):
    path, alg, parts = folders(family), SFT(), VISION_FAMILIES[family]
    groups = groups_for(alg, ImageProcessor(path))
    pieces = in_pieces(alg, groups)
    changed = {}
    for name, freeze in {"train": [], "frozen": ["vision"]}.items():
        trainer = trainer_of(path, alg, freeze=freeze)
        before = weights_of(trainer)
        tensors = [*make_model(family).named_parameters(), *saved_buffers(make_model(family))]
        assert {*before} == {name for name, _ in tensors}, "all of it is saved and sent"
        trainer.step([pieces])
        changed[name] = changed_parts(trainer, before)
    inside = {n for n in before if parts.in_tower(n)}
    connector = {n for n in before if parts.in_vision(n)} - inside
    assert inside and connector
    assert changed["frozen"] & inside == set()
    assert connector <= changed["frozen"] and changed["train"] >= changed["frozen"]
    assert len(changed["train"] & inside) > 0.8 * len(inside)


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_adapters_are_in_the_language_part_unless_asked_for(folders, family, targets, tmp_path):
    path, alg, parts = folders(family), SFT(), VISION_FAMILIES[family]
    groups = groups_for(alg, ImageProcessor(path))
    for vision in (False, True):
        if vision and targets != "all-linear":
            continue
        lora = LoraConfig(r=4, targets=targets, vision=vision, merge_on_save=True)
        trainer = trainer_of(path, alg, lora=lora)
        before = weights_of(trainer)
        trainer.step([in_pieces(alg, groups)])
        trainer.step([in_pieces(alg, groups)])  # B begins at zero, and A learns from then on
        changed = changed_parts(trainer, before)
        outside = {name for name in changed if not parts.in_language(name)}
        assert changed - outside and bool(outside) == vision
        assert "lm_head.weight" not in changed
        folder = tmp_path / str(vision)
        trainer.save_model(folder)
        check_saved(folder, dtype="float32")
        merged = dict(load_model(str(folder), dtype="float32", attention="auto").named_parameters())
        torch.testing.assert_close(merged, weights_of(trainer))


@pytest.mark.parametrize("family", ["idefics3", "qwen2_vl"])
def test_a_saved_model_is_whole_and_a_checkpoint_goes_on_to_the_bit(folders, family, tmp_path):
    path, alg = folders(family), SFT()
    groups = groups_for(alg, ImageProcessor(path))
    pieces = in_pieces(alg, groups)
    trainer = trainer_of(path, alg, optimizer="adamw", lr=1e-3, freeze=["vision"])
    trainer.step([pieces])
    (tmp_path / "state").mkdir()
    trainer.save_state(tmp_path / "state")
    trainer.save_model(tmp_path / "model")
    check_saved(tmp_path / "model", dtype="float32")
    ImageProcessor(path).save(tmp_path / "model")
    saved = weights_of(trainer)
    loaded = dict(load_model(str(tmp_path / "model"), dtype="float32", attention="auto").named_parameters())
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    again = trainer_of(path, alg, optimizer="adamw", lr=1e-3, freeze=["vision"])
    again.load_state(tmp_path / "state")
    assert again.step([pieces]) == trainer.step([pieces])
    assert torch.equal(again.flatten_weights(), trainer.flatten_weights())


def test_the_plan_of_a_run_knows_the_vision_part(folders, recipe):
    path = folders("qwen2_5_vl")
    plain: Any = make_model("qwen2_5_vl")
    parts = VISION_FAMILIES["qwen2_5_vl"]
    n_vision = sum(p.numel() for n, p in plain.named_parameters() if parts.in_vision(n))
    n_tower = sum(p.numel() for n, p in plain.named_parameters() if parts.in_tower(n))
    whole, frozen = (
        load_recipe(SLConfig, recipe({"model.path": path, "trainer.freeze": freeze}, kind="sl"), [])
        for freeze in ([], ["vision"])
    )
    told = dict(describe_memory(whole))
    assert f"{n_vision:,} (" in told["of these, vision"] and told["of these, vision"].endswith("trained")
    # 16,384 tokens of 4 patches of 3 x 2 x 4 x 4 numbers of 4 bytes
    assert "65,536 patches go through the tower's 2 layers, and their pixels take 24 MiB" in told["images"]
    # each layer reads 32 numbers of a patch
    assert told["images"].endswith("the inputs of these layers 16 MiB")
    assert "layers" not in dict(describe_memory(frozen))["memory for images"]
    assert f"{n_tower:,} of them frozen" in dict(describe_memory(frozen))["of these, vision"]
    one, other = estimate_memory(whole), estimate_memory(frozen)
    assert one.weights == other.weights
    assert (one.gradients - other.gradients) * GIB == pytest.approx(4 * n_tower)


def test_the_patches_of_a_token_follow_from_the_models_config(recipe, tmp_path):
    config = make_config("gemma3")
    config.vision_config.image_size, config.mm_tokens_per_image = 48, 9
    config.save_pretrained(tmp_path)
    part = measure_vision(load_recipe(SLConfig, recipe({"model.path": str(tmp_path)}, kind="sl"), []).cfg)
    assert (part.patches, part.numbers) == (16, 48), "12 patches a side become 3 tokens a side"
    assert (part.layers, part.width, part.frozen, part.trains_tower) == (2, 32, 0, True)


@pytest.mark.parametrize(("is_adapted", "how"), [(False, "frozen"), (True, "with adapters")])
def test_the_plan_of_a_run_tells_whether_an_adapter_is_in_the_vision_part(folders, recipe, is_adapted, how):
    changes = {"model.path": folders("qwen2_5_vl"), "model.lora": {"r": 2, "vision": is_adapted}}
    told = dict(describe_memory(load_recipe(SLConfig, recipe(changes, kind="sl"), [])))
    assert told["of these, vision"].endswith(f"%), {how}")
    assert ("the inputs of these layers" in told["images"]) == is_adapted


def test_a_reward_model_that_sees_rewards_a_reply_by_its_image(tmp_path, tiny_path):
    path, saved = make_seeing(tmp_path / "policy"), tmp_path / "reward"
    scalar: Any = load_scalar_model(path, dtype="float32", attention="auto")
    torch.manual_seed(0)
    nn.init.normal_(scalar.score.weight)
    scalar.save_pretrained(saved)
    tokenizer = ChatTokenizer(path, "chat")
    tokenizer.save(saved)
    plain: Any = load_plain(path)
    said: list[Message] = [{"role": "assistant", "content": "3 red"}]
    rewards: list[float] = []
    for i in range(2):
        asked = Prompt(id="p", messages=[say("user", draw(i), "how many?")])
        rewards.append(asyncio.run(reward_model.score(asked, said, model=str(saved)))["reward"])
        ids, _ = tokenizer.mask_turns([*asked.messages, *said])
        media = AutoImageProcessor.from_pretrained(path)(images=[[draw(i).open()]], return_tensors="pt")
        with torch.no_grad():
            last = plain.model(input_ids=torch.tensor([ids]), **media).last_hidden_state[0, -1]
            assert rewards[-1] == pytest.approx(float(scalar.score(last)), rel=1e-4)
    assert abs(rewards[0] - rewards[1]) > 0.1, "the texts are the same"
    text: Any = load_scalar_model(tiny_path, dtype="float32", attention="auto")
    text.save_pretrained(tmp_path / "blind")
    ChatTokenizer(tiny_path, "chat").save(tmp_path / "blind")
    with pytest.raises(UserError, match=r"^reward\.settings\.model=.* is a language model, which sees no images"):
        asyncio.run(reward_model.score(asked, said, model=str(tmp_path / "blind")))


def test_the_recipe_of_a_real_model_that_sees_tells_what_images_take(tmp_path, capsys):
    """A folder with the true sizes of Qwen2.5-VL-3B, and no weights."""
    text: dict[str, Any] = {
        **{"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "vocab_size": 151_936},
        **{"num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 128_000},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
    }
    vision = {
        **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048},
        **{"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112},
        **{"fullatt_block_indexes": [7, 15, 23, 31]},
    }
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision, tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    recipe = ROOT / "configs" / "mm_math_qwen2.5_vl_3b.yaml"
    assert run_here(main_rl, "--config", str(recipe), "--explain", f"model.path={tmp_path}") == (0, "")
    out = " ".join(capsys.readouterr().out.split())
    assert "parameters 3,754,622,976" in out
    assert "of these, vision 668,684,288 (18%), trained" in out
    # 16,384 tokens x 4 patches x 3 x 2 x 14 x 14 numbers, and x 1280 x 32 layers, of 2 bytes each
    assert "their pixels take 147 MiB, the inputs of these layers 5,120 MiB" in out
    # 2 bytes of weights, 4 / 4 ranks of gradients, (4 + 8) / 4 of the optimizer
    assert f"memory for images about {668_684_288 * 6 / GIB:.2f} GiB per rank (18%)" in out
    assert "up to 5.14 GiB" in out
