"""Operations of training, against torch's own count, and the metrics that are made of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from configs.schema import RLConfig
from driver.load_recipe import load_recipe
from driver.records.speed import measure_speed
from modeling.flops import count_training_flops
from trainers.utilization import measure_peak
from unit_tests.helpers.models import random_model
from unit_tests.helpers.runs import metrics_of

LENGTH = 6


def count(model) -> float:
    """Return torch's count of a forward and a backward pass over one sequence."""
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(LENGTH)[None]).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_that_torch_counts(tied):
    model = random_model("llama", tie_word_embeddings=tied)
    found = count_training_flops(model)
    # eager attention computes all pairs, those after a token included
    assert found.per_token * LENGTH + found.per_pair * LENGTH**2 == count(model)


def test_a_frozen_matrix_needs_no_gradient_of_its_own():
    model = random_model("llama", tie_word_embeddings=False)
    whole = count_training_flops(model)
    for name, p in model.named_parameters():
        p.requires_grad_("embed" in name or ".0." not in name)
    found = count_training_flops(model)
    assert found.per_token < whole.per_token
    assert found.per_token * LENGTH + found.per_pair * LENGTH**2 == count(model)


def test_a_mixture_counts_the_experts_that_a_token_has():
    sizes = {"num_experts": 4, "moe_intermediate_size": 48}
    one, two = (
        count_training_flops(random_model("qwen3_moe", num_experts_per_tok=k, **sizes)).per_token for k in (1, 2)
    )
    model = random_model("qwen3_moe", **sizes)
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    assert two - one == 6 * layers * 3 * hidden * 48


def test_speed_is_per_device_and_of_what_the_devices_could_do(recipe):
    line = {"time/step_s": 4.0, "time/train_s": 2.0, "train/tflops": 30.0, "rollout/engines": 3.0}
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
    assert line["mfu"] == pytest.approx(line["train/tflops"] / (line["time/train_s"] * 0.01))
    assert line["tokens_per_s_per_device"] == line["tokens_per_s"] and 0 < line["train/tflops"] < 0.01
    assert 1e-4 < measure_peak("cpu", torch.float32) < 100
