"""A fault of one row is counted as that row's, and rows may repeat an id."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from configs.data_schema import PromptDataConfig, RowDataConfig
from core.errors import UserError
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups, load_prompts

FINE = [{"messages": f"{i}+1="} for i in range(20)]
FAULTS: dict[str, tuple[Any, str, str]] = {
    "a role": ([{"role": "bishop", "content": "1"}], "bad_messages", "the role 'bishop'.*form: sharegpt"),
    "a key": ([{"role": "user", "content": "1", "function_call": 1}], "bad_messages", "holds 'function_call'"),
    "a part": (
        [{"role": "user", "content": [{"type": "video", "video": "x"}]}],
        "bad_messages",
        "a part of the type video",
    ),
    "a key of an image": (
        [{"role": "user", "content": [{"type": "image", "image": "x.png", "max_pixels": 3}]}],
        "bad_image",
        "an image holds 'max_pixels'",
    ),
}


ASKED, SAID = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}


EACH: list[tuple[str, dict[str, Any], str, str]] = [
    # kind of rows, row, reason, part of the sentence
    ("prompts", {"messages": [{"role": "user", "content": " "}]}, "empty", "all its messages are empty"),
    ("prompts", {"messages": [ASKED, SAID]}, "ends_in_reply", "or set data.continue_final_message"),
    ("prompts", {"messages": "1" * 90}, "too_long", "tokens, more than data.max_prompt_tokens=40"),
    ("prompts", {"messages": '[{"role": "user"'}, "bad_messages", "begins as turns and is no JSON"),
    ("prompts", {"messages": [ASKED | {"train": True}]}, "bad_messages", "which only supervised conversations read"),
    ("conversations", {"messages": [ASKED]}, "no_reply", "it has no turn of assistant"),
    ("conversations", {"messages": [ASKED, SAID | {"train": False}]}, "no_reply", "it has no turn to train on"),
    ("unpaired", {"messages": [ASKED, SAID], "label": 2}, "bad_label", "must be true, false, 1 or 0, found 2"),
    ("unpaired", {"messages": [ASKED, SAID], "label": "1"}, "bad_label", "must be true, false, 1 or 0, found '1'"),
    ("pairs", {"chosen": "2", "rejected": "3"}, "missing_column", "chosen is a reply alone"),
    ("pairs", {"messages": "1", "chosen": "2", "rejected": "2"}, "same_reply", "are the same"),
    (
        "pairs",
        {"chosen": [ASKED, SAID], "rejected": [SAID, SAID]},
        "ends_in_reply",
        "rejected follows another assistant",
    ),
    ("pairs", {"messages": "1", "chosen": [ASKED, SAID], "rejected": "3"}, "not_one_prompt", "begins with them"),
    ("pairs", {"chosen": [ASKED, SAID], "rejected": [ASKED, ASKED, SAID]}, "not_one_prompt", "before their last reply"),
]


@pytest.fixture(scope="module")
def chat(tiny_path) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


def load(chat, tmp_path, rows, **settings):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(PromptDataConfig(train=str(path), max_prompt_tokens=40, **settings), "train", chat, seed=0)


@pytest.mark.parametrize("fault", [*FAULTS, "extra"])
def test_one_bad_row_stops_no_run_and_many_do(fault, chat, tmp_path):
    messages, reason, words = FAULTS.get(fault, ("1+1=", "bad_extra", "extra must be an object.*found '{'"))
    bad = {"messages": messages} | ({"extra": "{"} if fault == "extra" else {})
    feed = load(chat, tmp_path, [*FINE, bad])
    assert len(feed.all()) == 20 and feed.sources[0].invalid.cases[reason].rows == 1
    for rows in ([bad] * 2, [*FINE, *[bad] * 3]):
        with pytest.raises(UserError, match=f"of {len(rows)} rows.*{reason} .such as row .*{words}"):
            load(chat, tmp_path, rows)


@pytest.mark.parametrize(("kind", "row", "reason", "words"), EACH, ids=[words for *_, words in EACH])
def test_a_row_is_invalid_for_its_own_reason(kind, row, reason, words, chat, tmp_path):
    (path := tmp_path / "x.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=f"none of 1 rows is valid: 1 {reason} .*{re.escape(words)}"):
        if kind == "prompts":
            load_prompts(PromptDataConfig(train=str(path), max_prompt_tokens=40), "train", chat, seed=0)
        else:
            load_groups(RowDataConfig(train=str(path), max_tokens=40), "train", chat, rows=kind, seed=0)


def test_ids_that_repeat_are_numbered_by_row_and_counted(chat, tmp_path):
    ids = ["a", "a", None, "a#1", 2, "a", "b", "long"]
    rows = [{"messages": f"{i}+1=", "id": name} for i, name in enumerate(ids)] + [{"messages": "1" * 90, "id": "long"}]
    feed = load(chat, tmp_path, rows, max_invalid_fraction=0.2)
    assert [prompt.id for prompt in feed.all()] == ["a", "a#1#", "2", "a#1", "2#4", "a#5", "b", "long"]
    sentences, facts = feed.summary("data.train")
    assert sentences[-1] == (
        "data.train: of x, 3 rows have the id of an earlier row: # and their row number are appended to it"
    )
    assert facts["x"]["repeated_ids"] == 3 and facts["x"]["invalid"]["too_long"]["example"] == "long#8"
    [quiet], facts = load(chat, tmp_path, [{"messages": "1+1="}, {"messages": "1" * 90}],
                          max_invalid_fraction=0.5).summary("data.train")  # fmt: skip
    assert "1 are invalid" in quiet and facts["x"]["repeated_ids"] == 0
