"""Tests of other folders that name no device, once more on the pretend CUDA device.

Those that `python -m tools.device_mistakes` needs, or in whose files it plants none; test_all_once_more.py has the
others.
"""

from importlib import import_module

import pytest

from unit_tests.helpers.pretend_cuda import needs_pretend_cuda

CHOSEN: dict[str, tuple[str, ...]] = {
    "analysis.test_capture": ("step", "test_the_shadow_of_the_same_loss_equals_it"),
    "trainers.test_step": ("test_a_gradient_that_is_not_finite_is_not_applied",),
    "trainers.test_weight_sync": (*vars(import_module("unit_tests.trainers.test_weight_sync")),),
}
"""Modules, and the fixtures and tests that are taken."""

for module, names in CHOSEN.items():
    found = vars(import_module(f"unit_tests.{module}"))
    globals().update({name: found[name] for name in names if not name.startswith("_")})

pytestmark = [
    *(pytest.mark.one_core, pytest.mark.slow),
    *(needs_pretend_cuda, pytest.mark.usefixtures("one_thread", "cuda_device")),
]


@pytest.mark.parametrize("alg", [{"name": "grpo", "kl": {"coef": 0.1}}, {"name": "ppo"}], ids=["kl", "ppo"])
def test_replay_reproduces_a_run(step, alg):
    capture = import_module("unit_tests.analysis.test_capture")
    capture.test_replay_reproduces_the_run_to_the_last_digits(step, {"alg": alg})
