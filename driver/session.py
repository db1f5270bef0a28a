"""The frame around a training loop: run folder, clock, display, and an orderly end whatever happens."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema import RLConfig, RunConfig
from core.clock import Clock
from core.errors import ProcessDied, RunStopped, UserError
from core.ray_cluster import Cluster
from core.workers import Workers
from data_feeds.feed import Feed
from data_feeds.tokenizer import ChatTokenizer
from driver.checkpoint import Checkpoint, Stand, is_due, retain, write_checkpoint
from driver.console import Progress
from driver.resume import other_bits
from driver.run_folder import RunFolder
from driver.time_account import shares

CLOSE_TIMEOUT_S = 20.0


@dataclass
class Session:
    """What both programs use while they run. `facts` ends up in summary.json."""

    cfg: RunConfig
    folder: RunFolder
    clock: Clock
    progress: Progress
    cluster: Cluster | None = None
    engines: Workers | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        metrics = {"step": float(step), **metrics, **self.clock.lap()}
        tokens = metrics.get("rollout/tokens", metrics["train/tokens"])
        metrics["tokens_per_s"] = tokens / metrics["time/step_s"]
        self.folder.log(metrics)
        self.progress.step(metrics)
        self.facts["steps_done"] = step + 1

    def tell_data(self, feeds: dict[str, Feed[Any] | None]) -> None:
        """Say which rows do not fit, by the setting that named their file."""
        for key, feed in feeds.items():
            if feed is not None:
                sentences, self.facts[key] = feed.told(key)
                for sentence in sentences:
                    self.progress.say(sentence)

    async def save_model(self, trainers: Workers, tokenizer: ChatTokenizer) -> None:
        """The final model in the run folder, and a second time where `save_to` says."""
        named = [Path(self.cfg.save_to).absolute()] if self.cfg.save_to else []
        with self.clock.phase("save"):
            for folder in [self.folder.path / "model", *named]:
                await trainers.all("save", folder)
                tokenizer.save(folder)

    def checkpoint_is_due(self, steps_done: int) -> bool:
        return is_due(steps_done, every=self.cfg.checkpoint.every, steps=self.cfg.steps)

    async def checkpoint(self, trainers: Workers, stand: Stand) -> None:
        with self.clock.phase("checkpoint"):
            home = self.folder.path / "checkpoints"
            await write_checkpoint(home, trainers, stand)
            retain(home, self.cfg.checkpoint.keep)

    async def resume(self, trainers: Workers, checkpoint: Checkpoint | None, recipe: dict[str, Any]) -> int:
        """Put the trainers where `checkpoint` left off; returns the steps that are done, 0 without one."""
        if checkpoint is None:
            return 0
        with self.clock.phase("resume"):
            await trainers.all("load_state", checkpoint.folder)
        done = checkpoint.stand.steps_done
        self.facts["resumed"] = {"checkpoint": str(checkpoint.folder), "steps_done": done}
        self.progress.done = done
        self.progress.say(f"resumed after {done} steps: {checkpoint.folder}")
        if moved := other_bits(checkpoint.stand.recipe["settings"], recipe["settings"]):
            self.progress.say(f"not to the last bit: {', '.join(moved)} differs from the run that is resumed")
        return done

    def show_outcome(self) -> None:
        """What was measured on held-out data before and after, if it was, and where everything lies."""
        before, after = self.facts.get("before", {}), self.facts.get("after", {})
        shown = [n for n in before if n in after and not n.endswith("/std") and (n != "rollout/failed" or after[n])]
        if shown:
            rows = [(name, f"{before[name]:.3f}", f"{after[name]:.3f}") for name in shown]
            self.progress.table("on held-out data", rows, ("", "before", "after"))
        if devices := self.facts.get("devices"):
            for line in (*shares(devices), self.facts["bottleneck"]):
                self.progress.say(line)
        self.progress.say(f"run folder: {self.folder.path}")

    async def close(self) -> None:
        try:
            if self.engines is not None:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self.engines.all("close")
        except (TimeoutError, RunStopped) as error:  # it is killed next
            self.progress.say(f"an engine did not close by itself ({error or 'no answer'})")
        finally:
            if self.cluster is not None:
                self.cluster.close()


def _interrupt_at_once() -> None:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt wherever Python is; one that was ignored still is."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def run_session(cfg: RunConfig, body: Callable[[Session], Awaitable[None]]) -> int:
    """Run `body` to its end, or to Ctrl-C, SIGTERM or an error, and always leave a summary and no process behind."""
    clock = Clock()
    folder = RunFolder(cfg.run_dir, cfg.name, cfg.model_dump())
    progress = Progress(cfg.steps, clock, live=cfg.backend == "ray")
    session = Session(cfg=cfg, folder=folder, clock=clock, progress=progress)
    session.progress.say(f"run folder: {folder.path}")
    reason = "error"

    async def framed() -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if cfg.backend == "ray":
                with clock.phase("start"):
                    session.cluster = Cluster(cfg.ray_address)
            # after Ray, which takes the signal for itself and aborts
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            if cfg.backend == "local" and not isinstance(cfg, RLConfig):  # the loop does not turn before the end
                _interrupt_at_once()
            await body(session)
        except ProcessDied:
            session.engines = None  # they may wait for it; all are killed next
            raise
        finally:
            with clock.phase("close"):
                await session.close()

    try:
        with session.progress:
            asyncio.run(framed())
        reason = "done"
        session.show_outcome()
    except (KeyboardInterrupt, asyncio.CancelledError):
        reason = "interrupted"
        raise KeyboardInterrupt from None
    except (RunStopped, UserError) as error:
        reason = f"stopped: {error}"
        raise
    except Exception as error:
        reason = f"error: {type(error).__name__}: {error}"
        raise
    finally:
        folder.write_summary(exit_reason=reason, seconds=clock.totals(), **session.facts)
        folder.close()
    return 0
