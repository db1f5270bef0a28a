"""Numbers of a gap, and the lines of a set-up that is right: one for each part of a recipe."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from analysis.doctor.__main__ import main
from analysis.doctor.findings import Finding, attempt, show_all
from analysis.doctor.gap import Gap, collect, measure_gap
from analysis.doctor.recipe_checks import check_recipe
from analysis.doctor.target import find_target, is_supervised
from core.errors import UserError
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.runs import file_of

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
