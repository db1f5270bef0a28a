"""Parameters of a request to vLLM, and the reading of answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.errors import RunStopped, TransportFailed
from core.types.allowed_tokens import AllowedTokens
from rollouts.engines.base import CompletionStop
from rollouts.engines.vllm_support.settings import ADAPTER_ID

if TYPE_CHECKING:
    from vllm import SamplingParams

UNPUBLISHED = -1
"""Version of tokens sampled before the first update."""


def sampling_params(
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    size: int = 1,
    stop_token_ids: Sequence[int],
    allowed_tokens: AllowedTokens,
    truncation: Mapping[str, Any],
    reports_tokens: bool,
) -> SamplingParams:
    """Return parameters that sample from the policy's distribution.

    size: number of samples, of which sample i has the seed `seed` + i. truncation: those of `KeptReports.make_params`.
    reports_tokens: return an output per token, which costs time,
    instead of the last output only.
    """
    # the module, not the package: the package looks names up by itself, for every sample
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=temperature,
        max_tokens=max_new_tokens,
        seed=seed % 2**63,
        n=size,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,  # one list of numbers, instead of an object per token
        stop_token_ids=[*stop_token_ids],
        ignore_eos=True,  # the caller's stop tokens are complete
        detokenize=False,
        skip_clone=True,  # no other request has them
        output_kind=RequestOutputKind.CUMULATIVE if reports_tokens else RequestOutputKind.FINAL_ONLY,
        **_limit_tokens(allowed_tokens),
        **truncation,  # top_p, top_k and min_p
    )


def probe_params(truncation: Mapping[str, Any]) -> SamplingParams:
    """Return parameters that compute the log-probabilities of a prompt at temperature 1.

    truncation: those of `KeptReports.make_probe_params`.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=1.0,
        # the least that vLLM accepts
        max_tokens=1,
        prompt_logprobs=0,
        # tokens served from the cache are not computed, so they have no log-probabilities
        skip_reading_prefix_cache=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **truncation,
    )


def _limit_tokens(allowed_tokens: AllowedTokens) -> dict[str, Any]:
    """Return vLLM's SamplingParams that restrict sampling. Returned log-probabilities respect them.

    vLLM masks before dividing by the temperature, and a bias of -inf bans exactly. On GPUs, each kind has at most 1024
    ids.
    """
    if allowed_tokens.allowed is not None:
        return {"allowed_token_ids": list(allowed_tokens.allowed)}
    return {"logit_bias": dict.fromkeys(allowed_tokens.banned, -math.inf)} if allowed_tokens.banned else {}


def make_adapter_request() -> Any:
    """Return vLLM's request for the in-memory adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, "in memory")


def read_versions(output: Any) -> list[int]:
    """Return the policy version of each sampled token. vLLM reports versions as spans of tokens."""
    return [
        UNPUBLISHED if span.version == "default" else int(span.version)
        for span in output.weight_versions
        for _ in range(span.start, span.end)
    ]


def read_stop(reason: str | None) -> CompletionStop:
    """Return the stop reason of a completion that vLLM has ended. reason: vLLM's."""
    if reason not in ("stop", "length"):
        raise RunStopped(f"vLLM ended a request with {reason!r} instead of a completion")
    return "eos" if reason == "stop" else "length"


def raise_first(failures: list[str]) -> None:
    """Raise TransportFailed for the first failure. failures: message by rank, "" for success."""
    for rank, message in enumerate(failures):
        if message:
            raise TransportFailed(message if len(failures) == 1 else f"rank {rank}: {message}")
