"""Weight sync: afterwards every engine verifiably samples from the trainer's current weights, or the run stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from core.clock import ActivityTimer
from core.errors import CallFailed, ProcessDied, TransportFailed
from core.phases import Activity
from core.ray_cluster import Remote
from weight_sync.base import Bucket, ExportScope, ExportsWeights, Probe, ReceivesWeights, Sent
from weight_sync.fingerprint import fingerprint, verify_sync
from weight_sync.transports import SyncEndpoints, Transport


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
        sent = await self.transfer(version)
        gap = verify_sync(
            sent.checksums,
            [await self.engine.read_fingerprint()],
            expected_logp=self.trainer.probe(self.probe.token_ids, **self.probe.settings),
            probe_logp=[await self.engine.probe(self.probe.token_ids, **self.probe.settings)],
            bound=self.probe.bound,
        )
        return {"sync/probe_gap": gap, "sync/bytes": float(sent.nbytes)}

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
    """Weight sync over the first of `transports` that works; the verification is the same for all."""

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

    async def publish_weights(self, version: int, engines: Sequence[int] | None = None) -> dict[str, float]:
        try:
            return await self._publish(version, range(len(self.engines)) if engines is None else engines)
        except ProcessDied as error:
            raise ProcessDied(f"in the sync of version {version}, {error}", worker=error.worker) from error
        except CallFailed as error:
            raise type(error)(f"in the sync of version {version}, {error}") from error

    async def _publish(self, version: int, ranks: Sequence[int]) -> dict[str, float]:
        ends, ids, more = self.ends.only(ranks), self.probe.token_ids, self.probe.settings
        patient = self.engines.only(ranks)
        try:
            await ends.engine_timers.call_all(ActivityTimer.begin_activity, Activity.SYNC)
            # pause first: draining can take minutes, and the broadcast's own timeout is short
            await patient.call_all(ReceivesWeights.pause)
            sent = await self._transfer(version, ends, patient)
            loaded = await ends.engines.call_all(ReceivesWeights.read_fingerprint)
            # one after the other: on shared cores two forward passes at once take longer than both
            (expected, *_) = await ends.trainers.call_all(ExportsWeights.probe, ids, **more)
            probed = await ends.engines.call_all(ReceivesWeights.probe, ids, **more)
            gap = verify_sync(
                sent.checksums,
                loaded,
                expected_logp=expected,
                probe_logp=probed,
                bound=self.probe.bound,
                engines=ranks,
            )
        except ProcessDied as error:
            gone = None if error.worker is None else error.worker[1]
            await self._end_activity([rank for rank in ranks if rank != gone])  # these take part in the next sync
            raise
        await self._end_activity(ranks)
        return {"sync/probe_gap": gap, "sync/bytes": float(sent.nbytes)}

    async def _end_activity(self, ranks: Sequence[int]) -> None:
        timers = self.ends.only(ranks).engine_timers
        await timers.call_all(ActivityTimer.end_activity, Activity.SYNC)

    async def _transfer(self, version: int, ends: SyncEndpoints, patient: Remote[ReceivesWeights]) -> Sent:
        while True:
            transport, *others = self.transports
            try:
                sent = await transport.transfer(version, ends)
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
                # again: engines that had received all their weights have resumed
                await patient.call_all(ReceivesWeights.pause)
