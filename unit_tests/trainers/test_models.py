"""Models of a trainer, as they are loaded: which are frozen, and which are loaded at all."""

from __future__ import annotations

import pytest

from algs.grpo import GRPO
from algs.opd import OPD
from algs.ppo import PPO
from algs.reward_model import RewardModel
from algs.sft import SFT
from algs.terms import KL
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.errors import UserError
from trainers.models import ModelLoader

pytestmark = pytest.mark.usefixtures("one_thread")


def test_frozen_models_are_loaded_once_and_those_of_the_policy_never(tiny_path):
    """Two teachers of one path are one model; a start that moves, or with an adapter, is the policy's."""

    def load(alg, *, has_ref_logp: bool = False, **model) -> list[list[str]]:
        loader = ModelLoader(ModelConfig(path=tiny_path, **model), TrainerConfig(), alg)
        found = [*loader.load_teachers(has_ref_logp=has_ref_logp)]
        assert not any(p.requires_grad for _, one in found for p in one.parameters())
        return [names for names, _ in found]

    own = GRPO(kl=KL(coef=0.1))
    assert load(own) == [["ref_logp"]] and load(own, has_ref_logp=True) == [] and load(own, lora={}) == []
    assert load(GRPO(kl=KL(coef=0.1, ema=0.5))) == [] and load(SFT()) == []
    both = [f"teacher of {name}" for name in ("a", "b")]
    assert (
        load(OPD(teacher={"a": tiny_path, "b": tiny_path}))
        == [both]
        == load(OPD(teacher={"a": tiny_path, "b": tiny_path}), has_ref_logp=True, lora={})
    )
    with pytest.raises(UserError, match=r"alg, the model of teacher of a"):
        load(OPD(teacher={"a": "/nowhere"}))


def test_models_are_frozen_before_they_are_placed(tiny_path):
    """Sharding chooses float32 for what is trained, and the model's dtype for the rest."""
    seen: list[tuple[str, int]] = []

    def place(name: str):
        return lambda model: seen.append((name, sum(p.requires_grad for p in model.parameters())))

    model = ModelConfig(path=tiny_path)
    cfg = TrainerConfig(freeze=["model.embed_tokens", "model.layers.0"])
    loader = ModelLoader(model, cfg, OPD(teacher=tiny_path), place=place("own"), place_frozen=place("frozen"))
    policy = loader.load_policy()
    trained = sum(p.requires_grad for p in policy.parameters())
    assert 0 < trained < len([*policy.parameters()])
    scalar = loader.load_scalar()
    assert len([*loader.load_teachers(has_ref_logp=False)]) == 1
    heads = sum(p.requires_grad for p in scalar.parameters())
    assert seen == [("own", trained), ("own", heads), ("frozen", 0)]
    adapted = ModelLoader(
        ModelConfig(path=tiny_path, lora={}), TrainerConfig(), SFT(), place=place("base")
    ).load_policy()
    assert seen[3:] == [("base", 0)] and all("lora_" in n for n, p in adapted.named_parameters() if p.requires_grad)
    reward = ModelLoader(model, TrainerConfig(lr_scales={"model.layers.1": 0.5}), RewardModel()).load_policy()
    assert reward.config.num_labels == 1 and all(p.requires_grad for p in reward.parameters())
    with pytest.raises(UserError, match=r"trainer.lr_scales: 'lm_head' matches no parameter"):
        ModelLoader(model, TrainerConfig(lr_scales={"lm_head": 0.5}), RewardModel()).load_policy()
    ModelLoader(model, TrainerConfig(freeze=["lm_head"]), PPO()).load_scalar()  # the policy has it
    with pytest.raises(UserError, match=r"trainer.freeze: 'lm_head' matches no parameter"):
        ModelLoader(model, TrainerConfig(freeze=["lm_head"]), RewardModel()).load_policy()
