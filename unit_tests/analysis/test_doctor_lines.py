"""Numbers of a gap, and the lines of a set-up that is right: one for each part of a recipe."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from analysis.doctor.__main__ import main
from analysis.doctor.bench import Sampling
from analysis.doctor.findings import Finding, attempt, show_all
from analysis.doctor.gap import Gap, collect, measure_gap
from analysis.doctor.knobs import Knob, price_knobs
from analysis.doctor.recipe_checks import check_recipe
from analysis.doctor.setup_checks import check_disk, check_memory
from analysis.doctor.target import find_target, is_supervised
from core.errors import UserError
from driver.checks.explain import estimate_memory
from driver.rl.setup import prepare
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.runs import file_of
from unit_tests.helpers.sentences import tell

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_gap_is_measured_on_the_sampled_tokens_alone():
    apart = [0.0, 9.0, 0.5, -0.25, 0.0, 9.0]
    mask = [False, False, True, True, True, False]
    logp = [0.0, -9.0, -1.0, -2.0, -3.0, -9.0]
    one = sample_of(
        [1] * 6, mask, rollout_logp=logp, columns={"prox_logp": [a + b for a, b in zip(logp, apart, strict=True)]}
    )
    two = sample_of([1, 1], [False, True], rollout_logp=[0.0, -1.0], columns={"prox_logp": [0.0, -1.0]})
    rollout, trainer = collect([one, two])
    assert (rollout.tolist(), trainer.tolist()) == ([-1.0, -2.0, -3.0, -1.0], [-0.5, -2.25, -3.0, -1.0])
    assert rollout.dtype == trainer.dtype == np.float64
    # k3 = e^x - 1 - x of the trainer's minus the engine's
    kl = (math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 4
    found = measure_gap([one, two])
    assert (found.mean, found.largest, found.tokens) == (0.1875, 0.5, 4)
    # 97 % of the way from the third to the fourth of four
    assert found.p99 == pytest.approx(0.25 + 0.97 * 0.25) and found.kl == pytest.approx(kl)


def test_a_gap_is_told_in_two_digits():
    gap = Gap(mean=0.00123, p99=0.0456, largest=0.789, kl=1e-7, tokens=4)
    assert str(gap) == "0.0012 nats"
    assert gap.describe() == "mean 0.0012, p99 0.046, largest 0.79, KL 1e-07 nats"


def test_a_finding_is_what_a_look_says_or_refuses():
    def refuse() -> str:
        raise UserError("name another")

    said: list[str] = []
    found = show_all(
        (attempt(name, look) for name, look in (("disk", lambda: "1 GiB"), ("model", refuse))), said.append
    )
    assert found == [
        Finding(check="disk", level="ok", found="1 GiB"),
        Finding(check="model", level="error", found="name another"),
    ]
    assert said == ["ok       disk          1 GiB", "error    model         name another"]


RL_PARTS = {
    "folders": r"results go to {home}/runs, {home}/model and .*",
    "model": r"{tiny} can be read",
    "tokenizer": r"\d+ ids, template \S+, replies end with .*\d+.*",
    "weights": r"the files hold the tensors of the config, and every token has an embedding",
    "data.train": r"30 rows",
    "data.eval": r"10 rows",
    "reward": r"row \S+ with its own answer as reply: correct 1; together 1",
}
SL_PARTS = {name: RL_PARTS[name] for name in ("folders", "model", "tokenizer", "weights")} | {"data.train": r"15 rows"}


@pytest.mark.parametrize(("kind", "parts"), [("rl", RL_PARTS), ("sl", SL_PARTS)])
def test_every_part_of_a_recipe_that_is_right_is_a_line(kind, parts, recipe, sums, tiny_path, tmp_path):
    changes = {"save_to": str(tmp_path / "model")}
    changes |= {"data.eval": str(sums / "eval.parquet")} if kind == "rl" else {}
    said: list[str] = []
    findings, prepared = check_recipe(find_target(recipe(changes, kind=kind), []).loaded, said.append)
    assert (
        [*map(str, findings)] == said and {f.level for f in findings} == {"ok"} and (prepared is None) == (kind == "sl")
    )
    assert [f.check for f in findings] == [*parts]
    for finding in findings:
        wanted = parts[finding.check].format(home=re.escape(str(tmp_path)), tiny=re.escape(tiny_path))
        assert re.fullmatch(wanted, finding.found), finding


def test_a_reward_of_groups_scores_the_answer_beside_an_equal_one(recipe, tmp_path):
    text = "def score_group(prompt, conversations): return [{'correct': float(len(conversations))}] * 2"
    changes = {"reward.function": file_of(tmp_path / "places.py", text), "group_size": 2}
    findings, _ = check_recipe(find_target(recipe(changes), []).loaded, lambda _: None)
    assert (findings[-1].check, findings[-1].level) == ("reward", "ok")
    assert re.fullmatch(r"row \S+ with its own answer as reply: correct 2; together 2", findings[-1].found)


def test_a_stop_that_cannot_be_is_told_once_with_the_tokenizer(recipe):
    findings, _ = check_recipe(find_target(recipe({"rollout.stop_token_ids": [10**6]}), []).loaded, lambda _: None)
    [refused] = [f for f in findings if f.level != "ok"]
    assert refused.check == "tokenizer" and refused.found.startswith("rollout.stop_token_ids names 1000000, and the")


def test_an_examination_is_printed_in_lines(recipe, capsys):
    assert main([recipe(), "--sequences", "4", "--tokens", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "" and lines[-1].startswith("no mismatch: ")
    assert [line.split()[0] for line in lines[-5:-2]] == ["weights", "ids", "tokens"]


@pytest.mark.parametrize("key", ["rollout", "reward", "groups_per_step", "group_size"])
def test_a_recipe_with_samples_of_its_own_is_of_rl(key):
    assert not is_supervised({"steps": 3, key: 1}) and is_supervised({"steps": 3, "alg": {}})


def test_what_the_command_line_does_not_measure_is_told(recipe, capsys):
    path = recipe(kind="sl")
    said = f"--knob measures the engine of an RL recipe, and {path} has none: leave it out"
    assert tell(lambda: main([path, "--knob", "quantization=int8"])) == said
    assert capsys.readouterr().out == ""
    assert main([recipe({"model.path": "models/missing"})]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "the engine is not compared with the trainer: fix the errors first"
    why = "model.path=models/missing does not exist: make the folder first, or name a model of the hub"
    assert f"warning  memory        unknown, and so is the disk space: {why}" in lines


def test_prices_of_knobs_are_in_the_json(recipe, capsys):
    assert main([recipe(), "--json", "--sequences", "4", "--tokens", "2", "--knob", "quantization=int8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "mismatch" not in report
    usual, rounded = report["knobs"]
    assert (usual["knob"], usual["changed"], usual["refused"]) == ("none", 0.0, "")
    assert (rounded["knob"], rounded["changed"], rounded["refused"]) == ("quantization=int8", 1.0, "")
    assert usual["gap"]["mean"] < 1e-4 < rounded["gap"]["mean"]


NOTING = """
from pathlib import Path

from rollouts.engines.hf import HfEngine


class Noting(HfEngine):
    def __init__(self, config):
        super().__init__(config)
        note("open")

    async def close(self):
        note("close")


def note(what):
    with Path(__file__).with_suffix(".txt").open("a") as file:
        print(what, file=file)
"""


def test_an_engine_is_closed_before_the_next_one_is_measured(recipe, tmp_path):
    path = recipe({"rollout.engine": file_of(tmp_path / "noting.py", NOTING)})
    target, rounded = find_target(path, []), Knob(name="x", changes={"quantization": "int8"})
    prices = price_knobs(target, prepare(target.loaded), Sampling(sequences=4, tokens=2), [rounded], print)
    assert [price.knob for price in prices] == ["none", "x"]
    assert (tmp_path / "noting.txt").read_text().split() == ["open", "close"] * 3, "one warms up"


def test_on_gpus_a_rank_or_an_engine_has_one_for_itself(recipe):
    target = find_target(recipe(), [])
    parts = {"weights": 4.0, "gradients": 0.0, "optimizer": 0.0, "frozen": 0.0, "per_engine": 3.0}
    estimate, cfg = replace(estimate_memory(target.loaded), **parts), target.loaded.cfg
    for offload, per_engine, wanted in ((False, 3.0, 4.0), (False, 5.0, 5.0), (True, 3.0, 3.0), (True, 0.5, 0.5)):
        trainer = cfg.trainer.model_copy(update={"ranks": 8, "offload": offload})
        on_gpus = cfg.model_copy(update={"backend": "ray", "device": "cuda", "trainer": trainer})
        found = f"about {wanted:.2f} GiB without activations, and a GPU has 80.0 GiB"
        assert check_memory(on_gpus, replace(estimate, per_engine=per_engine), total_gib=80.0) == Finding(
            check="memory", level="ok", found=found
        )


def test_a_run_folder_that_cannot_be_written_to_is_an_error(recipe):
    loaded = find_target(recipe(), []).loaded
    cfg = loaded.cfg.model_copy(update={"run_dir": "/proc/self/nowhere"})
    found = "run_dir=/proc/self/nowhere: /proc/self cannot be written to: name another folder"
    assert check_disk(cfg, estimate_memory(loaded)) == Finding(check="disk", level="error", found=found)


def test_rows_are_counted_also_beside_a_source_that_is_missing(recipe):
    target = find_target(recipe({"data.eval": "nowhere.jsonl"}, kind="sl"), [])
    found = {f.check: (f.level, f.found) for f in check_recipe(target.loaded, lambda _: None)[0]}
    assert found["data.train"] == ("ok", "15 rows") and found["data.eval"][0] == "error"
