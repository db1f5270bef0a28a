"""Publish: every engine samples from the trainer's current weights, and has proven it, or the run stops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from core.cluster import Local, Remote, together
from rollouts.fingerprint import fingerprint
from rollouts.weight_sync import Bucket, verify
from trainers.weights import Part


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

        with trainer.ledger.doing("sync"), self.rollouts.worker.ledger.doing("sync"):
            await engine.hold()
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

    async def publish(self, version: int) -> dict[str, float]:
        if not self.joined:
            await self._join()
        # Before anything is sent: a drain may take the run's timeout_s, a broadcast waits weight_sync.timeout_s.
        await self.rollouts.all("engine.hold")
        # They meet in a broadcast; where one fails, the others are not waited for.
        [sent, *_], _ = await together(
            [self.trainers.all("send_weights", self.max_bytes, self.part), self.rollouts.all("engine.receive", version)]
        )
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
        joins = [self.rollouts.call(i, "engine.join", first_rank=1 + i * n, **group) for i in range(len(self.rollouts))]
        await together([self.trainers.call(0, "join_sync", group["members"]), *joins])
        self.joined = True
