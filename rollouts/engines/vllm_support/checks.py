"""Checks of a recipe before vLLM starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from configs.rollout_schema import RolloutConfig
from rollouts.engines.vllm_support import architectures
from rollouts.engines.vllm_support.drafts import check_drafts
from rollouts.engines.vllm_support.kept_sets import check_masks_of_gpu
from rollouts.engines.vllm_support.options import check_names
from rollouts.engines.vllm_support.quantized import check_quantization, check_rounded
from rollouts.engines.vllm_support.routes import check_routes_of_gpu
from rollouts.engines.vllm_support.settings import check_adapter_dtype


class VllmChecks:
    """Checks of the engine's class; see rollouts/engines/base.py."""

    @classmethod
    def check_user_code(cls, model: nn.Module, *, path: str) -> None:
        architectures.check_user_code(model, path=path)

    @classmethod
    def check_family(cls, family: str, *, path: str, dtype: str) -> None:
        architectures.check_family(family, path=path, dtype=dtype)

    @classmethod
    def check_images(cls, config: Any, *, path: str) -> None:
        architectures.check_images(config, path=path)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], rollout: RolloutConfig) -> None:
        check_names(options)
        check_drafts(options, rollout)

    @classmethod
    def check_truncation(cls, rollout: RolloutConfig, *, on_gpu: bool, aborts: bool) -> None:
        check_masks_of_gpu(rollout, on_gpu=on_gpu, aborts=aborts)

    @classmethod
    def check_quantization(cls, rollout: RolloutConfig, *, dtype: str, on_gpu: bool) -> None:
        check_quantization(rollout, dtype=dtype, on_gpu=on_gpu)

    @classmethod
    def check_adapter(cls, *, engine: str, dtype: str, on_gpu: bool) -> None:
        check_adapter_dtype(dtype, on_gpu=on_gpu)

    @classmethod
    def check_rounded(cls, rollout: RolloutConfig, model: nn.Module) -> None:
        check_rounded(rollout, model)

    @classmethod
    def check_routes(cls, rollout: RolloutConfig, *, on_gpu: bool, aborts: bool) -> None:
        check_routes_of_gpu(rollout, on_gpu=on_gpu, aborts=aborts)
