"""Base of both vLLM engines: requests, and the sequence of a weight update."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from configs.rollout_schema import PauseMode
from configs.trainer_schema import LoraConfig
from core.errors import RunStopped, TransportFailed, UserError
from core.types.allowed_tokens import AllowedTokens
from core.types.images import PlacedImage, list_written
from modeling.hf_config import needs_images
from rollouts.engines.base import Completion, Engine, EngineConfig
from rollouts.engines.sleeping import Sleeper
from rollouts.engines.vllm_support.architectures import has_architecture
from rollouts.engines.vllm_support.images import check_prompt, make_prompt
from rollouts.engines.vllm_support.settings import engine_args, prepare_cpu

PACKAGES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("torchvision",)),
    "smolvlm": ("torchvision", "num2words"),
}
"""Packages that vLLM requires for families of vision models."""
ADAPTER_ID = 1
"""Id of the adapter, as in vllm_support/worker.py. That file cannot be imported before vLLM's environment is set."""
_UNPUBLISHED = -1
"""Version of tokens sampled before the first update."""


class VllmBase(Engine):
    """Base of both vLLM engines."""

    def __init__(self, config: EngineConfig) -> None:
        self._temperature = config.temperature
        self._stop_token_ids = list(config.stop_token_ids)
        self._stop_strings, self._support = config.stop_strings, config.allowed_tokens
        self._timeout_s = config.timeout_s
        self._request_mode: PauseMode = config.pause_mode
        self._lora = config.lora
        self._sleeper, self._sleep_level = Sleeper(), 2 if config.sleep == "discard" else 1
        self._running = 0  # requests to vLLM that are not finished
        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            prepare_cpu(config.cores, config.tensor_parallel_size)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about settings that we choose
        # vLLM would send statistics over the network
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        trusts = config.trust_remote_code
        self._sees = needs_images(config.model_path, trust_remote_code=trusts)
        self._placeholder: int | None = None
        if self._sees:
            from modeling.images.processor import ImageProcessor

            self._placeholder = ImageProcessor(config.model_path, trust_remote_code=trusts).placeholder_id
        self._args = engine_args(config, on_cpu=on_cpu, sees=self._sees)
        self._start()

    @classmethod
    def check_user_code(cls, model: nn.Module, *, path: str) -> None:
        """Raise UserError for an architecture that vLLM lacks, since its weights could not be synced."""
        [architecture, *_] = getattr(model.config, "architectures", None) or [type(model).__name__]
        if not has_architecture(architecture):
            raise UserError(
                f"model.path={path} comes with code of its own, and vLLM does not have its architecture "
                f"{architecture}: set rollout.engine=hf"
            )

    @classmethod
    def check_family(cls, family: str, *, path: str) -> None:
        """Raise UserError if vLLM lacks a package for this family of models."""
        if lacking := [name for name in PACKAGES.get(family, ()) if find_spec(name) is None]:
            raise UserError(
                f"model.path={path} is a {family} model, which vLLM loads only with {' and '.join(lacking)}: install "
                "what is missing (the torchvision that was built for this torch), or set rollout.engine=hf"
            )

    def _start(self) -> None:
        """Create vLLM from `self._args`."""
        raise NotImplementedError

    async def generate(
        self, token_ids: list[int], *, max_new_tokens: int, seed: int, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        """Sample one continuation of `token_ids` at the run's temperature, including the stop token.

        A request aborted by an update (weight_sync.pause_mode: abort) continues from the tokens already sampled.
        """
        ids: list[int] = []
        logp: list[float] = []
        versions: list[int] = []
        stop: Literal["eos", "length"] | None = None
        while stop is None:
            # a request to a paused engine waits there: this does not spin
            seed_now = _seed_after(len(ids), seed)
            output = await self._sample(token_ids, images, ids, max_new_tokens - len(ids), seed_now)
            start = len(ids)
            ids += output.token_ids
            logp += [at[token].logprob for token, at in zip(output.token_ids, output.logprobs, strict=True)]
            # vLLM reports versions as spans of tokens
            versions += [
                _parse_version(span.version) for span in output.weight_versions for _ in range(span.start, span.end)
            ]
            end = None if self._stop_strings is None else self._stop_strings.find_end(ids, start)
            if end is not None:  # vLLM may have sampled more, before it was told to end
                return Completion(token_ids=ids[:end], logp=logp[:end], versions=versions[:end], stop="eos")
            stop = self._stop_reason(output.finish_reason, ids, max_new_tokens)
        return Completion(token_ids=ids, logp=logp, versions=versions, stop=stop)

    async def _sample(
        self, prompt: list[int], images: Sequence[PlacedImage], ids: list[int], max_new_tokens: int, seed: int
    ) -> Any:
        """Run one vLLM request to the end or a stop string. An update may abort it.

        ids: completion tokens sampled so far.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        seen, strings = len(ids), self._stop_strings

        def ends(new: list[int]) -> bool:
            nonlocal seen
            start, seen = seen, len(ids) + len(new)
            return strings is not None and strings.find_end([*ids, *new], start) is not None

        answer = await self._ask(
            prompt + ids,
            images,
            SamplingParams(
                temperature=self._temperature,
                # none of these cuts the distribution, which the trainer's softmax would not repeat
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                max_tokens=max_new_tokens,
                seed=seed % 2**63,
                logprobs=0,  # of the sampled token only
                stop_token_ids=self._stop_token_ids,
                ignore_eos=True,  # the caller's stop tokens are complete
                detokenize=False,
                skip_clone=True,  # no other request has them
                # intermediate answers cost time, and only stop strings need them
                output_kind=RequestOutputKind.FINAL_ONLY if strings is None else RequestOutputKind.CUMULATIVE,
                **_support_params(self._support),
            ),
            ends,
        )
        [output] = answer.outputs
        return output

    def _stop_reason(self, reason: str, ids: list[int], max_new_tokens: int) -> Literal["eos", "length"] | None:
        """Return the stop reason of a completion, or None if it was aborted and is incomplete."""
        # an abort may come after the last token: the completion is then finished all the same
        if reason == "abort" and self._request_mode == "abort":
            if ids and ids[-1] in self._stop_token_ids:
                return "eos"
            return "length" if len(ids) == max_new_tokens else None
        if reason not in ("stop", "length"):
            raise RunStopped(f"vLLM ended a request with {reason!r} instead of a completion")
        return "eos" if reason == "stop" else "length"

    async def probe(self, token_ids: list[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        """Return the log-probability of each text token after the first, at temperature 1 and without prefix cache."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        answer = await self._ask(
            token_ids,
            images,
            SamplingParams(
                temperature=1.0,
                # the least that vLLM accepts
                max_tokens=1,
                prompt_logprobs=0,
                # tokens served from the cache are not computed, so they have no log-probabilities
                skip_reading_prefix_cache=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        return [answer.prompt_logprobs[i][token_ids[i]].logprob for i in list_written(len(token_ids), images)]

    async def read_fingerprint(self) -> list[Mapping[str, int]]:
        """Return checksums of the tensors loaded in the last update, per tensor-parallel rank."""
        return await self._rpc("feynrl_consumed")

    async def _update(self, version: int, update_info: dict[str, Any]) -> None:
        await self._begin_update()
        await self._load_part(update_info)
        await self._finish_update(version)

    async def _begin_update(self) -> None:
        await self._rpc("feynrl_begin", kwargs={"adapter": self._lora is not None})

    async def _load_part(self, update_info: dict[str, Any]) -> None:
        _raise_first(
            await self._rpc("feynrl_load_part", kwargs={"adapter": self._lora is not None, "update_info": update_info})
        )

    async def _finish_update(self, version: int) -> None:
        if self._lora is not None:
            return await self._finish_adapter(version, self._lora)
        await self._rpc("finish_weight_update")
        for rank, untouched in enumerate(await self._rpc("feynrl_untouched")):
            if untouched:
                raise RunStopped(
                    f"the sync of version {version} had no values for {len(untouched)} parameters of rank {rank}, "
                    f"such as {untouched[0]}"
                )

    async def _finish_adapter(self, version: int, lora: LoraConfig) -> None:
        config = {"r": lora.r, "lora_alpha": lora.alpha, "target_modules": lora.targets, "use_rslora": lora.rslora}
        lost = await self._rpc("feynrl_load_adapter", kwargs={"config": config})
        for rank, names in enumerate(lost):
            if names:
                raise RunStopped(
                    f"the sync of version {version} sent an adapter for {len(names)} layers that vLLM's model does "
                    f"not have (rank {rank}), such as {names[0]}: set weight_sync.lora to merged"
                )

    def _adapter_of_requests(self) -> Any:
        """Return vLLM's request for the in-memory adapter, or None without LoRA."""
        if self._lora is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", ADAPTER_ID, "in memory")

    async def _ask(
        self,
        token_ids: list[int],
        images: Sequence[PlacedImage],
        params: Any,
        ends: Callable[[list[int]], bool] | None = None,
    ) -> Any:
        """Run one vLLM request. Raises RunStopped if vLLM expanded images to other tokens than we did."""
        self._sleeper.check_sampling()
        # counted for sleep(), which needs an idle engine
        self._running += 1
        try:
            answer = await self._request(make_prompt(token_ids, images, self._placeholder), params, ends)
        finally:
            self._running -= 1
        if images:
            check_prompt(answer.prompt_token_ids, token_ids)
        return answer

    async def _request(
        self, prompt: dict[str, Any], params: Any, ends: Callable[[list[int]], bool] | None = None
    ) -> Any:
        """Run one request to the end, or until `ends` is true for the tokens sampled so far."""
        raise NotImplementedError

    async def _rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Call a method of every worker. Return one result per rank."""
        raise NotImplementedError


def _support_params(allowed_tokens: AllowedTokens) -> dict[str, Any]:
    """Return vLLM's SamplingParams that restrict sampling. Returned log-probabilities respect them.

    vLLM masks before dividing by the temperature, and a bias of -inf bans exactly. On GPUs, each kind has at most 1024
    ids.
    """
    if allowed_tokens.allowed is not None:
        return {"allowed_token_ids": list(allowed_tokens.allowed)}
    return {"logit_bias": dict.fromkeys(allowed_tokens.banned, -math.inf)} if allowed_tokens.banned else {}


def _raise_first(failures: list[str]) -> None:
    """Raise TransportFailed for the first failure. failures: message by rank, "" for success."""
    for rank, message in enumerate(failures):
        if message:
            raise TransportFailed(message if len(failures) == 1 else f"rank {rank}: {message}")


def _seed_after(tokens: int, seed: int) -> int:
    """Return the seed for the rest of a request. vLLM restarts its random numbers for each request."""
    if tokens == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _parse_version(label: str) -> int:
    return _UNPUBLISHED if label == "default" else int(label)
