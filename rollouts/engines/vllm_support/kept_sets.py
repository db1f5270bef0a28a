"""Kept sets of vLLM's requests: those of our logits processor (V1 runner), or of vLLM's sampling mask (V2 runner).

vLLM runs V1 on a CPU, and V2 on GPUs. V1 reports no sets, so kept_processor.py truncates in its place and stores them.
V2 truncates by top-p, top-k and min-p of its own, and reports the sets with a finished request. No test has run V2's
part, which needs a GPU.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from typing import Any
from uuid import uuid4

import numpy as np

from configs.rollout_schema import RolloutConfig
from core.errors import RunStopped, UserError
from core.types.arrays import INTS, Ids
from core.types.truncation import EVERYTHING_KEPT, Truncation
from rollouts.engines.base import EngineConfig

PROCESSOR = "rollouts.engines.vllm_support.kept_processor:KeptSetProcessor"
ASKED = "feynrl_truncation"
"""Extra argument of a request: its key, and the rules of truncation."""


def truncation_args(truncation: Truncation, *, on_cpu: bool) -> dict[str, Any]:
    """Return vLLM's EngineArgs that report kept sets; {} without truncation."""
    if truncation.is_off:
        return {}
    return {"logits_processors": [PROCESSOR]} if on_cpu else {"return_sampling_mask": True}


def check_masks_of_gpu(rollout: RolloutConfig, *, on_gpu: bool, aborts: bool) -> None:
    """Raise UserError for a recipe whose kept sets the V2 runner does not report. aborts: if updates abort requests."""
    if not on_gpu:
        return
    if not rollout.top_k:
        raise UserError(
            "vLLM on a GPU reports the kept sets of rollout.top_p and min_p only with a bound on their size: set "
            "rollout.top_k too, such as 100"
        )
    if rollout.stop or aborts:
        raise UserError(
            "vLLM on a GPU reports the kept sets of rollout.top_p, top_k and min_p only for requests that it ends "
            "itself: leave out rollout.stop (or use rollout.stop_token_ids), and weight_sync.pause_mode: abort"
        )


class KeptReports:
    """Kept sets of an engine's requests."""

    def __init__(self, config: EngineConfig, rpc: Callable[..., Awaitable[list[Any]]], *, on_cpu: bool):
        """rpc: call a method of every worker, and return one result per rank."""
        self.truncation, self._params = config.truncation, asdict(config.truncation)
        self.rpc, self.on_cpu = rpc, on_cpu
        self.names, self.numbers = uuid4().hex, count()
        self.done: list[str] = []
        """Keys of ended requests whose sets may still be stored."""

    @property
    def may_join(self) -> bool:
        """True if several samples may share a request: sets are not stored by request."""
        return not self._stores_sets

    @property
    def _stores_sets(self) -> bool:
        """True if our processor stores the sets, by the key of the request."""
        return self.on_cpu and not self.truncation.is_off

    @contextmanager
    def naming(self) -> Generator[str]:
        """Yield the key of a request, unique in its process. After the body its sets cannot be read."""
        key = f"{self.names}/{next(self.numbers)}"
        try:
            yield key
        finally:
            # also if an update aborted it, or its caller gave up
            if self._stores_sets:
                self.done.append(key)

    def make_params(self, key: str) -> dict[str, Any]:
        """Return vLLM's SamplingParams of a request that truncate."""
        if self._stores_sets:
            # the sampler itself samples from all that the processor leaves
            return {"extra_args": {ASKED: {"key": key, **asdict(self.truncation)}}, **asdict(EVERYTHING_KEPT)}
        return {**self._params}

    def make_probe_params(self) -> dict[str, Any]:
        """Return vLLM's SamplingParams of a probe, which samples a token that nobody reads."""
        # V2 takes no request without a bound on its sets; log-probabilities of the prompt are over all tokens
        return {} if self.on_cpu else {**self._params}

    async def read(self, key: str, output: Any) -> list[Ids]:
        """Return the sets of the tokens of a request that has ended; [] without truncation."""
        if self.truncation.is_off:
            return []
        if not self.on_cpu:
            if output.sampling_mask is None:
                raise RunStopped("vLLM reported no kept sets (sampling_mask) for a finished request")
            return [np.array(ids, dtype=INTS) for ids in output.sampling_mask.token_ids]
        done, self.done = self.done, []
        # Ranks that sample have the same sets, the others none.
        stored = max(await self.rpc("feynrl_take_kept", key=key, forget=done), key=len)
        # vLLM may have sampled ahead of the token that ended the request.
        return stored[: len(output.token_ids)]
