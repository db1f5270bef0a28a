"""Completions that vLLM samples in parts: a stop string may end them, or a weight update abort their requests."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from core.types.arrays import Ids
from core.types.drafts import NO_DRAFTS
from core.types.images import PlacedImage
from core.types.routes import Routes
from rollouts.engines.base import Completion, CompletionStop, EngineConfig, make_completion
from rollouts.engines.vllm_support.drafts import read_drafts
from rollouts.engines.vllm_support.kept_sets import KeptReports
from rollouts.engines.vllm_support.requests import read_stop, read_versions
from rollouts.engines.vllm_support.routes import RouteReports


@dataclass(frozen=True, slots=True)
class Parts:
    """Sampler of such completions, with a request for each part."""

    ask: Callable[..., Awaitable[Any]]
    """Runs a request. Returns None if an update aborts it before a token."""
    make_params: Callable[..., Any]
    """Returns vLLM's SamplingParams."""
    reports: KeptReports
    routes: RouteReports
    config: EngineConfig

    async def generate(
        self, token_ids: list[int], images: Sequence[PlacedImage], *, max_new_tokens: int, seed: int
    ) -> Completion:
        """Sample a continuation, including the stop token or the token that completes a stop string.

        A request aborted by an update (weight_sync.pause_mode: abort) continues from the tokens already sampled.
        """
        ids, versions = list[int](), list[int]()
        logp, kept = list[float](), list[Ids]()
        routes: Routes | None = None
        drafts = NO_DRAFTS
        stop: CompletionStop | None = None
        strings = self.config.stop_strings
        while stop is None:
            # a request to a paused engine waits there: this does not spin
            seed_now = continue_seed(seed, len(ids))
            with self.reports.naming() as key:
                output = await self._sample(token_ids, images, ids, max_new_tokens - len(ids), seed_now, key)
                if output is None:  # aborted before the first token
                    continue
                kept += await self.reports.read(key, output)
            start = len(ids)
            ids += output.token_ids
            logp += output.logprobs.logprobs
            versions += read_versions(output)
            routes = self.routes.read(output, len(token_ids) + len(ids), routes)
            drafts = drafts.add(read_drafts(output))
            end = None if strings is None else strings.find_end(ids, start)
            if end is not None:  # vLLM may have sampled more, before it was told to end
                return make_completion(ids, logp, versions, kept, stop="eos", routes=routes, drafts=drafts).cut(end)
            stop = self._read_stop(output.finish_reason, ids, max_new_tokens)
        return make_completion(ids, logp, versions, kept, stop=stop, routes=routes, drafts=drafts)

    async def _sample(
        self, prompt: list[int], images: Sequence[PlacedImage], ids: list[int], max_new_tokens: int, seed: int, key: str
    ) -> Any:
        """Run a vLLM request to the end or a stop string. Return None if an update aborts it before a token.

        ids: completion tokens sampled so far. key: name of the request, for its kept sets.
        """
        seen, strings = len(ids), self.config.stop_strings

        def ends(new: list[int]) -> bool:
            nonlocal seen
            start, seen = seen, len(ids) + len(new)
            return strings is not None and strings.find_end([*ids, *new], start) is not None

        truncation = self.reports.make_params(key)
        params = self.make_params(max_new_tokens=max_new_tokens, seed=seed, truncation=truncation)
        answer = await self.ask(prompt + ids, images, params, None if strings is None else ends)
        return None if answer is None else answer.outputs[0]

    def _read_stop(self, reason: str | None, ids: Sequence[int], max_new_tokens: int) -> CompletionStop | None:
        """Return the stop reason of a completion, or None if it was aborted and is incomplete.

        reason: vLLM's, None for an aborted request. ids: all tokens of the completion.
        """
        if reason is not None or self.config.pause_mode != "abort":
            return read_stop(reason)
        # an abort may come after the last token: the completion is then finished all the same
        if ids and ids[-1] in self.config.stop_token_ids:
            return "eos"
        return "length" if len(ids) == max_new_tokens else None


def continue_seed(seed: int, tokens: int) -> int:
    """Return the seed for the rest of a completion, after `tokens` tokens.

    vLLM restarts its random numbers for each request.
    """
    if tokens == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
