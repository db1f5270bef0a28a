"""Observer of the key `profile`: traces and memory snapshots of trainers and engines.

A step's trace of a trainer covers the updates. That of an engine covers the generation from then on, up to the updates
of the next step: the samples of that step, or of later ones with max_staleness.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from configs.profile_schema import FOLDER, ProfileConfig
from configs.schema import RLConfig
from core.errors import UserError
from core.timing.trace import Tracer
from driver.load_recipe import Loaded
from driver.rl.observers import PlannedStep, RunObserver, StartedRun
from rollouts.scheduling.availability import list_running
from rollouts.worker import RolloutWorker
from trainers.observers import Observer
from trainers.trainer import Trainer


def plan_observer(loaded: Loaded[RLConfig]) -> ProfilePlan:
    """Check the steps. Raises UserError for one that the run does not make."""
    cfg = loaded.cfg
    if late := [step for step in cfg.profile.steps if step >= cfg.steps]:
        raise UserError(f"profile.steps has {late[0]}, and the run makes steps 0 to {cfg.steps - 1}: name one of them")
    return ProfilePlan()


class ProfilePlan:
    """The steps to profile, before the start."""

    @property
    def on_trainer(self) -> type[TrainerTracer]:
        return TrainerTracer

    def start(self, run: StartedRun) -> Profiler:
        return Profiler(run)


class TrainerTracer(Observer):
    """Tracer of a trainer rank."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.tracer = trainer, Tracer()

    def begin(self, cfg: ProfileConfig) -> None:
        self.tracer.start(trace=cfg.trace, memory=cfg.memory)

    def end(self, folder: Path, step: int) -> list[str]:
        """Write this rank's files; return their names."""
        return self.tracer.stop(folder / f"step-{step}-trainer-{self.trainer.rank}")


class Profiler(RunObserver):
    """The profiler of a run, in the driver."""

    def __init__(self, run: StartedRun) -> None:
        self.cfg, self.context = run.loaded.cfg.profile, run.context
        self.tracers = run.trainers.attribute("observers.profile")
        self.folder = run.context.folder.path / FOLDER
        self.engines_since: int | None = None
        """Step after which the engines' traces began; None while there is none."""

    @asynccontextmanager
    async def around_updates(self, step: PlannedStep) -> AsyncGenerator[None]:
        await self._end_engines()
        if step.step not in self.cfg.steps:
            yield
            return
        await self.tracers.call_all(TrainerTracer.begin, self.cfg)
        yield
        written = await self.tracers.call_all(TrainerTracer.end, self.folder, step.step)
        self._tell([name for names in written for name in names])
        await self._begin_engines(step.step)

    async def finish(self) -> None:
        await self._end_engines()

    async def _begin_engines(self, step: int) -> None:
        if (engines := self.context.engines) is None:
            return
        for rank in list_running(len(engines), self.context.availability):
            await engines.call_one(rank, RolloutWorker.start_trace, self.cfg.trace, self.cfg.memory)
        self.engines_since = step

    async def _end_engines(self) -> None:
        engines, step = self.context.engines, self.engines_since
        if engines is None or step is None:
            return
        self.engines_since = None
        written: list[str] = []
        for rank in list_running(len(engines), self.context.availability):
            written += await engines.call_one(
                rank, RolloutWorker.stop_trace, self.folder / f"step-{step}-engine-{rank}"
            )
        self._tell(written)

    def _tell(self, names: list[str]) -> None:
        if names:
            self.context.console.say(f"wrote {', '.join(names)} to {self.folder}")
