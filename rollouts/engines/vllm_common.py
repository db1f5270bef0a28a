"""What both vLLM engines share: settings, requests and the sequence of a weight update."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from configs.rollout_schema import UpdateMode
from configs.trainer_schema import LoraConfig
from core.errors import RunStopped, TransportFailed
from rollouts.engines.base import Completion

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM can make room for."""
ADAPTER_ID = 1
"""As in rollouts/engines/vllm_worker.py, which cannot be imported before vLLM's environment is set."""
_UNPUBLISHED = -1
"""The version of tokens that were sampled before the first update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """Settings of one vLLM engine."""

    model_path: str
    temperature: float
    max_model_len: int
    """Tokens of the longest prompt and completion together."""
    stop_token_ids: Sequence[int]
    """Tokens that end a completion. The model's own generation config is ignored."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 0
    tensor_parallel: int = 1
    cores: Sequence[int] | None = None
    """CPU cores of this engine, shared out among its ranks; all that the process may use by default."""
    kv_cache_gib: float | None = None
    """Size of the KV cache per rank, in GiB; by default what `gpu_memory_utilization` leaves (4 on a CPU)."""
    gpu_memory_utilization: float = 0.85
    enforce_eager: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy leaves the weights random until the first update."""
    lora: LoraConfig | None = None
    """Updates bring this adapter, its `targets` named one by one, and the weights stay the model's own."""
    timeout_s: float = 300.0
    """Deadline of one step of a weight update. Draining the running requests has none here."""
    update: UpdateMode = "in_flight"
    """What happens to running requests when weights come."""

    def engine_args(self, *, on_cpu: bool) -> dict[str, Any]:
        """Return the keyword arguments of vLLM's EngineArgs."""
        kv_cache_gib = 4.0 if on_cpu and self.kv_cache_gib is None else self.kv_cache_gib
        return {
            "model": self.model_path,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "seed": self.seed,
            "tensor_parallel_size": self.tensor_parallel,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
            # Compiling costs more than it brings on a CPU: see _prepare_cpu.
            "enforce_eager": self.enforce_eager or on_cpu,
            # A prompt cut in two with a seed of its own ends vLLM on a CPU: "CPU Generator does not use offset".
            "enable_chunked_prefill": not on_cpu,
            "load_format": self.load_format,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            # The log-probability under the distribution the token was drawn from: temperature included.
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "worker_extension_cls": "rollouts.engines.vllm_worker.WorkerMethods",
            "disable_log_stats": True,
            **({} if self.lora is None else _lora_settings(self.lora)),
        }


class _Vllm:
    """What the two engines share: the settings, the requests, and the sequence of an update."""

    def __init__(self, config: VllmConfig) -> None:
        """Start the engine; return when requests can be made."""
        self._temperature = config.temperature
        self._stop_token_ids = list(config.stop_token_ids)
        self._timeout_s = config.timeout_s
        self._on_update: UpdateMode = config.update
        self._lora = config.lora
        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            _prepare_cpu(config.cores, config.tensor_parallel)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about settings that are ours
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self._settings = config.engine_args(on_cpu=on_cpu)
        self._start()

    def _start(self) -> None:
        """Make vLLM from `self._settings`."""
        raise NotImplementedError

    async def generate(self, token_ids: list[int], *, max_new_tokens: int, seed: int) -> Completion:
        """Sample one continuation of `token_ids` at the run's temperature; it includes the token that stopped it.

        What an update cut off (update=abort) is asked again from the tokens already there.
        """
        ids: list[int] = []
        logp: list[float] = []
        versions: list[int] = []
        stop: Literal["eos", "length"] | None = None
        while stop is None:
            # Asked while the engine is held, it waits there: this does not spin.
            said = await self._sample(token_ids + ids, max_new_tokens - len(ids), _seed_after(len(ids), seed))
            stop = self._stop(said.finish_reason, [*ids, *said.token_ids], max_new_tokens)
            ids += said.token_ids
            logp += [at[token].logprob for token, at in zip(said.token_ids, said.logprobs, strict=True)]
            versions += [_version(span.version) for span in said.weight_versions for _ in range(span.start, span.end)]
        return Completion(token_ids=ids, logp=logp, versions=versions, stop=stop)

    async def _sample(self, token_ids: list[int], max_new_tokens: int, seed: int) -> Any:
        """One request of vLLM's, to its end, which may come early."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        answer = await self._ask(
            token_ids,
            SamplingParams(
                temperature=self._temperature,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                max_tokens=max_new_tokens,
                seed=seed % 2**63,
                logprobs=0,  # of the sampled token only
                stop_token_ids=self._stop_token_ids,
                ignore_eos=True,  # the caller's stop tokens say it all
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        [said] = answer.outputs
        return said

    def _stop(self, reason: str, ids: list[int], max_new_tokens: int) -> Literal["eos", "length"] | None:
        """Why a completion is over; None if it was cut off and lacks tokens."""
        if reason == "abort" and self._on_update == "abort":
            if ids and ids[-1] in self._stop_token_ids:
                return "eos"
            return "length" if len(ids) == max_new_tokens else None
        if reason not in ("stop", "length"):
            raise RunStopped(f"vLLM ended a request with {reason!r} instead of a completion")
        return "eos" if reason == "stop" else "length"

    async def probe(self, token_ids: list[int]) -> list[float]:
        """Log-probability, at temperature 1, of token_ids[1:] given what is before each; never from the cache."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        answer = await self._ask(
            token_ids,
            SamplingParams(
                temperature=1.0,
                max_tokens=1,
                prompt_logprobs=0,
                skip_reading_prefix_cache=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        return [at[token].logprob for token, at in zip(token_ids[1:], answer.prompt_logprobs[1:], strict=True)]

    async def cached_tokens(self, token_ids: list[int]) -> int:
        """How many tokens of this prompt the prefix cache serves at the moment."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        return (await self._ask(token_ids, params)).num_cached_tokens

    async def fingerprint(self) -> list[Mapping[str, int]]:
        """Per tensor-parallel rank, the checksums of what the last update's weight loaders wrote."""
        return await self._rpc("feynrl_consumed")

    async def _update(self, version: int, update_info: dict[str, Any]) -> None:
        await self._begin()
        await self._bring(update_info)
        await self._finish(version)

    async def _begin(self) -> None:
        await self._rpc("feynrl_begin", kwargs={"adapter": self._lora is not None})

    async def _bring(self, update_info: dict[str, Any]) -> None:
        _raise_first(
            await self._rpc("feynrl_bring", kwargs={"adapter": self._lora is not None, "update_info": update_info})
        )

    async def _finish(self, version: int) -> None:
        if self._lora is not None:
            return await self._finish_adapter(version, self._lora)
        await self._rpc("finish_weight_update")
        for rank, left_out in enumerate(await self._rpc("feynrl_left_out")):
            if left_out:
                raise RunStopped(
                    f"the sync of version {version} had no values for {len(left_out)} parameters of rank {rank}, "
                    f"such as {left_out[0]}"
                )

    async def _finish_adapter(self, version: int, lora: LoraConfig) -> None:
        config = {"r": lora.r, "lora_alpha": lora.alpha, "target_modules": lora.targets, "use_rslora": lora.rslora}
        lost = await self._rpc("feynrl_load_adapter", kwargs={"config": config})
        for rank, names in enumerate(lost):
            if names:
                raise RunStopped(
                    f"the sync of version {version} brought an adapter for {len(names)} layers that vLLM's model has "
                    f"not (rank {rank}), such as {names[0]}: set weight_sync.lora to merged"
                )

    def _adapter(self) -> Any:
        """What a request says of the adapter: the one in memory, never loaded from a folder."""
        if self._lora is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", ADAPTER_ID, "in memory")

    async def _ask(self, token_ids: list[int], params: Any) -> Any:
        raise NotImplementedError

    async def _rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Call a method of every worker; one answer per rank."""
        raise NotImplementedError


def _lora_settings(lora: LoraConfig) -> dict[str, Any]:
    """Only the layers of the adapter are wrapped: vLLM's wrapped head fails where a batch mixes prompts and samples."""
    rank = next(rank for rank in LORA_RANKS if rank >= lora.r)
    targets = [name.rpartition(".")[2] for name in lora.targets]
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": targets}


def _raise_first(failures: list[str]) -> None:
    """failures: by rank, what its transport said; an empty string where all went well."""
    for rank, said in enumerate(failures):
        if said:
            raise TransportFailed(said if len(failures) == 1 else f"rank {rank}: {said}")


def _seed_after(tokens: int, seed: int) -> int:
    """The seed of a request's rest: vLLM draws from the beginning again for each request."""
    if tokens == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _version(label: str) -> int:
    return _UNPUBLISHED if label == "default" else int(label)


def _prepare_cpu(cores: Sequence[int] | None, ranks: int) -> None:
    """Set what vLLM reads from the environment on a CPU, before it is imported."""
    available = sorted(cores if cores is not None else os.sched_getaffinity(0))
    # vLLM's own choice leaves a core idle, and refuses tensor parallelism without NUMA nodes.
    n = len(available)
    shares = [available[r * n // ranks : (r + 1) * n // ranks] or [available[r % n]] for r in range(ranks)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    # The first batch would compile C++ for 20 s and more, and later ones are no faster for it.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Idle threads sleep instead of spinning: the trainer, and whatever else runs, needs the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # An explicit size replaces the settings' one, in whole GiB.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
