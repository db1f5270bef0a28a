"""Operations of training, against torch's own count, and the metrics that are made of them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification

from algs.base import Algorithm
from algs.ppo import PPO
from algs.sft import SFT
from configs.schema import RLConfig
from configs.trainer_schema import LoraConfig, TrainerConfig
from data_feeds.packing.batches import pack
from driver.load_recipe import load_recipe
from driver.records.speed import measure_speed
from modeling.flops import TrainingFlops, count_training_flops
from modeling.lora import with_adapter
from trainers.utilization import Utilization, measure_peak
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.models import random_model
from unit_tests.helpers.runs import metrics_of

LENGTH, LABELS = 6, 2


def count(model) -> float:
    """Return torch's count of a forward and a backward pass over one sequence, with the head at the last tokens."""
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(LENGTH)[None], logits_to_keep=LABELS).logits.sum().backward()
    return counter.get_total_flops()


def total(found: TrainingFlops) -> float:
    """Return our count of the same. Eager attention computes all pairs, those after a token included."""
    pairs = (found.per_pair + found.per_near_pair) * LENGTH**2
    return found.per_token * LENGTH + found.per_label * LABELS + pairs


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", {"tie_word_embeddings": True}), ("llama", {"tie_word_embeddings": False}), ("gemma2", {}), ("gpt2", {})],
)
def test_operations_are_those_that_torch_counts(family, more):
    model = random_model(family, **more)
    assert total(count_training_flops(model)) == count(model)


def test_a_frozen_matrix_needs_no_gradient_of_its_own():
    model = random_model("llama", tie_word_embeddings=False)
    whole = count_training_flops(model)
    for name, p in model.named_parameters():
        p.requires_grad_("embed" in name or ".0." not in name)
    found = count_training_flops(model)
    assert found.per_token < whole.per_token and total(found) == count(model)


LATENT = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 0},
    **{"n_group": 2, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 16, "v_head_dim": 40, "head_dim": 8, "num_key_value_heads": 2},
}
H, FF, HEAD = 64, 96, 64 * 64
"""Hidden size, width of the MLP, and weights of the head, with a vocabulary of 64 tokens."""
ATTENTION = 2 * H * H + 2 * H * 32
"""Weights of a layer's attention: two heads of 32, and one of keys and values."""


@pytest.mark.parametrize(
    ("family", "more", "weights", "whole", "near", "window"),
    [
        ("llama", {}, ATTENTION + 3 * H * FF, 2 * 64, 0, 0),
        ("llama", {"head_dim": 16}, 2 * H * 32 + 2 * H * 16 + 3 * H * FF, 2 * 32, 0, 0),
        ("gemma2", {"sliding_window": 4}, ATTENTION + 3 * H * FF, 64, 64, 4),
        (
            "gemma3_text", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2},
            ATTENTION + 3 * H * FF, 0, 128, 5,
        ),
        ("gpt2", {"n_inner": 100}, 4 * H * H + 2 * H * 100, 2 * 64, 0, 0),
        (
            "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            ATTENTION + 2 * 3 * H * 48, 2 * 64, 0, 0,
        ),
        (
            "deepseek_v3", LATENT,
            H * 48 + H * 40 + 32 * 2 * 56 + 80 * H + 3 * 3 * H * 48, 2 * (24 + 40), 0, 0,
        ),
    ],
)  # fmt: skip
def test_operations_by_hand(family, more, weights, whole, near, window):
    """Six for each weight and token, in two layers; in attention six for each pair and number of a key and a value."""
    found = count_training_flops(random_model(family, **more))
    assert (found.per_token, found.per_label) == (6 * 2 * weights, 6 * HEAD)
    assert (found.per_pair, found.per_near_pair, found.window) == (6 * 2 * whole, 6 * 2 * near, window)


def test_a_value_model_has_no_operations_per_label():
    config = random_model("llama").config
    model = AutoModelForSequenceClassification.from_config(config)
    found, policy = count_training_flops(model), count_training_flops(random_model("llama"))
    assert found.per_label == 0.0 and found.per_token == policy.per_token and found.per_pair == policy.per_pair


@pytest.mark.parametrize("adapted", [False, True])
def test_a_mixture_counts_the_experts_that_a_token_has(adapted):
    sizes = {"num_experts": 4, "moe_intermediate_size": 48}
    lora = LoraConfig(r=4, experts=True) if adapted else None

    def count_tokens(k: int) -> float:
        model = random_model("qwen3_moe", num_experts_per_tok=k, **sizes)
        return count_training_flops(model if lora is None else with_adapter(model, lora, path="here")).per_token

    hidden, layers = 64, 2
    frozen = layers * 3 * hidden * 48 * (4 if adapted else 6)
    found = count_tokens(2) - count_tokens(1)
    assert frozen <= found < 1.5 * frozen and (found == frozen) == (not adapted)


def test_speed_is_per_device_and_of_what_the_devices_could_do(recipe):
    line = {"time/step_s": 4.0, "time/train_s": 2.0, "tflops": 30.0, "rollout/engines": 3.0}
    shapes = [
        ({"backend": "local"}, 1, 1),
        ({"backend": "ray", "trainer.ranks": 2}, 2, 5),
        ({"backend": "ray", "trainer.ranks": 2, "placement": "colocate", "rollout.num_engines": 2}, 2, 3),
    ]
    for changes, ranks, devices in shapes:
        cfg = load_recipe(RLConfig, recipe(changes), []).cfg
        found = measure_speed(cfg, line, 1200.0, peak_tflops=10.0)
        assert found == {
            "tokens_per_s": 300.0,
            "tokens_per_s_per_device": 300.0 / devices,
            "mfu": 30.0 / (2.0 * 10.0 * ranks),
        }


@pytest.mark.usefixtures("one_thread")
def test_a_run_says_how_much_of_the_peak_it_reached(trained):
    [line] = metrics_of(trained({"steps": 1, "trainer.peak_tflops": 0.01}))
    assert line["mfu"] == pytest.approx(line["tflops"] / (line["time/train_s"] * 0.01))
    assert line["tokens_per_s_per_device"] == line["tokens_per_s"] and 0 < line["tflops"] < 0.01
    assert 1e-4 < measure_peak("cpu", torch.float32) < 100


@dataclass(frozen=True)
class OneRank:
    """What is trained, and for which algorithm."""

    policy: Any
    critic: Any
    alg: Algorithm
    device: str = "cpu"
    cfg: ClassVar[TrainerConfig] = TrainerConfig(peak_tflops=7.0)
    ranks: ClassVar[int] = 2

    def sum_over_rows(self, values: torch.Tensor) -> torch.Tensor:
        return self.ranks * values


def test_a_step_counts_the_operations_of_its_batches_on_all_ranks():
    """Torch counts all 36 pairs; ours are a token and those before it, 1 + .. + 6, or at most 4 in a window."""
    learner = SimpleNamespace(model=random_model("gemma2", sliding_window=4))
    trained = [n > LENGTH - LABELS for n in range(LENGTH + 1)]  # the last token is predicted, and predicts none
    batch = SimpleNamespace(batch=pack([sample_of([5] * (LENGTH + 1), trained)], [1.0]))
    per = count_training_flops(learner.model)
    once = count(learner.model) - per.per_pair * (LENGTH**2 - 21) - per.per_near_pair * (LENGTH**2 - 18)
    # a step that trains the value model alone computes a third of the policy's
    for alg, critic, share in ((SFT(), None, 1), (PPO(), learner, 2), (PPO(critic_warmup=1), learner, 4 / 3)):
        seen = Utilization(OneRank(policy=learner, critic=critic, alg=alg))
        for n_batches in (1, 3):  # a step begins at zero
            seen.begin_step()
            for _ in range(n_batches):
                seen.on_batch(batch)
            assert seen.finish() == {}
            assert seen.read_tflops() * 1e12 == pytest.approx(n_batches * OneRank.ranks * once * share)
    assert seen.find_peak("float32") == 7.0, "as the recipe names it"
