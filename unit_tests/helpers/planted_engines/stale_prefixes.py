"""Keeps keys and values of every prompt, and uses them after the weights have changed."""

from copy import deepcopy

import numpy as np
import torch
from transformers import DynamicCache

from rollouts.engines.base import Completion
from rollouts.engines.hf import HfEngine


class StalePrefixEngine(HfEngine):
    def __init__(self, config):
        super().__init__(config)
        self.prefixes: dict[tuple[int, ...], DynamicCache] = {}

    async def generate(self, token_ids, *, max_new_tokens, seed):
        with torch.no_grad():
            return self._continue(token_ids, max_new_tokens, seed)

    def _continue(self, token_ids, max_new_tokens, seed):
        uniform, cache = np.random.default_rng(seed), self._read_prefix(token_ids)
        ids, logp = [], []
        while len(ids) < max_new_tokens and not (ids and ids[-1] in self.stop):
            last = self._make_tensor([[*token_ids, *ids][-1:]])
            logits = self.model(input_ids=last, past_key_values=cache, use_cache=True).logits[:, -1]
            scores = (logits / self.temperature).log_softmax(-1)[0]
            drawn = int(torch.searchsorted(scores.exp().cumsum(0), uniform.random(), right=True))
            ids.append(min(drawn, len(scores) - 1))
            logp.append(float(scores[ids[-1]]))
        stop = "eos" if ids[-1] in self.stop else "length"
        return Completion(token_ids=ids, logp=logp, versions=[self.version] * len(ids), stop=stop)

    def _read_prefix(self, token_ids):
        """Return the cache of all tokens but the last, begun with the longest prefix that was computed before."""
        wanted = tuple(token_ids[:-1])
        known = max((p for p in self.prefixes if wanted[: len(p)] == p), key=len, default=())
        cache = deepcopy(self.prefixes[known]) if known else DynamicCache(config=self.model.config)
        if rest := wanted[len(known) :]:
            self.model(input_ids=self._make_tensor([list(rest)]), past_key_values=cache, use_cache=True)
        self.prefixes[wanted] = deepcopy(cache)
        return cache
