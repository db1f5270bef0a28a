"""Publish: every engine samples from the trainer's current weights, and has proven it, or the run stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from core.errors import CallFailed, ProcessDied, TransportFailed
from core.ray_cluster import Remote
from core.workers import Local
from weight_sync.base import Bucket, Part, Probe, Sent
from weight_sync.fingerprint import fingerprint, verify
from weight_sync.transports import Ends, Transport


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
    """Over the first of `transports` that works; the proof is the same whatever carried the weights."""

    ends: Ends
    rollouts: Remote
    """The engines again, with the run's deadline: a drain may take that long, a transport weight_sync.timeout_s."""
    probe: Probe
    transports: list[Transport]
    """Those that failed are taken off."""
    may_fall_back: bool
    """Else a transport that fails ends the run."""
    say: Callable[[str], None]
    facts: dict[str, Any]
    """What stands in the run's summary."""

    async def publish(self, version: int) -> dict[str, float]:
        try:
            return await self._publish(version)
        except (CallFailed, ProcessDied) as error:
            raise type(error)(f"in the sync of version {version}, {error}") from error

    async def _publish(self, version: int) -> dict[str, float]:
        engines = self.ends.engines
        await engines.all("ledger.begin", "sync")
        await self.rollouts.all("engine.hold")  # before anything is sent, for whose members nobody waits long
        sent = await self._carry(version)
        expected, *_ = await self.ends.trainers.all("probe", self.probe.token_ids)
        gap = verify(
            sent.checksums,
            await engines.all("engine.fingerprint"),
            expected_logp=expected,
            probe_logp=await engines.all("engine.probe", self.probe.token_ids),
            bound=self.probe.bound,
        )
        await engines.all("ledger.end", "sync")
        return {"sync/probe_gap": gap, "sync/bytes": float(sent.nbytes)}

    async def _carry(self, version: int) -> Sent:
        while True:
            transport, *others = self.transports
            try:
                sent = await transport.carry(version)
                self.facts["transport"] = transport.name
                return sent
            except TransportFailed as error:
                if not others or not self.may_fall_back:
                    raise
                self.say(
                    f"WARNING: in the sync of version {version}, {error}; from here on weight_sync.transport is "
                    f"{others[0].name} instead of {transport.name}"
                )
                self.transports = others
                await self.rollouts.all("engine.hold")  # some may have had all their weights, and gone on
