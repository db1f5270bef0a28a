"""Plain transformers as an engine: for `backend: local`, for debugging, and as a yardstick for the other one.

Its own copy of the weights, a key-value cache, and every sampling warper off but the temperature,
whatever the model's generation config says: it samples from softmax(logits / temperature), full stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from core.errors import RunStopped
from rollouts.engine import Completion
from rollouts.fingerprint import fingerprint
from rollouts.parcels import Parcel, unpack
from rollouts.weight_sync import Bucket, WeightReceiver


@dataclass(slots=True)
class _Request:
    token_ids: list[int]
    max_new_tokens: int
    uniform: np.random.Generator
    """One draw per token; a request's tokens do not depend on what it is batched with."""
    done: asyncio.Future[Completion]
    new_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)


class HfEngine:
    """Requests that wait at the same moment are generated in one batch, up to `max_batch` of them."""

    def __init__(
        self,
        *,
        model_path: str,
        dtype: str,
        temperature: float,
        stop_token_ids: list[int],
        max_batch: int = 256,
        timeout_s: float = 300.0,
    ):
        from trainers.models import load_model

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = load_model(model_path, dtype=dtype, attention="sdpa").eval().to(self.device)
        self.temperature, self.stop, self.max_batch = temperature, set(stop_token_ids), max_batch
        self.timeout_s = timeout_s
        self.version = -1
        self.fed = False
        self.loaded: dict[str, int] = {}
        self.waiting: list[_Request] = []

    async def generate(self, token_ids: list[int], *, max_new_tokens: int, seed: int) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.waiting.append(_Request(token_ids, max_new_tokens, np.random.default_rng(seed), future))
        for _ in range(3):  # let everybody who is about to ask do so
            await asyncio.sleep(0)
        if not future.done():
            batch, self.waiting = self.waiting[: self.max_batch], self.waiting[self.max_batch :]
            self._run(sorted(batch, key=lambda r: len(r.token_ids)))
        return await future

    @torch.no_grad()
    def _run(self, batch: list[_Request]) -> None:
        """Generate all of `batch`, token by token; a request that is finished leaves it."""
        from transformers import DynamicCache

        width = max(len(r.token_ids) for r in batch)
        pads = [width - len(r.token_ids) for r in batch]
        ids = self._tensor([[0] * pad + r.token_ids for pad, r in zip(pads, batch, strict=True)])  # [B, L]
        mask = self._tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        cache = DynamicCache(config=self.model.config)
        live = batch
        while live:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logp = (out.logits[:, -1].float() / self.temperature).log_softmax(-1)  # [B, V]
            chosen = self._draw(logp, live)  # [B]
            chosen_logp = logp.gather(-1, chosen[:, None])[:, 0].tolist()
            stay = []
            for i, (request, token) in enumerate(zip(live, chosen.tolist(), strict=True)):
                request.new_ids.append(token)
                request.logp.append(chosen_logp[i])
                if token in self.stop or len(request.new_ids) == request.max_new_tokens:
                    self._finish(request)
                else:
                    stay.append(i)
            ids, mask = chosen[:, None], torch.cat([mask, mask.new_ones(len(live), 1)], -1)
            if 0 < len(stay) < len(live):
                rows = torch.tensor(stay, device=self.device)
                ids, mask = ids[rows], mask[rows]
                cache.batch_select_indices(rows)
            live = [live[i] for i in stay]

    def _draw(self, logp: Tensor, live: list[_Request]) -> Tensor:
        """Inverse of the cumulative distribution at one uniform number per request, [B]."""
        cumulative = logp.double().exp().cumsum(-1)
        at = torch.tensor([r.uniform.random() for r in live], dtype=torch.float64, device=self.device)
        return torch.searchsorted(cumulative, (at * cumulative[:, -1])[:, None], right=True)[:, 0].clamp(
            max=logp.shape[-1] - 1
        )

    def _finish(self, request: _Request) -> None:
        request.done.set_result(
            Completion(
                token_ids=request.new_ids,
                logp=request.logp,
                versions=[self.version] * len(request.new_ids),
                stop="eos" if request.new_ids[-1] in self.stop else "length",
            )
        )

    async def probe(self, token_ids: list[int]) -> list[float]:
        with torch.no_grad():
            logp = self.model(input_ids=self._tensor([token_ids]), use_cache=False).logits[0].float().log_softmax(-1)
        return logp[:-1].gather(-1, self._tensor(token_ids[1:])[:, None])[:, 0].tolist()

    async def load(self, version: int, buckets: Iterable[Bucket]) -> None:
        """Copy every tensor of the stream into the model's own; each must be there, in its shape."""
        self.loaded = {}
        for bucket in buckets:
            self._copy(bucket)
        self._complete(version)

    def _copy(self, bucket: Bucket) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in bucket:
            if name not in own or own[name].shape != tensor.shape:
                raise RunStopped(f"the hf engine's model has no {name} of shape {list(tensor.shape)}")
            own[name].data.copy_(tensor)
        self.loaded |= fingerprint((name, own[name].detach()) for name, _ in bucket)

    def _complete(self, version: int) -> None:
        if missing := dict(self.model.named_parameters()).keys() - self.loaded.keys():
            raise RunStopped(
                f"the sync of version {version} had no values for {len(missing)} tensors, such as {min(missing)}"
            )
        self.version = version

    async def join(self, *, address: str, port: int, first_rank: int, members: int) -> None:
        """Become member `first_rank` of the sender's group, from which weights come now."""
        self.fed = False
        self.receiver = WeightReceiver(
            address=address, port=port, rank=first_rank, members=members, timeout_s=self.timeout_s
        )

    async def open_feed(self) -> None:
        """From now on weights come by `feed`."""
        self.fed, self.loaded = True, {}

    async def feed(self, parcel: Parcel) -> None:
        self._copy(unpack(parcel))

    async def receive(self, version: int) -> None:
        """Take part in one `WeightSender.send`, or complete what was fed."""
        if self.fed:
            self._complete(version)
        else:
            await self.load(version, self.receiver.receive())

    async def fingerprint(self) -> list[Mapping[str, int]]:
        return [self.loaded]

    async def close(self) -> None:
        return

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
