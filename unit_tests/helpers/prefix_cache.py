"""What vLLM's prefix cache holds of a prompt."""

from __future__ import annotations

from rollouts.engines.vllm_support.common import VllmBase


async def count_cached(engine: VllmBase, token_ids: list[int]) -> int:
    """Return how many tokens of the prompt are served from the cache; a request, after which all of it is there."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    return (await engine._ask(token_ids, (), params)).num_cached_tokens
