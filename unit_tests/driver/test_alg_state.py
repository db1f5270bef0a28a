"""State and schedules in whole runs: in the log, in checkpoints, in snapshots, and after a kill."""

import asyncio
import os
import signal
import subprocess
import sys
from itertools import pairwise

import pytest

import main_rl
import main_sl
from algs.base import Algorithm
from algs.grpo import GRPO
from analysis.capture.recompute import replay
from analysis.capture.tokens import snapshot_folder
from core.cluster.workers import Local
from core.errors import UserError
from driver.alg_state import move_algorithm
from driver.checkpoint import read_checkpoint
from trainers.trainer import Trainer
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import LUCK, ROOT, file_of, folder_of, metrics_of, numbers_of

pytestmark = pytest.mark.usefixtures("one_thread")

MEMORY = """
import os, signal
import numpy as np
from algs.grpo import GRPO

class Memory(GRPO):
    def initial_state(self):
        return {"seen": 0.0, "recent": np.zeros(3)}

    def next_state(self, step):
        if step.number + 1 == int(os.environ.get("DIE_AFTER", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        recent = np.append(self.state["recent"], step.mean("approx_kl") + step.mean("loss"))[-3:]
        rewards = [r for own in step.group_by(lambda s: s.prompt.id, lambda s: s.reward).values() for r in own]
        return {"seen": self.state["seen"] + sum(rewards), "recent": recent}

    def accept_group(self, group):
        return self.state["seen"] >= 0 and self.step_number >= 0

    def compute_advantages(self, groups):
        return [[s.with_advantage(s.advantage * (1 + self.state["seen"])) for s in g]
                for g in super().compute_advantages(groups)]

    def loss(self, policy, tokens):
        loss, metrics = super().loss(policy, tokens)
        return loss * (1 + abs(float(self.state["recent"].sum()))), metrics
"""
MOVING = {
    "alg.schedules": {"clip_high": {"start": 0.05, "end": 0.3, "steps": 4, "shape": "cosine"}},
    "alg.kl": {"coef": 0.1, "target": 1e-5, "horizon": 64},
    "alg.adaptive_entropy": {"target": 9.0, "delta": 0.01, "high": 0.1},
    "updates_per_step": 2,
    "groups_per_step": 2,
    "rollout.max_new_tokens": 4,
    "trainer.lr": 1e-2,
    "steps": 5,
    "checkpoint": {"every": 2, "keep": 9},
}


@pytest.fixture
def moving(recipe, tmp_path):
    """A recipe of an algorithm in which everything moves."""
    files = {"alg.file": file_of(tmp_path / "memory.py", MEMORY), "alg.name": None}
    files |= {"reward.function": file_of(tmp_path / "luck.py", LUCK)}
    return lambda **changes: recipe(MOVING | files | changes)


def test_a_state_moves_once_per_step_and_is_logged_as_the_step_used_it(moving, tmp_path):
    assert run_here(main_rl, "--config", moving(), "name=whole") == (0, "")
    rows = metrics_of(folder_of(tmp_path, "whole"))
    assert [row["alg/clip_high"] for row in rows[::2]] == pytest.approx([0.05, 0.175, 0.3])
    assert [row["alg/state/entropy_coef"] for row in rows] == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])
    assert rows[0]["alg/state/kl_coef"] == 0.1
    for row, after in pairwise(rows):
        error = min(0.2, max(-0.2, row["train/kl_ref"] / 1e-5 - 1))
        assert after["alg/state/kl_coef"] == pytest.approx(row["alg/state/kl_coef"] * (1 + error * 8 / 64))
        rewards = row["reward/mean"] * 8
        assert after["alg/state/seen"] - row["alg/state/seen"] == pytest.approx(rewards) and rewards > 0
    assert not any("recent" in name for name in rows[0]), "arrays are in the checkpoint"


@pytest.mark.one_core
@pytest.mark.one_core
@pytest.mark.slow
def test_a_killed_run_with_a_state_goes_on_as_if_nothing_had_been(moving, tmp_path):
    path = moving()
    command = [sys.executable, "main_rl.py", "--config", path, "name=killed"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DIE_AFTER": "4"}
    assert subprocess.run(command, cwd=ROOT, env=env).returncode == -signal.SIGKILL
    killed = folder_of(tmp_path, "killed")
    assert run_here(main_rl, "--config", path, "name=whole") == (0, "")
    assert run_here(main_rl, "--config", path, "name=resumed", f"resume={killed}") == (0, "")
    whole, resumed = folder_of(tmp_path, "whole"), folder_of(tmp_path, "resumed")
    assert len(numbers_of(killed)) == 3
    assert numbers_of(killed) + numbers_of(resumed)[1:] == numbers_of(whole)
    assert numbers_of(resumed)[0] == numbers_of(whole)[2], "the state of the checkpoint"
    assert (resumed / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    last = [read_checkpoint(folder / "checkpoints/step_00005").state.alg_state for folder in (whole, resumed)]
    assert last[0] == last[1] and last[0]["recent"]["base64"]


def test_a_snapshot_is_recomputed_with_the_state_of_its_step(moving, tmp_path):
    path = moving(steps=3, capture={"every": 1, "weights": True})
    assert run_here(main_rl, "--config", path) == (0, "")
    for step in range(3):
        for update in range(2):
            found = replay(snapshot_folder(folder_of(tmp_path), step), [], update=update)
            assert found.is_reproduced, (step, update, found)
    with pytest.raises(UserError, match="GRPO reads the state entropy_coef, which the run's algorithm did not have"):
        other = {"name": "grpo", "adaptive_entropy": {"target": 1.0}, "as": "other"}
        assert run_here(main_rl, "--config", moving(**PLAIN), "name=plain") == (0, "")
        replay(snapshot_folder(folder_of(tmp_path, "plain"), 0), [other])


PLAIN = {"alg.adaptive_entropy": {}, "steps": 1, "capture": {"every": 1, "weights": True}}


def test_a_checkpoint_without_the_state_that_a_run_needs_is_refused(moving, tmp_path):
    assert run_here(main_rl, "--config", moving(steps=2), "name=first") == (0, "")
    folder = folder_of(tmp_path, "first") / "checkpoints/step_00002"
    at = folder / "progress.json"
    at.write_text(at.read_text().replace('"seen"', '"sown"'))
    code, err = run_here(main_rl, "--config", moving(steps=3), f"resume={folder}")
    assert code == 2 and "has no seen in the state of the algorithm: leave resume out to start again" in err


def test_with_staleness_a_group_is_not_accepted_by_a_state(moving):
    code, err = run_here(main_rl, "--config", moving(), "max_staleness=1")
    assert code == 1 and "Memory.accept_group reads the state, which moves" in err and "set max_staleness: 0" in err


def test_a_loss_that_moves_cannot_watch(moving):
    code, err = run_here(main_rl, "--config", moving(), "compare_losses=[{name: grpo, kl: {coef: 0.1, target: 1}}]")
    assert code == 2 and "changes from step to step" in err, err


SUPERVISED = """
from algs.sft import SFT

class Slowing(SFT):
    def initial_state(self):
        return {"loss": 1.0}

    def next_state(self, step):
        return {"loss": 0.5 * self.state["loss"] + 0.5 * step.mean("loss") / step.n_samples}

    def loss(self, policy, tokens):
        loss, metrics = super().loss(policy, tokens)
        return loss * self.state["loss"], metrics
"""


def test_a_supervised_run_with_a_state_goes_on_too(recipe, tmp_path, sums):
    changes = {"alg": {"file": file_of(tmp_path / "slowing.py", SUPERVISED)}, "steps": 4, "trainer.lr": 1e-2}
    changes |= {"data.eval": str(sums / "sft.parquet"), "eval_every": 1, "checkpoint": {"every": 2, "keep": 9}}
    path = recipe(changes, kind="sl")
    assert run_here(main_sl, "--config", path, "name=whole") == (0, "")
    whole = folder_of(tmp_path, "whole")
    rows = metrics_of(whole)
    assert rows[0]["alg/state/loss"] == 1.0
    assert rows[1]["alg/state/loss"] == pytest.approx(0.5 + 0.5 * rows[0]["train/loss"] / 5)
    at = whole / "checkpoints/step_00002"
    assert run_here(main_sl, "--config", path, "name=resumed", f"resume={at}") == (0, "")
    assert numbers_of(folder_of(tmp_path, "resumed")) == numbers_of(whole)[2:]


def test_a_step_without_an_update_moves_the_schedules_and_no_state():
    """So it is where every gradient of a step was not finite."""

    class Keeper(Trainer):
        def __init__(self) -> None: ...

        def set_algorithm(self, alg: Algorithm) -> None:
            self.kept = alg

    alg, keeper = GRPO(), Keeper()
    moved = asyncio.run(move_algorithm(alg.with_state({}, step=4), Local(keeper), [], {}))
    assert moved.step_number == 5 and moved.state == {} and keeper.kept is moved
