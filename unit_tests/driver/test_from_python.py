"""A run from Python: what it came to, its errors as exceptions, and a caller with an event loop, as a notebook is."""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import rich.console
import yaml

import main_rl
import main_sl
from core.errors import RunStopped, UserError
from core.timing.clock import Clock
from driver.evaluation.estimators import Estimate
from driver.evaluation.suites.run import EvalReport
from driver.evaluation.suites.table import TableRow
from driver.records.console import Console
from unit_tests.helpers.runs import metrics_of

SEVENS = "def score(prompt, messages):\n    return {'correct': messages[-1]['content'][:8].count('7') / 8}\n"


def read(path: str) -> dict:
    with open(path) as file:
        return yaml.safe_load(file)


def test_a_supervised_run_returns_what_it_came_to(recipe, sums):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    result = main_sl.run(recipe({"data.eval": str(sums / "sft.parquet")}, kind="sl"), ["trainer.lr=1e-2"])
    assert result.exit_reason == "done" and result.steps_done == 2
    assert (result.model / "model.safetensors").is_file() and result.model.parent == result.folder
    last = metrics_of(result.folder)[-1]
    assert result.metrics == last and last["train/lr"] == 1e-2
    assert result.after["eval/loss"] < result.before["eval/loss"]
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_run_in_a_notebook_takes_keys_and_values(recipe, tmp_path):
    """A notebook's cell runs within an event loop."""
    (tmp_path / "sevens.py").write_text(SEVENS)
    keys = read(recipe({"reward.function": str(tmp_path / "sevens.py"), "steps": 1}))
    given = json.dumps(keys)

    async def cell():
        return main_rl.run(keys, ["seed=3"])

    result = asyncio.run(cell())
    assert result.exit_reason == "done" and "reward/mean" in result.metrics
    assert read(str(result.folder / "config.yaml"))["seed"] == 3
    assert json.dumps(keys) == given, "the caller's keys are as they were"


def test_errors_are_exceptions(recipe, tmp_path):
    with pytest.raises(UserError, match="steps=0"):
        main_rl.run(recipe(), ["steps=0"])
    with pytest.raises(UserError, match="known key"):
        main_rl.run(read(recipe()) | {"stesp": 1})
    (tmp_path / "broken.py").write_text("def score(prompt, messages):\n    return 1 / 0\n")

    async def cell():
        main_rl.run(recipe({"reward.function": str(tmp_path / "broken.py")}))

    with pytest.raises(RunStopped, match="ZeroDivisionError"):
        asyncio.run(cell())


def test_a_recipe_of_keys_may_build_on_a_file(recipe, tmp_path, monkeypatch):
    recipe(kind="sl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"trainer\.lr=-1"):
        main_sl.run({"base": "sl.yaml", "trainer": {"lr": -1}})


def test_ctrl_c_in_a_notebook_ends_the_run_in_order(recipe, tmp_path):
    """The signal reaches the main thread, which waits; the run is in another one."""
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "def score(prompt, messages):\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )

    async def cell():
        main_rl.run(recipe({"reward.function": str(tmp_path / "slow.py")}))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    [folder] = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["exit_reason"] == "interrupted"


BESIDE_RAY = """
import sys
import ray
import main_sl
from core.errors import UserError
from core.cluster.ray_workers import Cluster

ray.init(num_cpus=1, include_dashboard=False)

@ray.remote(num_cpus=0)
def add(a, b):
    return a + b

for start in (lambda: main_sl.run(sys.argv[1]), lambda: Cluster(None)):
    try:
        start()
    except UserError as error:
        print(error)
print("Ray is there:", ray.is_initialized(), ray.get(add.remote(1, 2), timeout=30))
"""
AFTER_A_RUN = """
import gc, io, logging, os, signal, sys, time
from contextlib import redirect_stdout
import ray
import main_sl

def look():
    ours = {n: v for n, v in os.environ.items() if n.startswith(("RAY", "PYTHON", "FEYNRL", "TMPDIR", "VLLM"))}
    levels = [logging.getLogger(name).level for name in ("", "ray", "ray._private.worker")]
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    return ours, levels, signals, gc.get_threshold(), gc.get_freeze_count(), os.getcwd(), sys.excepthook

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # as Ray itself sets it
before = look()
print(main_sl.run(sys.argv[1]).exit_reason)
assert look() == before, (before, look())

ray.init(num_cpus=1, include_dashboard=False)

@ray.remote(num_cpus=0)
def speak():
    print("a worker speaks")

end = time.monotonic() + 20
with redirect_stdout(io.StringIO()) as heard:
    ray.get(speak.remote(), timeout=30)
    while "speaks" not in heard.getvalue() and time.monotonic() < end:
        time.sleep(0.1)
print(heard.getvalue())
"""


def run_script(script: str, *argv: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a user's own program. home: where Ray keeps a token of its own."""
    home.mkdir()
    path = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", script, *argv],
        env=os.environ | {"PYTHONPATH": path, "HOME": str(home)},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_run_on_ray_is_refused_beside_the_callers_ray_and_leaves_it_be(recipe, tmp_path):
    done = run_script(BESIDE_RAY, recipe({"backend": "ray"}, kind="sl"), home=tmp_path / "home")
    assert done.returncode == 0, done.stdout + done.stderr
    refusal, of_cluster, there = done.stdout.splitlines()
    assert refusal == of_cluster, "whoever starts it: a file of the recipe may call ray.init after the first check"
    assert refusal.startswith("this process is connected to a Ray cluster already") and "ray.shutdown()" in refusal
    assert there == "Ray is there: True 3"
    assert not (tmp_path / "runs").exists(), "refused before anything is made"


@pytest.mark.verify
def test_after_a_run_on_ray_the_process_is_as_before_and_may_use_ray(recipe, tmp_path):
    done = run_script(AFTER_A_RUN, recipe({"backend": "ray", "steps": 1}, kind="sl"), home=tmp_path / "home")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\ndone\n" in done.stdout and "a worker speaks" in done.stdout


def test_a_result_prints_a_short_summary_and_is_a_table_in_a_notebook(recipe, sums):
    result = main_sl.run(recipe({"data.eval": str(sums / "sft.parquet")}, kind="sl"), ["name=<b>bold"])
    before, after = (f"{metrics['eval/loss']:.3f}" for metrics in (result.before, result.after))
    first, folder, head, held_out, loss = str(result).splitlines()
    assert first == "done after 2 steps" and folder == f"run folder: {result.folder}"
    assert head.split() == ["before", "after", "last", "step"] and held_out.split() == ["eval/loss", before, after]
    assert loss.split() == ["train/loss", f"{result.metrics['train/loss']:.3f}"] and repr(result) == str(result)
    html = result._repr_html_()
    assert f"<tr><td>eval/loss</td><td>{before}</td><td>{after}</td><td></td></tr>" in html
    assert "&lt;b&gt;bold" in html and "<b>" not in html


def test_an_evaluation_prints_its_table(tmp_path):
    estimate = Estimate(value=0.5, low=0.25, high=0.75)
    row = TableRow(column="set", value="sums", prompts=4, samples=8, failed=0, metrics={"mean": estimate})
    report = EvalReport(folder=tmp_path, table=[row])
    assert str(report).splitlines()[-1].split() == ["set=sums", "4", "0.500", "[0.250,", "0.750]"]
    assert "<td>set=sums</td><td>4</td><td>0.500 [0.250, 0.750]</td>" in report._repr_html_()


class ZMQInteractiveShell:
    """A notebook's shell, by whose name rich knows one."""


def test_the_lines_of_a_run_in_a_notebook_are_text_in_one_output(monkeypatch, capsys):
    """Rich would show every line as an output of its own."""
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    assert rich.console.Console().is_jupyter
    with Console(2, Clock(), live=True) as console:
        console.say("one")
        console.show_table("two", [("reward", "1")], ("", "after"))
    assert not console.terminal.is_jupyter
    assert capsys.readouterr().out.startswith("one\ntwo")
