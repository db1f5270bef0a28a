"""Options of `rollout.vllm`: vLLM's engine arguments by name, checked before the start.

The names come from the source of the installed vLLM, which is read and not imported: its import takes seconds. vLLM
itself checks the values when an engine starts.
"""

from __future__ import annotations

import ast
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from core.errors import UserError, suggest_name

KEYS = {
    "model": "model.path",
    "model_weights": "model.path",
    "tokenizer": "model.path",
    "hf_config_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "seed": "seed",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "enforce_eager": "rollout.enforce_eager",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "data_parallel_size": "rollout.num_engines",
    "enable_sleep_mode": "placement",
    "enable_lora": "weight_sync.lora",
    "max_lora_rank": "model.lora.r",
    "lora_target_modules": "model.lora.targets",
    **dict.fromkeys(("quantization", "quantization_config"), "rollout.quantization"),
    "reasoning_parser": "rollout.tool_parser",
    "enable_return_routed_experts": "rollout.router_replay",
}
"""Our key for an argument."""
OURS = {
    **dict.fromkeys(
        ("weight_transfer_config", "load_format", "worker_extension_cls", "worker_cls", "revision", "ignore_patterns"),
        "weights come from the trainer, with proof",
    ),
    **dict.fromkeys(
        ("max_logprobs", "logprobs_mode", "logits_processors", "return_sampling_mask", "skip_tokenizer_init"),
        "log-probabilities must be those of the distribution that tokens are drawn from",
    ),
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "hf_overrides", "model_class_overrides", "model_impl"),
        "it would change the distribution, and the trainer's would stay as it is",
    ),
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "speculative_config holds its settings"),
    **dict.fromkeys(
        ("runner", "convert", "pooler_config", "diffusion_config", "watermark_config"),
        "an engine returns tokens with their log-probabilities",
    ),
    **dict.fromkeys(
        ("distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port", "device_ids"),
        "Ray places the processes",
    ),
    **dict.fromkeys(
        ("disable_log_stats", "log_level", "log_config_file", "per_request_spec_decode_metrics"),
        "logging is the run's",
    ),
}
"""Reasons why an argument cannot be set."""
PARALLEL = ("parallel", "lora")
"""Parts of the names of arguments about parallelism and adapters, which are ours as well."""


def check_names(options: Mapping[str, Any]) -> None:
    """Raise UserError for an option that vLLM does not have, or that FeynRL sets itself."""
    known = list_arguments()
    for name in options:
        if name in KEYS:
            raise UserError(f"rollout.vllm.{name} is set by {KEYS[name]}: set that instead")
        if name in OURS:
            raise UserError(f"rollout.vllm.{name} cannot be set: {OURS[name]}")
        if any(part in name for part in PARALLEL):
            raise UserError(f"rollout.vllm.{name} cannot be set: engines have tensor parallelism and one adapter only")
        if name not in known:
            raise UserError(
                f"rollout.vllm.{name} is no engine argument of the installed vLLM"
                f"{suggest_name(name, sorted(known))}: see its EngineArgs"
            )


@cache
def list_arguments() -> frozenset[str]:
    """Return the names of the engine arguments of the installed vLLM. Raises UserError without vLLM."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        raise UserError("rollout.vllm is set, and vLLM is not installed: run make install")
    source = Path(package.origin).parent / "engine" / "arg_utils.py"
    classes = [n for n in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)]
    [arguments] = [found for found in classes if found.name == "EngineArgs"]
    fields = [n.target for n in arguments.body if isinstance(n, ast.AnnAssign)]
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))


@contextmanager
def naming_refused(options: Mapping[str, Any]) -> Generator[None]:
    """Turn an error of the body into a UserError that names the options, if there are any."""
    try:
        yield
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        if not options:
            raise
        said = " ".join(str(error).split())
        raise UserError(f"rollout.vllm: vLLM does not start with {dict(options)}: {said:.500}") from error
