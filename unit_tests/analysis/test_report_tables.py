"""Facts, metrics and numbers of a run page, each from a made-up run: whole tables of what is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from analysis.report.assemble import save_page
from analysis.report.header import (
    describe_metrics,
    describe_run,
    describe_time,
    flatten,
    list_facts,
    list_warnings,
)
from analysis.report.page import describe_with_blocks, to_columns, write_page
from analysis.report.run_files import RunRecord, read_run
from analysis.report.step_data import average_groups, summarize_rows
from analysis.report.token_account import PARTS
from core.errors import UserError
from core.metrics import METRICS
from unit_tests.helpers.long_run import make_run
from unit_tests.helpers.pages import Elements, unpack

LINE = {"step": 0.0}


def record(**given: Any) -> RunRecord:
    empty = {"folder": Path("x"), "config": {}, "summary": {}, "metrics": [LINE], "evaluations": {}, "sample_files": {}}
    return RunRecord(**empty | given)


CONFIG = {
    **{"name": "n", "alg": {"name": "grpo"}, "model": {"path": "m"}, "data": {"train": "d"}, "steps": 4},
    **{"groups_per_step": 8, "group_size": 2, "rollout": {"engine": "hf"}, "backend": "local", "seed": 3},
}
SUMMARY = {"seconds": {"all": 1.5}, "git": "no clone", "resumed": {"checkpoint": "c"}, "bottleneck": "the engine"}
FACTS = {
    **{"recipe": "n", "algorithm": "grpo", "model": "m", "data": "d", "steps": "2 of 4"},
    **{"samples a step": "8 groups x 2", "engine": "hf", "backend": "local", "seed": "3", "time": "1.5 s"},
    **{"git": "no clone", "resumed": "c", "bottleneck": "the engine"},
}
UNKNOWN = dict.fromkeys(FACTS, "")


@pytest.mark.parametrize(
    ("run", "facts"),
    [
        (record(config=CONFIG, summary=SUMMARY, metrics=[LINE, {"step": 1.0}]), FACTS),
        (record(), UNKNOWN | {"steps": "1"}),
        (record(summary={"seconds": {"all": None}, "resumed": None, "git": None}), UNKNOWN | {"steps": "1"}),
        (record(config={"alg": {"file": "mine.py"}}), UNKNOWN | {"steps": "1", "algorithm": "mine.py"}),
        (record(config={"groups_per_step": 8}), UNKNOWN | {"steps": "1"}),
        (record(config={"group_size": 2}), UNKNOWN | {"steps": "1"}),
    ],
    ids=["all", "none", "null", "a file", "no group size", "no groups"],
)
def test_the_facts_of_a_run_are_those_of_its_recipe_and_summary(run, facts):
    assert list_facts(run, flatten(run.config)) == facts


def test_what_went_wrong_is_told_with_its_number():
    lines = [{"train/updates_skipped": 2.0, "rollout/failed": 0.0}, LINE, {"train/updates_skipped": 1.0}]
    told = [{"step": 1, "rule": "entropy", "text": "low"}]
    assert list_warnings(record(metrics=lines, summary={"warnings": told})) == [
        {"step": 1, "text": "low"},
        {"step": None, "text": "3 updates were skipped: a gradient was not finite, or no token was trained"},
    ]
    failed = [{"step": None, "text": "4 samples have no reward, because it failed"}]
    assert list_warnings(record(metrics=[{"rollout/failed": 4.0}])) == failed and list_warnings(record()) == []


def test_metrics_are_in_the_order_of_their_declarations_and_others_last():
    fixed = [metric for metric in METRICS[1:] if "<" not in metric.name]
    first, middle, last = fixed[0], fixed[20], fixed[-1]
    logged = {"mine/a": 1.0, last.name: 1.0, first.name: 1.0}
    found = describe_metrics([record(metrics=[LINE | logged]), record(evaluations={3: LINE | {middle.name: 1.0}})])
    assert [*found] == [first.name, middle.name, last.name, "mine/a"] and found.pop("mine/a") == {}
    assert [*found.values()] == [{"unit": one.unit, "meaning": one.meaning} for one in (first, middle, last)]


@pytest.mark.parametrize("everything", [False, True])
def test_the_head_of_a_page_explains_metrics_times_and_tokens(everything, tmp_path):
    run = make_run(tmp_path / "made", steps=1, groups=2, size=2, words=5)
    write_page([run], tmp_path / "page.html", samples=2, everything=everything)
    head = json.loads(Elements(tmp_path / "page.html").scripts["head"])
    [described] = head.pop("runs")
    assert described["name"] == "made" and described["profile"] == []
    explained = {"metrics": describe_metrics([read_run(run)]), "time": describe_time(), "tokens": PARTS}
    assert head == json.loads(json.dumps(explained)) | {"files": "page_files" if everything else None}
    assert head["metrics"]["train/loss"]["meaning"]


def test_a_step_has_a_list_for_each_number_and_each_part():
    rows: list[dict[str, Any]] = [
        {"group": 0, "reward": 1.0, "new_tokens": 3, "advantage": 0.5, "reward_parts": {"b": 1.0}},
        {"group": 0, "reward": None, "reward_parts": None},
        {"group": 4, "reward": 0.0, "reward_parts": {"b": 0.0, "a": 2.0}},
    ]
    found = summarize_rows(rows)
    assert found == {
        **{"group": [0, 0, 4], "reward": [1.0, None, 0.0], "tokens": [3, None, None], "advantage": [0.5, None, None]},
        "parts": {"a": [None, None, 2.0], "b": [1.0, None, 0.0]},
    }
    assert [*found["parts"]] == ["a", "b"]


def test_a_group_counts_if_it_has_a_reward_and_its_prompt_a_name():
    given = [("p", 0, 1.0), ("p", 0, 0.0), ("p", 1, None), ("", 2, 1.0), ("q", 3, None), ("q", 3, 0.5), ("p", 4, 2.0)]
    rows = [{"id": name, "group": group, "reward": reward} for name, group, reward in given]
    assert average_groups([*rows, {"group": 5, "reward": 1.0}]) == [("p", 0, 0.5), ("q", 3, 0.5), ("p", 4, 2.0)]


def test_the_description_of_a_run_holds_its_end_and_its_machine():
    summary = {
        "exit_reason": "done",
        "packages": {"torch": "2"},
        "devices": {"gpus": 1},
        "before": {"a": 1},
        "after": 3,
    }
    told = describe_run(record(config={"name": "n"}, summary=summary, metrics=[LINE, {"step": 4.0}]), "r7")
    assert told == {
        **{
            "key": "r7",
            "name": "x",
            "exit_reason": "done",
            "facts": [["recipe", "n"], ["steps", "5"]],
            "last_step": 4.0,
        },
        **{"warnings": [], "held_out": {"before": {"a": 1}}, "config": {"name": "n"}},
        **{"packages": {"torch": "2"}, "devices": {"gpus": 1}},
    }
    goes_on = describe_run(record(), "r0")
    assert goes_on["exit_reason"] == "no summary.json: the run goes on, or was killed"
    assert goes_on["held_out"] == goes_on["packages"] == goes_on["devices"] == {}


def test_columns_have_a_value_or_none_for_each_step_and_evaluation():
    metrics = [{"step": 0.0, "a": 1.0}, {"step": 2.0, "a": 3.0, "b": 4.0}]
    run = record(metrics=metrics, evaluations={0: {"step": 0.0, "e": 5.0}, 3: {"step": 3.0, "e": 6.0}})
    assert to_columns(run, {2: {"clipped": 7.0}}) == {
        **{"steps": [0, 2, 3], "trained": [0, 2]},
        "values": {"a": [1.0, 3.0, None], "e": [5.0, None, 6.0], "b": [None, 4.0, None]},
        "tokens": {part: [None, None, None] for part in PARTS} | {"clipped": [None, 7.0, None]},
    }


def write_samples(folder: Path, step: int, given: list[tuple[int, str, float]]) -> None:
    told = {"prompt": [], "completion": "", "new_tokens": 2, "advantage": 0.0}
    rows = [{"group": g, "id": name, "reward": r} | told for g, name, r in given]
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "samples" / f"step_{step:05d}.jsonl").write_text(text)


def test_a_page_counts_samples_and_follows_prompts_that_came_again(tmp_path):
    write_samples(tmp_path, 0, [(0, "p", 1.0), (0, "p", 0.0), (1, "q", 1.0), (1, "q", 1.0)])
    write_samples(tmp_path, 1, [(0, "r", 1.0), (1, "p", 1.0)])
    write_samples(tmp_path, 2, [])
    files = {step: tmp_path / "samples" / f"step_{step:05d}.jsonl" for step in range(3)}
    lines = [{"step": float(step)} for step in range(4)]
    lines[1] |= {"rollout/tokens": 9.0, "train/tokens": 8.0}
    run, notes = record(folder=tmp_path, metrics=lines, sample_files=files, summary={"a": 1}), list[str]()
    told, blocks = describe_with_blocks(run, "r0", 3, None, notes)
    assert told["sample_counts"] == {0: [3, 4], 1: [2, 2]} and told["captured"] == notes == []
    found = [re.fullmatch(r'<script type="application/gzip" id="(.+?)">(.+)</script>\n', block) for block in blocks]
    data = {match[1]: unpack(match[2]) for match in found if match}
    assert [*data] == ["step-r0-0", "step-r0-1", "prompts-r0", "metrics-r0"]
    assert data["prompts-r0"] == {"p": [[0, 0, 0.5], [1, 1, 1.0]]}
    assert data["step-r0-1"]["reward"] == [1.0, 1.0] and data["metrics-r0"]["steps"] == [0, 1, 2, 3]
    # two samples of two tokens had an advantage of 0
    parts = {"contributing": 4.0, "clipped": 0.0, "no_signal": 4.0, "not_trained": 1.0, "rejected": 0.0}
    assert data["metrics-r0"]["tokens"] == {part: [None, n, None, None] for part, n in parts.items()}


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_last_samples_of_a_run_that_goes_on_may_be_cut_off(has_ended, tmp_path):
    write_samples(tmp_path, 0, [(0, "p", 1.0)])
    files = {0: tmp_path / "samples" / "step_00000.jsonl"}
    files[0].write_text(files[0].read_text() + '{"group')
    run, notes = record(folder=tmp_path, sample_files=files, summary={"a": 1} if has_ended else {}), list[str]()
    if has_ended:
        with pytest.raises(UserError, match="line 2 is not JSON"):
            describe_with_blocks(run, "r0", 3, None, notes)
        return
    told, _ = describe_with_blocks(run, "r0", 3, None, notes)
    [note] = notes
    assert told["sample_counts"] == {} and note.startswith(
        "without the samples of step 0, whose file is not complete: "
    )


def test_a_page_is_saved_with_its_folder_and_told_with_its_size(tmp_path):
    out = tmp_path / "new" / "page.html"
    assert save_page(out, "é" * 140_000, key="--out") == f"page: {out} (0.1 MB)"
    assert out.read_text(encoding="utf-8") == "é" * 140_000
