"""Sample files of a run as rows: a row for each group, and the files that cannot be replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import UserError
from data_feeds.rows.run_samples import list_sample_files, read_run

ASKED = [{"role": "user", "content": "1+1="}]


def sample(group: int, completion: str = "2", **more: Any) -> dict[str, Any]:
    return {"group": group, "id": f"row{group}", "prompt": ASKED, "completion": completion, **more}


def write(path: Path, *samples: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in samples))
    return path


def test_a_run_or_one_of_its_files_is_named(tmp_path):
    files = [write(tmp_path / "samples" / name) for name in ("step_00.jsonl", "step_10.jsonl")]
    for name in ("eval_0.jsonl", "step_1.json", "xstep_1.jsonl", "step_.jsonl"):
        write(tmp_path / "samples" / name)
    assert list_sample_files(str(tmp_path)) == [], "without a config.yaml it is no run"
    (tmp_path / "config.yaml").write_text("")
    assert list_sample_files(str(tmp_path)) == files
    assert list_sample_files(str(files[1])) == files[1:]
    assert list_sample_files(str(write(tmp_path / "step_1.jsonl"))) == []
    assert list_sample_files(str(tmp_path / "samples" / "step_5.jsonl")) == []


def test_a_group_is_a_row_with_its_samples_as_episodes(tmp_path):
    sampled = {"stop": "length", "token_ids": [1, 2], "logp": [None, -1.0], "temperature": 0.5, "top_p": 1.0}
    talk = [{"role": "assistant", "content": "2", "tokens": 3, "reward": 1.0}, {"role": "user", "content": "?"}]
    about = {"answer": "2", "tools": [{"x": 1}], "extra": {"k": 3}}
    file = write(
        tmp_path / "step_3.jsonl",
        sample(4, reward=1.0, **sampled, **about),
        sample(5, turns=talk),
        sample(4, "3", top_k=5, min_p=0.1, allowed_tokens=["2"]),
        sample(4, failure="timeout"),
        sample(6, failure="timeout"),
    )
    one, other = read_run([file, write(tmp_path / "step_4.jsonl")], "data.train=x")
    assert one == {
        **{"id": "row4/step_3/4", "messages": ASKED, "answer": "2", "tools": [{"x": 1}], "extra": {"k": 3}},
        "episodes": [
            {"completion": "2", **sampled},
            {"completion": "3", "top_k": 5, "min_p": 0.1, "allowed_tokens": ["2"]},
        ],
    }
    assert other == {
        **{"id": "row5/step_3/5", "messages": ASKED, "answer": "", "tools": None, "extra": None},
        "episodes": [{"completion": "2", "messages": [{"role": "assistant", "content": "2"}, talk[1]]}],
    }


ALONE = (
    "data.train=x, step_3.jsonl has samples of an agent's branches or of a game's players, which are no episodes "
    "alone: replay runs of one conversation per episode"
)
ODD = (
    "data.train=x, step_3.jsonl has a sample whose group is no whole number, or whose prompt or turns are no list of "
    "objects: it is no sample file of a run"
)
IMAGES = "data.train=x, step_3.jsonl has images, which sample files do not hold: replay runs of text"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        *(
            ({name: None}, f"data.train=x, step_3.jsonl has a sample without {name}: it is no sample file of a run")
            for name in ("group", "id", "prompt", "completion")
        ),
        ({"episode": 0}, ALONE),
        ({"player": 1}, ALONE),
        ({"prompt": [{**ASKED[0], "parts": []}]}, IMAGES),
        ({"turns": [{**ASKED[0], "parts": []}]}, IMAGES),
        *((more, ODD) for more in ({"group": [1]}, {"prompt": "hi"}, {"prompt": ["hi"]}, {"turns": 3}, {"turns": [3]})),
    ],
)
def test_what_cannot_be_replayed_is_refused(more, sentence, tmp_path):
    record = {name: value for name, value in (sample(0) | more).items() if value is not None}
    with pytest.raises(UserError) as refused:
        read_run([write(tmp_path / "step_3.jsonl", sample(1), record)], "data.train=x")
    assert str(refused.value) == sentence
