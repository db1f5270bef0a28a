"""Arguments that vLLM's engine is made with, all of them, for each place and kind of model."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from typing import Any

import pytest

from configs.trainer_schema import LoraConfig
from core.errors import UserError
from rollouts.engines.vllm_support.settings import check_adapter_dtype, engine_args
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.small_trained import edit


def test_an_engine_is_made_with_the_settings_of_the_run(tiny_path):
    config = engine_config(tiny_path, kv_cache_gib=0.5)
    on_gpu: dict[str, Any] = {
        **{"model": tiny_path, "dtype": "float32", "max_model_len": 256, "seed": 0, "tensor_parallel_size": 1},
        **{"gpu_memory_utilization": 0.85, "kv_cache_memory_bytes": 2**29, "block_size": None},
        **{"enforce_eager": False, "enable_chunked_prefill": True, "load_format": "auto", "use_tqdm_on_load": False},
        **{"skip_tokenizer_init": True, "trust_remote_code": False, "generation_config": "vllm"},
        **{"logprobs_mode": "processed_logprobs", "enable_prefix_caching": True, "enable_sleep_mode": False},
        "worker_extension_cls": "rollouts.engines.vllm_support.worker.WorkerMethods",
    }
    on_cpu = on_gpu | {"block_size": 32, "enforce_eager": True, "enable_chunked_prefill": False}
    assert engine_args(config, on_cpu=False) == on_gpu and engine_args(config, on_cpu=True) == on_cpu
    for changes, how, found in (
        ({"kv_cache_gib": None}, {}, {"kv_cache_memory_bytes": None}),
        ({"kv_cache_gib": 1.75}, {}, {"kv_cache_memory_bytes": 7 * 2**28}),
        ({"enforce_eager": True, "prefix_cache": False}, {}, {"enforce_eager": True, "enable_prefix_caching": False}),
        ({"starts_empty": True, "sleep": "offload"}, {}, {"load_format": "dummy", "enable_sleep_mode": True}),
        ({"options": {"max_num_seqs": 3, "seed": 9}}, {}, {"max_num_seqs": 3, "seed": 9}),
        (
            {},
            {"sees": True},
            {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"video": 0, "audio": 0}},
        ),
        ({}, {"text_only": True}, {"language_model_only": True}),
        (
            {"lora": LoraConfig(r=9, targets=["model.layers.0.q_proj", "up_proj"])},
            {},
            {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16, "lora_target_modules": ["q_proj", "up_proj"]},
        ),
    ):
        assert engine_args(replace(config, **changes), on_cpu=False, **how) == on_gpu | found
    for changes, found in (({"kv_cache_gib": None}, {"kv_cache_memory_bytes": 2**32}), ({"sleep": "discard"}, {})):
        assert engine_args(replace(config, **changes), on_cpu=True) == on_cpu | found


def test_adapters_in_float32_are_refused_on_a_gpu():
    for dtype, on_gpu in (("bfloat16", True), ("float32", False)):
        check_adapter_dtype(dtype, on_gpu=on_gpu)
    with pytest.raises(UserError, match=r"^weight_sync\.lora is adapter and model\.dtype is float32, and vLLM's kern"):
        check_adapter_dtype("float32", on_gpu=True)


@pytest.mark.parametrize(
    ("changes", "has_states"),
    [
        ({}, False),
        ({"mamba_d_state": 8}, True),
        ({"layers_block_type": ["attention", "mamba"]}, True),
        ({"layers_block_type": ["attention", "attention"]}, False),
    ],
    ids=["llama", "states", "a mamba layer", "attention"],
)
def test_a_cpu_keeps_no_prefixes_of_models_with_recurrent_layers(tiny_path, tmp_path, changes, has_states):
    folder = shutil.copytree(tiny_path, tmp_path / "model")
    edit(folder / "config.json", **changes)
    for on_cpu, text_only, prefix_cache in itertools.product([True, False], repeat=3):
        config = engine_config(str(folder), prefix_cache=prefix_cache)
        kept = engine_args(config, on_cpu=on_cpu, text_only=text_only)["enable_prefix_caching"]
        assert kept == (prefix_cache and not (on_cpu and has_states))
