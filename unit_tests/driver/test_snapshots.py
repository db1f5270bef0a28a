"""Snapshots of the policy that play as opponent: when they are taken, and in which engines they play."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from algs.grpo import GRPO
from configs.schema import RLConfig
from core.cluster.workers import Local
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.checkpoint import Checkpoint, RunState
from driver.load_recipe import load_recipe
from driver.rl.opponent import make_snapshots
from rollouts.opponents import OpponentSlot
from unit_tests.helpers.episodes import Scripted
from unit_tests.helpers.local_trainers import trainer_of


class Engines(Local[Any]):
    """Engines in this process, each with an opponent."""

    def __init__(self, slots: list[OpponentSlot]) -> None:
        super().__init__(slots)

    def attribute(self, name: str) -> Engines:
        assert name == "opponent"
        return self

    async def call_one(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        return await method(self.worker[rank], *args, **kwargs)


def test_the_newest_snapshot_plays_in_the_engines_that_are_asked(recipe, tiny_path, tmp_path: Path):
    cfg = load_recipe(RLConfig, recipe({}), []).cfg
    loaded: list[tuple[int, str]] = []
    said: list[str] = []

    def make_slot(rank: int) -> OpponentSlot:
        def load(folder: str) -> Any:
            loaded.append((rank, folder))
            return Scripted()

        return OpponentSlot(Scripted(), version=0, load=load)

    slots = [make_slot(rank) for rank in range(2)]
    trainer = trainer_of(tiny_path, GRPO(), attention="auto")
    more: Any = {"trainers": Local(trainer), "engines": Engines(slots)}

    def make(run: Path, every: int | None, checkpoint: Checkpoint | None = None) -> Any:
        run.mkdir()
        (run / "config.yaml").touch()
        context: Any = SimpleNamespace(folder=SimpleNamespace(path=run), console=SimpleNamespace(say=said.append))
        rollout = cfg.rollout.model_copy(update={"opponent_every": every})
        given = cfg.model_copy(update={"rollout": rollout})
        return make_snapshots(given, context, ChatTokenizer(tiny_path, "chat"), checkpoint=checkpoint, **more)

    assert make(tmp_path / "none", None) is None
    snapshots, home = make(tmp_path / "run", 2), tmp_path / "run/opponents/step_00002"

    async def play() -> None:
        await snapshots.renew(1)
        await snapshots.send([0, 1])
        assert loaded == [] and not home.parent.exists(), "the model of the start plays"
        await snapshots.renew(2)
        await snapshots.send([1])
        assert loaded == [(1, str(home))] and [slot.version for slot in slots] == [0, 2]
        await snapshots.send([0, 1])
        assert loaded == [(1, str(home)), (0, str(home))] and [slot.version for slot in slots] == [2, 2]

    asyncio.run(play())
    weights = load_file(home / "model.safetensors")
    assert torch.equal(weights["model.norm.weight"], dict(trainer.model.named_parameters())["model.norm.weight"])
    assert said == [f"saved {home}: {len(weights)} tensors, read back"]
    state = RunState(steps_done=3, metrics={}, position={}, recipe={}, opponent_version=2)
    again = make(tmp_path / "again", 2, Checkpoint(folder=tmp_path / "run/checkpoints/step_00003", state=state))
    assert (again.every, again.version, again.first_step) == (2, 2, 3)
    assert (tmp_path / "again/opponents/step_00002/model.safetensors").is_file()
