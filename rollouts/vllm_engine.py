"""vLLM behind the `Engine` interface: `VllmEngine` in processes of its own, `LocalVllmEngine` in the caller's.

Both take weights through vLLM's weight-transfer API (rollouts/vllm_worker.py), or an adapter alone beside the model's
own weights, and clear the prefix cache with every update. vLLM is imported when an engine is made, after its
environment is set.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any, Literal, TypeVar

import torch

from configs.schema import LoraConfig, UpdateMode
from core.errors import ProcessDied, RunStopped, TransportFailed
from rollouts.engine import Completion
from rollouts.parcels import Parcel
from rollouts.weight_sync import Bucket

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM can make room for."""
ADAPTER_ID = 1
"""As in rollouts/vllm_worker.py, which cannot be imported before vLLM's environment is set."""
_UNPUBLISHED = -1
"""The version of tokens that were sampled before the first update."""
_POLL_S = 0.5
_GRACE_S = 2.0
"""So much later than the deadlines of vLLM's workers ends the wait for them."""
_DIED = "vLLM's own process died; what it said last is in the log of this worker, in Ray's session folder"
T = TypeVar("T")
_PAUSES: dict[UpdateMode, Literal["keep", "wait", "abort"]] = {"in_flight": "keep", "drain": "wait", "abort": "abort"}
"""What vLLM does with the requests it is answering; all three queue new ones."""


class _Vllm:
    """What the two engines share: the settings, the requests, and the sequence of an update."""

    def __init__(
        self,
        *,
        model_path: str,
        temperature: float,
        max_model_len: int,
        stop_token_ids: Sequence[int],
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        seed: int = 0,
        tensor_parallel: int = 1,
        cores: Sequence[int] | None = None,
        kv_cache_gib: float | None = None,
        gpu_memory_utilization: float = 0.85,
        enforce_eager: bool = False,
        load_format: Literal["auto", "dummy"] = "auto",
        lora: LoraConfig | None = None,
        timeout_s: float = 300.0,
        update: UpdateMode = "in_flight",
    ) -> None:
        """Start the engine; it returns when requests can be made.

        stop_token_ids: what ends a completion. The model's own generation config is ignored.
        cores: the CPU cores of this engine, shared out among its ranks; all that the process may use by default.
        kv_cache_gib: size of the KV cache per rank; by default what `gpu_memory_utilization` leaves (4 on a CPU).
        load_format: "dummy" leaves the weights random until the first update.
        lora: updates bring this adapter, its `targets` named one by one, and the weights stay the model's own.
        timeout_s: how long one step of a weight update may take; a drain is none.
        update: what becomes of requests that are being answered when weights come.
        """
        self._temperature = temperature
        self._stop_token_ids = list(stop_token_ids)
        self._timeout_s = timeout_s
        self._on_update: UpdateMode = update
        self._lora = lora
        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            _prepare_cpu(cores, tensor_parallel)
            kv_cache_gib = 4.0 if kv_cache_gib is None else kv_cache_gib
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about settings that are ours
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self._settings: dict[str, Any] = {
            "model": model_path,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed,
            "tensor_parallel_size": tensor_parallel,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
            # Compiling costs more than it brings on a CPU: see _prepare_cpu.
            "enforce_eager": enforce_eager or on_cpu,
            # A prompt cut in two with a seed of its own ends vLLM on a CPU: "CPU Generator does not use offset".
            "enable_chunked_prefill": not on_cpu,
            "load_format": load_format,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            # The log-probability under the distribution the token was drawn from: temperature included.
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "worker_extension_cls": "rollouts.vllm_worker.WorkerMethods",
            "disable_log_stats": True,
            **({} if lora is None else _lora_settings(lora)),
        }
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


class VllmEngine(_Vllm):
    """AsyncLLM: engine and workers run in processes of their own, requests are batched as they come."""

    def __init__(self, *, over_nccl: bool = False, **settings: Any) -> None:
        """over_nccl: an `NcclSender` will send the weights, which takes GPUs at both ends."""
        self._transfer = "feynrl_nccl" if over_nccl else "feynrl_gloo"
        self._fed = self._held = False
        super().__init__(**settings)

    def _start(self) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**self._settings, weight_transfer_config=WeightTransferConfig(backend=self._transfer))
        )
        self._requests = count()

    async def join(self, *, address: str, port: int, first_rank: int, members: int) -> None:
        """Make this engine's workers members `first_rank`, `first_rank` + 1, ... of the sender's group.

        From now on weights come from there.
        """
        self._fed = False
        where = {"address": address, "port": port, "first_rank": first_rank, "members": members}
        _raise_first(await self._rpc("feynrl_join", kwargs={"init_info": {**where, "timeout_s": self._timeout_s}}))

    async def open_feed(self) -> None:
        """From now on weights come by `feed`, between a `hold` and a `receive`."""
        self._must_be_held()
        self._fed = True
        await self._begin()

    async def feed(self, parcel: Parcel) -> None:
        await self._bring({"parcel": parcel})

    async def hold(self) -> None:
        """Keep, finish or cut off what runs, as `update` says; new requests wait. `receive` lets all go on."""
        # A drain is as long as the longest completion, and its deadline that of every remote call, the run's timeout_s.
        # What vLLM has preempted for want of cache is not drained: it waits, and goes on as with in_flight.
        async with asyncio.timeout(None if self._on_update == "drain" else self._timeout_s):
            await self._while_alive(self._llm.pause_generation(mode=_PAUSES[self._on_update], clear_cache=False))
        self._held = True

    async def receive(self, version: int) -> None:
        """Take part in one `WeightSender.send`, or complete what was fed; after a `hold`."""
        self._must_be_held()
        await (self._finish(version) if self._fed else self._update(version, {}))
        await self._go_on(version)

    def _must_be_held(self) -> None:
        if not self._held:
            raise RuntimeError("an update without hold: requests would run while their weights are replaced")

    async def _go_on(self, version: int) -> None:
        async def go_on() -> None:
            await self._llm.update_weight_version(str(version))
            # What was kept is computed anew from its tokens, or old keys and values would live on in it.
            await self._llm.reset_prefix_cache(reset_running_requests=True)
            await self._llm.resume_generation()

        async with asyncio.timeout(self._timeout_s):
            await self._while_alive(go_on())
        self._held = False

    async def close(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown(timeout=10.0)
        del self._llm  # its finalizer fails when it runs at the interpreter's exit

    async def _ask(self, token_ids: list[int], params: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        request = self._llm.generate(
            {"prompt_token_ids": token_ids},
            params,
            request_id=str(next(self._requests)),
            lora_request=self._adapter(),
        )
        try:
            async with aclosing(request) as answers:
                async for answer in answers:
                    return answer
        except EngineDeadError as error:
            raise ProcessDied(_DIED) from error
        raise RunStopped("vLLM ended a request without an answer")

    async def _rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        async with asyncio.timeout(self._timeout_s + _GRACE_S):
            return await self._while_alive(self._llm.collective_rpc(method, kwargs=kwargs))

    async def _while_alive(self, call: Awaitable[T]) -> T:
        """Await `call`, and raise ProcessDied once vLLM's own process is gone: vLLM would leave it unanswered."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_POLL_S)
                if self._llm.errored and not task.done():
                    raise ProcessDied(_DIED)
            return task.result()
        except EngineDeadError as error:
            raise ProcessDied(_DIED) from error
        finally:
            task.cancel()


class LocalVllmEngine(_Vllm):
    """LLM in the caller's process, one rank, for `backend: local` on a CPU.

    Requests made in the same turn of the event loop run as one batch, during which the process does nothing else.
    """

    def _start(self) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        self._llm = LLM(**self._settings, weight_transfer_config=WeightTransferConfig(backend="feynrl_local"))
        # vLLM takes the process for its own: one thread, and a set_num_threads that does nothing.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        self._waiting: list[tuple[list[int], Any, asyncio.Future[Any]]] = []

    async def hold(self) -> None:
        """Return at once, whatever `update` says: while requests run, nobody else does, so none is running now."""

    async def load(self, version: int, buckets: Iterable[Bucket]) -> None:
        """Take the weights straight from the trainer, which is in this process."""
        await self._update(version, {"buckets": buckets})
        self._llm.update_weight_version(str(version))
        if not self._llm.reset_prefix_cache():
            raise RunStopped(f"vLLM did not clear its prefix cache for version {version}")

    async def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    async def _ask(self, token_ids: list[int], params: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, params, answer))
        if len(self._waiting) == 1:
            await asyncio.sleep(0)  # the first asks for all who come after it in this turn
            self._answer_all()
        return await answer

    def _answer_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        prompts = [{"prompt_token_ids": token_ids} for token_ids, _, _ in waiting]
        params = [params for _, params, _ in waiting]
        answers = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter())
        for (_, _, future), answer in zip(waiting, answers, strict=True):
            future.set_result(answer)

    async def _rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        return self._llm.collective_rpc(method, kwargs=kwargs)


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
