"""Rows of the training file that are held out: chosen by what they hold, and never trained on."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

import main_sl
from configs.data_schema import HoldOutConfig, RowDataConfig, SourceConfig
from configs.load import validate
from core.errors import UserError
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups
from unit_tests.helpers.chat_families import assistant, user
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.prompt_files import write
from unit_tests.helpers.runs import folder_of

ROWS = [{"id": f"r{n}", "messages": [user(f"{n}+1="), assistant(str(n + 1))]} for n in range(30)]


@pytest.fixture(scope="module")
def chat(tiny_path: str) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


def split(chat: ChatTokenizer, train: Any, rows: int) -> tuple[list[str], list[str]]:
    """The texts that are trained on, and those that are held out."""
    data = RowDataConfig(train=train, eval=HoldOutConfig(from_train=rows), max_tokens=40)
    feeds = [load_groups(data, which, chat, rows="conversations", seed=0) for which in ("train", "eval")]
    trained, held = ([group[0].prompt.messages[0]["content"] for group in feed.all()] for feed in feeds)
    return trained, held


def test_rows_are_held_out_by_their_content_wherever_they_stand(chat, tmp_path):
    trained, held = split(chat, write(tmp_path / "a.jsonl", ROWS), 10)
    assert len(held) == 10 and len(trained) == 20 and not {*held} & {*trained}
    moved = random.Random(0).sample(ROWS, 30)
    renamed = [row | {"id": f"s{n}"} for n, row in enumerate(moved)]
    assert {*split(chat, write(tmp_path / "b.jsonl", renamed), 10)[1]} == {*held}
    # a file that grows keeps those that are still among the smallest hashes
    more = [{"messages": [user(f"9{n}+2="), assistant("x")]} for n in range(10)]
    assert len({*split(chat, write(tmp_path / "c.jsonl", [*ROWS, *more]), 10)[1]} & {*held}) >= 5


def test_copies_of_a_held_out_row_are_not_trained_on(chat, tmp_path):
    twice = [*ROWS, *(row | {"id": f"again{n}"} for n, row in enumerate(ROWS))]
    trained, held = split(chat, write(tmp_path / "a.jsonl", twice), 10)
    assert len(held) == 10 and len(trained) == 40 and not {*held} & {*trained}
    mixture = [SourceConfig(path=write(tmp_path / f"{name}.jsonl", rows)) for name, rows in (("b", ROWS), ("c", ROWS))]
    trained, held = split(chat, mixture, 10)
    assert len(held) == 20 and not {*held} & {*trained}


def test_some_row_is_left_for_training(chat, tmp_path):
    with pytest.raises(UserError, match=r"a.jsonl has 30 different rows, and data.eval.from_train=30 leaves none"):
        split(chat, write(tmp_path / "a.jsonl", ROWS), 30)
    for given, words in (({"from_train": 0}, "data.eval.from_train"), ({"from_trian": 3}, "from_train")):
        with pytest.raises(UserError, match=words):
            validate(RowDataConfig, {"train": "x.jsonl", "eval": given}, prefix="data.")


def test_a_run_says_what_it_holds_out_and_resumes_with_it(recipe, tmp_path):
    """The rows are those of the first run: with others, the hash of what is trained on would refuse the resume."""
    train = write(tmp_path / "a.jsonl", ROWS)
    changes = {"data.train": train, "data.eval": {"from_train": 10}, "data.max_tokens": 40, "checkpoint.every": 1}
    path = recipe(changes, kind="sl")
    code, err = run_here(main_sl, "--config", path, "name=first")
    assert code == 0, err
    first = folder_of(tmp_path, "first-*")
    again = ["--config", path, f"resume={first}", "steps=3"]
    assert run_here(main_sl, *again, "name=second")[0] == 0
    assert json.loads((folder_of(tmp_path, "second-*") / "summary.json").read_text())["data.eval"]["a"]["used"] == 10
    code, err = run_here(main_sl, *again, "data.eval={from_train: 9}")
    assert code == 2 and "what the rows of data.train hold changed" in err
