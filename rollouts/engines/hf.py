"""Engine on plain transformers, for `backend: local`, debugging, and tests of the vLLM engine.

It has a copy of the weights and a KV cache, and computes the prompt of a group once. It samples from softmax(logits /
temperature) over the allowed tokens, truncated by top-p, top-k and min-p, and greedily at temperature 0. The model's
generation config is ignored.

The engine yields to the event loop after every token, so weights can be loaded during generation. The KV cache of
running requests is then recomputed from all their tokens and images.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from configs.rollout_schema import RolloutConfig
from core.device import find_device
from core.errors import RunStopped, UserError
from core.timing.trace import Tracer
from core.types.allowed_tokens import LOWEST
from core.types.images import PlacedImage, list_written
from core.types.weights import Bucket
from modeling.export import saved_buffers
from modeling.fixed_order import fixed_order
from modeling.hf_config import needs_images
from modeling.image_blocks import find_image_blocks
from modeling.softmax import normalize
from modeling.text_use import list_unused
from rollouts.engines.base import Capabilities, Completion, Engine, EngineConfig
from rollouts.engines.hf_support.invariance import check_batch_invariance
from rollouts.engines.hf_support.quantized import RoundedLinears, refuse_experts
from rollouts.engines.hf_support.rows import EngineRequest, Rows, keep_routes, keep_sets, make_rows
from rollouts.engines.sleeping import Sleeper, WakePart
from trainers.offload.storages import OffloadedStorages, find_storages
from trainers.weight_sync.base import Chunk
from trainers.weight_sync.broadcast import WeightReceiver
from trainers.weight_sync.chunks import read_chunk
from trainers.weight_sync.delta import DeltaDecoder
from trainers.weight_sync.fingerprint import fingerprint

if TYPE_CHECKING:
    from modeling.images.processor import ImageProcessor
    from modeling.routes import RouterHook

PARAMETERS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
"""Arguments of the calls of a model's forward()."""


class HfEngine(Engine):
    """Batched generation with transformers, in the caller's process.

    Simultaneous requests form a batch of at most `max_batch`, and return when the batch ends. Later requests wait for
    the next batch.
    """

    capabilities = Capabilities(
        broadcast=True,
        chunks=True,
        deltas=True,
        images=True,
        allowed_tokens=True,
        kept_sets=True,
        routes=True,
        batch_invariant=True,
        stop_strings=True,
        sleep=True,
    )
    max_batch = 256

    def __init__(self, config: EngineConfig) -> None:
        from modeling.layout_probe import set_exact_attention

        self.device = find_device()
        model = _load_model(config)
        # eval(): dropout would change the policy at every token
        self.model = model.eval().to(self.device)
        self.order, self.make_cache = nullcontext[None], partial(DynamicCache, config=self.model.config)
        if config.batch_invariant:
            # a cache by the config would drop keys outside of a window, and with them the places of the others
            self.order, self.make_cache = fixed_order, DynamicCache
            check_batch_invariance(self.model)
        else:
            set_exact_attention(self.model, device=self.device)  # ours takes no cache
        self.routers: RouterHook | None = None
        if config.routes:
            from modeling.routes import RouterHook

            self.routers = RouterHook(self.model, self.model, device=self.device, key="rollout.router_replay is set")
        trusts = config.trust_remote_code
        self.processor: ImageProcessor | None = None
        if needs_images(config.model_path, trust_remote_code=trusts, images=config.images):
            from modeling.images.processor import ImageProcessor

            self.processor = ImageProcessor(config.model_path, trust_remote_code=trusts)
        self.rounded = None if config.quantization is None else RoundedLinears(self.model, config.quantization)
        self.temperature, self.stop = config.temperature, set(config.stop_token_ids)
        self.stop_strings, self.allowed_tokens = config.stop_strings, config.allowed_tokens
        self.truncation = config.truncation
        self.timeout_s, self.request_mode = config.timeout_s, config.pause_mode
        self.sleeper, self.aside, self.sleep_mode = Sleeper(), OffloadedStorages(), config.sleep
        self.version = -1  # until the first weight sync
        self.n_updates, self.unused = 0, {*list_unused(self.model, config.images)}  # the trainer does not send these
        self.loaded: dict[str, int] = {}
        self.waiting: list[EngineRequest] = []
        self.running: asyncio.Task[None] | None = None
        self.paused = False
        self._tracer = Tracer()
        self.chunks: list[Bucket] | None = None
        """Buckets for the next `receive_weights`. None: weights arrive by broadcast."""
        self.decoder = DeltaDecoder()

    @classmethod
    def check_user_code(cls, model: nn.Module, *, path: str) -> None:
        """Raise UserError if the model's forward() lacks a parameter that generation passes."""
        taken = inspect.signature(model.forward).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        if not takes_all and (lacking := [name for name in PARAMETERS if name not in taken]):
            raise UserError(
                f"model.path={path} comes with code whose forward() takes no {lacking[0]}, with which the engine hf "
                "generates: add it, as the models of transformers do"
            )

    @classmethod
    def check_quantization(cls, rollout: RolloutConfig, *, dtype: str, on_gpu: bool) -> None:
        return

    @classmethod
    def check_rounded(cls, rollout: RolloutConfig, model: nn.Module) -> None:
        refuse_experts(rollout.quantization, model)

    async def generate(
        self, token_ids: list[int], *, max_new_tokens: int, seed: int, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        self.sleeper.check_sampling()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.waiting.append(EngineRequest(token_ids, images, max_new_tokens, np.random.default_rng(seed), future))
        for _ in range(3):  # let other callers add their requests first
            await asyncio.sleep(0)
        self._start_batch()
        return await future

    def _start_batch(self) -> None:
        """Start a batch of waiting requests, unless a batch is running or the engine is paused."""
        if self.running is not None or self.paused:
            return  # at once: every request comes here
        self.waiting = [request for request in self.waiting if not request.done.done()]  # some callers gave up
        if self.waiting:
            batch, self.waiting = self.waiting[: self.max_batch], self.waiting[self.max_batch :]
            self.running = asyncio.create_task(self._run_batch(batch))
            self.running.add_done_callback(partial(self._finish_batch, batch))

    async def _run_batch(self, batch: list[EngineRequest]) -> None:
        """Generate a batch, token by token. With weight_sync.pause_mode=abort, stop at the next update."""
        live = sorted(batch, key=lambda r: len(r.so_far))
        while live:
            # After an update the cache has keys and values of the old weights, so it is rebuilt from all tokens.
            n_updates, rows = self.n_updates, self._make_rows([(r.so_far, r.images) for r in live])
            while live and n_updates == self.n_updates:
                with self.order():
                    live = self._sample_tokens(rows, live)
                await asyncio.sleep(0)
            if self.request_mode == "abort":
                return

    def _finish_batch(self, batch: list[EngineRequest], run: asyncio.Task[None]) -> None:
        """Return completions to callers, in order of requests. Put aborted requests first in the queue."""
        self.running = None
        error = None if run.cancelled() else run.exception()
        cut_off: list[EngineRequest] = []
        for request in batch:
            if request.done.done():
                continue
            if run.cancelled():  # by the end of the event loop
                request.done.cancel()
            elif error is not None:
                request.done.set_exception(error)
            elif stop := self._stop_reason(request):
                request.done.set_result(request.make_completion(stop))
            else:
                cut_off.append(request)
        self.waiting = cut_off + self.waiting
        if self.waiting and not run.cancelled():
            # after the callers' tasks: their next requests join the same batch
            asyncio.get_running_loop().call_soon(self._start_batch)

    def _make_rows(self, live: Sequence[tuple[list[int], Sequence[PlacedImage]]]) -> Rows:
        """Return inputs with all tokens and images of the requests, and an empty cache."""
        return make_rows(live, self.make_cache(), self.processor, self.device, find_image_blocks(self.model.config))

    @torch.no_grad()  # here and not around the loop: between two tokens other tasks run, which may want gradients
    def _sample_tokens(self, rows: Rows, live: list[EngineRequest]) -> list[EngineRequest]:
        """Sample a token for each live request. Return the unfinished requests, with their rows prepared."""
        with nullcontext() if self.routers is None else self.routers.recording() as found:
            out = self.model(**rows.arguments())
        if self.routers is not None and found is not None:
            keep_routes(live, found.stack(), rows, experts=self.routers.experts)
        logits = rows.split(out.logits[:, -1])
        logits = self.allowed_tokens.restrict(logits, self.temperature or 1.0)  # [B, A]; 1 if greedy
        if self.temperature and not self.truncation.is_off:
            kept = self.truncation.find_kept(logits)
            logits = logits.masked_fill(~kept, LOWEST)
            keep_sets(live, kept, self.allowed_tokens)
        logp = normalize(logits)
        columns = self._draw_tokens(logp, live) if self.temperature else logp.argmax(-1)  # [B]
        chosen, chosen_logp = self.allowed_tokens.to_ids(columns), logp.gather(-1, columns[:, None])[:, 0].tolist()
        stay = []
        for i, (request, token) in enumerate(zip(live, chosen.tolist(), strict=True)):
            request.new_ids.append(token)
            request.logp.append(chosen_logp[i])
            request.versions.append(self.version)
            if self._stop_reason(request) is None and not request.done.done():
                stay.append(i)
        rows.append_tokens(chosen)
        # rows of finished requests are dropped, so late tokens of long replies cost less
        if 0 < len(stay) < len(live):
            rows.keep_rows(torch.tensor(stay, device=self.device))
        return [live[i] for i in stay]

    def _stop_reason(self, request: EngineRequest) -> Literal["eos", "length"] | None:
        """Return the stop reason of a request, or None if it is unfinished."""
        n = len(request.new_ids)
        if n and (request.new_ids[-1] in self.stop or self._ends_in_stop_string(request)):
            return "eos"
        return "length" if n == request.max_new_tokens else None

    def _ends_in_stop_string(self, request: EngineRequest) -> bool:
        strings = self.stop_strings
        return strings is not None and strings.find_end(request.new_ids, start=len(request.new_ids) - 1) is not None

    def _draw_tokens(self, logp: Tensor, live: list[EngineRequest]) -> Tensor:
        """Sample by inverting the cumulative distribution at one uniform number per request, [B, A] -> [B]."""
        # float64, and scaled by the last sum: in float32 the sum over a large vocabulary misses 1 noticeably
        cumulative = logp.double().exp().cumsum(-1)
        at = torch.tensor([r.uniform.random() for r in live], dtype=torch.float64, device=self.device)
        # right=True: a token of probability 0 is never drawn, not even at 0. The clamp is for rounding up to the sum.
        return torch.searchsorted(cumulative, (at * cumulative[:, -1])[:, None], right=True)[:, 0].clamp(
            max=logp.shape[-1] - 1
        )

    async def probe(self, token_ids: list[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        self.sleeper.check_sampling()
        rows = self._make_rows([(token_ids, images)])
        with torch.no_grad():
            out = self.model(input_ids=rows.ids, position_ids=rows.positions, use_cache=False, **rows.media)
        at = list_written(len(token_ids), images)
        # float32, since bfloat16 has two to three decimals
        logp = out.logits[0].float().log_softmax(-1)[[i - 1 for i in at]]  # [T, V]; logits i-1 predict token i
        return logp.gather(-1, self._make_tensor([token_ids[i] for i in at])[:, None])[:, 0].tolist()

    async def pause(self) -> None:
        """Finish the running batch with pause_mode `wait`. In other modes an update may come between two tokens."""
        if self.request_mode == "wait":
            self.paused = True
            if self.running is not None:
                await asyncio.wait([self.running])  # if it fails, its callers get the error

    async def load_weights(self, version: int, buckets: Iterable[Bucket]) -> None:
        """Copy every tensor into the model. Raises RunStopped for a missing name or a wrong shape."""
        self.sleeper.check_loading()
        held = [*self.model.named_parameters(), *saved_buffers(self.model)]
        own: dict[str, Tensor] = {name: tensor for name, tensor in held if name not in self.unused}
        self.loaded = {}
        # a running batch sees the change, and rebuilds its cache
        self.n_updates += 1
        for bucket in buckets:
            for name, tensor in bucket:
                if name not in own or own[name].shape != tensor.shape:
                    raise RunStopped(f"the hf engine's model has no {name} of shape {list(tensor.shape)}")
                # in place, so that tied parameters stay tied
                own[name].data.copy_(tensor)
            # of the model's tensors, not the received ones: the checksum proves that the copy was made
            self.loaded |= fingerprint((name, own[name].detach()) for name, _ in bucket)
        if missing := own.keys() - self.loaded.keys():
            raise RunStopped(
                f"the sync of version {version} had no values for {len(missing)} tensors, such as {min(missing)}"
            )
        if self.rounded is not None:  # after the checksums, which are of what was sent
            self.rounded.round_weights()
        self.version = version
        if self.paused:
            self.paused = False
            self._start_batch()

    async def join_broadcast(self, *, address: str, port: int, first_rank: int, members: int) -> None:
        self.chunks = None
        self.receiver = WeightReceiver(
            address=address, port=port, rank=first_rank, members=members, timeout_s=self.timeout_s
        )

    async def begin_chunks(self) -> None:
        self.chunks = []  # kept until all have arrived: tokens may be sampled meanwhile

    async def load_chunk(self, chunk: Chunk) -> None:
        assert self.chunks is not None
        self.chunks.append(self.decoder.decode(read_chunk(chunk)))

    async def receive_weights(self, version: int) -> None:
        """Load the received weights, without yielding to requests."""
        if self.chunks is None:
            await self.load_weights(version, map(self.decoder.decode, self.receiver.receive()))
        else:
            await self.load_weights(version, self.chunks)
            self.chunks = []

    async def sleep(self) -> None:
        self.sleeper.fall_asleep(running=len(self.waiting) + (self.running is not None))
        if self.sleep_mode == "discard":  # parameters only: no weight sync sends the buffers
            self.aside.put(find_storages([*self.model.parameters()], device=self.device), keep=False)
        self.aside.put(find_storages(self.model, device=self.device))

    async def wake(self, part: WakePart) -> None:
        """Restore the weights. The KV cache is created anew with every batch."""
        self.sleeper.wake(part)
        if part == "weights":
            self.aside.bring_back()

    async def start_trace(self, *, trace: bool, memory: bool) -> None:
        self._tracer.start(trace=trace, memory=memory)

    async def stop_trace(self, stem: Path) -> list[str]:
        return self._tracer.stop(stem)

    async def read_fingerprint(self) -> list[Mapping[str, int]]:
        return [self.loaded]

    async def close(self) -> None:
        return

    def _make_tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _load_model(config: EngineConfig) -> nn.Module:
    from modeling.load import load_model
    from modeling.merge import load_merged

    path, dtype, trusts = config.model_path, config.dtype, config.trust_remote_code
    if config.adapter is not None:
        return load_merged(path, config.adapter, dtype=dtype, key="rollout.opponent", trust_remote_code=trusts)
    return load_model(path, dtype=dtype, attention="auto", trust_remote_code=trusts)
