"""Edges of a run page: shares of tokens, samples that are chosen and read, and data that stays data."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from analysis.report.captured import encode_column, select_captured
from analysis.report.embed import data_element, pack, policy, to_json
from analysis.report.page import write_page
from analysis.report.run_files import list_sample_files, read_metrics, read_samples
from analysis.report.selection import Chosen, Entry, choose_samples, thin_out
from analysis.report.token_account import account_tokens
from unit_tests.helpers.long_run import make_run
from unit_tests.helpers.sentences import tell

ROLLOUT, TRAIN, WASTED = "rollout/tokens", "train/tokens", "rollout/wasted_fraction"


def row(tokens: int | None, advantage: float | None, failure: str = "") -> dict[str, Any]:
    return {"new_tokens": tokens, "advantage": advantage, "failure": failure}


@pytest.mark.parametrize(
    ("line", "rows", "parts"),
    [
        # contributing, clipped, no signal, not trained, rejected
        ({ROLLOUT: 10}, [], []),
        ({TRAIN: 10}, [], []),
        ({ROLLOUT: 10, TRAIN: 8}, [], [8, 0, 0, 2, 0]),
        ({ROLLOUT: 10, TRAIN: 20}, [], [10, 0, 0, 0, 0]),
        ({ROLLOUT: 10, TRAIN: 10}, [row(4, 1.0, "timeout")], [6, 0, 0, 0, 0]),
        ({ROLLOUT: 10, TRAIN: 8, WASTED: 1.0}, [row(4, None, "timeout")], [6, 0, 0, 0, 4]),
        ({ROLLOUT: 10, TRAIN: 8, WASTED: 0.5}, [], [8, 0, 0, 2, 10]),
        ({ROLLOUT: 10, TRAIN: 8}, [row(3, 0.0), row(2, 0.5), row(None, 0.0), row(1, None)], [5, 0, 3, 2, 0]),
        ({ROLLOUT: 30, TRAIN: 8}, [row(20, 0.0)], [0, 0, 8, 22, 0]),
        ({ROLLOUT: 8, TRAIN: 8, "train/clip_frac_low": 0.5, "train/clip_frac_high": 0.25}, [], [2, 6, 0, 0, 0]),
        ({ROLLOUT: 8, TRAIN: 8, "train/clip_frac_low": 0.5}, [row(6, 0.0)], [0, 2, 6, 0, 0]),
        ({ROLLOUT: 8, TRAIN: 8, "train/clip_frac": 0.25, "train/masked": 0.125}, [], [5, 3, 0, 0, 0]),
    ],
)
def test_the_tokens_of_a_step_are_shared_out(line, rows, parts):
    found = account_tokens({name: float(value) for name, value in line.items()}, rows)
    assert [*found.values()] == parts


@pytest.mark.parametrize(
    ("n", "kept"),
    [(1, [5]), (2, [4, 5]), (3, [4, 5, 7]), (4, [4, 5, 6, 8]), (5, [4, 5, 6, 7, 8]), (9, [4, 5, 6, 7, 8])],
)
def test_the_best_then_the_worst_and_those_between_stand_for_a_group(n, kept):
    assert thin_out([4, 5, 6, 7, 8], [0.0, 1.0, 0.5, 0.2, None], n) == kept


def test_members_without_a_reward_stand_for_a_group_that_has_none():
    assert thin_out([4, 5, 6], [None] * 3, 2) == [4, 6]


def test_of_equal_groups_the_more_divided_one_comes_first():
    groups = [[3.0, 2.5], [3.0, 1.0], [0.0, 1.0], [0.0, 2.5], [1.0, 1.0]]
    samples = [Entry(g, reward) for g, own in enumerate(groups) for reward in own]
    found = choose_samples(samples, 10, step=0)
    assert [(one.group, one.why) for one in found[:3]] == [(1, "best"), (3, "worst"), (2, "most divided")]
    assert sorted(one.group for one in found) == [0, 1, 2, 3, 4]
    assert [one.why for one in found[3:]] == ["random", "best"]
    assert choose_samples(samples, 1, step=0) == [Chosen(group=1, why="best", samples=[2])]
    assert choose_samples(samples, 0, step=0) == [] == choose_samples([], 5, step=0)


def test_captured_samples_are_chosen_as_those_of_the_files():
    samples = [{"group": i // 8, "reward": float(i % 8 == i // 8), "i": i} for i in range(64)]
    entries = [Entry(one["group"], one["reward"]) for one in samples]
    wanted = sorted(i for one in choose_samples(entries, 16, step=2) for i in one.samples)
    assert [one["i"] for one in select_captured(samples, 16, step=2)] == wanted and len(wanted) == 16


def test_a_column_is_written_in_four_bytes_a_number():
    assert encode_column([1.0, -2.0]) == base64.b64encode(bytes.fromhex("0000803f000000c0")).decode()


SAMPLE = {"group": 0, "prompt": "p", "completion": "c\u2028d", "reward": 1.0}


def test_samples_are_read_line_by_line_with_what_is_no_number_told(tmp_path: Path):
    file = tmp_path / "step_00000.jsonl"
    nan, both = SAMPLE | {"reward": float("nan")}, SAMPLE | {"reward": float("-inf"), "failure": "timeout"}
    lines = [json.dumps(one, ensure_ascii=False) for one in (SAMPLE, nan, both)]
    file.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    told = [
        SAMPLE,
        SAMPLE | {"reward": None, "failure": "a number of this sample is NaN"},
        both | {"reward": None},
    ]
    assert read_samples(file) == told


@pytest.mark.parametrize("line", ["[1]", "null", '"text"', "NaN"])
def test_a_line_of_samples_that_is_no_object_is_told_with_its_place(line: str, tmp_path: Path):
    file = tmp_path / "step_00000.jsonl"
    file.write_text(f"{json.dumps(SAMPLE)}\n{line}\n")
    assert tell(lambda: read_samples(file)) == f"{file}, line 2 is no sample, which is a JSON object"


def test_lines_of_steps_and_of_evaluations_are_told_apart(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": 0}, {"step": 0, "eval/a": 1}, {"step": 1, "eval/a": 2, "train/b": 3}, {"step": 3, "eval/a": 4}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert read_metrics(file) == ([lines[0], lines[2]], {0: lines[1], 3: lines[3]})


def test_sample_files_are_found_by_the_numbers_of_their_steps(tmp_path: Path):
    for name in ("step_00002.jsonl", "step_00010.jsonl", "step_100000.jsonl", "step_x.jsonl", "step_3.jsonl.part"):
        (tmp_path / name).touch()
    assert list_sample_files(tmp_path) == {n: tmp_path / f"step_{n:05}.jsonl" for n in (2, 10, 100_000)}
    assert list_sample_files(tmp_path / "none") == {}


def test_data_in_a_page_is_no_markup_and_its_script_alone_runs():
    value = {"a": ["</script><!--", 1.5, "é"]}
    written = to_json(value)
    assert "<" not in written and ": " not in written and json.loads(written) == value
    assert json.loads(gzip.decompress(base64.b64decode(pack(value)))) == value
    assert data_element("n", "p") == '<script type="application/gzip" id="n">p</script>\n'
    for write in (to_json, pack):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write(float("nan"))
    digest = base64.b64encode(hashlib.sha256(b"x").digest()).decode()
    for files_beside, beside in ((False, ""), (True, " 'self' file:")):
        said = f"default-src 'none'; script-src 'sha256-{digest}'{beside}; style-src 'unsafe-inline'"
        assert policy("x", files_beside=files_beside) == said


def test_a_page_says_where_the_other_samples_are_and_that_it_is_large(tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "run", steps=2, groups=2, size=2, words=3)
    [page] = write_page([run], tmp_path / "a.html", samples=1, everything=False)
    assert page.startswith(f"page: {tmp_path / 'a.html'} (")
    assert not (tmp_path / "a_files").exists()
    _, beside = write_page([run], tmp_path / "b.html", samples=1, everything=True)
    files = [*(tmp_path / "b_files").iterdir()]
    assert beside == f"all samples: {tmp_path / 'b_files'} ({len(files)} files; keep them beside the page)"
    name, _, call = min(files).read_text().partition("(")[2].partition(",")
    packed = call.removesuffix(")\n").strip('"')
    assert files and name == f'"{min(files).stem}"' and json.loads(gzip.decompress(base64.b64decode(packed)))
    large = "the page is large: --samples with less than 1 makes it smaller"
    size = len((tmp_path / "a.html").read_text())
    for limit, notes in ((size, 1), (size - 1, 2)):
        monkeypatch.setattr("analysis.report.page.LARGE", limit)
        told = write_page([run], tmp_path / "a.html", samples=1, everything=False)
        assert told == [page, large][:notes]
