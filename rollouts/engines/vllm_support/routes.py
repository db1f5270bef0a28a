"""Routes of vLLM's requests (`enable_return_routed_experts`).

vLLM returns uint8 or uint16 [tokens, decoder layers, k] with a finished request: the experts of every token that was an
input, prompt included, and zeros for layers without experts. A token whose keys were in the prefix cache has the routes
stored beside them. No test has run this with vLLM itself, whose V2 runner needs Triton.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from configs.rollout_schema import RolloutConfig
from core.errors import RunStopped, UserError
from core.types.routes import ROUTE_DTYPES, Routes, dtype_for, extend, fill_unknown
from modeling.experts import list_blocks
from modeling.hf_config import meta_model
from rollouts.engines.base import EngineConfig


def check_routes_of_gpu(rollout: RolloutConfig, *, on_gpu: bool, aborts: bool) -> None:
    """Raise UserError for a recipe whose routes vLLM does not return. aborts: if updates abort requests."""
    asked = f"rollout.router_replay is {rollout.router_replay}"
    if not on_gpu:
        raise UserError(
            f"{asked}, and vLLM returns routes on a GPU only, where it has Triton: set rollout.engine to hf, or leave "
            "rollout.router_replay out"
        )
    if rollout.stop or aborts:
        raise UserError(
            f"{asked}, and vLLM returns routes only for requests that it ends itself: leave out rollout.stop (or use "
            "rollout.stop_token_ids), and weight_sync.pause_mode: abort"
        )
    if rollout.vllm.get("enable_prefix_caching") is False:
        raise UserError(
            f"{asked}, and vLLM keeps routes in its prefix cache: leave rollout.vllm.enable_prefix_caching out"
        )


def route_args(config: EngineConfig) -> dict[str, Any]:
    """Return vLLM's EngineArgs that report routes."""
    return {"enable_return_routed_experts": True} if config.routes and config.prefix_cache else {}


class RouteReports:
    """Routes of an engine's requests."""

    def __init__(self, config: EngineConfig):
        self.is_on = bool(route_args(config))
        if self.is_on:
            blocks = list_blocks(meta_model(config.model_path, trust_remote_code=config.trust_remote_code))
            self.layers, self.experts = [block.layer for block in blocks], max(block.experts for block in blocks)

    def read(self, output: Any, length: int, known: Routes | None = None) -> Routes | None:
        """Return the routes of all tokens of a request that has ended, [length, layers, k]; None if it reports none.

        output: vLLM's CompletionOutput. known: those of the tokens that an earlier request of the same reply sampled.
        Raises RunStopped for routes in another form.
        """
        if not self.is_on:
            return None
        found = output.routed_experts
        if found is None:
            raise RunStopped("vLLM reported no routes (routed_experts) for a finished request")
        # the last token was never an input
        if found.ndim != 3 or len(found) != length - 1 or found.shape[1] <= max(self.layers):
            raise RunStopped(
                f"vLLM reported routes {list(found.shape)} for {length - 1} input tokens, and experts in the decoder "
                f"layers {self.layers}"
            )
        own = found[:, self.layers]
        if found.dtype not in ROUTE_DTYPES or int(own.max(initial=0)) >= self.experts:
            raise RunStopped(
                f"vLLM reported the expert {int(own.max(initial=0))} in {found.dtype}, and the model has {self.experts}"
            )
        return fill_unknown(known, extend(np.ascontiguousarray(own, dtype=dtype_for(self.experts)), length))
