"""Processes of a run are killed; neither numbers nor processes tell of it."""

import asyncio
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from configs.schema import RLConfig
from core.errors import ProcessDied, UserError
from core.guardian import MARK
from core.workers import Local
from driver.checkpoint import list_checkpoints, write_checkpoint
from driver.load_recipe import load_recipe
from driver.on_failure import run_with_resumes
from unit_tests.examples import is_running
from unit_tests.test_checkpoint import Writer, stand

ROOT = Path(__file__).parent.parent
KILLS, STEPS = 20, 80
NOTHING_LEFT_S = 15.0
EXACT = {"backend": "ray", "groups_per_step": 1, "group_size": 8, "checkpoint.every": 1, "trainer.lr": 1e-3}
"""One group in a step: with more, their timing decides which of them an engine samples in one batch: the last bits."""


def start(recipe: str, run_dir: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "main_rl.py", "--config", recipe, f"run_dir={run_dir}", *overrides]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def rows_of(folder: Path) -> dict[int, dict]:
    """Return what a run logged by step, without seconds; a line that was being written is none."""
    lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1] if (folder / "metrics.jsonl").exists() else []
    rows = [json.loads(line) for line in lines]
    return {int(r["step"]): {k: v for k, v in r.items() if not k.startswith(("time/", "tokens_per_s"))} for r in rows}


def marked() -> set[int]:
    """Return the processes of any run of this project, from whatever it started."""
    found = set()
    for process in psutil.process_iter():
        try:
            if MARK in process.environ():
                found.add(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


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
    before = marked()

    for kill in range(KILLS):
        run = start(path, tmp_path / "killed", *resume)
        if draw.random() < 0.4:
            wait_for_lines(run, 10**9, draw.uniform(0.0, 12.0))  # while it starts, mostly
        else:
            wait_for_lines(run, draw.randint(2, 5), 120.0)
            time.sleep(draw.uniform(0.0, 0.5))
        assert run.poll() is None, (kill, run.stderr.read())
        below = {p.pid for p in psutil.Process(run.pid).children(recursive=True)} | (marked() - before)
        run.send_signal(signal.SIGKILL)
        run.wait()
        until = time.monotonic() + NOTHING_LEFT_S
        while (left := {pid for pid in below | (marked() - before) if is_running(pid)}) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, (kill, [psutil.Process(pid).cmdline() for pid in left])
        folders = sorted((tmp_path / "killed").iterdir()) if (tmp_path / "killed").exists() else []
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


DIES_ONCE = """
import os, signal
from pathlib import Path
from {module} import {base}

class Mine({base}):
    {method}
        once = Path({mark!r})
        if {when} and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        {rest}
"""
TRAINER = {
    "module": "algs.grpo",
    "base": "GRPO",
    "method": "def loss(self, policy, tokens):",
    "when": "Path({counter!r}).open('a').write('x') and Path({counter!r}).stat().st_size > 3",
    "rest": "return super().loss(policy, tokens)",
}
ENGINE = {
    "module": "rollouts.engines.hf",
    "base": "HfEngine",
    "method": "async def generate(self, token_ids, **settings):",
    "when": "self.version == 3",
    "rest": "return await super().generate(token_ids, **settings)",
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("who", ["trainer", "engine"])
def test_a_run_that_loses_a_process_resumes_by_itself_with_the_same_numbers(recipe, tmp_path, who):
    parts = TRAINER if who == "trainer" else ENGINE
    mark, counter, file = tmp_path / "died", str(tmp_path / "counter"), tmp_path / "dies.py"
    file.write_text(DIES_ONCE.format(mark=str(mark), **parts | {"when": parts["when"].format(counter=counter)}))
    own = {"alg": {"file": str(file)}} if who == "trainer" else {"rollout.engine": str(file)}
    path = recipe(EXACT | own | {"steps": 5})
    run = start(path, tmp_path / "resumed", "on_failure=resume")
    out, err = (said.decode() for said in run.communicate())
    assert run.returncode == 0 and mark.exists(), err
    assert re.search(rf"stopped: {who} 0 .*its process died", out), out
    assert re.search(r"on_failure=resume: resuming from .*step_0000\d \(1 of max_resumes=3\)", out), out
    whole = start(path, tmp_path / "whole")  # nothing dies any more
    _, err = whole.communicate()
    assert whole.returncode == 0, err
    [reference] = (tmp_path / "whole").iterdir()
    first, second = sorted((tmp_path / "resumed").iterdir())
    assert rows_of(first) | rows_of(second) == rows_of(reference)
    assert json.loads((second / "summary.json").read_text())["exit_reason"] == "done"


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
    assert capsys.readouterr().out.count("on_failure=resume: resuming from") == 2


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
