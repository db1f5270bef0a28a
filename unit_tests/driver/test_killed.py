"""Processes of a run are killed; neither numbers nor processes tell of it."""

import asyncio
import os
import random
import re
import select
import signal
import subprocess
import time

import psutil
import pytest
from safetensors.torch import load_file

from configs.schema import RLConfig
from core.cluster.workers import Local
from core.errors import ProcessDied, UserError
from driver.checkpoint import list_checkpoints, write_checkpoint
from driver.load_recipe import load_recipe
from driver.on_failure import run_with_resumes
from unit_tests.helpers.checkpoints import Writer, stand
from unit_tests.helpers.examples import command_of, is_running
from unit_tests.helpers.runs import EXACT, list_started, rows_of, start

KILLS, STEPS = 20, 80
NOTHING_LEFT_S = 15.0


def wait_for_lines(run: subprocess.Popen, lines: int, seconds: float) -> None:
    """Return after the run has printed so many lines, or after so many seconds."""
    until = time.monotonic() + seconds
    while lines and time.monotonic() < until and run.poll() is None:
        if select.select([run.stdout], [], [], 0.1)[0]:
            lines -= os.read(run.stdout.fileno(), 65536).count(b"\n")
            lines = max(lines, 0)


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_a_run_killed_twenty_times_makes_the_numbers_of_one_that_was_not(recipe, tmp_path):
    path = recipe(EXACT | {"steps": STEPS})
    whole = start(path, tmp_path / "whole")
    assert whole.wait() == 0, whole.stderr.read()
    [reference] = (tmp_path / "whole").iterdir()
    expected, draw, resume, done = rows_of(reference), random.Random(0), (), 0
    killed = tmp_path / "killed"

    for kill in range(KILLS):
        run = start(path, killed, *resume)
        if draw.random() < 0.4:
            wait_for_lines(run, 10**9, draw.uniform(0.0, 12.0))  # while it starts, mostly
        else:
            wait_for_lines(run, draw.randint(2, 5), 120.0)
            time.sleep(draw.uniform(0.0, 0.5))
        assert run.poll() is None, (kill, run.stderr.read())
        below = {p.pid for p in psutil.Process(run.pid).children(recursive=True)} | list_started(killed)
        run.send_signal(signal.SIGKILL)
        run.wait()
        until = time.monotonic() + NOTHING_LEFT_S
        while (left := {pid for pid in below | list_started(killed) if is_running(pid)}) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, (kill, [command_of(pid) for pid in left])
        folders = sorted(killed.iterdir()) if killed.exists() else []
        for folder in folders:
            logged = rows_of(folder)
            assert logged == {step: expected[step] for step in logged}, (kill, folder)
        complete = [c for folder in folders for c in list_checkpoints(folder / "checkpoints")]
        if complete:
            newest = max(complete, key=lambda c: c.state.steps_done)
            resume, done = (f"resume={newest.folder}",), newest.state.steps_done
        print(f"kill {kill + 1}: {done} of {STEPS} steps are in a checkpoint")

    assert 10 < done < STEPS, "it was killed in many places"
    last = start(path, tmp_path / "last", *resume)
    assert last.wait() == 0, last.stderr.read()
    [end] = (tmp_path / "last").iterdir()
    assert rows_of(end) == {step: expected[step] for step in range(done, STEPS)}
    weights, wanted = (load_file(folder / "model" / "model.safetensors") for folder in (end, reference))
    assert weights.keys() == wanted.keys() and all(weights[name].equal(wanted[name]) for name in wanted)


STRIKES = """
import os, signal
from pathlib import Path
import psutil
import trainers.trainer
from algs.grpo import GRPO
from trainers.weight_sync.broadcast import WeightSender
from {module} import {engine}

HERE = Path(__file__).parent

def strike(moment):
    orders = (HERE / "orders").read_text().split()
    if not orders or not orders[0].endswith("/" + moment):
        return
    (HERE / "orders").write_text(" ".join(orders[1:]))
    who = orders[0].split("/")[0]
    if who == "trainer":
        return os.kill(int((HERE / "trainer").read_text()), signal.SIGKILL)
    engine = psutil.Process(int((HERE / "engine").read_text()))
    below = [p for p in engine.children(recursive=True) if who in " ".join(p.cmdline())]
    os.kill(engine.pid if who == "engine" else below[-1].pid, signal.SIGKILL)

def before(owner, name, first):
    call = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: (first(), call(*args, **kwargs))[1])

before(trainers.trainer, "make_lr_schedule", lambda: (HERE / "trainer").write_text(str(os.getpid())))
before(trainers.trainer, "save_state", lambda: strike("checkpoint"))
before(WeightSender, "_send_bucket", lambda: strike("sync"))
{mine}
"""
MY_TRAINER = """
class Mine(GRPO):
    def loss(self, policy, tokens):
        strike("training")
        return super().loss(policy, tokens)
"""
MY_ENGINE = """
class Mine({engine}):
    def __init__(self, config):
        super().__init__(config)
        (HERE / "engine").write_text(str(os.getpid()))
        self.asked = 0

    async def generate(self, token_ids, **settings):
        self.asked += 1
        if self.asked == 1:  # once in the life of an engine: samples of a group are asked for at once
            strike("generation")
        return await super().generate(token_ids, **settings)
"""
MOMENTS = ("generation", "training", "sync", "checkpoint")


def orders_of(*victims: str) -> list[str]:
    """Return every victim at every moment."""
    return [f"{victim}/{moment}" for moment in MOMENTS for victim in victims]


CASES = {
    "hf": (
        {"module": "rollouts.engines.hf", "engine": "HfEngine"},
        {},
        ["engine/generation", "engine/sync", "engine/checkpoint", "trainer/sync"],  # the last needs a checkpoint
    ),
    "vllm": (
        {"module": "rollouts.engines.vllm", "engine": "VllmEngine"},
        {"rollout.tensor_parallel_size": 2, "rollout.kv_cache_gib": 0.1},
        orders_of("engine", "Worker", "trainer"),
    ),
}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "engine",
    [pytest.param("hf", marks=[pytest.mark.slow, pytest.mark.usual]), pytest.param("vllm", marks=pytest.mark.verify)],
)
def test_killing_processes_at_every_moment_changes_no_number_of_a_run(recipe, tmp_path, engine):
    parts, changes, orders = CASES[engine]
    own = {}
    for key, mine in (("alg", MY_TRAINER), ("rollout.engine", MY_ENGINE)):
        file = tmp_path / f"{key.replace('.', '_')}.py"
        file.write_text(STRIKES.format(**parts, mine=mine.format(**parts)))
        own[key] = {"file": str(file)} if key == "alg" else str(file)
    path = recipe(EXACT | own | changes | {"steps": 6 if engine == "hf" else 20, "rollout.restarts": len(orders)})
    (tmp_path / "orders").write_text(" ".join(orders))
    run = start(path, tmp_path / "struck", "on_failure=resume", f"max_resumes={len(orders)}")
    out, err = (said.decode() for said in run.communicate())
    print(out, err)
    assert run.returncode == 0, err
    assert not (tmp_path / "orders").read_text(), "every order was carried out"
    of_trainer = [order for order in orders if order.startswith("trainer")]
    assert out.count("on_failure=resume: resuming from") == len(of_trainer)
    assert len(re.findall(r"restarting it \(\d+ of rollout\.restarts", out)) == len(orders) - len(of_trainer)
    whole = start(path, tmp_path / "whole")  # nothing dies any more
    _, err = whole.communicate()
    assert whole.returncode == 0, err
    [reference] = (tmp_path / "whole").iterdir()
    made = {}
    for folder in sorted((tmp_path / "struck").iterdir()):
        made |= rows_of(folder)
    restarts = [row.pop("rollout/engine_restarts") for row in made.values()]
    expected = rows_of(reference)
    assert {row.pop("rollout/engine_restarts") for row in expected.values()} == {0.0} and max(restarts) > 0
    assert made == expected


def test_a_run_resumes_as_often_as_allowed_and_from_where_it_came(tmp_path, recipe, capsys):
    """The second attempt dies before it has a checkpoint: the third begins where the second did."""
    loaded = load_recipe(RLConfig, recipe({"checkpoint.every": 1}), ["on_failure=resume", "max_resumes=2", "steps=9"])
    made = [tmp_path / "first", tmp_path / "second", tmp_path / "third"]
    for steps in (3, 4, 9):
        asyncio.run(write_checkpoint(made[0] / "checkpoints", Local(Writer()), stand(steps)))
    seen = []

    def attempt(loaded):
        seen.append(loaded.cfg.resume)
        death = ProcessDied("trainer 0 (step): its process died")
        death.run_folder, death.steps = made[len(seen) - 1], loaded.cfg.n_steps
        raise death

    with pytest.raises(ProcessDied):
        run_with_resumes(attempt, loaded)
    newest = str(made[0] / "checkpoints" / "step_00004")
    assert seen == [None, newest, newest], "the checkpoint at the end has nothing left to do"
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(("stopped", "on_failure"))] == [
        line
        for n in (1, 2)
        for line in (
            "stopped: trainer 0 (step): its process died",
            f"on_failure=resume: resuming from {newest} ({n} of max_resumes=2)",
        )
    ]


def test_a_run_that_dies_before_a_checkpoint_resumes_from_its_start(tmp_path, recipe, capsys):
    loaded = load_recipe(RLConfig, recipe({"checkpoint.every": 1}), ["on_failure=resume", "max_resumes=1"])

    def attempt(loaded):
        assert loaded.cfg.resume is None
        death = ProcessDied("trainer 0 (step): its process died")
        death.run_folder, death.steps = tmp_path, loaded.cfg.n_steps
        raise death

    with pytest.raises(ProcessDied):
        run_with_resumes(attempt, loaded)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "on_failure=resume: resuming from the start, because there is no checkpoint yet (1 of max_resumes=1)"
    )


def test_a_run_that_may_not_resume_ends_at_once(recipe):
    loaded = load_recipe(RLConfig, recipe(), [])
    seen = []

    def attempt(loaded):
        seen.append(loaded)
        raise ProcessDied("engine 0 (start): its process died")

    with pytest.raises(ProcessDied):
        run_with_resumes(attempt, loaded)
    assert len(seen) == 1
    with pytest.raises(UserError, match=r"on_failure is resume, .* set checkpoint\.every"):
        load_recipe(RLConfig, recipe(), ["on_failure=resume"])
