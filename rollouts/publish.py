"""Publish: every engine samples from the trainer's current weights, and has proven it, or the run stops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from core.cluster import Local, Remote, blaming, together
from core.errors import ProcessDied
from rollouts.fingerprint import fingerprint
from rollouts.weight_sync import Bucket, verify
from trainers.weights import Part

GRACE_S = 5.0
"""So much later than the deadlines inside a worker ends the wait for it: the worker knows better what failed."""


class WeightSync(Protocol):
    async def publish(self, version: int) -> dict[str, float]:
        """Return when every engine samples from version `version` and has shown it; raise RunStopped otherwise."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A prompt whose log-probabilities trainer and engines must agree on after every sync."""

    token_ids: list[int]
    bound: float
    """Largest mean absolute difference, in nats."""


@dataclass(slots=True)
class LocalSync:
    """Trainer and engine in this process: tensors are handed over."""

    trainers: Local
    rollouts: Local
    probe: Probe
    max_bytes: int
    part: Part

    async def publish(self, version: int) -> dict[str, float]:
        trainer, engine = self.trainers.worker, self.rollouts.worker.engine
        sent: dict[str, int] = {}
        nbytes = 0

        def sending() -> Iterator[Bucket]:
            nonlocal nbytes
            for bucket in trainer.weights(self.max_bytes, self.part):
                sent.update(fingerprint(bucket))
                nbytes += sum(tensor.nbytes for _, tensor in bucket)
                yield bucket

        await engine.load(version, sending())
        gap = verify(
            sent,
            [await engine.fingerprint()],
            expected_logp=trainer.probe(self.probe.token_ids),
            probe_logp=[await engine.probe(self.probe.token_ids)],
            bound=self.probe.bound,
        )
        return {"sync/probe_gap": gap, "sync/bytes": float(nbytes)}


@dataclass(slots=True)
class RemoteSync:
    """Trainer rank 0 broadcasts to every rank of every engine."""

    trainers: Remote
    rollouts: Remote
    probe: Probe
    max_bytes: int
    part: Part
    ranks_per_engine: int
    timeout_s: float
    over_nccl: bool
    joined: bool = False

    def __post_init__(self) -> None:
        deadline = {"timeout_s": self.timeout_s + GRACE_S, "key": "weight_sync.timeout_s"}
        self.trainers, self.rollouts = self.trainers.within(**deadline), self.rollouts.within(**deadline)

    async def publish(self, version: int) -> dict[str, float]:
        try:
            return await self._publish(version)
        except ProcessDied as error:
            raise ProcessDied(f"in the sync of version {version}, {error}") from error

    async def _publish(self, version: int) -> dict[str, float]:
        if not self.joined:
            await self._join()
        # They meet in a broadcast; where one fails, the others are not waited for.
        sends = self.trainers.calls("send_weights", self.max_bytes, self.part)
        receives = self.rollouts.calls("engine.receive", version)
        sent, *_ = await blaming([self.trainers, self.rollouts], together([*sends, *receives]))
        expected, *_ = await self.trainers.all("probe", self.probe.token_ids)
        gap = verify(
            sent.checksums,
            await self.rollouts.all("engine.fingerprint"),
            expected_logp=expected,
            probe_logp=await self.rollouts.all("engine.probe", self.probe.token_ids),
            bound=self.probe.bound,
        )
        return {"sync/probe_gap": gap, "sync/bytes": float(sent.nbytes)}

    async def _join(self) -> None:
        address, _ = await self.trainers.ask(0, "free_address")
        port = await self.trainers.call(0, "open_sync", address, self.timeout_s, self.over_nccl)
        n = self.ranks_per_engine
        group = {"address": address, "port": port, "members": 1 + len(self.rollouts) * n}
        joins = [
            self.rollouts.ask(i, "call", "engine.join", first_rank=1 + i * n, **group)
            for i in range(len(self.rollouts))
        ]
        meets = self.trainers.ask(0, "call", "join_sync", group["members"])
        await blaming([self.trainers, self.rollouts], together([meets, *joins]))
        self.joined = True
