"""The report on data finds what was planted in it."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path

import pytest

from tools import data_report
from tools.data_measures import find_copies, find_near_copies, find_overlap, find_quantiles

STORY = [
    *("a", "long", "sentence", "of", "many", "words", "that", "tells", "about", "a"),
    *("hen", "and", "its", "seven", "eggs", "in", "the", "old", "barn"),
]


def swap(at: int) -> str:
    return " ".join([*STORY[:at], "goose", *STORY[at + 1 :]])


def test_copies_are_found_and_near_copies_apart_from_them():
    texts = ["1 + 1", " ".join(STORY), "1  +  1", " ".join(STORY).upper(), swap(0), swap(8), "other words of no story"]
    assert (find_copies(texts).rows, find_copies(texts).of) == ([2, 3], [0, 1])
    # a word at the end is in 1 of 15 shingles: 14 / 16 are shared; a word in the middle is in 5: 10 / 20
    found = find_near_copies(texts)
    assert (found.rows, found.of) == ([4], [1])


def test_words_of_held_out_rows_are_found():
    held_out = [" ".join(["now", *STORY[:14]]), "What is 2 + 2?"]
    texts = [" ".join(STORY[:12]), " ".join([*STORY, "then"]), "what is 2+2", "say what is 2+2 now"]
    found = find_overlap(texts, held_out, n=13)
    assert (found.rows, found.of) == ([1, 2], [0, 1])


def test_quantiles_are_lengths_of_rows():
    assert find_quantiles([*range(1, 101)]) == {"least": 1, "median": 51, "90 %": 91, "99 %": 100, "most": 100}


@pytest.fixture
def page(recipe, tmp_path, monkeypatch):
    def make(rows: list[dict], changes: dict, kind: str, *more: str) -> dict[str, tuple[int, str]]:
        train, out = tmp_path / "x.jsonl", tmp_path / "page.html"
        train.write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = recipe({"data.train": str(train)} | changes, kind=kind)
        monkeypatch.setattr(sys, "argv", ["data_report", path, "--out", str(out), *more])
        assert data_report.main() == 0
        text = out.read_text()
        assert "<script" not in text and "http" not in re.sub('http-equiv="', "", text)
        cells = re.findall(r'<tr><td>(.*?)</td><td class="right">([\d,]+)</td><td>(.*?)</td></tr>', text)
        return {html.unescape(what): (int(rows), html.unescape(such)) for what, rows, such in cells}

    return make


def test_a_page_of_prompts(page, tmp_path):
    samples = tmp_path / "run" / "samples"
    samples.mkdir(parents=True)
    records = [{"id": "a", "group": g, "reward": float(g * i)} for g in range(2) for i in range(2)]
    (samples / "step_00000.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    rows = [
        {"id": "a", "messages": "1+1=", "answer": "2", "level": 1},
        {"id": "b", "messages": "1+1=", "answer": "2"},
        {"id": "c", "messages": "2+2=", "answer": "<b>four</b>"},
        {"id": "d", "messages": "1" * 90, "answer": "3"},
    ]
    found = page(rows, {"reward": {"function": "gsm8k", "workers": 1}}, "rl", "--run", str(Path(samples.parent)))
    assert found["invalid: too_long"][0] == 1
    assert found["copies of an earlier row"] == (1, "b: 1+1=")
    assert found["column level: not shown to the model"][0] == 1
    assert found["answers that the reward cannot read"][0] == 1
    assert "<b>four</b>" in found["answers that the reward cannot read"][1]
    [(name, (equal, _))] = [(k, v) for k, v in found.items() if k.startswith("groups of equal rewards")]
    assert equal == 1 and name.endswith("mean reward 0.250 of 4 samples in 2 groups")


def test_a_page_of_conversations_names_what_is_in_the_evaluation(page, tmp_path):
    talks = [[{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}] for n in range(6)]
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text(json.dumps({"messages": talks[2]}) + "\n")
    found = page([{"messages": talk} for talk in talks], {"data.eval": str(held_out)}, "sl")
    assert found["13 words of a row of data.eval"] == (1, "2: 2+1=\\n3")
