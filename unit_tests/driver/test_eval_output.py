"""Output of an evaluation to the letter: progress lines, tables, results.json, and sentences of a refused resume."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from configs.eval_schema import EvalConfig
from core.errors import UserError
from core.text.summary import Summary
from core.timing.clock import Clock
from core.types.samples import Prompt
from driver.evaluation.estimators import Estimate
from driver.evaluation.suites.display import EvalDisplay, choose_columns, format_table
from driver.evaluation.suites.generations import (
    Generation,
    PartWriter,
    describe_group,
    list_files,
    list_parts,
    restore_spend,
    write_spend,
)
from driver.evaluation.suites.resume import FREE, find_samples
from driver.evaluation.suites.run import EvalReport, EvalRun, grade_prompt
from driver.evaluation.suites.setup import read_settings
from driver.evaluation.suites.table import GradedPrompt, TableRow, make_table, measure_prompt
from driver.run_inputs import hash_row
from rollouts.scheduling.judge_spend import JudgeSpend
from unit_tests.helpers.examples import sample_of


class Screen:
    """Console that keeps its lines and what it shows."""

    def __init__(self, *, is_live: bool = False) -> None:
        self.is_live, self.lines, self.shown = is_live, list[str](), list[Any]()
        self.live, self.say, self.update = self, self.lines.append, self.shown.append


def test_progress_is_said_ten_times_with_the_mean_so_far():
    screen: Any = Screen()
    display = EvalDisplay({"a": 5, "b": 20}, [1], screen)
    for i in range(25):
        name, mean = ("a", 1.0) if i < 5 else ("b", 0.0)
        display.count(name, {"mean": mean, "pass@1": mean})
    means = ("1.000", "1.000", "0.625", "0.500", "0.385", "0.333", "0.278", "0.250", "0.217", "0.200")
    done = (3, 5, 8, 10, 13, 15, 18, 20, 23, 25)
    assert screen.lines == [f"{n} of 25 prompts: mean {mean}" for n, mean in zip(done, means, strict=True)]


@pytest.mark.parametrize("is_live", [True, False])
def test_a_terminal_shows_a_table_in_place_of_lines(is_live):
    screen: Any = Screen(is_live=is_live)
    display = EvalDisplay({"a": 2, "b": 3}, [1, 2], screen)
    for name, mean in (("a", 1.0), ("a", 0.25), ("b", 0.5)):
        display.count(name, {"mean": mean, "pass@1": mean / 2} | ({"pass@2": 1.0} if name == "b" else {}), quiet=True)
    assert not screen.lines
    table = display.__rich__()
    assert (table.title, table.title_justify) == ("so far", "left")
    assert {str(column.header): [*column.cells] for column in table.columns} == {
        "data set": ["a", "b"],
        "prompts": ["2/2", "1/3"],
        "mean": ["0.625", "0.500"],
        "pass@1": ["0.312", "0.250"],
        "pass@2": ["-", "1.000"],
        "pass^2": ["-", "-"],
        "majority@2": ["-", "-"],
    }
    with pytest.raises(ValueError, match="it broke"), display.shown():
        display.count("b", {"mean": 0.0})
        raise ValueError("it broke")
    assert screen.shown == ([display, screen] if is_live else [])
    assert screen.lines == ([] if is_live else ["4 of 5 prompts: mean 0.438"])


SOME, OTHER = Estimate(value=0.5, low=0.25, high=0.75), Estimate(value=1, low=0.9996, high=1)
TABLE = [
    TableRow(column="", value="all", prompts=30, samples=8, failed=0, metrics={"mean": SOME, "pass@1": OTHER}),
    TableRow(column="level", value="hard", prompts=1, samples=4, failed=0, metrics={"mean": OTHER}),
]


def test_the_table_of_results_is_aligned():
    assert [choose_columns(ks) for ks in ([1], [4], [2, 3])] == [
        ["mean", "pass@1"],
        ["mean", "pass@4", "pass^4", "majority@4"],
        ["mean", "pass@2", "pass@3", "pass^3", "majority@3"],
    ]
    assert format_table(TABLE, [1]) == [
        "prompts of  prompts                    mean                  pass@1",
        "all              30    0.500 [0.250, 0.750]    1.000 [1.000, 1.000]",
        "level=hard        1    1.000 [1.000, 1.000]                       -",
    ]
    assert format_table(TABLE[:1], [1])[1] == "all              30    0.500 [0.250, 0.750]    1.000 [1.000, 1.000]"


def test_a_report_shows_the_folder_and_the_table():
    assert EvalReport(folder=Path("runs/x"), table=TABLE).summarize() == Summary(
        lines=["evaluation: runs/x"],
        headings=("prompts of", "prompts", "mean", "pass@1"),
        rows=[
            ["all", "30", "0.500 [0.250, 0.750]", "1.000 [1.000, 1.000]"],
            ["level=hard", "1", "1.000 [1.000, 1.000]", "-"],
        ],
    )


def grade(passes: str, players: str = "", **labels: str) -> GradedPrompt:
    """A prompt whose samples are 1 or 0, with an answer of their own each where they are wrong."""
    right = [one == "1" for one in passes]
    return GradedPrompt(
        **({"labels": labels} if labels else {}),
        rewards=[2.0 * one for one in right],
        passes=right,
        answers=["x" if one else str(i) for i, one in enumerate(right)],
        players=[int(one) for one in players or "0" * len(passes)],
        failed=passes.count("0"),
    )


def test_each_side_of_a_game_counts_alike_and_numbers_come_before_texts():
    # the first side has 2 of 3, the second 1 of 2: metrics of three samples are only those of one side
    assert measure_prompt(grade("11010", "00110"), [1, 2, 3]) == pytest.approx(
        {"mean": 7 / 6, "pass@1": 7 / 12, "pass@2": 1.0, "pass^2": 1 / 6, "majority@2": 0.75}
    )
    assert measure_prompt(grade("110"), [2, 3, 4]) == pytest.approx(
        {"mean": 4 / 3, "pass@2": 1.0, "pass^2": 1 / 3, "majority@2": 1.0, "pass@3": 1.0, "pass^3": 0.0}
        | {"majority@3": 1.0}
    )
    values = ["10", *"badcfehg", "9", "nan", "-1", "0.5"]
    prompts = [grade("10", level=value) for value in values] + [grade("00"), grade("011", level="9")]
    rows = make_table(prompts, [1, 2], by=["level", "none"], resamples=100, seed=0)
    assert [(row.column, row.value, row.prompts, row.samples, row.failed) for row in rows] == [
        ("", "all", 15, 31, 16),
        *(("level", value, 1, 2, 1) for value in ("-1", "0.5")),
        ("level", "9", 2, 5, 2),
        *(("level", value, 1, 2, 1) for value in ("10", *"abcdefgh", "nan")),
    ]


def make_row(of: str, index: int, sample: int, **changes: Any) -> Generation:
    given: dict[str, Any] = {"id": f"{of}/{index}", "prompt": "[]", "row": "0", "answer": "7", "extra": "{}"}
    given |= {"completion": "7", "final_answer": "7", "reward": 1.0, "reward_parts": "{}", "failure": ""}
    given |= {"player": 0, "stop": "eos", "tokens": 3}
    return Generation(set=of, index=index, sample=sample, **given | changes)


def test_samples_are_graded_by_their_reward_and_columns():
    extra = json.dumps({"level": 3, "tags": ["x"], "kind": "hard"})
    rewards = (0.5, None, 0.75)
    rows = [make_row("a", 0, i, reward=r, failure="" if r else "no", extra=extra) for i, r in enumerate(rewards)]
    assert grade_prompt(rows, by=["level", "tags", "kind", "none"], pass_reward=0.5) == GradedPrompt(
        labels={"level": "3", "tags": '["x"]', "kind": "hard", "set": "a"},
        rewards=[0.5, 0.0, 0.75],
        passes=[True, False, True],
        answers=["7"] * 3,
        players=[0] * 3,
        failed=1,
    )


class Console(Screen):
    """Screen with what else an evaluation uses of a run's context."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.console, self.facts = SimpleNamespace(path=folder), self, dict[str, Any]()
        self.clock = Clock()


def start(folder: Path, sets: list[str], rows: list[list[Generation]], **keys: Any) -> tuple[EvalRun, Any]:
    raw = {
        "name": "eval",
        "model": {"path": "models/tiny"},
        "data": {"sets": [{"path": f"{name}.jsonl"} for name in sets], **keys.pop("data", {})},
        "reward": {"function": "arithmetic", "max_failed_fraction": 0.5},
        "samples": 2,
        "resamples": 100,
    }
    context: Any = Console(folder)
    unused: Any = None
    cfg = EvalConfig.model_validate(raw | keys)
    named: Any = [SimpleNamespace(name=name, samples=2, prompts=[]) for name in sets]
    writer = PartWriter(folder, prompts_per_part=9)
    run = EvalRun(cfg=cfg, sets=named, requests=unused, context=context, writer=writer, done={})
    for group in rows:
        writer.add(group)
    writer.flush()
    return run, context


def test_results_hold_the_table_and_the_counts_of_all_samples(tmp_path):
    extra = '{"level": 1}'
    broken = make_row("a", 0, 1, reward=None, failure="it broke", extra=extra, stop="length", tokens=4)
    rows = [[make_row("a", 0, 0, extra=extra), broken], [make_row("b", 0, 0), make_row("b", 0, 1, tokens=8)]]
    run, context = start(tmp_path, ["a", "b"], rows, data={"by": ["level"]})
    table = run.report()
    assert [(row.column, row.value, row.prompts, row.samples, row.failed) for row in table] == [
        ("", "all", 2, 4, 1),
        ("set", "a", 1, 2, 1),
        ("set", "b", 1, 2, 0),
        ("level", "1", 1, 2, 1),
    ]
    written = (tmp_path / "results.json").read_text()
    wanted = {
        "table": [asdict(row) for row in table],
        "samples": 4,
        "failed": 1,
        "truncated_fraction": 0.25,
        "tokens_mean": 4.5,
    }
    assert written == json.dumps(wanted, indent=1) + "\n"
    assert context.facts == {"results": wanted["table"][0]}
    said = "a: 1 of 2 samples failed and count as 0; the first: it broke"
    assert context.lines == [said, *format_table(table, [1, 2])]
    assert table[0].metrics["mean"].value == 0.75 and run.ks == [1, 2]


def test_one_data_set_has_no_row_beside_all(tmp_path):
    run, _ = start(tmp_path, ["a"], [[make_row("a", 0, 0), make_row("a", 0, 1)]], k=[2, 1, 2])
    assert [row.value for row in run.report()] == ["all"] and run.ks == [1, 2]


def test_a_sample_is_written_with_everything_that_is_said_of_it():
    prompt = Prompt(
        id="p/3",
        messages=[{"role": "user", "content": "1+1="}],
        answer="2",
        extra={"level": {1: "é"}, "day": date(2026, 1, 2)},
    )
    more = {"completion": r"so \boxed{ 2 }", "reward": 0.5, "reward_parts": {"correct": 1.0}, "stop": "eos"}
    group = [
        sample_of([1, 2, 3], [False, True, True], prompt=prompt, **more),
        sample_of([1, 2], [False, True], prompt=prompt, failure="it broke", player=1, stop="length"),
    ]
    shared: dict[str, Any] = {"set": "s", "index": 3, "id": "p/3", "row": hash_row(prompt), "answer": "2"}
    shared |= {
        "prompt": '[{"role": "user", "content": "1+1="}]',
        "extra": '{"level": {"1": "\\u00e9"}, "day": "2026-01-02"}',
    }
    first, second = (asdict(row) for row in describe_group(group, prompt, of_set="s", index=3))
    assert first == shared | {
        **{"player": 0, "sample": 0, "completion": r"so \boxed{ 2 }", "final_answer": "2", "reward": 0.5},
        **{"reward_parts": '{"correct": 1.0}', "failure": "", "stop": "eos", "tokens": 2},
    }
    assert second == shared | {
        **{"player": 1, "sample": 1, "completion": "", "final_answer": "", "reward": None},
        **{"reward_parts": "{}", "failure": "it broke", "stop": "length", "tokens": 1},
    }


def test_files_of_samples_are_the_parts_or_the_whole(tmp_path):
    home = tmp_path / "generations"
    home.mkdir()
    names = ["part_00001.parquet", "part_00000.parquet", "part_100000.parquet"]
    for name in (*names, "part_0.parquet", "part_00003.parquet.partial", "part_x.parquet"):
        (home / name).touch()
    assert list_files(tmp_path) == list_parts(tmp_path) == [home / name for name in sorted(names)]
    (tmp_path / "generations.parquet").touch()
    assert list_files(tmp_path) == [tmp_path / "generations.parquet"]


def test_a_part_without_any_reward_has_columns_of_the_same_types(tmp_path: Path):
    writer = PartWriter(tmp_path, prompts_per_part=1)
    for index, reward in enumerate((None, 1.0)):
        writer.add([make_row("a", index, 0, reward=reward)])
    types = [{column.name: str(column.type) for column in pq.read_schema(part)} for part in list_parts(tmp_path)]
    assert types[0] == types[1] and (types[0]["reward"], types[0]["tokens"]) == ("double", "int32")


def test_the_spending_of_judges_is_kept_with_the_samples(tmp_path):
    spend, again = JudgeSpend(), JudgeSpend()
    write_spend(tmp_path, spend)
    restore_spend(tmp_path, again)
    assert not [*tmp_path.iterdir()] and not again.calls
    spend.calls, spend.tokens = 3.0, 40.0
    write_spend(tmp_path, spend)
    restore_spend(tmp_path, again)
    assert (again.calls, again.tokens) == (3.0, 40.0)
    assert (tmp_path / "judge_spend.json").read_text().endswith("}\n")


SETTINGS: dict[str, Any] = {"settings": {"seed": 0, "samples": 4}, "sha256": {"the template": "a"}}
AGAIN = "when the samples were made: set it back to resume, or leave resume out to start again"
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "changed": ({"seed": 1}, {}, f"seed is 1 and was 0 {AGAIN}"),
    "gone": ({"samples": None}, {}, f"samples is None and was 4 {AGAIN}"),
    "new": ({"mine": 3}, {}, f"mine is 3 and was None {AGAIN}"),
    "another file": (
        {},
        {"the template": "b"},
        "the template changed since the samples were made: restore it to resume, or leave resume out to start again",
    ),
    "a file that was not compared": (
        {},
        {"the rubric": "b"},
        "the samples were made before the rubric was compared or existed, so nothing shows that they are of the same "
        "evaluation: leave resume out to start again",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_samples_of_another_evaluation_are_refused_in_one_sentence(name, tmp_path):
    settings, hashes, sentence = REFUSED[name]
    now = {"settings": SETTINGS["settings"] | settings, "sha256": SETTINGS["sha256"] | hashes}
    with pytest.raises(UserError) as refused:
        find_samples(str(tmp_path), SETTINGS, now, [])
    assert str(refused.value) == sentence


def test_settings_that_change_no_sample_may_differ(tmp_path):
    free = {key.removesuffix("."): 1 for key in FREE} | {"rollout.gateway.port": 2}
    then = SETTINGS | {"settings": SETTINGS["settings"] | dict.fromkeys(free, 0)}
    assert find_samples(str(tmp_path), then, SETTINGS | {"settings": SETTINGS["settings"] | free}, []).done == {}
    without = SETTINGS | {"sha256": {}}
    with pytest.raises(UserError, match=r"^the template changed since the samples were made: "):
        find_samples(str(tmp_path), SETTINGS, without, [])
    assert sorted(FREE) == [
        *("data.by", "data.max_invalid_fraction", "device", "k", "name", "pass_reward", "prompts_per_engine"),
        *("prompts_per_part", "ray_address", "resamples", "resume", "reward.judge_budget.calls"),
        *("reward.judge_budget.tokens", "reward.max_concurrency", "reward.max_failed_fraction", "reward.timeout_s"),
        *("reward.workers", "rollout.agent.address", "rollout.enforce_eager", "rollout.gateway", "rollout.gateway."),
        *("rollout.gpu_memory_utilization", "rollout.kv_cache_gib", "rollout.max_concurrency", "rollout.num_engines"),
        *("rollout.restarts", "rollout.tensor_parallel_size", "rollout.timeout_s", "run_dir", "ship_code", "timeout_s"),
    ]


def test_a_folder_that_cannot_be_resumed_is_told(tmp_path):
    with pytest.raises(UserError) as refused:
        read_settings(str(tmp_path))
    assert str(refused.value) == f"resume={tmp_path} is no run folder of an evaluation: it has no evaluation.json"
    (tmp_path / "evaluation.json").write_text('{"settings": {}, "sha256": {}}')
    assert read_settings(str(tmp_path)) == {"settings": {}, "sha256": {}}
    (tmp_path / "results.json").touch()
    with pytest.raises(UserError) as refused:
        find_samples(str(tmp_path), SETTINGS, SETTINGS, [])
    assert str(refused.value) == f"resume={tmp_path} is complete: its results are in {tmp_path / 'results.json'}"
