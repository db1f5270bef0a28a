"""Snapshots of the policy that play as opponent (`rollout.opponent: policy`), in the run folder."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from configs.schema import RLConfig
from core.cluster.workers import Workers
from core.errors import UserError, writing
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.checkpoint import Checkpoint, list_checkpoints
from driver.context import RunContext
from driver.saving import write_model
from rollouts.opponents import OpponentSlot
from rollouts.worker import RolloutWorker
from trainers.trainer import Trainer

FOLDER = "opponents"
"""Folder of a run folder with the snapshots."""


@dataclass(kw_only=True)
class Snapshots:
    """Snapshots of a run, of which the newest plays."""

    every: int
    """Steps between two snapshots: rollout.opponent_every."""
    run_folder: Path
    slots: Workers[OpponentSlot]
    save: Callable[..., Awaitable[None]]
    """Writes the trainers' weights to a folder."""
    version: int = 0
    """Training steps of the newest; 0: model.path."""
    first_step: int = 0
    """First step of a resumed run. No snapshot is taken there, because the uninterrupted run takes none."""

    def find_folder(self, version: int) -> Path:
        return self.run_folder / FOLDER / f"step_{version:05d}"

    async def renew(self, version: int) -> None:
        """Take a snapshot of the trainers' weights if it is due, and remove those that no checkpoint plays."""
        if version == self.first_step or version - self.version < self.every:
            return
        await self.save(self.find_folder(version), steps=version)
        self.version = version
        kept = {c.state.opponent_version for c in list_checkpoints(self.run_folder / "checkpoints")} | {version}
        names = {self.find_folder(one).name for one in kept}
        for folder in (self.run_folder / FOLDER).iterdir():
            if folder.name not in names:
                shutil.rmtree(folder)

    async def send(self, engines: Sequence[int]) -> None:
        """Let the newest snapshot play in these engines, new ones included."""
        if self.version:
            folder = str(self.find_folder(self.version))
            calls = (self.slots.call_one(rank, OpponentSlot.replace, folder, self.version) for rank in engines)
            await asyncio.gather(*calls)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Copy the snapshot that played when a checkpoint was made. Raises UserError if it is missing."""
        self.version, self.first_step = checkpoint.state.opponent_version, checkpoint.state.steps_done
        if not self.version:
            return
        home = self.find_folder(self.version)
        there = checkpoint.folder.parents[1] / FOLDER / home.name
        if not there.is_dir():
            raise UserError(
                f"resume: {there} is missing, the opponent that played when the checkpoint was made: restore it, or "
                "leave resume out to start again"
            )
        with writing(home):
            shutil.copytree(there, home)


def make_snapshots(
    cfg: RLConfig,
    context: RunContext,
    tokenizer: ChatTokenizer,
    *,
    trainers: Workers[Trainer],
    engines: Workers[RolloutWorker],
    checkpoint: Checkpoint | None,
) -> Snapshots | None:
    """Return the snapshots of a run, as the checkpoint left them; None for another opponent."""
    if cfg.rollout.opponent_every is None:
        return None
    run = context.folder.path
    how = {"trainers": trainers, "tokenizer": tokenizer, "cfg": cfg, "run": run, "say": context.console.say}
    slots: Workers[OpponentSlot] = engines.attribute("opponent")
    every = cfg.rollout.opponent_every
    snapshots = Snapshots(every=every, run_folder=run, slots=slots, save=partial(write_model, **how))
    if checkpoint is not None:
        snapshots.restore(checkpoint)
    return snapshots
