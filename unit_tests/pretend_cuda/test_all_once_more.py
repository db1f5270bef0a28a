"""Whole files of other folders that name no device, once more on the pretend CUDA device: long evidence."""

from importlib import import_module

import pytest

from unit_tests.helpers.pretend_cuda import needs_pretend_cuda

MODULES: dict[str, tuple[str, ...]] = {
    "rollouts.test_hf_engine": (),
    # these give a model tensors of the CPU themselves
    "trainers.test_step": (
        "test_a_frozen_model_is_scored_at_the_sampling_temperature",
        "test_columns_land_on_the_tokens_that_are_trained_on",
    ),
}
"""Modules, and the tests that are left out."""

for module, left_out in MODULES.items():
    found = vars(import_module(f"unit_tests.{module}"))
    globals().update({name: x for name, x in found.items() if not name.startswith("_") and name not in left_out})
for name in ("step", "test_replay_reproduces_the_run_to_the_last_digits"):
    globals()[name] = getattr(import_module("unit_tests.analysis.test_capture"), name)

pytestmark = [needs_pretend_cuda, pytest.mark.verify, pytest.mark.usefixtures("one_thread", "cuda_device")]
