"""Weight sync: afterwards every engine verifiably samples from the trainer's current weights, or the run stops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from core.cluster.ray_workers import Remote
from core.errors import CallFailed, ProcessDied, ProofFailed, TransportFailed
from core.sync_metrics import SYNC_BY_XOR, SYNC_BYTES, SYNC_CHANGED, SYNC_PROBE_GAP
from core.timing.clock import ActivityTimer
from core.timing.phases import Activity
from core.types.weights import Bucket, ExportScope
from trainers.weight_sync.base import Delivery, ExportsWeights, Probe, ReceivesWeights, Sent
from trainers.weight_sync.delta import Coding
from trainers.weight_sync.fingerprint import fingerprint, verify_sync
from trainers.weight_sync.transports import SyncEndpoints, Transport


@dataclass(slots=True)
class LocalWeightSync:
    """Weight sync between trainer and engine in this process: tensors are passed by reference."""

    trainer: ExportsWeights
    engine: ReceivesWeights
    timers: tuple[ActivityTimer, ActivityTimer]
    """Timers of the trainer and of the engine."""
    probe: Probe
    max_bytes: int
    scope: ExportScope

    async def publish_weights(self, version: int, engines: Sequence[int] | None = None) -> dict[str, float]:
        return await self.prove_weights(await self.deliver_weights(version))

    async def deliver_weights(self, version: int) -> Delivery:
        sent = await self.transfer(version)
        return Delivery(
            version=version,
            engines=[0],
            sent=sent,
            loaded=[[*await self.engine.read_fingerprint()]],
            expected_logp=self.trainer.probe(self.probe.token_ids, **self.probe.settings),
        )

    async def prove_weights(self, delivery: Delivery) -> dict[str, float]:
        probed = await self.engine.probe(self.probe.token_ids, **self.probe.settings)
        return prove(delivery, [probed], self.probe)

    async def transfer(self, version: int) -> Sent:
        """Transfer the weights without a proof."""
        sent: dict[str, int] = {}
        nbytes = 0

        def export_recorded() -> Iterator[Bucket]:
            nonlocal nbytes
            for bucket in self.trainer.export_weights(self.max_bytes, self.scope):
                sent.update(fingerprint(bucket))
                nbytes += sum(tensor.nbytes for _, tensor in bucket)
                yield bucket

        of_trainer, of_engine = self.timers
        with of_trainer.measure(Activity.SYNC), of_engine.measure(Activity.SYNC):
            await self.engine.pause()
            await self.engine.load_weights(version, export_recorded())
        return Sent(checksums=sent, nbytes=nbytes)


@dataclass(slots=True)
class RemoteWeightSync:
    """Weight sync over the first of `transports` that works; all transports are verified in the same way."""

    ends: SyncEndpoints
    engines: Remote[ReceivesWeights]
    """Engine handles with the run's deadline: finishing running requests may take longer than a transfer."""
    probe: Probe
    transports: list[Transport]
    """Transports to try, in order; those that failed are removed."""
    may_fall_back: bool
    """False: a transport that fails ends the run."""
    say: Callable[[str], None]
    facts: dict[str, Any]
    """Entries of the run's summary."""
    whole_every: int = 0
    """Send only what changed, and all weights in every n-th sync; 0: all weights in every sync."""
    deltas: int = 0
    """Syncs of changes since the last one of all weights."""
    kept_by: list[Any] = field(default_factory=list[Any])
    """Actors of the engines that hold the sender's last values; none while a sync runs, or after one failed."""

    async def publish_weights(self, version: int, engines: Sequence[int] | None = None) -> dict[str, float]:
        ranks = range(len(self.engines)) if engines is None else engines
        with _naming_version(version):
            async with self._charging_engines(ranks):
                delivery = await self._deliver(version, ranks)
                try:
                    return await self._prove(delivery)
                except ProofFailed as error:
                    if not self.deltas:
                        raise
                    self.say(f"WARNING: in the sync of version {version}, {error}; all weights are sent once more")
                self.kept_by = []
                return await self._prove(await self._deliver(version, ranks))

    async def deliver_weights(self, version: int) -> Delivery:
        ranks = range(len(self.engines))
        with _naming_version(version):
            async with self._charging_engines(ranks):
                return await self._deliver(version, ranks)

    async def prove_weights(self, delivery: Delivery) -> dict[str, float]:
        with _naming_version(delivery.version):
            async with self._charging_engines(delivery.engines):
                return await self._prove(delivery)

    async def _deliver(self, version: int, ranks: Sequence[int]) -> Delivery:
        ends, patient = self.ends.only(ranks), self.engines.only(ranks)
        # pause first: draining can take minutes, and the broadcast's own timeout is short
        await patient.call_all(ReceivesWeights.pause)
        sent = await self._transfer(version, ends, patient)
        loaded = await ends.engines.call_all(ReceivesWeights.read_fingerprint)
        # before the engines: on shared cores two forward passes at once take longer than both
        (expected, *_) = await ends.trainers.call_all(ExportsWeights.probe, self.probe.token_ids, **self.probe.settings)
        return Delivery(version=version, engines=ranks, sent=sent, loaded=loaded, expected_logp=expected)

    async def _prove(self, delivery: Delivery) -> dict[str, float]:
        engines = self.ends.only(delivery.engines).engines
        probed = await engines.call_all(ReceivesWeights.probe, self.probe.token_ids, **self.probe.settings)
        return prove(delivery, probed, self.probe)

    @asynccontextmanager
    async def _charging_engines(self, ranks: Sequence[int]) -> AsyncGenerator[None]:
        """Time the body as weight sync on the engines; skip engines that have died."""
        timers = self.ends.only(ranks).engine_timers
        try:
            await timers.call_all(ActivityTimer.begin_activity, Activity.SYNC)
            yield
        except ProcessDied as error:
            gone = None if error.worker is None else error.worker[1]
            others = [rank for rank in ranks if rank != gone]  # these take part in the next sync
            await self.ends.only(others).engine_timers.call_all(ActivityTimer.end_activity, Activity.SYNC)
            raise
        await timers.call_all(ActivityTimer.end_activity, Activity.SYNC)

    async def _transfer(self, version: int, ends: SyncEndpoints, patient: Remote[ReceivesWeights]) -> Sent:
        while True:
            transport, *others = self.transports
            members = ends.list_members()
            coding = self._choose_coding(members)
            self.kept_by = []
            try:
                sent = await transport.transfer(version, replace(ends, coding=coding))
                self.facts["transport"] = transport.name
                self.kept_by, self.deltas = members, self.deltas + 1 if coding == "changes" else 0
                return sent
            except TransportFailed as error:
                if not others or not self.may_fall_back:
                    raise
                self.say(
                    f"WARNING: in the sync of version {version}, {error}; from here on weight_sync.transport is "
                    f"{others[0].name} instead of {transport.name}"
                )
                self.transports = others
                # again: engines that had received all their weights have resumed
                await patient.call_all(ReceivesWeights.pause)

    def _choose_coding(self, members: list[Any]) -> Coding:
        if not self.whole_every:
            return "plain"
        return "changes" if members == self.kept_by and self.deltas + 1 < self.whole_every else "whole"


@contextmanager
def _naming_version(version: int) -> Generator[None]:
    """Add the version of the sync to errors of processes."""
    try:
        yield
    except ProcessDied as error:
        raise ProcessDied(f"in the sync of version {version}, {error}", worker=error.worker) from error
    except CallFailed as error:
        raise type(error)(f"in the sync of version {version}, {error}") from error


def prove(delivery: Delivery, probed: Sequence[Sequence[float]], probe: Probe) -> dict[str, float]:
    """Verify a sync and return the metrics. Raises RunStopped unless every engine loaded the sent weights.

    probed: the engines' log-probabilities of the probe prompt.
    """
    gap = verify_sync(
        delivery.sent.checksums,
        delivery.loaded,
        expected_logp=delivery.expected_logp,
        probe_logp=probed,
        bound=probe.bound,
        engines=delivery.engines,
        explain=probe.explain,
    )
    metrics = {SYNC_PROBE_GAP: gap, SYNC_BYTES: float(delivery.sent.nbytes)}
    changes = delivery.sent.changes
    if changes.tensors:
        metrics |= {SYNC_CHANGED: changes.changed / changes.values, SYNC_BY_XOR: changes.by_xor / changes.tensors}
    return metrics
