"""Observer of the key `capture`, which writes step snapshots from trainer records, beside the loop."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from analysis.capture.pieces import PieceDecoder
from analysis.capture.record import Recorded, capture_samples, describe_updates
from analysis.capture.snapshot import Manifest, RunFacts, write_snapshot
from analysis.capture.step_recorder import StepRecorder
from analysis.capture.tokens import snapshot_folder
from analysis.capture.triggers import Triggers
from configs.capture_schema import CaptureConfig
from configs.schema import RLConfig
from core.cluster.workers import Workers, first_of_groups
from core.errors import CallFailed, ProcessDied, RunStopped, UserError, writing
from core.tasks import start_task
from core.timing.clock import Clock
from core.timing.phases import Phase
from driver.alg_state import state_to_json
from driver.load_recipe import Loaded
from driver.rl.observers import PlannedStep, RunObserver, StartedRun
from driver.start.devices import uses_gpus


def plan_observer(loaded: Loaded[RLConfig]) -> CapturePlan:
    """Return the step recorder of a recipe, already checked by the schema. Raises UserError for several terms."""
    if loaded.alg.terms:
        raise UserError(
            f"capture records one loss per token, and {type(loaded.alg).__name__} has the terms "
            f"{', '.join(term.name for term in loaded.alg.terms)}: leave capture out"
        )
    return CapturePlan()


class CapturePlan:
    """Recorder of steps, before the start."""

    on_trainer = StepRecorder

    def start(self, run: StartedRun) -> Recorder:
        loaded, cfg = run.loaded, run.loaded.cfg
        facts = RunFacts(
            alg=cfg.alg,
            alg_file=loaded.alg_spec,
            model=cfg.model.model_dump(),
            trainer=cfg.trainer.model_dump(),
            temperature=cfg.rollout.temperature,
            allowed_tokens=run.allowed_tokens,
            max_new_tokens=cfg.rollout.max_new_tokens,
            updates_per_step=cfg.updates_per_step,
            layout=run.layout,
            on_cpu=not uses_gpus(cfg),
            router_replay=cfg.rollout.router_replay,
        )
        return Recorder(
            cfg.capture,
            run.trainers.attribute("observers.capture"),
            home=run.context.folder.path,
            facts=facts,
            tokenizer=run.tokenizer.hf,
            clock=run.context.clock,
            say=run.context.console.say,
            resumed_from=None if run.checkpoint is None else run.checkpoint.folder,
        )


class Recorder(RunObserver):
    """Writer of step snapshots, which decides on the steps to keep."""

    def __init__(
        self,
        cfg: CaptureConfig,
        recorders: Workers[StepRecorder],
        *,
        home: Path,
        facts: RunFacts,
        tokenizer: Any,
        clock: Clock,
        say: Callable[[str], None],
        resumed_from: Path | None = None,
    ):
        """home: the run folder. tokenizer: of Hugging Face. resumed_from: the checkpoint that the run began with."""
        self.cfg, self.recorders, self.home, self.facts = cfg, recorders, home, facts
        self.clock, self.say = clock, say
        self.decoder = PieceDecoder(tokenizer)
        self.triggers = Triggers(cfg)
        self.kept_by_events = 0
        self.resumed_from = resumed_from
        self._is_recording = False
        self._writing: asyncio.Task[None] | None = None
        """The last snapshot, until it is written."""

    @asynccontextmanager
    async def around_updates(self, step: PlannedStep) -> AsyncGenerator[None]:
        """Record the updates, if the step may be kept. One that ends the run is kept by non_finite."""
        # only the metrics after the updates tell of an event, so until the limit is reached every step is recorded
        waits_for_events = bool(self.cfg.on) and self.kept_by_events < self.cfg.most
        self._is_recording = self._is_due(step) or waits_for_events
        if not self._is_recording:
            yield
            return
        with self.clock.phase(Phase.CAPTURE):
            weights = snapshot_folder(self.home, step.step) / "weights" if self.cfg.weights else None
            await self.recorders.call_all(StepRecorder.begin, weights)
        try:
            yield
        except RunStopped as stopped:
            # after a failed call or a dead process, the trainers can no longer return their records
            if not isinstance(stopped, CallFailed | ProcessDied) and "non_finite" in self.cfg.on:
                try:
                    await self._keep(step, f"non_finite: the run stopped: {stopped}", {})
                    await self.finish()
                except RunStopped as another:  # the run ends for the first of the two reasons
                    self.say(f"WARNING: the step could not be kept: {another}")
            raise

    async def on_step(
        self, step: PlannedStep, measured: Mapping[str, float], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Save the recorded step, if the step number or a trigger requires it."""
        if not self._is_recording:
            return {}
        with self.clock.phase(Phase.CAPTURE):
            event, is_due = self.triggers.find_event(metrics), self._is_due(step)
            # capture.most limits the steps that are kept for an event alone
            self.kept_by_events += bool(event) and not is_due
            reason = event or (f"every: step {step.step}, capture.every={self.cfg.every}" if is_due else "")
            if reason:
                await self._keep(step, reason, metrics)
            else:
                await self.recorders.call_all(StepRecorder.end, keep=False)
                # the weights before the updates had to be written before anybody knew whether the step would be kept
                if self.cfg.weights:
                    await asyncio.to_thread(shutil.rmtree, snapshot_folder(self.home, step.step))
        return {}

    def _is_due(self, step: PlannedStep) -> bool:
        return self.cfg.every > 0 and step.step % self.cfg.every == 0

    async def _keep(self, step: PlannedStep, reason: str, metrics: Mapping[str, float]) -> None:
        of_ranks = await self.recorders.call_all(StepRecorder.end, keep=True)
        recorded: Recorded = first_of_groups(of_ranks, len(step.plans[0].bins))
        manifest = Manifest(
            step=step.step,
            version=step.step,
            reason=reason,
            run=self.facts,
            updates=describe_updates(step.groups, step.plans, recorded),
            metrics=dict(metrics),
            checkpoint=self._find_checkpoint(step.step),
            alg_state=state_to_json(step.alg),
        )
        folder = snapshot_folder(self.home, step.step)

        def write() -> None:
            with writing(folder):
                captured = capture_samples(step.step, step.groups, step.plans, recorded, self.decoder)
                write_snapshot(folder, manifest, captured, step.groups)

        async def write_beside() -> None:
            await asyncio.to_thread(write)
            self.say(f"step {step.step} is kept in {folder} ({reason})")

        await self.finish()  # one at a time: each holds its step in memory
        self._writing = start_task(write_beside())

    async def finish(self) -> None:
        """Wait until the last snapshot is written. Raises RunStopped if it cannot be written."""
        last, self._writing = self._writing, None
        if last is not None:
            await last

    def _find_checkpoint(self, step: int) -> str | None:
        """Return the checkpoint with the weights before a step."""
        own = self.home / "checkpoints" / f"step_{step:05d}"
        if own.is_dir():
            return str(own)
        # the first step after a resume begins with the weights of the resumed checkpoint
        resumed = self.resumed_from
        return str(resumed) if resumed is not None and resumed.name == own.name else None
