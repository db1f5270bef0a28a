"""The frame around a training loop: run folder, clock, display, and an orderly end whatever happens."""

from __future__ import annotations

import asyncio
import bdb
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from algs.base import Algorithm
from configs.schema import RLConfig, RunConfig
from core import metrics as names
from core.clock import Clock
from core.deadlines import CLOSE_TIMEOUT_S
from core.errors import ProcessDied, RunStopped, UserError
from core.phases import Milestone, Phase
from core.ray_cluster import Cluster
from core.scratch import Scratch
from core.secrets import hide_secrets
from core.signals import end_on_signals, raise_interrupt
from core.types import Group
from core.workers import Workers
from data_feeds.feed import Feed
from data_feeds.tokenizer import ChatTokenizer
from driver.advice import Adviser
from driver.advice import Settings as AdviceSettings
from driver.checkpoint import Checkpoint, RunState, is_due, remove_old_checkpoints, write_checkpoint
from driver.console import Console
from driver.resume import bitwise_only_changes, changed_package_files
from driver.run_folder import RunFolder
from driver.sample_text import make_record, write_sample
from driver.save_to import save_in_one_step
from driver.time_account import describe_shares
from driver.tracking import make_sample_rows, make_trackers
from rollouts.availability import EngineAvailability
from rollouts.worker import RolloutWorker
from trackers.base import Outcome
from trackers.hub import Trackers
from trainers.allocator import keep_freed_memory
from trainers.trainer import Trainer


@dataclass
class Session:
    """Objects that both programs use while they run. `facts` are written to summary.json."""

    cfg: RunConfig
    folder: RunFolder
    clock: Clock
    console: Console
    trackers: Trackers
    adviser: Adviser
    cluster: Cluster | None = None
    engines: Workers[RolloutWorker] | None = None
    availability: EngineAvailability | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    updates_skipped: int = 0
    updates_made: int = 0

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Give the step's metrics to the trackers and show them, with what there is to advise."""
        metrics = {names.STEP_NUMBER: float(step), **metrics, **self.clock.start_lap()}
        tokens = metrics.get(names.ROLLOUT_TOKENS, metrics[names.TRAIN_TOKENS])
        metrics[names.TOKENS_PER_S] = tokens / metrics[names.STEP_SECONDS]
        with self.clock.phase(Phase.LOG):  # of the next step: the seconds of this one are in the line
            self.trackers.metrics(step, metrics)
            self.console.show_step(metrics)
            for rule, text in self.adviser.read_line(metrics):
                self.console.advise(rule, text)
        self.facts["steps_done"] = step + 1
        skipped = int(metrics[names.TRAIN_SKIPPED])
        self.updates_skipped += skipped
        self.updates_made += self.cfg.total_updates // self.cfg.n_steps - skipped

    def show_samples(self, step: int, groups: list[Group], *, every: int) -> None:
        """Give some samples of the step to the trackers, and print one after every `every` steps, if they are due."""
        tracking = self.cfg.tracking
        if self.trackers.feeders and tracking.samples_every and step % tracking.samples_every == 0:
            self.trackers.samples(step, make_sample_rows(step, groups, tracking.samples))
        if every and step % every == 0:
            record = make_record(step, groups)
            self.console.show_sample(step, write_sample(step, record), record)

    def check_trained(self) -> None:
        """Say how many updates were skipped. Raises RunStopped where the run made none: its model is the old one."""
        if not self.updates_skipped:
            return
        why = "because its gradient was not finite"
        if not self.updates_made:
            raise RunStopped(
                f"none of the run's {self.updates_skipped} updates was made, each {why}: the model is what it was "
                "before; look at the loss and the advantages, or lower trainer.lr"
            )
        self.facts["updates_skipped"] = self.updates_skipped
        self.console.say(
            f"{self.updates_skipped} of {self.updates_skipped + self.updates_made} updates were skipped, each {why}"
        )

    def report_data(self, feeds: dict[str, Feed[Any] | None]) -> None:
        """Say which rows are invalid, by the key that names their file."""
        for key, feed in feeds.items():
            if feed is not None:
                sentences, self.facts[key] = feed.summary(key)
                for sentence in sentences:
                    self.console.say(sentence)

    async def save_model(self, trainers: Workers[Trainer], tokenizer: ChatTokenizer, alg: Algorithm) -> None:
        """Write the final model into the run folder and into `save_to`; and the value model, if there is one."""
        self.check_trained()
        copies = [Path(self.cfg.save_to).absolute()] if self.cfg.save_to else []

        async def write(folder: Path) -> None:
            await trainers.call_all(Trainer.save_model, folder)
            tokenizer.save(folder)

        with self.clock.phase(Phase.SAVE):
            for folder in [self.folder.path / "model", *copies]:
                await save_in_one_step(folder, write, {"run": str(self.folder.path), "steps": self.cfg.n_steps})
            if alg.value_lr is not None:
                await trainers.call_all(Trainer.save_value_model, self.folder.path / "value_model")

    def checkpoint_is_due(self, steps_done: int) -> bool:
        return is_due(steps_done, every=self.cfg.checkpoint.every, steps=self.cfg.n_steps)

    async def write_checkpoint(self, trainers: Workers[Trainer], state: RunState) -> None:
        with self.clock.phase(Phase.CHECKPOINT):
            home = self.folder.path / "checkpoints"
            await write_checkpoint(home, trainers, state)
            remove_old_checkpoints(home, self.cfg.checkpoint.keep)

    async def resume(self, trainers: Workers[Trainer], checkpoint: Checkpoint | None, settings: dict[str, Any]) -> int:
        """Restore the trainers from `checkpoint`; return the steps that are done, 0 without one."""
        if checkpoint is None:
            return 0
        with self.clock.phase(Phase.RESUME):
            await trainers.call_all(Trainer.load_state, checkpoint.folder)
        done = checkpoint.state.steps_done
        self.facts["resumed"] = {"checkpoint": str(checkpoint.folder), "steps_done": done}
        self.console.steps_done = done
        self.console.say(f"resumed after {done} steps: {checkpoint.folder}")
        for key in changed_package_files(checkpoint.state.recipe, settings):
            self.console.say(f"{key}: this file of FeynRL has changed since the checkpoint; the numbers may differ")
        if moved := bitwise_only_changes(checkpoint.state.recipe["settings"], settings["settings"]):
            self.console.say(f"not to the last bit: {', '.join(moved)} differs from the run that is resumed")
        return done

    def show_outcome(self) -> None:
        """Show the held-out results before and after, where the time went, and the run folder."""
        before, after = self.facts.get("before", {}), self.facts.get("after", {})
        shown = [n for n in before if n in after and n != names.REWARD_STD and (n != names.ROLLOUT_FAILED or after[n])]
        if shown:
            rows = [(name, f"{before[name]:.3f}", f"{after[name]:.3f}") for name in shown]
            self.console.show_table("on held-out data", rows, ("", "before", "after"))
        if devices := self.facts.get("devices"):
            for line in (*describe_shares(devices), self.facts["bottleneck"]):
                self.console.say(line)
        self.console.say(f"run folder: {self.folder.path}")

    async def start_cluster(self) -> None:
        """Start Ray, in a thread: in the main one it would take SIGTERM for itself, and the loop would not turn."""
        starting = asyncio.create_task(asyncio.to_thread(Cluster, self.cfg.ray_address))
        try:
            self.cluster = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.cluster = await starting  # what has started must be ended
            raise

    def write_summary(self, exit_reason: str) -> None:
        """Write summary.json; where that fails, say why: the reason of the end must not be lost for it."""
        try:
            self.folder.write_summary(
                exit_reason=exit_reason, seconds=self.clock.get_totals(), reached=self.clock.reached, **self.facts
            )
        except RunStopped as error:
            self.console.say(f"{error}")

    @contextmanager
    def tracking(self, at_once: Callable[[], None]) -> Generator[None]:
        """Feed the trackers while the body runs; then tell them how it ended, and where the model is.

        at_once: called where a signal ends this process at once.
        """
        self.trackers.start()
        end: BaseException | None = None
        try:
            yield
        except BaseException as error:
            end = error
            raise
        finally:
            end_on_signals(at_once=at_once)  # the loop has ended; a signal now ends the wait for slow trackers
            model = self.folder.path / "model"
            path = str(model) if model.is_dir() else None
            with self.clock.phase(Phase.CLOSE):
                self.facts["trackers"] = self.trackers.finish(Outcome(exit_reason=name_end(end), model=path))
            self.facts["advice"] = self.adviser.given

    async def close(self) -> None:
        try:
            if self.availability is not None:
                await self.availability.stop()
            if self.engines is not None:
                ranks = range(len(self.engines)) if self.availability is None else self.availability.running()
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await asyncio.gather(*(self.engines.call_one(rank, RolloutWorker.close) for rank in ranks))
        except (TimeoutError, RunStopped) as error:  # it is killed next
            self.console.say(f"an engine did not close by itself ({error or 'no response'})")
        finally:
            if self.cluster is not None:
                self.cluster.close()


async def run_body(session: Session, body: Callable[[Session], Awaitable[None]], at_once: Callable[[], None]) -> None:
    """Start Ray if the run needs it, run `body`, and close, in the event loop of the run.

    at_once: called where a signal ends this process at once.
    """
    cfg, clock = session.cfg, session.clock
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop_turns = cfg.backend == "ray" or isinstance(cfg, RLConfig)
    end_on_signals(
        first=(lambda: loop.call_soon_threadsafe(task.cancel)) if loop_turns else raise_interrupt, at_once=at_once
    )
    try:
        if cfg.backend == "ray":
            with clock.phase(Phase.START):
                await session.start_cluster()
            clock.reach(Milestone.RAY)
        await body(session)
    except ProcessDied:
        session.engines = None  # they may wait for it; all are killed next
        raise
    finally:
        with clock.phase(Phase.CLOSE):
            await session.close()


def name_end(error: BaseException | None) -> str:
    """Return the exit reason for summary.json and the trackers; None is a run that came to its end."""
    match error:
        case None:
            return "done"
        case KeyboardInterrupt() | asyncio.CancelledError():
            return "interrupted"
        case bdb.BdbQuit():
            return "interrupted in the debugger"
        case RunStopped() | UserError():
            return f"stopped: {hide_secrets(str(error))}"
        case _:
            return f"error: {type(error).__name__}: {hide_secrets(str(error))}"


def make_advice_settings(cfg: RunConfig) -> AdviceSettings:
    """Return what the rules of driver/advice.py must know of the recipe."""
    if not isinstance(cfg, RLConfig):
        return AdviceSettings()
    return AdviceSettings(
        group_size=cfg.group_size, updates_per_step=cfg.updates_per_step, max_new_tokens=cfg.rollout.max_new_tokens
    )


def run_session(cfg: RunConfig, body: Callable[[Session], Awaitable[None]]) -> int:
    """Run `body` to its end, Ctrl-C, SIGTERM or an error; always write a summary and end all processes."""
    clock = Clock()
    clock.reach(Milestone.CHECKED)
    keep_freed_memory()  # every step makes arrays of about the same sizes
    folder = RunFolder(cfg.run_dir, cfg.name, cfg.model_dump())
    console = Console(cfg.n_steps, clock, live=cfg.backend == "ray", display=cfg.display)
    session = Session(
        cfg=cfg,
        folder=folder,
        clock=clock,
        console=console,
        trackers=make_trackers(cfg, folder.path, console.say),
        adviser=Adviser(make_advice_settings(cfg), cfg.n_steps),
    )
    at_once = partial(session.write_summary, "interrupted")
    reason = "error"
    try:
        end_on_signals(at_once=at_once)
        console.say(f"run folder: {folder.path}")
        with Scratch(logs=folder.path / "logs"), session.tracking(at_once), console:
            asyncio.run(run_body(session, body, at_once))
        reason = "done"
        session.show_outcome()
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        reason = name_end(error)
        raise KeyboardInterrupt from None
    except Exception as error:
        reason = name_end(error)
        if isinstance(error, ProcessDied):
            error.run_folder, error.steps = folder.path, cfg.n_steps
        raise
    finally:
        for unwritten in folder.samples.close():
            console.say(unwritten)
        session.write_summary(reason)
        end_on_signals()  # as before the run
    return 0
