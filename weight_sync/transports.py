"""What carries weights from the trainers to the engines, as seen by the driver. One after another may be tried."""

from __future__ import annotations

import shutil
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from core.errors import TransportFailed
from core.ray_cluster import Remote, blaming
from core.workers import together
from weight_sync.base import Part, Sent

TransportName = Literal["nccl", "gloo", "direct", "disk"]
GRACE_S = 5.0
"""So much later than the deadlines inside a worker ends the wait for it: the worker knows better what failed."""


class Transport(Protocol):
    name: TransportName

    async def carry(self, version: int) -> Sent:
        """Return when every engine has loaded what was sent. TransportFailed: nobody is waiting any longer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Between whom, and what."""

    trainers: Remote
    engines: Remote
    ranks_per_engine: int
    max_bytes: int
    part: Part
    timeout_s: float

    async def meet(self, calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Calls that wait for each other. Where a transport fails, all of them are to end before another is tried."""
        return await blaming([self.trainers, self.engines], together(calls, last_words_s=self.timeout_s + GRACE_S))


@dataclass(slots=True)
class Stream:
    """Trainer rank 0 broadcasts to every rank of every engine, in a process group that they form once."""

    name: TransportName
    ends: Ends
    joined: bool = False

    async def carry(self, version: int) -> Sent:
        if not self.joined:
            await self._join()
        ends = self.ends
        sends = ends.trainers.calls("send_weights", ends.max_bytes, ends.part)
        sent, *_ = await ends.meet([*sends, *ends.engines.calls("engine.receive", version)])
        return sent

    async def _join(self) -> None:
        trainers, engines, n = self.ends.trainers, self.ends.engines, self.ends.ranks_per_engine
        address, _ = await trainers.ask(0, "free_address")
        port = await trainers.call(0, "open_sync", address, self.ends.timeout_s, self.name == "nccl")
        group = {"address": address, "port": port, "members": 1 + len(engines) * n}
        joins = [engines.ask(i, "call", "engine.join", first_rank=1 + i * n, **group) for i in range(len(engines))]
        await self.ends.meet([trainers.ask(0, "call", "join_sync", group["members"]), *joins])
        self.joined = True


@dataclass(slots=True)
class Parcels:
    """Every bucket in turn: trainer rank 0 packs it, each engine is handed it and loads it."""

    name: TransportName
    ends: Ends
    folder: Path | None
    """On a file system of all machines; None keeps the bytes in Ray's object store."""

    async def carry(self, version: int) -> Sent:
        folder = None if self.folder is None else self.folder / str(version)
        try:
            if folder is not None:
                folder.mkdir(parents=True)
            return await self._carry(version, folder)
        finally:
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)

    async def _carry(self, version: int, folder: Path | None) -> Sent:
        ends, trainers, engines, meet = self.ends, self.ends.trainers, self.ends.engines, self.ends.meet
        packs = trainers.calls("pack_for", ends.max_bytes, ends.part, None if folder is None else str(folder))
        await meet([*engines.calls("engine.open_feed"), *packs])
        try:
            while (await meet(trainers.calls("pack")))[0]:
                await meet(engines.calls("engine.feed", trainers.refer(0, "packed")))
        except TransportFailed:
            await trainers.all("packer.close")
            raise
        await meet(engines.calls("engine.receive", version))
        return await trainers.call(0, "packer.sent")
