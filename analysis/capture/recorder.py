"""Keeps snapshots while a run trains: what the trainers recorded of a step is written beside the loop."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.capture.pieces import PieceDecoder
from analysis.capture.record import Recorded, capture_samples, describe_updates
from analysis.capture.snapshot import Manifest, RunFacts, write_snapshot
from analysis.capture.tokens import snapshot_folder
from analysis.capture.triggers import Triggers
from configs.capture_schema import CaptureConfig
from core.cluster.workers import Workers, first_of_groups
from core.errors import CallFailed, ProcessDied, RunStopped, writing
from core.tasks import start_task
from core.timing.clock import Clock
from core.timing.phases import Phase
from core.types.samples import Group
from data_feeds.packing.batches import Plan
from trainers.trainer import Trainer


@dataclass
class Recording:
    """Step that is being made."""

    metrics: dict[str, float] = field(default_factory=dict)
    """What the trainer logged; set at the end of the step."""


class Recorder:
    """Writer of a run's snapshots, which decides what steps are kept."""

    def __init__(
        self,
        cfg: CaptureConfig,
        trainers: Workers[Trainer],
        *,
        home: Path,
        facts: RunFacts,
        tokenizer: Any,
        say: Callable[[str], None],
        resumed_from: Path | None = None,
    ):
        """home: the run folder. tokenizer: of Hugging Face. resumed_from: the checkpoint that the run began with."""
        self.cfg, self.trainers, self.home, self.facts, self.say = cfg, trainers, home, facts, say
        self.decoder = PieceDecoder(tokenizer)
        self.triggers = Triggers(cfg)
        self.kept_by_events = 0
        self.resumed_from = resumed_from
        self._writing: asyncio.Task[None] | None = None
        """The last snapshot, until it is written."""

    @asynccontextmanager
    async def recording(
        self, step: int, of_updates: list[list[Group]], plans: list[Plan], clock: Clock
    ) -> AsyncGenerator[Recording]:
        """Keep the step that the body makes, if its number or what happens in it asks for that.

        of_updates: groups of each update. The body sets `metrics`. A step that ends the run is kept by non_finite.
        """
        recording, is_due = Recording(), self.cfg.every > 0 and step % self.cfg.every == 0
        waits_for_events = bool(self.cfg.on) and self.kept_by_events < self.cfg.most
        if not (is_due or waits_for_events):
            yield recording
            return
        folder = snapshot_folder(self.home, step)
        with clock.phase(Phase.CAPTURE):
            await self.trainers.call_all(Trainer.begin_record, folder / "weights" if self.cfg.weights else None)
        try:
            yield recording
        except RunStopped as stopped:
            if not isinstance(stopped, CallFailed | ProcessDied) and "non_finite" in self.cfg.on:
                reason = f"non_finite: the run stopped: {stopped}"
                try:
                    await self._keep(step, reason, of_updates, plans, recording.metrics)
                    await self.finish()
                except RunStopped as another:  # the run ends for the first of the two reasons
                    self.say(f"WARNING: the step could not be kept: {another}")
            raise
        with clock.phase(Phase.CAPTURE):
            event = self.triggers.find_event(recording.metrics)
            self.kept_by_events += bool(event) and not is_due
            reason = event or (f"every: step {step}, capture.every={self.cfg.every}" if is_due else "")
            if reason:
                await self._keep(step, reason, of_updates, plans, recording.metrics)
            else:
                await self.trainers.call_all(Trainer.end_record, keep=False)
                if self.cfg.weights:
                    await asyncio.to_thread(shutil.rmtree, folder)

    async def _keep(
        self, step: int, reason: str, of_updates: list[list[Group]], plans: list[Plan], metrics: dict[str, float]
    ) -> None:
        of_ranks = await self.trainers.call_all(Trainer.end_record, keep=True)
        recorded: Recorded = first_of_groups(of_ranks, len(plans[0].bins))
        manifest = Manifest(
            step=step,
            version=step,
            reason=reason,
            run=self.facts,
            updates=describe_updates(of_updates, plans, recorded),
            metrics=metrics,
            checkpoint=self._find_checkpoint(step),
        )
        folder = snapshot_folder(self.home, step)

        def write() -> None:
            with writing(folder):
                captured = capture_samples(step, of_updates, plans, recorded, self.decoder)
                write_snapshot(folder, manifest, captured, of_updates)

        async def write_beside() -> None:
            await asyncio.to_thread(write)
            self.say(f"step {step} is kept in {folder} ({reason})")

        await self.finish()  # one at a time: each holds its step in memory
        self._writing = start_task(write_beside())

    async def finish(self) -> None:
        """Wait until the last snapshot is written. Raises RunStopped where it could not be."""
        last, self._writing = self._writing, None
        if last is not None:
            await last

    def _find_checkpoint(self, step: int) -> str | None:
        """Return the checkpoint with the weights before a step."""
        own = self.home / "checkpoints" / f"step_{step:05d}"
        if own.is_dir():
            return str(own)
        resumed = self.resumed_from
        return str(resumed) if resumed is not None and resumed.name == own.name else None
