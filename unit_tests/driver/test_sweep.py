"""Sweeps: which values a comma separates, and every combination as a run of its own with a table at the end."""

from __future__ import annotations

import json

import pytest

import main_rl
import main_sl
from configs.schema import RLConfig
from core.cluster.signals import EXIT_CODE
from core.errors import UserError
from driver import sweep
from driver.sweep import combine_overrides, read_run, show_table, split_values
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import file_of, program

VALUES = {
    "1e-5,3e-5": ["1e-5", "3e-5"],
    "[0.9,0.95]": ["[0.9,0.95]"],
    "[0.9,0.95],[0.9,0.99]": ["[0.9,0.95]", "[0.9,0.99]"],
    "{a: 1, b: [2, 3]},{}": ["{a: 1, b: [2, 3]}", "{}"],
    "'a,b'": ["'a,b'"],
    '"a,\\"b"': ['"a,\\"b"'],
    "['a]', b],c": ["['a]', b]", "c"],
    "it's,fine": ["it's", "fine"],
    "": [""],
    "models/a": ["models/a"],
    "[{path: a.jsonl, ratio: 3},{path: b.jsonl}]": ["[{path: a.jsonl, ratio: 3},{path: b.jsonl}]"],
}


@pytest.mark.parametrize("text", VALUES)
def test_a_comma_outside_of_brackets_and_quotes_separates_values(text):
    assert split_values(text) == VALUES[text]


def test_all_combinations_are_run_the_last_key_fastest():
    assert combine_overrides(["a=1,2", "b=x", "c=[1,2],[3]"]) == [
        ["a=1", "b=x", "c=[1,2]"],
        ["a=1", "b=x", "c=[3]"],
        ["a=2", "b=x", "c=[1,2]"],
        ["a=2", "b=x", "c=[3]"],
    ]
    assert combine_overrides([]) == [[]] and combine_overrides(["seed"]) == [["seed"]]
    with pytest.raises(UserError, match="between two commas is empty"):
        combine_overrides(["a=1,,2"])


REFUSED = {
    "a value of one run": (["seed=0,-1"], "seed=-1 is not valid"),
    "one run twice": (["seed=1,1"], "two runs of the sweep are the same"),
    "one model for all": (["seed=0,1", "save_to=models/x"], "save_to=models/x would be written by several runs"),
    "several folders": (["run_dir=a,b"], "run_dir is the same for all runs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_sweep_is_checked_before_its_first_run(name, recipe, tmp_path):
    overrides, words = REFUSED[name]
    code, err = run_here(main_rl, "--config", recipe(), *overrides)
    assert code == 2 and err.count("\n") == 1 and words in err, err
    assert not (tmp_path / "runs").exists()


def test_explain_of_a_sweep_explains_every_run(recipe, capsys):
    assert run_here(main_sl, "--config", recipe(kind="sl"), "--explain", "steps=3,7")[0] == 0
    out = capsys.readouterr().out
    assert "# steps=3\n" in out and "7 steps -> 35 rows" in out


def test_a_run_without_a_folder_is_in_the_table(tmp_path, capsys):
    show_table([read_run(tmp_path / "none", ["seed=0"], 1)])
    assert capsys.readouterr().out.splitlines() == ["seed  steps  ended", "0     0      exit code 1"]


def test_the_table_has_the_reward_and_the_metric_that_the_recipe_asks_for(tmp_path, capsys):
    """Of the last step, and of the last evaluation."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    lines = [
        *({"step": 0, "eval/pass@2": 0.25}, {"step": 0, "reward/mean": 0.5, "train/entropy": 2.0}),
        {"step": 1, "eval/pass@2": 0.75},
        {"step": 1, "reward/mean": 0.625, "train/entropy": 1.5, "train/loss": 0.25},
        {"step": 2, "eval/pass@2": 0.875},
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    show_table([read_run(tmp_path, ["seed=0"], 0)], ["eval/pass@2", "train/entropy", "reward/mean"])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["seed", "steps", "reward", "loss", "eval/pass@2", "train/entropy", "ended"]
    assert row.split()[:6] == ["0", "2", "0.6250", "0.2500", "0.8750", "1.5000"]


def test_a_run_without_a_log_beside_a_trackers_file_is_in_the_table(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "mlflow.db").touch()
    (tmp_path / "mlruns").mkdir()
    found = read_run(tmp_path, ["seed=0"], 1)
    assert (found.folder, found.exit_reason, found.metrics) == (str(tmp_path / "run"), "exit code 1", {})


def test_sweeps_of_the_same_second_have_their_own_folders(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "_run", lambda *_: 0)
    monkeypatch.setattr(sweep.time, "strftime", lambda _: "now")
    for _ in range(2):
        assert sweep.run_sweep("main_rl.py", RLConfig, recipe(), [["seed=0"], ["seed=1"]]) == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"test-sweep-now", "test-sweep-now.2"}


RUN = """
import json, sys
from pathlib import Path
recipe, *overrides = sys.argv[2:]
keys = dict(item.split("=", 1) for item in overrides)
folder, seed = Path(json.loads(keys["run_dir"])) / "run", int(keys["seed"])
folder.mkdir(parents=True)
(folder / "config.yaml").touch()
after = {"reward/mean": seed / 4} if seed < 2 else {"eval/loss": seed / 4}
(folder / "summary.json").write_text(json.dumps({"exit_reason": f"end {seed}", "after": after}))
sys.exit(seed)
"""
"""Program that ends with its seed as exit code. Supervised runs call a metric by its whole name after training."""
HELD_OUT = {0: ["0.0000", "-"], 1: ["0.2500", "-"], 2: ["-", "0.5000"], 3: ["-", "0.7500"], EXIT_CODE: ["-", "32.5000"]}


@pytest.mark.parametrize(
    ("seeds", "made", "code"), [((0, 3, 2), 3, 3), ((1, EXIT_CODE, 2), 2, 1), ((0, EXIT_CODE, 2), 2, EXIT_CODE)]
)
def test_each_run_of_a_sweep_has_a_folder_and_a_row_until_ctrl_c(seeds, made, code, recipe, tmp_path, capsys):
    main, combinations = file_of(tmp_path / "main.py", RUN), [[f"seed={seed}", "steps=3"] for seed in seeds]
    assert sweep.run_sweep(main, RLConfig, recipe(), combinations) == code
    seeds = seeds[:made]
    [home] = (tmp_path / "runs").iterdir()
    assert sorted(file.name for file in home.iterdir()) == [*(f"00{n}" for n in range(made)), "sweep.json"]
    assert json.loads((home / "sweep.json").read_text()) == [
        {
            "overrides": [f"seed={seed}"],
            "folder": str(home / f"00{n}" / "run"),
            "exit_reason": f"end {seed}",
            "metrics": {"eval/reward/mean" if seed < 2 else "eval/loss": seed / 4},
        }
        for n, seed in enumerate(seeds)
    ]
    lines = capsys.readouterr().out.splitlines()
    told, head, rows, end = lines[:made], lines[made], lines[made + 1 : -1], lines[-1]
    assert told == [f"sweep, run {n + 1} of 3: seed={seed}" for n, seed in enumerate(seeds)]
    assert head == "seed  steps  held-out reward  held-out loss  ended" and end == f"sweep folder: {home}"
    assert [row.split() for row in rows] == [[f"{seed}", "0", *HELD_OUT[seed], "end", f"{seed}"] for seed in seeds]
    assert {row.index("end") for row in rows} == {head.index("ended")}


@pytest.mark.verify
def test_every_combination_is_a_run_of_its_own(recipe, tmp_path, sums):
    path = recipe({"steps": 1, "data.eval": str(sums / "sft.parquet")}, kind="sl")
    done = program(path, "trainer.betas=[0.9,0.95],[0.8,0.9]", "trainer.lr=1e-2", main="main_sl.py")
    assert done.returncode == 0, done.stderr
    [home] = (tmp_path / "runs").iterdir()
    assert home.name.startswith("test-sweep-")
    runs = json.loads((home / "sweep.json").read_text())
    assert [run["overrides"] for run in runs] == [["trainer.betas=[0.9,0.95]"], ["trainer.betas=[0.8,0.9]"]]
    table = done.stdout.splitlines()[-4:]
    assert table[0].split() == ["trainer.betas", "steps", "loss", "held-out", "loss", "ended"]
    for line, run in zip(table[1:3], runs, strict=True):
        after = json.loads((home / run["folder"] / "summary.json").read_text())["after"]["eval/loss"]
        assert f"{after:.4f}" in line and line.endswith("done")
    assert table[3] == f"sweep folder: {home}"
