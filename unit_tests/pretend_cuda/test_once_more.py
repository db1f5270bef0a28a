"""Tests of other folders that name no device, once more on the pretend CUDA device."""

from importlib import import_module

import pytest

from unit_tests.helpers.pretend_cuda import needs_pretend_cuda

MODULES: dict[str, tuple[str, ...]] = {
    "rollouts.test_hf_engine": (),
    "trainers.test_weight_sync": (),
    # these give a model tensors of the CPU themselves
    "trainers.test_step": (
        "test_a_frozen_model_is_scored_at_the_sampling_temperature",
        "test_columns_land_on_the_tokens_that_are_trained_on",
    ),
}
"""Modules, and the tests that are left out."""
CHOSEN: dict[str, tuple[str, ...]] = {
    "analysis.test_capture": (
        *("step", "test_replay_reproduces_the_run_to_the_last_digits", "test_the_shadow_of_the_same_loss_equals_it"),
    ),
}
"""Modules, and the fixtures and tests that are taken."""

for module, left_out in MODULES.items():
    found = vars(import_module(f"unit_tests.{module}"))
    globals().update({name: x for name, x in found.items() if not name.startswith("_") and name not in left_out})
for module, names in CHOSEN.items():
    globals().update({name: getattr(import_module(f"unit_tests.{module}"), name) for name in names})

pytestmark = [
    pytest.mark.one_core,
    needs_pretend_cuda,
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread", "cuda_device"),
]
