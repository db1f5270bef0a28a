"""Transports of weights from the trainers to the engines, as the driver calls them."""

from __future__ import annotations

import shutil
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from core.clock import ActivityTimer
from core.deadlines import SYNC_TIMEOUT_GRACE_S
from core.errors import TransportFailed
from core.ray_cluster import Remote, attribute_failure
from core.workers import gather_fail_fast
from weight_sync.base import ExportScope, ExportsWeights, ReceivesWeights, Sent, TransportName
from weight_sync.source import WeightSource


class Transport(Protocol):
    """Transfer weights to the engines, in one way."""

    name: TransportName

    async def transfer(self, version: int) -> Sent:
        """Return when every engine has loaded what was sent. After TransportFailed no process waits any longer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncEndpoints:
    """The trainer and engine handles, and the settings that every transport shares.

    The deadline of the handles is longer than `timeout_s`, the one inside the workers: they report first.
    """

    trainers: Remote[ExportsWeights]
    sources: Remote[WeightSource]
    engines: Remote[ReceivesWeights]
    engine_timers: Remote[ActivityTimer]
    ranks_per_engine: int
    max_bytes: int
    """Size of a bucket."""
    scope: ExportScope
    timeout_s: float
    """Deadline of one step of a sync inside a worker."""

    async def gather_collective(self, calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Await calls that depend on each other. If a transport fails, all end before another one is tried."""
        together = gather_fail_fast(calls, grace_s=self.timeout_s + SYNC_TIMEOUT_GRACE_S)
        return await attribute_failure([self.sources, self.engines], together)


@dataclass(slots=True)
class BroadcastTransport:
    """Broadcast from trainer rank 0 to every rank of every engine, in a process group that they form once."""

    name: TransportName
    ends: SyncEndpoints
    joined: bool = False

    async def transfer(self, version: int) -> Sent:
        if not self.joined:
            await self._form_group()
        ends = self.ends
        sends = ends.sources.start_all(WeightSource.broadcast_weights, ends.max_bytes, ends.scope)
        receives = ends.engines.start_all(ReceivesWeights.receive_weights, version)
        sent, *_ = await ends.gather_collective([*sends, *receives])
        return sent

    async def _form_group(self) -> None:
        sources, engines, n = self.ends.sources, self.ends.engines, self.ends.ranks_per_engine
        address, _ = await sources.find_free_address(0)
        over_nccl = self.name == "nccl"
        port = await sources.call_one(0, WeightSource.open_broadcast, address, self.ends.timeout_s, over_nccl)
        members = 1 + len(engines) * n
        joins = [
            engines.start_one(
                i,
                ReceivesWeights.join_broadcast,
                address=address,
                port=port,
                first_rank=1 + i * n,
                members=members,
            )
            for i in range(len(engines))
        ]
        waits = sources.start_one(0, WeightSource.wait_for_members, members)
        await self.ends.gather_collective([waits, *joins])
        self.joined = True


@dataclass(slots=True)
class ChunkedTransport:
    """Transfer of one chunk at a time: trainer rank 0 writes it, and each engine loads it."""

    name: TransportName
    ends: SyncEndpoints
    folder: Path | None
    """Folder on a file system that all machines share; None keeps the bytes in Ray's object store."""

    async def transfer(self, version: int) -> Sent:
        folder = None if self.folder is None else self.folder / str(version)
        try:
            if folder is not None:
                folder.mkdir(parents=True)
            return await self._transfer(version, folder)
        finally:
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)

    async def _transfer(self, version: int, folder: Path | None) -> Sent:
        ends, sources, engines, gather = self.ends, self.ends.sources, self.ends.engines, self.ends.gather_collective
        where = None if folder is None else str(folder)
        begins = sources.start_all(WeightSource.begin_chunks, ends.max_bytes, ends.scope, where)
        await gather([*engines.start_all(ReceivesWeights.begin_chunks), *begins])
        try:
            while (await gather([*sources.start_all(WeightSource.write_chunk)]))[0]:
                chunk = sources.submit(0, WeightSource.get_chunk)
                await gather([*engines.start_all(ReceivesWeights.load_chunk, chunk)])
        except TransportFailed:
            await sources.call_all(WeightSource.abort_chunks)
            raise
        await gather([*engines.start_all(ReceivesWeights.receive_weights, version)])
        return await sources.call_one(0, WeightSource.summarize_chunks)
