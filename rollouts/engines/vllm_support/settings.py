"""Settings of vLLM: engine arguments, and environment variables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from configs.trainer_schema import LoraConfig
from core.errors import UserError
from modeling.hf_config import is_text_use, read_config, vision_family
from modeling.model_files import find_own_head
from rollouts.engines.base import EngineConfig
from rollouts.engines.vllm_support.drafts import draft_args
from rollouts.engines.vllm_support.kept_sets import truncation_args
from rollouts.engines.vllm_support.quantized import quantization_args
from rollouts.engines.vllm_support.routes import route_args

CORES = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's variable: the cores of every rank, as 0,1|2,3."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM supports."""
ADAPTER_ID = 1
"""Id of the only adapter. Requests refer to it."""
RECURRENT = frozenset({"linear_attention", "conv", "mamba", "hybrid"})
"""Kinds of recurrent layers in configs."""
CPU_BLOCK = 32
"""KV-cache block size on a CPU, in tokens: the minimum of the attention kernel. vLLM's default is 128.

Requests share only whole blocks. With 128, every sample of a group would recompute a prompt of 100 tokens.
"""


def engine_args(config: EngineConfig, *, on_cpu: bool, sees: bool = False, text_only: bool = False) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's EngineArgs. sees: prompts may have images. text_only: the model has a
    vision part that is not used.
    """
    kv_cache_gib = 4.0 if on_cpu and config.kv_cache_gib is None else config.kv_cache_gib
    return {
        "model": config.model_path,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "seed": config.seed,
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
        "block_size": CPU_BLOCK if on_cpu else None,
        # compiling costs more than it saves on a CPU: see prepare_cpu
        "enforce_eager": config.enforce_eager or on_cpu,
        # a chunked prompt with its own seed crashes vLLM on a CPU: "CPU Generator does not use offset"
        "enable_chunked_prefill": not on_cpu,
        "load_format": "dummy" if config.starts_empty else "auto",
        "use_tqdm_on_load": False,
        "skip_tokenizer_init": not sees,  # vLLM's image processors need it
        "trust_remote_code": config.trust_remote_code,
        # the model's own would change the defaults of sampling
        "generation_config": "vllm",
        # log-probabilities of the distribution that tokens are drawn from, so including the temperature
        "logprobs_mode": "processed_logprobs",
        # vLLM caches the states of recurrent layers at the borders of chunks only
        "enable_prefix_caching": config.prefix_cache and not (on_cpu and has_recurrent_layers(config)),
        "worker_extension_cls": "rollouts.engines.vllm_support.worker.WorkerMethods",
        "enable_sleep_mode": config.sleep is not None and not on_cpu,  # a CPU engine sleeps in name only
        # vLLM ties by the config alone, and would ignore a head of its own that the files hold
        **({"hf_overrides": {"tie_word_embeddings": False}} if _has_own_head(config) else {}),
        # rows have no others, and a part for sound is not sent
        **({"limit_mm_per_prompt": {"video": 0, "audio": 0}} if sees else {}),
        **({"language_model_only": True} if text_only else {}),
        **({} if config.lora is None else _lora_args(config.lora)),
        **truncation_args(config.truncation, on_cpu=on_cpu),
        **route_args(config),
        **draft_args(config),
        **quantization_args(config),
        **config.options,
    }


def find_use(config: EngineConfig) -> tuple[bool, bool]:
    """Return whether prompts may have images, and whether the model has a vision part that is not used."""
    found = read_config(config.model_path, trust_remote_code=config.trust_remote_code)
    text_only = is_text_use(found, config.images)
    return not text_only and vision_family(found) is not None, text_only


def has_recurrent_layers(config: EngineConfig) -> bool:
    """Tell whether some layers of the model pass a state from token to token, as of Mamba or a delta net."""
    text = read_config(config.model_path, trust_remote_code=config.trust_remote_code).get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    return bool(kinds & RECURRENT) or hasattr(text, "mamba_d_state")


def _has_own_head(config: EngineConfig) -> bool:
    return find_own_head(config.model_path, trust_remote_code=config.trust_remote_code) is not None


def check_adapter_dtype(dtype: str, *, on_gpu: bool) -> None:
    """Raise UserError for an adapter in a dtype that vLLM's kernels do not take. They assert it when vLLM starts."""
    if on_gpu and dtype == "float32":
        raise UserError(
            "weight_sync.lora is adapter and model.dtype is float32, and vLLM's kernels for adapters take no float32 "
            "on a GPU: set model.dtype to bfloat16, or weight_sync.lora to merged"
        )


def _lora_args(lora: LoraConfig) -> dict[str, Any]:
    """Return vLLM's arguments for an adapter.

    Only the adapter's layers are wrapped: vLLM's wrapped head fails in batches that mix prompts and samples.
    """
    rank = next(rank for rank in LORA_RANKS if rank >= lora.r)
    targets = [name.rpartition(".")[2] for name in lora.targets]
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": targets}


def prepare_cpu(cores: Sequence[int] | None, ranks: int) -> list[int]:
    """Set the environment variables that vLLM reads on a CPU, before it is imported. Return the cores of rank 0."""
    available = sorted(cores if cores is not None else os.sched_getaffinity(0))
    # vLLM's default leaves a core idle, and refuses tensor parallelism without NUMA nodes
    n = len(available)
    # more ranks than cores share them
    shares = [available[r * n // ranks : (r + 1) * n // ranks] or [available[r % n]] for r in range(ranks)]
    os.environ[CORES] = "|".join(",".join(map(str, share)) for share in shares)
    # without it, the first batch compiles C++ for 20 s and more, and later ones are not faster
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # nothing is compiled: processes that would compile need not be started. vLLM sets it too, after its import
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # an explicit size replaces this variable, which counts whole GiB
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return shares[0]


def prepare_gpu(dtype: str) -> None:
    """Set the environment variables that vLLM and its kernels read on a GPU, before its import; the user's stay."""
    # as vLLM does on a CPU: a fork would copy locks of this process's threads, and skip what our plugin starts
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if dtype == "float32":
        # attention in float32 is Triton's, which multiplies in TF32 (10 bits) unless told otherwise
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
