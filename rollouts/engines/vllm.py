"""vLLM engine.

vLLM runs in this process, on a thread of its own (vllm_support/loop.py); with tensor parallelism its ranks are other
processes. Weights arrive through vLLM's weight-transfer API (vllm_support/worker.py). With LoRA, only an adapter
arrives, beside the base weights. Each update clears the prefix cache and the image cache. vLLM is imported when an
engine is created, after its environment variables are set.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from configs.trainer_schema import LoraConfig
from core.errors import RunStopped
from core.gc_control import without_gc
from core.timing.deadlines import ENGINE_RPC_GRACE_S
from core.types.images import PlacedImage, list_written
from core.types.weights import Bucket
from rollouts.engines.base import Capabilities, Completion, Engine, EngineConfig, make_completion
from rollouts.engines.sleeping import Sleeper, WakePart
from rollouts.engines.vllm_support.checks import VllmChecks
from rollouts.engines.vllm_support.drafts import read_drafts
from rollouts.engines.vllm_support.images import check_prompt, make_prompt
from rollouts.engines.vllm_support.kept_sets import KeptReports
from rollouts.engines.vllm_support.loop import EngineLoop
from rollouts.engines.vllm_support.options import naming_refused
from rollouts.engines.vllm_support.parts import Parts
from rollouts.engines.vllm_support.patches import hide_invented_dict, restoring_threads, spare_other_models
from rollouts.engines.vllm_support.plugin import require_plugin
from rollouts.engines.vllm_support.requests import (
    make_adapter_request,
    probe_params,
    raise_first,
    read_stop,
    read_versions,
    sampling_params,
)
from rollouts.engines.vllm_support.routes import RouteReports
from rollouts.engines.vllm_support.settings import engine_args, find_use, prepare_cpu, prepare_gpu
from rollouts.engines.vllm_support.sockets import place_sockets
from trainers.weight_sync.base import Chunk


class VllmEngine(VllmChecks, Engine):
    """Engine on vLLM's LLMEngine, with continuous batching."""

    capabilities = Capabilities(
        tensor_parallel=True,
        broadcast=True,
        nccl=True,
        chunks=True,
        deltas=True,
        adapter=True,
        images=True,
        allowed_tokens=True,
        kept_sets=True,
        routes=True,
        stop_strings=True,
        sleep=True,
        ipc=True,
        file_names=True,
    )
    stat_loggers: ClassVar[Sequence[Any]] = ()
    """Classes of vLLM's StatLoggerBase, for a subclass that counts iterations."""

    def __init__(self, config: EngineConfig) -> None:
        """Start vLLM in this process, whose environment variables it sets. Raises UserError for options it refuses."""
        self._timeout_s, self._lora = config.timeout_s, config.lora
        self._sleeper, self._sleep_level = Sleeper(), 2 if config.sleep == "discard" else 1
        self._running, self._takes_chunks = 0, False  # requests that are not finished; whether chunks come
        on_cpu = not torch.cuda.is_available()
        self._reports, self._routes = KeptReports(config, self._rpc, on_cpu=on_cpu), RouteReports(config)
        self.prepare_requests(config)
        require_plugin()
        cores: list[int] | None = None
        if on_cpu:
            cores = prepare_cpu(config.cores, config.tensor_parallel_size)
        else:
            prepare_gpu(config.dtype)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about settings that we choose
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it would send statistics over the network
        place_sockets()
        self._sees, text_only = find_use(config)
        self._placeholder: int | None = None
        if self._sees:
            from modeling.images.processor import ImageProcessor

            given = {"trust_remote_code": config.trust_remote_code}
            self._placeholder = ImageProcessor(config.model_path, **given).placeholder_id
        transfer = "feynrl_nccl" if config.over_nccl else "feynrl_ipc" if config.over_ipc else "feynrl_gloo"
        args = engine_args(config, on_cpu=on_cpu, sees=self._sees, text_only=text_only)
        self._start(args, config.options, transfer=transfer, cores=cores)

    def prepare_requests(self, config: EngineConfig) -> None:
        """Take the settings of requests, and the treatment of running ones during a weight update."""
        self.config, self._pause_mode = config, config.pause_mode
        ends_requests = config.stop_strings is not None or config.pause_mode == "abort"
        self._make_params = partial(
            sampling_params,
            temperature=config.temperature,
            stop_token_ids=config.stop_token_ids,
            allowed_tokens=config.allowed_tokens,
            # a request that may end, or be aborted, at any token
            reports_tokens=ends_requests,
        )
        self._parts: Parts | None = None
        if ends_requests:
            self._parts = Parts(self._ask, self._make_params, self._reports, self._routes, config)
        # without chance vLLM refuses to sample a prompt several times; a subclass may change each sample
        is_plain = config.temperature > 0 and type(self).generate is VllmEngine.generate
        self._joins = is_plain and not ends_requests and self._reports.may_join

    def _start(
        self, args: dict[str, Any], options: Mapping[str, Any], *, transfer: str, cores: Sequence[int] | None
    ) -> None:
        """Start vLLM. options: the user's. transfer: the weight-transfer engine. cores: rank 0's, None on a GPU."""

        def make_engine() -> Any:
            with without_gc():
                from vllm import EngineArgs
                from vllm.config import WeightTransferConfig
                from vllm.usage.usage_lib import UsageContext
                from vllm.v1.engine.llm_engine import LLMEngine

            if cores is not None:
                os.sched_setaffinity(0, cores)  # of this thread, and of OpenMP's threads, which it starts
            hide_invented_dict()
            spare_other_models()
            with restoring_threads(None if cores is None else len(cores)), naming_refused(options):
                return LLMEngine.from_engine_args(
                    EngineArgs(
                        **args,
                        disable_log_stats=not self.stat_loggers,
                        weight_transfer_config=WeightTransferConfig(backend=transfer),
                        # within a placement group vLLM would take Ray, and place its workers itself
                        distributed_executor_backend="mp" if args["tensor_parallel_size"] > 1 else None,
                    ),
                    # the defaults of a server keep few requests in a batch, since its users wait for the next token
                    usage_context=UsageContext.LLM_CLASS,
                    stat_loggers=[*self.stat_loggers],
                )

        self._loop = EngineLoop(make_engine)

    async def generate(
        self, token_ids: list[int], *, max_new_tokens: int, seed: int, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        """Sample a continuation of `token_ids` at the run's temperature, including the stop token."""
        if self._parts is not None:
            return await self._parts.generate(token_ids, images, max_new_tokens=max_new_tokens, seed=seed)
        [done] = await self._request_group(token_ids, images, size=1, max_new_tokens=max_new_tokens, seed=seed)
        return done

    async def generate_group(
        self, token_ids: list[int], *, size: int, max_new_tokens: int, seed: int, images: Sequence[PlacedImage] = ()
    ) -> list[Completion]:
        """Sample continuations in one request, where vLLM alone ends them and takes several, else in one for each."""
        if size > 1 and self._joins:
            return await self._request_group(token_ids, images, size=size, max_new_tokens=max_new_tokens, seed=seed)
        one_each = super().generate_group
        return await one_each(token_ids, size=size, max_new_tokens=max_new_tokens, seed=seed, images=images)

    async def _request_group(
        self, token_ids: list[int], images: Sequence[PlacedImage], *, size: int, max_new_tokens: int, seed: int
    ) -> list[Completion]:
        """Return the samples of a vLLM request."""
        with self._reports.naming() as key:
            truncation = self._reports.make_params(key)
            params = self._make_params(max_new_tokens=max_new_tokens, seed=seed, size=size, truncation=truncation)
            answer = await self._ask(token_ids, images, params)
            done: list[Completion] = []
            for output in answer.outputs:
                ids, kept = [*output.token_ids], await self._reports.read(key, output)
                done.append(
                    make_completion(
                        ids,
                        [*output.logprobs.logprobs],
                        read_versions(output),
                        kept,
                        stop=read_stop(output.finish_reason),
                        routes=self._routes.read(output, len(token_ids) + len(ids)),
                        drafts=read_drafts(output),
                    )
                )
            return done

    async def probe(self, token_ids: list[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        """Return the log-probability of each text token after the first, at temperature 1 and without prefix cache."""
        answer = await self._ask(token_ids, images, probe_params(self._reports.make_probe_params()))
        return [answer.prompt_logprobs[i][token_ids[i]].logprob for i in list_written(len(token_ids), images)]

    async def _ask(
        self,
        token_ids: list[int],
        images: Sequence[PlacedImage],
        params: Any,
        ends: Callable[[list[int]], bool] | None = None,
    ) -> Any:
        """Run a vLLM request. Raises RunStopped if vLLM expanded images to other tokens than we did."""
        self._sleeper.check_sampling()
        # counted for sleep(), which needs an idle engine
        self._running += 1
        try:
            answer = await self._request(make_prompt(token_ids, images, self._placeholder), params, ends)
        finally:
            self._running -= 1
        if images and answer is not None:
            check_prompt(answer.prompt_token_ids, token_ids)
        return answer

    async def _request(self, prompt: dict[str, Any], params: Any, ends: Callable[[list[int]], bool] | None) -> Any:
        adapter = None if self._lora is None else make_adapter_request()
        return await self._loop.request(prompt, params, adapter=adapter, ends=ends)

    async def join_broadcast(self, *, address: str, port: int, first_rank: int, members: int) -> None:
        """Join the sender's group with ranks `first_rank`, `first_rank` + 1, ... for this engine's workers."""
        self._takes_chunks = False
        where = {"address": address, "port": port, "first_rank": first_rank, "members": members}
        raise_first(await self._rpc("feynrl_join", init_info={**where, "timeout_s": self._timeout_s}))

    async def pause(self) -> None:
        """Keep, finish or abort running requests, as `weight_sync.pause_mode` says. New requests wait."""
        if not self._sleeper.may_sample:
            return  # it was paused when it went to sleep
        # Finishing takes as long as the longest completion; its deadline is that of every remote call, timeout_s.
        async with asyncio.timeout(None if self._pause_mode == "wait" else self._timeout_s):
            await self._loop.pause(self._pause_mode)

    async def load_weights(self, version: int, buckets: Iterable[Bucket]) -> None:
        """Load weights of a trainer in this process."""
        self._check_paused()
        await self._begin_update()
        await self._load_part(buckets=buckets)
        await self._finish_update(version)

    async def begin_chunks(self) -> None:
        self._check_paused()
        self._takes_chunks = True
        await self._begin_update()

    async def load_chunk(self, chunk: Chunk) -> None:
        await self._load_part(chunk=chunk)

    async def receive_weights(self, version: int) -> None:
        self._check_paused()
        if not self._takes_chunks:
            await self._begin_update()
            await self._load_part()
        await self._finish_update(version)

    def _check_paused(self) -> None:
        self._sleeper.check_loading()
        if not self._loop.is_paused:
            raise RuntimeError("pause() comes before an update: requests would run while their weights are replaced")

    async def _begin_update(self) -> None:
        await self._rpc("feynrl_begin", adapter=self._lora is not None)

    async def _load_part(self, **update_info: Any) -> None:
        """Load a part of an update, a vllm_support.worker.WeightUpdate."""
        raise_first(await self._rpc("feynrl_load_part", adapter=self._lora is not None, update_info=update_info))

    async def _finish_update(self, version: int) -> None:
        """Check the update, clear what was computed with the old weights, and continue sampling."""
        if self._lora is not None:
            await self._finish_adapter(version, self._lora)
        else:
            await self._rpc("finish_weight_update")
            for rank, untouched in enumerate(await self._rpc("feynrl_untouched")):
                if untouched:
                    raise RunStopped(
                        f"the sync of version {version} had no values for {len(untouched)} parameters of rank {rank}, "
                        f"such as {untouched[0]}"
                    )
        async with asyncio.timeout(self._timeout_s):
            await self._loop.call(self._set_version, version)
        if self._sleeper.may_sample:  # else it resumes when its cache wakes
            self._loop.resume()

    async def _finish_adapter(self, version: int, lora: LoraConfig) -> None:
        config = {"r": lora.r, "lora_alpha": lora.alpha, "target_modules": lora.targets, "use_rslora": lora.rslora}
        lost = await self._rpc("feynrl_load_adapter", config=config)
        for rank, names in enumerate(lost):
            if names:
                raise RunStopped(
                    f"the sync of version {version} sent an adapter for {len(names)} layers that vLLM's model does "
                    f"not have (rank {rank}), such as {names[0]}: set weight_sync.lora to merged"
                )

    def _set_version(self, version: int) -> None:
        llm = self._loop.llm
        # before requests go on: vLLM labels the tokens with it
        llm.set_weight_version(str(version))
        # Kept requests are computed again from their tokens, or old keys and values would stay in use.
        if not llm.reset_prefix_cache(reset_running_requests=True):
            raise RunStopped(f"vLLM did not clear its prefix cache for version {version}")
        if self._sees:
            llm.reset_encoder_cache()  # after that: what was computed of images, by their hashes

    async def read_fingerprint(self) -> list[Mapping[str, int]]:
        """Return checksums of the tensors loaded in the last update, per tensor-parallel rank."""
        return await self._rpc("feynrl_consumed")

    async def sleep(self) -> None:
        self._sleeper.fall_asleep(running=self._running)
        async with asyncio.timeout(self._timeout_s):
            await self._loop.pause("keep")
            await self._loop.call(self._loop.llm.sleep, self._sleep_level, "keep")

    async def wake(self, part: WakePart) -> None:
        """Wake a part. vLLM samples again when both parts are awake."""
        self._sleeper.wake(part)
        async with asyncio.timeout(self._timeout_s):
            await self._loop.call(self._loop.llm.wake_up, [part])
        if self._sleeper.may_sample:
            self._loop.resume()

    async def start_trace(self, *, trace: bool, memory: bool) -> None:
        await self._rpc("feynrl_start_trace", trace=trace, memory=memory)

    async def stop_trace(self, stem: Path) -> list[str]:
        return [name for names in await self._rpc("feynrl_stop_trace", stem=str(stem)) for name in names]

    async def close(self) -> None:
        await self._loop.close()

    async def _rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of every worker. Return one result per rank."""
        # longer than the deadline inside the call, which raises the more precise error
        async with asyncio.timeout(self._timeout_s + ENGINE_RPC_GRACE_S):
            return await self._loop.call(lambda: self._loop.llm.collective_rpc(method, kwargs=kwargs))
