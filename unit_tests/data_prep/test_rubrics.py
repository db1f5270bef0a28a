"""Rubric rows of HealthBench and RaR, in the forms of their authors: what the reward `rubric` reads of them."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from data_prep import healthbench, rar
from rewards.rubric_rows import add_up, read_rubric

HEALTH = {
    "prompt_id": "7",
    "prompt": [{"role": "user", "content": "My head hurts."}],
    "rubrics": [
        {"criterion": "Asks since when", "points": 5, "tags": ["level:example"]},
        {"criterion": "Claims certainty", "points": -8, "tags": []},
    ],
}
SCIENCE = {
    "question": "Why is the sky blue?",
    "reference_answer": "Rayleigh scattering.",
    "rubric": json.dumps([{"title": "Cause", "description": "Essential: names scattering", "weight": 5}]),
}


@pytest.mark.parametrize(
    ("script", "whole", "broken"),
    [(healthbench, HEALTH, {"rubrics": []}), (rar, SCIENCE, {"rubric": "["})],
    ids=["healthbench", "rar"],
)
def test_rows_hold_the_rubric_and_broken_ones_are_counted(script, whole, broken, tmp_path, capsys):
    source, out = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    source.write_text("\n".join(map(json.dumps, [whole, whole | broken, {"id": 3}, {"prompt": ["?"]}])))
    script.main(["--out", str(out), "--from", str(source)])
    [row] = pq.read_table(out).to_pylist()
    assert row["messages"][0]["content"] in ("My head hurts.", "Why is the sky blue?")
    said = capsys.readouterr().out
    assert "3 of 4 rows are invalid" in said and "1 bad_extra" in said
    assert ("1 bad_messages" if script is healthbench else "2 missing_column") in said
    items = read_rubric(row["id"], json.loads(row["extra"]))
    assert [item.points for item in items] == ([5.0, -8.0] if script is healthbench else [5.0])
    assert row["answer"] == ("" if script is healthbench else "Rayleigh scattering.")
    assert add_up(items, [1.0] * len(items)) == (-0.6 if script is healthbench else 1.0)
