"""Whole evaluations by main_eval.py, from the command line to the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import combinations
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

import main_eval
import main_rl
import main_sl
from driver.evaluation.suites.generations import WHOLE, list_parts
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import OWN_ENGINE, evaluations_of, folder_of, lines_of

ROOT = Path(__file__).parent.parent.parent
DIGITS = "def score(prompt, messages):\n    return {'correct': sum(map(str.isdigit, messages[-1]['content'])) / 2}\n"


@pytest.fixture
def eval_recipe(tmp_path, tiny_path, sums):
    """Write a small, valid recipe of an evaluation with changes at its top, and return its path."""

    def write(**changes: object) -> str:
        raw = {
            "name": "eval",
            "backend": "local",
            "run_dir": str(tmp_path / "runs"),
            "model": {"path": tiny_path, "dtype": "float32"},
            "data": {"sets": [{"path": str(sums / "eval.parquet"), "name": "sums"}], "max_prompt_tokens": 32},
            "reward": {"function": str(tmp_path / "digits.py"), "workers": 1},
            "rollout": {"engine": "hf", "max_new_tokens": 8},
            "samples": 4,
            "pass_reward": 0.5,
            "resamples": 100,
        }
        (tmp_path / "digits.py").write_text(DIGITS)
        path = tmp_path / "eval.yaml"
        path.write_text(yaml.safe_dump(raw | changes))
        return str(path)

    return write


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def samples_of(folder: Path) -> list[dict]:
    return pq.read_table(folder / WHOLE).to_pylist()


def check_by_hand(metrics: dict, rows: list[dict]) -> None:
    """Compare the metrics of four samples a prompt with those counted from the file of all samples."""
    prompts = [[r for r in rows if r["index"] == i] for i in range(10)]
    rewards = [[sum(map(str.isdigit, r["completion"])) / 2 for r in of] for of in prompts]
    assert rewards == [[r["reward"] for r in of] for of in prompts]
    solved = [[reward >= 0.5 for reward in of] for of in rewards]
    for k in (2, 4):
        chosen = [list(combinations(of, k)) for of in solved]
        for name, test in (("pass@", any), ("pass^", all)):
            by_hand = sum(sum(map(test, of)) / len(of) for of in chosen) / 10
            assert metrics[f"{name}{k}"]["value"] == pytest.approx(by_hand, abs=1e-12)
    votes = []
    for of, passes in zip(prompts, solved, strict=True):
        counts = Counter(r["final_answer"] for r in of)
        winners = [answer for answer, n in counts.items() if n == max(counts.values())]
        by_answer = {w: [p for r, p in zip(of, passes, strict=True) if r["final_answer"] == w] for w in winners}
        votes.append(sum(sum(ps) / len(ps) for ps in by_answer.values()) / len(winners))
    assert metrics["majority@4"]["value"] == pytest.approx(sum(votes) / 10, abs=1e-12)


def test_an_evaluation_says_what_the_training_run_said(recipe, eval_recipe, tmp_path, sums, one_thread):
    """Of its last model and of its best one: the same samples, rewards and pass@k."""
    (tmp_path / "digits.py").write_text(DIGITS)
    held_out = {"data.eval": str(sums / "eval.parquet"), "eval_every": 1, "eval_samples": 4, "eval_pass_reward": 0.5}
    own = {"reward.function": str(tmp_path / "digits.py"), "steps": 3, "trainer.lr": 1e-2, "group_size": 8}
    path = recipe(held_out | own | {"checkpoint": {"every": 1, "keep": 1, "best": "eval/reward/mean"}})
    assert run_here(main_rl, "--config", path, "name=train") == (0, "")
    trained = folder_of(tmp_path, "train")
    summary = json.loads((trained / "summary.json").read_text())
    logged = evaluations_of(trained)
    assert [*logged] == [0, 1, 2, 3], "before the first step and after each"
    assert logged[0] == {"step": 0} | {f"eval/{k}": v for k, v in summary["before"].items()}
    means = [row["eval/reward/mean"] for row in logged.values()]
    assert len({*means[1:]}) == 3, "the model changes"
    best = means.index(max(means[1:]), 1)
    assert summary["best"] == {"steps_done": best, "eval/reward/mean": max(means)}
    assert os.readlink(trained / "checkpoints/best") == f"step_{best:05d}"
    assert summary["after"] == {k.removeprefix("eval/"): v for k, v in logged[3].items() if k != "step"}
    steps = [(line["step"], "train/loss" in line) for line in lines_of(trained)]
    assert steps == [(0, False), (0, True), (1, False), (1, True), (2, False), (2, True), (3, False)]

    config = eval_recipe()
    for model, wanted in (("model", logged[3]), ("best_model", logged[best])):
        assert run_here(main_eval, "--config", config, f"name={model}", f"model.path={trained / model}") == (0, "")
        [row] = results_of(folder_of(tmp_path, model))["table"]
        assert row["prompts"] == 10 and row["samples"] == 40
        assert row["metrics"]["mean"]["value"] == pytest.approx(wanted["eval/reward/mean"], abs=1e-12)
        for k in (1, 2, 4):
            assert row["metrics"][f"pass@{k}"]["value"] == pytest.approx(wanted[f"eval/pass@{k}"], abs=1e-12)
        check_by_hand(row["metrics"], samples_of(folder_of(tmp_path, model)))


def test_evaluations_beside_training_say_what_their_checkpoints_say(recipe, eval_recipe, tmp_path, sums, one_thread):
    """Each number is of one version, and is logged at the number of steps that it has behind it."""
    (tmp_path / "digits.py").write_text(DIGITS)
    held_out = {"data.eval": str(sums / "eval.parquet"), "eval_every": 2, "eval_samples": 4, "eval_pass_reward": 0.5}
    own = {"reward.function": str(tmp_path / "digits.py"), "steps": 6, "trainer.lr": 1e-2, "max_staleness": 1}
    path = recipe(held_out | own | {"checkpoint": {"every": 2, "keep": 9}})
    assert run_here(main_rl, "--config", path, "name=train") == (0, "")
    trained = folder_of(tmp_path, "train")
    evaluated = evaluations_of(trained)
    assert {step: row["eval/version"] for step, row in evaluated.items()} == {0: 0, 2: 2, 4: 4, 6: 6}
    assert len({row["eval/reward/mean"] for row in evaluated.values()}) == 4, "the model changes"
    facts = json.loads((trained / "summary.json").read_text())
    assert facts["after step 2"]["reward/mean"] == evaluated[2]["eval/reward/mean"]

    for version, row in ((2, evaluated[2]), (6, evaluated[6])):
        checkpoint = trained / "checkpoints" / f"step_{version:05d}"
        name = f"of_{version}"
        assert run_here(main_eval, "--config", eval_recipe(), f"name={name}", f"model.path={checkpoint}") == (0, "")
        found = results_of(folder_of(tmp_path, name))["table"][0]["metrics"]
        assert found["mean"]["value"] == pytest.approx(row["eval/reward/mean"], abs=1e-12)
        assert found["pass@4"]["value"] == pytest.approx(row["eval/pass@4"], abs=1e-12)
        assert not (folder_of(tmp_path, name) / "merged_model").exists()
    resume = f"resume={trained / 'checkpoints/step_00002'}"
    assert run_here(main_rl, "--config", path, "name=resumed", resume, "steps=4") == (0, "")
    resumed = evaluations_of(folder_of(tmp_path, "resumed"))
    assert {step: row["eval/version"] for step, row in resumed.items()} == {2: 2, 4: 4}
    assert resumed[2]["eval/reward/mean"] == evaluated[2]["eval/reward/mean"], "it was not lost"
    summary = json.loads((folder_of(tmp_path, "resumed") / "summary.json").read_text())
    assert all(summary[when] == facts[when] for when in ("before", "after step 2")), "before is the untrained model"


def test_sets_and_columns_get_rows_and_samples_do_not_depend_on_other_sets(eval_recipe, tmp_path, capsys, one_thread):
    for name, levels in (("a", "123"), ("b", "31")):
        rows = [{"messages": f"{i}+1=", "answer": str(i + 1), "level": int(level)} for i, level in enumerate(levels)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = [{"path": str(tmp_path / "a.jsonl")}, {"path": str(tmp_path / "b.jsonl"), "samples": 2}]
    data = {"sets": both, "by": ["level"], "max_prompt_tokens": 32}
    assert run_here(main_eval, "--config", eval_recipe(data=data, name="both")) == (0, "")
    out = capsys.readouterr().out
    whole = folder_of(tmp_path, "both")
    table = results_of(whole)["table"]
    names = [(row["column"], row["value"], row["prompts"], row["samples"]) for row in table]
    assert names[:3] == [("", "all", 5, 16), ("set", "a", 3, 12), ("set", "b", 2, 4)]
    assert names[3:] == [("level", "1", 2, 6), ("level", "2", 1, 4), ("level", "3", 2, 6)]
    assert "set=b" in out and "majority@4" in out and "\x1b" not in out
    rows = samples_of(whole)
    assert [(r["set"], r["index"], r["sample"]) for r in rows] == [
        *(("a", i, s) for i in range(3) for s in range(4)),
        *(("b", i, s) for i in range(2) for s in range(2)),
    ]
    each = {("a", i): [r["reward"] for r in rows if (r["set"], r["index"]) == ("a", i)] for i in range(3)}
    by_hand = sum(sum(of) / 4 for of in each.values()) / 3
    assert table[1]["metrics"]["mean"]["value"] == pytest.approx(by_hand)
    alone = {"sets": both[1:], "max_prompt_tokens": 32}
    assert run_here(main_eval, "--config", eval_recipe(data=alone, name="alone")) == (0, "")
    assert samples_of(folder_of(tmp_path, "alone")) == [r for r in rows if r["set"] == "b"]


BROKEN = {
    # name: (changes, what the sentence must hold)
    "an unknown key": ({"sampels": 3}, ["sampels", "did you mean 'samples'"]),
    "no data": ({"data": {"sets": []}}, ["data.sets"]),
    "a missing file": (
        {"data": {"sets": [{"path": "no.jsonl"}], "max_prompt_tokens": 9}},
        ["data.sets[0]=no.jsonl", "no such file"],
    ),
    "two sets of a name": ({"data": {"sets": [{"path": "x/a.jsonl"}, {"path": "y/a.jsonl"}]}}, ["called a", "name:"]),
    "a column of training": (
        {"data": {"sets": [{"path": "a", "columns": {"chosen": "x"}}]}},
        ["data.sets.0.columns", "chosen is not read"],
    ),
    "too large a k": ({"k": [1, 8]}, ["k names 8", "raise samples"]),
    "a k of nothing": ({"k": [0]}, ["k.0=0"]),
    "several greedy samples": ({"rollout": {"engine": "hf", "temperature": 0}}, ["temperature=0", "set samples to 1"]),
    "nearly greedy": ({"rollout": {"engine": "hf", "temperature": 0.001}}, ["rollout.temperature", "set 0 for greedy"]),
    "no model": ({"model": {"path": "/nowhere/m"}}, ["model.path=/nowhere/m does not exist"]),
    "no reward": ({"reward": {"function": "mathverify"}}, ["reward.function", "did you mean 'math_verify'"]),
    "engines in one process": ({"rollout": {"engine": "hf", "num_engines": 2}}, ["backend: local is one process"]),
    "nothing to resume": ({"resume": "/nowhere"}, ["resume=/nowhere is no run folder of an evaluation"]),
    "too long": ({"rollout": {"engine": "hf", "max_new_tokens": 300}}, ["332 tokens", "has 256 positions"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_gets_one_sentence_and_nothing_is_started(name, eval_recipe, tmp_path):
    changes, words = BROKEN[name]
    code, err = run_here(main_eval, "--config", eval_recipe(**changes))
    assert code == 2 and err.startswith("error: ") and len(err.splitlines()) == 1, err
    assert all(word in err for word in words), err
    assert not (tmp_path / "runs").exists()


def test_a_column_that_no_row_has_is_named_with_those_that_are_there(eval_recipe, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": "1+1=", "answer": "2", "level": 1}\n')
    data = {"sets": [{"path": str(tmp_path / "a.jsonl")}], "by": ["subject"], "max_prompt_tokens": 9}
    code, err = run_here(main_eval, "--config", eval_recipe(data=data))
    assert code == 2 and "data.by names the column subject" in err and "level" in err, err


def test_a_column_with_the_name_of_ours_is_refused(eval_recipe, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": "1+1=", "answer": "2", "set": "hard"}\n')
    data = {"sets": [{"path": str(tmp_path / "a.jsonl")}], "by": ["set"], "max_prompt_tokens": 9}
    code, err = run_here(main_eval, "--config", eval_recipe(data=data))
    assert code == 2 and "data.by names the column set, under which" in err and len(err.splitlines()) == 1, err


def test_stop_strings_are_refused_with_an_engine_that_ignores_them(eval_recipe, tmp_path):
    (tmp_path / "mine.py").write_text(OWN_ENGINE)
    rollout = {"engine": str(tmp_path / "mine.py"), "stop": ["a"]}
    code, err = run_here(main_eval, "--config", eval_recipe(rollout=rollout))
    assert code == 2 and "does not look for stop strings" in err, err


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("eval_*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_of_an_evaluation_loads_and_explains_itself(path, capsys):
    assert run_here(main_eval, "--config", str(path), "--explain") == (0, "")
    out = capsys.readouterr().out
    assert "what follows from it" in out and "samples per prompt" in out


FAILS = "def score(prompt, messages):\n    raise ValueError('no luck')\n"


def test_too_many_failures_stop_it_with_all_samples_kept(eval_recipe, tmp_path, one_thread):
    (tmp_path / "fails.py").write_text(FAILS)
    reward = {"function": str(tmp_path / "fails.py"), "workers": 1}
    code, err = run_here(main_eval, "--config", eval_recipe(reward=reward, samples=1))
    assert code == 1 and "10 of 10 samples failed" in err and "no luck" in err, err
    folder = folder_of(tmp_path, "eval")
    assert {row["failure"][:10] for row in samples_of(folder)} == {"ValueError"}
    again = ["--config", eval_recipe(reward=reward, samples=1), "reward.max_failed_fraction=1"]
    assert run_here(main_eval, *again, "name=graded", f"resume={folder}") == (0, "")
    graded = folder_of(tmp_path, "graded")
    assert results_of(graded)["failed"] == 10 and results_of(graded)["table"][0]["metrics"]["mean"]["high"] == 0
    assert samples_of(graded) == samples_of(folder), "nothing was sampled again"
    code, err = run_here(main_eval, *again, f"resume={graded}")
    assert code == 2 and "is complete" in err


@pytest.mark.one_core
@pytest.mark.one_core
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_evaluation_killed_in_the_middle_and_resumed_has_the_same_table(eval_recipe, tmp_path):
    path = eval_recipe(prompts_per_engine=1, prompts_per_part=1)
    assert run_here(main_eval, "--config", path, "name=whole") == (0, "")
    command = [sys.executable, "main_eval.py", "--config", path, "name=killed"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while run.poll() is None and len([p for f in (tmp_path / "runs").glob("killed-*") for p in list_parts(f)]) < 3:
        time.sleep(0.005)
    assert run.poll() is None, "it was over before it could be killed"
    run.send_signal(signal.SIGKILL)
    run.wait()
    killed, whole = folder_of(tmp_path, "killed"), folder_of(tmp_path, "whole")
    done = len(list_parts(killed))
    assert 3 <= done < 10 and not (killed / "results.json").exists()

    code, err = run_here(main_eval, "--config", path, f"resume={killed}", "seed=1", "name=other")
    assert code == 2 and "seed is 1 and was 0 when the samples were made" in err, err
    command = ["--config", path, "name=resumed", f"resume={killed}", "prompts_per_part=7"]
    assert run_here(main_eval, *command) == (0, "")
    resumed = folder_of(tmp_path, "resumed")
    assert (resumed / "results.json").read_bytes() == (whole / "results.json").read_bytes()
    assert samples_of(resumed) == samples_of(whole)


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_an_adapter_is_its_merged_model_and_vllm_on_two_ranks_agrees(recipe, eval_recipe, tmp_path, one_thread):
    """And the last checkpoint is the model of the end."""
    lora = {"r": 4, "merge_on_save": True}
    path = recipe({"model.lora": lora, "trainer.lr": 3e-2, "steps": 3, "checkpoint.every": 3}, kind="sl")
    assert run_here(main_sl, "--config", path, "name=lora") == (0, "")
    merged = folder_of(tmp_path, "lora") / "model"
    greedy = {"engine": "hf", "temperature": 0, "max_new_tokens": 8, "kv_cache_gib": 0.1}
    config = eval_recipe(samples=1, rollout=greedy)
    checkpoint = folder_of(tmp_path, "lora") / "checkpoints" / "last"
    cases = {
        "base": [],
        "merged": [f"model.path={merged}"],
        "adapter": [f"model.adapter={merged / 'adapter'}"],
        "checkpoint": [f"model.path={checkpoint}"],
        "vllm": [f"model.path={merged}", "rollout.engine=vllm", "backend=ray", "rollout.tensor_parallel_size=2"],
    }
    texts = {}
    for name, overrides in cases.items():
        assert run_here(main_eval, "--config", config, f"name={name}", *overrides) == (0, "")
        texts[name] = [row["completion"] for row in samples_of(folder_of(tmp_path, name))]
    assert texts["merged"] == texts["adapter"] == texts["checkpoint"] == texts["vllm"] != texts["base"]
    assert not (folder_of(tmp_path, "adapter") / "merged_model").exists()
    code, err = run_here(main_eval, "--config", config, f"model.path={checkpoint}", f"model.adapter={merged}")
    assert code == 2 and "is a checkpoint, and its adapter is in it" in err
    code, err = run_here(main_eval, "--config", config, f"model.path={merged / 'adapter'}")
    assert code == 2 and "name it in model.adapter" in err


MORTAL = """
import os
from pathlib import Path
from rollouts.engines.hf import HfEngine

class Mortal(HfEngine):
    async def generate(self, token_ids, **settings):
        mark = Path(__file__).with_name("died")
        if not mark.exists():
            mark.touch()
            os._exit(1)
        return await super().generate(token_ids, **settings)
"""


@pytest.mark.verify
@pytest.mark.timeout(300)
def test_two_engines_on_ray_of_which_one_dies_make_the_samples_of_one(eval_recipe, tmp_path):
    assert run_here(main_eval, "--config", eval_recipe(name="one")) == (0, "")
    (tmp_path / "mortal.py").write_text(MORTAL)
    rollout = {"engine": str(tmp_path / "mortal.py"), "num_engines": 2, "max_new_tokens": 8}
    two = eval_recipe(name="two", backend="ray", rollout=rollout)
    done = subprocess.run([sys.executable, "main_eval.py", "--config", two], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "restarting it (1 of rollout.restarts=3)" in done.stdout, "it died"
    one, two = (samples_of(folder_of(tmp_path, name)) for name in ("one", "two"))
    assert [r["completion"] for r in one] == [r["completion"] for r in two]
