"""Transports of weights from the trainers to the engines, as the driver calls them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import uuid4

from core.cluster.ray_workers import Remote
from core.cluster.root_cause import attribute_failure
from core.errors import RunStopped, TransportFailed
from core.tasks import gather_fail_fast
from core.timing.clock import ActivityTimer
from core.timing.deadlines import SYNC_TIMEOUT_GRACE_S
from core.types.weights import ExportScope
from trainers.weight_sync.base import ExportsWeights, ReceivesWeights, Sent, TransportName
from trainers.weight_sync.delta import Coding
from trainers.weight_sync.ipc import join_chunks
from trainers.weight_sync.source import WeightSource
from trainers.weight_sync.store import read_manifest, remove_folder

Calls = list[Coroutine[Any, Any, Any]]


class Transport(Protocol):
    """Transport of weights to the engines."""

    name: TransportName

    async def transfer(self, version: int, ends: SyncEndpoints) -> Sent:
        """Transfer the weights; return when every engine of `ends` has loaded them.

        After TransportFailed no process waits any longer.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncEndpoints:
    """Trainer and engine handles, and the settings that all transports share.

    The deadline of the handles is longer than `timeout_s`, the deadline inside the workers, so that workers report
    first.
    """

    trainers: Remote[ExportsWeights]
    sources: Remote[WeightSource]
    engines: Remote[ReceivesWeights]
    engine_timers: Remote[ActivityTimer]
    ranks_per_engine: int
    max_bytes: int
    """Size of a bucket."""
    scope: ExportScope
    coding: Coding = "plain"
    timeout_s: float
    """Deadline of a step of a sync inside a worker."""

    def only(self, engines: Sequence[int]) -> SyncEndpoints:
        """Return the endpoints of a sync with these engines alone."""
        return replace(self, engines=self.engines.only(engines), engine_timers=self.engine_timers.only(engines))

    def list_members(self) -> list[Any]:
        """Return the actors of the engines."""
        return [self.engines.actors[rank] for rank in self.engines.ranks]

    async def gather_collective(self, calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Await calls that depend on each other. If a transport fails, all end before another one is tried."""
        together = gather_fail_fast(calls, grace_s=self.timeout_s + SYNC_TIMEOUT_GRACE_S)
        return await attribute_failure([self.sources, self.engines], together)


@dataclass(slots=True)
class BroadcastTransport:
    """Broadcast from trainer rank 0 to every rank of the engines, in a process group that they form once.

    They form it again if the engines differ from those of the last sync, or an engine was restarted.
    """

    name: TransportName
    members: list[Any] = field(default_factory=list[Any])
    """Actors of the engines that are in the group."""

    async def transfer(self, version: int, ends: SyncEndpoints) -> Sent:
        members = ends.list_members()
        if members != self.members:
            self.members = []
            await self._form_group(ends)
            self.members = members
        sends = ends.sources.start_all(WeightSource.broadcast_weights, ends.max_bytes, ends.scope, ends.coding)
        receives = ends.engines.start_all(ReceivesWeights.receive_weights, version)
        try:
            sent, *_ = await ends.gather_collective([*sends, *receives])
        except RunStopped:
            self.members = []  # a member that fails has left the group
            raise
        return sent

    async def _form_group(self, ends: SyncEndpoints) -> None:
        sources, engines, n = ends.sources, ends.engines, ends.ranks_per_engine
        address, _ = await sources.find_free_address(0)
        over_nccl = self.name == "nccl"
        port = await sources.call_one(0, WeightSource.open_broadcast, address, ends.timeout_s, over_nccl)
        size = 1 + len(engines.ranks) * n
        joins = [
            engines.start_one(
                rank,
                ReceivesWeights.join_broadcast,
                address=address,
                port=port,
                first_rank=1 + place * n,
                members=size,
            )
            for place, rank in enumerate(engines.ranks)
        ]
        # at once: rank 0 and the engines wait for each other
        waits = sources.start_one(0, WeightSource.wait_for_members, size)
        await ends.gather_collective([waits, *joins])


@dataclass(slots=True)
class ChunkedTransport:
    """Transfer chunk by chunk through Ray's object store: trainer rank 0 writes a chunk, and each engine loads it."""

    name: TransportName

    async def transfer(self, version: int, ends: SyncEndpoints) -> Sent:
        sources, engines, gather = ends.sources, ends.engines, ends.gather_collective
        await gather([*engines.start_all(ReceivesWeights.begin_chunks), *self._begin(sources, ends)])
        async with _aborting_chunks(sources):
            while await _write_chunk(ends):
                await gather(await self._load_chunk(sources, ends))
        await gather([*engines.start_all(ReceivesWeights.receive_weights, version)])
        return await sources.call_one(0, WeightSource.summarize_chunks)

    def _begin(self, sources: Remote[WeightSource], ends: SyncEndpoints) -> Calls:
        return sources.start_all(WeightSource.begin_chunks, ends.max_bytes, ends.scope, None, ends.coding)

    async def _load_chunk(self, sources: Remote[WeightSource], ends: SyncEndpoints) -> Calls:
        """Return the calls that load the last written chunk into the engines."""
        return ends.engines.start_all(ReceivesWeights.load_chunk, sources.submit(0, WeightSource.get_chunk))


class HandleTransport(ChunkedTransport):
    """Transfer of IPC handles, chunk by chunk, between trainers and engines on the same GPUs. It ran on one."""

    def _begin(self, sources: Remote[WeightSource], ends: SyncEndpoints) -> Calls:
        return sources.start_all(WeightSource.begin_handles, ends.max_bytes, ends.scope)

    async def _load_chunk(self, sources: Remote[WeightSource], ends: SyncEndpoints) -> Calls:
        chunks, n = await sources.call_all(WeightSource.get_chunk), ends.ranks_per_engine
        return [
            ends.engines.start_one(
                engine, ReceivesWeights.load_chunk, join_chunks(chunks[engine * n : (engine + 1) * n])
            )
            for engine in ends.engines.ranks
        ]


@dataclass(slots=True)
class StoreTransport:
    """Transfer by objects in a folder or store: trainer rank 0 writes them all, then the engines read them."""

    folder: str
    """Address of this run's own part of the store; everything below it is removed after each sync."""
    name: TransportName = "disk"

    async def transfer(self, version: int, ends: SyncEndpoints) -> Sent:
        await asyncio.to_thread(remove_folder, self.folder)  # an earlier run may have been killed
        try:
            sent = await self._transfer(version, ends)
        except (Exception, asyncio.CancelledError):
            with suppress(TransportFailed):  # the first error says more
                await asyncio.to_thread(remove_folder, self.folder)
            raise
        await asyncio.to_thread(remove_folder, self.folder)
        return sent

    async def _transfer(self, version: int, ends: SyncEndpoints) -> Sent:
        sources, engines, gather = ends.sources, ends.engines, ends.gather_collective
        # never the name of an earlier sync, whose objects a cache on the way might still hold
        folder = f"{self.folder}/{version}-{uuid4().hex[:8]}"
        begins = sources.start_all(WeightSource.begin_chunks, ends.max_bytes, ends.scope, folder, ends.coding)
        await gather([*engines.start_all(ReceivesWeights.begin_chunks), *begins])
        async with _aborting_chunks(sources):
            while await _write_chunk(ends):
                pass
        chunks = await asyncio.to_thread(read_manifest, folder)

        async def load(engine: int) -> None:
            for chunk in chunks:  # a call for each, because the deadline is that of a bucket
                await engines.start_one(engine, ReceivesWeights.load_chunk, chunk)

        await gather([load(engine) for engine in engines.ranks])
        await gather([*engines.start_all(ReceivesWeights.receive_weights, version)])
        return await sources.call_one(0, WeightSource.summarize_chunks)


async def _write_chunk(ends: SyncEndpoints) -> bool:
    """Let every rank take part in the next chunk; return False at the end of the stream."""
    # all ranks reach the end together, so the first answer is everyone's
    return (await ends.gather_collective([*ends.sources.start_all(WeightSource.write_chunk)]))[0]


@asynccontextmanager
async def _aborting_chunks(sources: Remote[WeightSource]) -> AsyncGenerator[None]:
    """End the sync on every trainer rank if the body fails."""
    try:
        yield
    except RunStopped:  # an engine died, or no transport; where a trainer rank died, this says so
        await sources.call_all(WeightSource.abort_chunks)
        raise
    except (Exception, asyncio.CancelledError):
        with suppress(RunStopped):  # the first error says more
            await sources.call_all(WeightSource.abort_chunks)
        raise
