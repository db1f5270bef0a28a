"""Logits processor of vLLM's V1 runner that truncates the distribution, and stores the kept set of every token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from core.types.arrays import Ids
from core.types.truncation import Truncation
from rollouts.engines.vllm_support.kept_sets import ASKED

_STORED: dict[str, dict[int, Ids]] = {}
"""Kept sets of this process, by the request's key and the token's number in the output."""
_Row = tuple[str, Truncation, list[int]]
"""Key of a request, its rules, and vLLM's list of its tokens so far."""


class KeptSetProcessor(LogitsProcessor):
    """Truncation of the requests that ask for it."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Return True, since the most probable token is always kept. vLLM calls `apply` after the temperature."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.rows, batch_update, _read_request)

    def apply(self, logits: Tensor) -> Tensor:
        """Mask the logits [B, V] of the next tokens in place."""
        for truncation in {row[1] for row in self.rows.values()}:
            places = sorted(i for i, row in self.rows.items() if row[1] == truncation)
            kept = truncation.find_kept(logits[places])
            logits[places] = logits[places].masked_fill(~kept, -torch.inf)
            ids = kept.nonzero()[:, 1].to("cpu", torch.int32).numpy()  # in order of the rows
            ends = np.cumsum(kept.sum(-1).tolist())
            for place, own in zip(places, np.split(ids, ends[:-1]), strict=True):
                key, _, tokens = self.rows[place]
                # By number: a request that an update preempts may sample a token again. None is stored for a request
                # that has been taken, and still runs ahead.
                if key in _STORED:
                    _STORED[key][len(tokens)] = own
        return logits


def _read_request(params: SamplingParams, _prompt: list[int] | None, tokens: list[int]) -> _Row | None:
    asked = dict((params.extra_args or {}).get(ASKED, {}))
    if not asked:
        return None
    key = asked.pop("key")
    _STORED.setdefault(key, {})
    return key, Truncation(**asked), tokens


def take_kept(key: str, forget: list[str]) -> list[Ids]:
    """Return and drop the kept sets of a request's tokens, and drop those of the requests in `forget`."""
    for other in forget:
        _STORED.pop(other, None)
    stored = _STORED.pop(key, {})
    return [stored[i] for i in sorted(stored)]
