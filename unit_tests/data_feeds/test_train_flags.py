"""A message's `train` decides whether its turn is trained on; the tokens stay the same."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pytest

from configs.data_schema import PromptDataConfig, RowDataConfig
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups, load_prompts
from unit_tests.helpers.chat_families import assistant, user

TALK = [{"role": "system", "content": "s"}, user("1+1="), assistant("2"), user("2+2="), assistant("4"), user("bye")]
NO, YES = {"train": False}, {"train": True}


@pytest.fixture(scope="module")
def chat(tiny_path) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


def load(chat, tmp_path, rows, *, kind: Any = "conversations", **settings):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = RowDataConfig(train=str(path), max_tokens=100, max_invalid_fraction=1.0, **settings)
    return load_groups(data, "train", chat, rows=kind, seed=0)


def flag(**flags: Any) -> list[dict[str, Any]]:
    """Return the conversation with these keys on its turns: t4=NO is the turn 4."""
    return [{**turn, **flags.get(f"t{i}", {})} for i, turn in enumerate(TALK)]


def spoken(chat, sample) -> str:
    tokens = zip(chat.hf.convert_ids_to_tokens(sample.token_ids), sample.action_mask, strict=True)
    return "|".join("".join(text for text, _ in run) for learnt, run in groupby(tokens, key=lambda t: t[1]) if learnt)


CASES: list[tuple[Any, dict[str, Any], str]] = [
    (["assistant"], {"t2": NO}, "4<|end|>"),
    (["assistant"], {"t4": NO}, "2<|end|>"),
    (["assistant"], {"t4": {"weight": 0}}, "2<|end|>"),
    (["assistant"], {"t2": {"weight": 1.0}, "t4": {"weight": 0.0, "train": None}}, "2<|end|>"),
    (["assistant"], {"t3": YES, "t5": YES}, "2<|end|>|2+2=|4<|end|>|bye"),
    (["user"], {"t1": NO, "t2": YES}, "2<|end|>|2+2=|bye"),
    ("last_reply", {"t2": YES}, "2<|end|>|4<|end|>"),
    ("last_reply", {"t2": YES, "t4": NO}, "2<|end|>"),
    (
        "everything",
        {"t0": NO, "t2": NO, "t3": NO},
        "<|system|>|<|user|>1+1=<|assistant|>|<|user|>|<|assistant|>4<|end|><|user|>bye",
    ),
    (
        "everything",
        {"t1": NO, "t5": NO},
        "<|system|>s<|user|>|<|assistant|>2<|end|><|user|>2+2=<|assistant|>4<|end|>",
    ),
]


@pytest.mark.parametrize("as_text", [False, True])
def test_a_turn_is_trained_on_as_its_message_says(as_text, chat, tmp_path):
    as_usual, _ = chat.mask_turns(TALK, "everything")
    for train_on, flags, said in CASES:
        messages: Any = json.dumps(flag(**flags)) if as_text else flag(**flags)
        [[sample]] = load(chat, tmp_path, [{"messages": messages}], train_on=train_on).all()
        assert spoken(chat, sample) == said, (train_on, flags)
        assert sample.token_ids.tolist() == as_usual[: len(sample.token_ids)], "the template sees no flag"


def test_a_template_sees_no_flag(tiny_path, tmp_path):
    chat = ChatTokenizer(tiny_path, "chat")
    chat.hf.chat_template = chat.hf.chat_template.replace("{% for", "{{ messages[0] | length }}{% for", 1)
    [[with_flag]] = load(chat, tmp_path, [{"messages": [user("1"), assistant("2") | YES]}]).all()
    [[without]] = load(chat, tmp_path, [{"messages": [user("1"), assistant("2")]}]).all()
    assert with_flag.token_ids.tolist() == without.token_ids.tolist()


def test_the_last_reply_may_be_left_out_under_a_template_that_rewrites(families, tmp_path):
    """Qwen3's template removes earlier reasoning, so only the last reply can be trained on."""
    chat, thought = families["qwen3"], {"reasoning": "hm"}
    talk = [user("1"), assistant("2") | thought, user("3"), assistant("4") | thought]
    rows = [{"messages": talk}, {"messages": [*talk[:3], talk[3] | NO]}]
    feed = load(chat, tmp_path, rows, train_on="last_reply")
    assert len(feed.all()) == 1 and feed.sources[0].invalid.cases["no_reply"].why == "it has no turn to train on"


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("conversations", {"messages": flag(t2=NO, t4=NO)}, "no_reply", "it has no turn to train on"),
    (
        "conversations",
        {"messages": flag(t2={"weight": 0.5})},
        "bad_messages",
        "weight of a message must be",
    ),
    ("conversations", {"messages": flag(t2={"train": "no"})}, "bad_messages", "train of a message must be"),
    ("conversations", {"messages": flag(t2={"train": True, "weight": 0})}, "bad_messages", "and they differ"),
    ("unpaired", {"messages": flag(t2=NO)[:-1], "label": True}, "bad_messages", "which only supervised conversations"),
    ("pairs", {"chosen": flag(t2=NO)[:-1], "rejected": "5"}, "bad_messages", "which only supervised conversations"),
    ("prompts", {"messages": flag(t2=NO)}, "bad_messages", "which only supervised conversations"),
]
FINE = {
    "conversations": {"messages": TALK},
    "unpaired": {"messages": TALK[:-1], "label": False},
    "pairs": {"messages": "1+1=", "chosen": "2", "rejected": "3"},
    "prompts": {"messages": "1+1="},
}


def test_a_flag_without_effect_makes_its_row_invalid(chat, tmp_path):
    for kind, row, reason, words in BAD:
        rows = [row, FINE[kind]] + ([{"messages": TALK[:-1], "label": True}] if kind == "unpaired" else [])
        if kind == "prompts":
            path = tmp_path / "p.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            data = PromptDataConfig(train=str(path), max_invalid_fraction=1.0)
            feed: Any = load_prompts(data, "train", chat, seed=0)
        else:
            feed = load(chat, tmp_path, rows, kind=kind)
        assert feed.sources[0].invalid.rows == 1, (kind, row)
        assert words in feed.sources[0].invalid.cases[reason].why, (kind, row)
