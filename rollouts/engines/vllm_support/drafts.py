"""Speculative decoding of vLLM: the recipes that may use it, and the counts of drafted and accepted tokens.

vLLM drafts some tokens, computes their probabilities in one pass, and accepts each with the policy's own probability of
it; the first that is rejected is drawn again from the other tokens. So tokens have the policy's distribution, and the
log-probabilities of it (https://arxiv.org/abs/2211.17192). Random numbers are spent otherwise: a seed draws other
tokens than without drafts. Tests have shown this on a CPU. GPUs run another runner of vLLM, with a rejection sampler
of its own, which no test has run. It drafts in every step: where no earlier tokens match, it repeats the last one. So
fewer of the drafts are accepted there than on a CPU, which drafts at matches only.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from configs.rollout_schema import RolloutConfig
from core.errors import UserError
from core.types.drafts import NO_DRAFTS, Drafts
from rollouts.engines.base import EngineConfig

OPTION = "speculative_config"
"""Option of `rollout.vllm` that turns drafts on."""
KEY = f"rollout.vllm.{OPTION}"
METHODS = ("ngram", "suffix")
"""Methods without weights. Others would have to receive weights of their own at each sync."""
STANDARD = "standard"
"""vLLM's rejection sampling; the others accept tokens by other rules."""


def check_drafts(options: Mapping[str, Any], rollout: RolloutConfig) -> None:
    """Raise UserError for drafts that have not been shown to be exact."""
    given = options.get(OPTION)
    if given is None:
        return
    example = "{method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 4}"
    # vLLM takes both spellings
    settings = {name.replace("-", "_"): value for name, value in given.items()} if isinstance(given, dict) else {}
    if settings.get("method") not in METHODS:
        raise UserError(f"{KEY} needs a method without weights, ngram or suffix, such as {example}")
    if settings.get("rejection_sample_method", STANDARD) != STANDARD:
        raise UserError(f"{KEY}: only rejection_sample_method=standard is exact: leave it out")
    if settings["method"] == "suffix" and find_spec("arctic_inference") is None:
        raise UserError(f"{KEY}: method suffix needs the package arctic-inference: install it, or set method to ngram")
    pairs = {
        "rollout.top_p, top_k or min_p": rollout.is_truncated,
        "rollout.allowed_tokens": bool(rollout.allowed_tokens),
        "rollout.router_replay": rollout.router_replay != "off",
    }
    if other := next((key for key, is_set in pairs.items() if is_set), None):
        raise UserError(f"{KEY} and {other} together have not been shown to be exact: leave one of them out")


def draft_args(config: EngineConfig) -> dict[str, Any]:
    """Return vLLM's EngineArgs that count drafts. Raises UserError for an adapter, and a model that reads images."""
    if config.options.get(OPTION) is None:
        return {}
    if config.lora is not None:
        raise UserError(f"{KEY} has not been tried with an adapter: set weight_sync.lora to merged")
    if not config.allowed_tokens.is_everything:
        # vLLM would ignore the bias that bans placeholders of images, without an error
        raise UserError(f"{KEY}: vLLM cannot ban tokens in drafts, and the model reads images: leave it out")
    return {"per_request_spec_decode_metrics": "summary"}


def read_drafts(output: Any) -> Drafts:
    """Return the drafts of vLLM's CompletionOutput. Not counted are those of a request that we ended or aborted."""
    counted = output.spec_decode_metrics
    if counted is None:
        return NO_DRAFTS
    accepted = sum(n * times for n, times in enumerate(counted.histogram))
    return Drafts(drafted=counted.num_draft_tokens, accepted=accepted)
