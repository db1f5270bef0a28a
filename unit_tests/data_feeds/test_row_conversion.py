"""Rows are encoded side by side, and come out as if they were read one by one."""

import json

import pytest

from configs.data_schema import PromptDataConfig, RowDataConfig
from core.errors import UserError
from data_feeds import feed
from data_feeds.chat import encoding
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.rows import read_source

ASKS = [{"role": "user", "content": "1+1="}]
REPLIES = [{"role": "assistant", "content": "2"}]
TALK = [*ASKS, *REPLIES, {"role": "user", "content": "and 3+4="}, {"role": "assistant", "content": "7"}]
LONG = [{"role": "user", "content": "1" * 90}]
ROWS = {
    "prompts": [ASKS, LONG, "2+3=", [], TALK, [*TALK, *ASKS], 5, ""],
    "conversations": [[*ASKS, *REPLIES], TALK, [*LONG, *REPLIES], ASKS, [*ASKS, {"role": "assistant", "content": ""}]],
    "pairs": [("1+1=", "2", "3"), ("1+1=", "2", "2"), ("1", "2", "3" * 90), ("1", "2" * 90, "3"), (TALK[:3], "7", "8")],
    "unpaired": [([*ASKS, *REPLIES], True), (TALK, 0), (TALK, "no"), (LONG + REPLIES, 1), (ASKS, 1), (TALK, False)],
}


@pytest.fixture(scope="module")
def chat(tiny_path):
    return ChatTokenizer(tiny_path, "chat")


def write(path, kind: str, rows: list) -> str:
    columns = {"pairs": ("messages", "chosen", "rejected"), "unpaired": ("messages", "label")}.get(kind, ("messages",))
    rows = [row if len(columns) > 1 else (row,) for row in rows]
    path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    return str(path)


def load(file: str, kind, chat, **settings):
    if kind == "prompts":
        data = PromptDataConfig(train=file, max_prompt_tokens=60, max_invalid_fraction=1.0)
        return feed.load_prompts(data, "train", chat, seed=0)
    data = RowDataConfig(train=file, max_tokens=60, max_invalid_fraction=1.0, **settings)
    return feed.load_groups(data, "train", chat, rows=kind, seed=0)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *[(kind, {}) for kind in ROWS],
        *[("conversations", {"train_on": on}) for on in ("everything", ["user"], ["user", "assistant"])],
    ],
)
def test_rows_side_by_side_are_those_of_rows_one_by_one(kind, settings, chat, tmp_path, monkeypatch):
    file = write(tmp_path / "rows.jsonl", kind, ROWS[kind] * 3)
    together = load(file, kind, chat, **settings)
    monkeypatch.setattr(encoding, "CHARS_AT_ONCE", 40)
    in_small_calls = load(file, kind, chat, **settings)
    monkeypatch.setattr(read_source, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(encoding, "CHARS_AT_ONCE", 1)
    one_by_one = load(file, kind, chat, **settings)
    assert together == in_small_calls == one_by_one
    assert together.all() and together.sources[0].invalid.rows


def test_pieces_of_a_conversation_have_the_ids_of_their_texts(chat):
    pieces = chat.split_turns(TALK, ("assistant",))
    assert [ids for ids, _ in chat.encode_pieces([*pieces, ("", True)])] == [chat.encode(t) for t, _ in pieces] + [[]]
    assert chat.mask_turns(TALK)[0] == [i for text, _ in pieces for i in chat.encode(text)]


def test_the_first_wrong_row_is_named_though_a_later_one_fails_earlier(chat, tmp_path):
    """A pair is encoded reply by reply: its rejected reply fails after the texts of all rows were encoded once."""
    thought = [{"role": "assistant", "content": "3", "reasoning": "a field that the template does not write"}]
    later = [{"role": "assistant", "content": "3", "name": "another field that it does not write"}]
    file = write(tmp_path / "rows.jsonl", "pairs", [("1+1=", "2", thought), ("1+1=", later, "2")])
    with pytest.raises(UserError, match="row 0: the chat template leaves out reasoning"):
        load(file, "pairs", chat)


def test_a_wrong_row_after_the_last_one_that_is_needed_is_not_looked_at(chat, tmp_path):
    named = [{"role": "user", "content": "1", "name": "a field that the template does not write"}]
    file = write(tmp_path / "rows.jsonl", "prompts", [LONG, ASKS, ASKS, named])
    train = write(tmp_path / "train.jsonl", "prompts", [ASKS])
    data = PromptDataConfig(train=train, eval=file, eval_rows=2, max_prompt_tokens=60, max_invalid_fraction=1.0)
    assert len(feed.load_prompts(data, "eval", chat, seed=0).all()) == 2
    with pytest.raises(UserError, match="row 3: the chat template leaves out the name"):
        feed.load_prompts(data.model_copy(update={"eval_rows": 3}), "eval", chat, seed=0)


def test_slow_reading_says_how_far_it_is(chat, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("core.timing.progress.PROGRESS_EVERY_S", -1.0)
    file = write(tmp_path / "rows.jsonl", "prompts", ["1+1="] * 5)
    load(file, "prompts", chat)
    said = [line for line in capsys.readouterr().err.splitlines() if line.endswith("rows read")]
    assert said == [f"data.train={file}: {n} of 5 rows read" for n in range(1, 6)]
