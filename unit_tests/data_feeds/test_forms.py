"""Rows as people have them: each form is recognised and becomes what was meant, or is refused with the fix."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import pytest

from configs.data_schema import PromptDataConfig, RowDataConfig
from core.errors import UserError
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import Feed, load_groups, load_prompts
from data_feeds.rows.convert_form import convert_row
from data_feeds.rows.find_form import find_form
from data_feeds.rows.forms import FORMS
from data_feeds.rows.invalid_rows import InvalidRow
from unit_tests.helpers.row_forms import (
    ASKED,
    BAD,
    COLUMNS,
    CONVERSATIONS,
    ENDS,
    GROUND,
    LONG,
    PAIRS,
    PLAIN,
    PROMPTS,
    REFUSED,
    SCORED,
    TALK,
    UNPAIRED,
    Q,
)


def write(path: Path, rows: Any) -> str:
    listed = rows if isinstance(rows, list) else [rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in listed))
    return str(path)


def load(chat: ChatTokenizer, folder: Path, kind: Any, rows: Any, **source: Any) -> Feed[Any]:
    train = [{"path": write(folder / "x.jsonl", rows), **source}]
    if kind == "prompts":
        data = PromptDataConfig(train=train, max_prompt_tokens=2000, max_invalid_fraction=0)  # pyright: ignore[reportArgumentType]
        return load_prompts(data, "train", chat, seed=0)
    settings = {"train_on": "everything"} if chat.template == "plain" and "text" in json.dumps(rows)[:8] else {}
    data = RowDataConfig(train=train, max_tokens=2000, max_invalid_fraction=0, **settings)  # pyright: ignore[reportArgumentType]
    return load_groups(data, "train", chat, rows=kind, seed=0)


def list_trained(chat: ChatTokenizer, sample: Any) -> list[str]:
    """The trained parts of a sample; calls are shortened."""
    runs = groupby(zip(sample.token_ids.tolist(), sample.action_mask, strict=True), key=lambda token: token[1])
    texts = [chat.hf.decode([i for i, _ in run]) for learnt, run in runs if learnt]
    return ["<tool_call>...</tool_call><|im_end|>" if "<tool_call>" in text else text for text in texts]


def encode_whole(chat: ChatTokenizer, talk: list[Any], tools: Any = None, *, reply_next: bool = False) -> list[int]:
    """The ids of a conversation, as transformers writes all of it at once."""
    return chat.hf.apply_chat_template(
        talk, tools=tools or None, tokenize=True, return_dict=False, add_generation_prompt=reply_next
    )


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_of_every_form_are_those_of_the_whole_text(name, qwen, tmp_path):
    row, form, talk, trained = CONVERSATIONS[name]
    feed = load(qwen, tmp_path, "conversations", row)
    [[sample]] = feed.all()
    assert feed.sources[0].form == form
    found = [{k: v for k, v in m.items() if k != "train"} for m in sample.prompt.messages]
    assert talk in (..., found)
    assert sample.token_ids.tolist() == encode_whole(qwen, found, sample.prompt.tools)
    assert trained in (..., list_trained(qwen, sample))
    assert (len(feed.sources[0].notes) == 1) == (form != "ours"), "the start of a run says which form was recognised"


@pytest.mark.parametrize("name", PLAIN)
def test_text_without_turns_is_written_as_it_is(name, tiny_path, tmp_path):
    row, form, text, trained = PLAIN[name]
    plain = ChatTokenizer(tiny_path, "plain")
    feed = load(plain, tmp_path, "conversations", row)
    [[sample]] = feed.all()
    ids = sample.token_ids.tolist()
    assert feed.sources[0].form == form
    assert ids[: len(plain.encode(text))] == plain.encode(text)
    assert list_trained(plain, sample)[0].startswith(trained[0])


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_every_form_are_a_good_and_a_bad_reply(name, qwen, tmp_path):
    row, form = PAIRS[name]
    feed = load(qwen, tmp_path, "pairs", row)
    [[chosen, rejected]] = feed.all()
    assert feed.sources[0].form == form
    assert chosen.prompt.messages == [ASKED]
    assert chosen.token_ids.tolist() == encode_whole(qwen, TALK)
    assert rejected.token_ids.tolist() == encode_whole(qwen, [ASKED, BAD])
    assert [list_trained(qwen, s) for s in (chosen, rejected)] == [ENDS, ["5<|im_end|>"]]


@pytest.mark.parametrize("name", UNPAIRED)
def test_replies_with_a_label_of_every_form(name, qwen, tmp_path):
    row, form = UNPAIRED[name]
    label = "kto_tag" if "kto_tag" in row else "label"
    feed = load(qwen, tmp_path, "unpaired", [row, row | {label: False}])
    [[good], [bad]] = feed.all()
    assert feed.sources[0].form == form
    assert (good.reward, bad.reward) == (1.0, 0.0)
    assert good.token_ids.tolist() == encode_whole(qwen, TALK) and list_trained(qwen, good) == ENDS


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_of_every_form_have_their_answer(name, qwen, tmp_path):
    row, form, answer = PROMPTS[name]
    feed = load(qwen, tmp_path, "prompts", row)
    [prompt] = feed.all()
    assert feed.sources[0].form == form
    assert prompt.messages == [ASKED] and prompt.answer == answer
    assert qwen.render(prompt.messages) == encode_whole(qwen, [ASKED], reply_next=True)


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_would_be_misread_are_refused_with_the_fix(name, qwen, tmp_path):
    kind, rows, words = REFUSED[name]
    with pytest.raises(UserError, match=words) as refused:
        load(qwen, tmp_path, kind, rows)
    assert str(refused.value).startswith("data.train=") and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_say_what_no_form_does(name, qwen, tmp_path):
    kind, row, columns, words = COLUMNS[name]
    if words:
        with pytest.raises(UserError, match=words):
            load(qwen, tmp_path, kind, row, columns=columns)
        return
    [item] = load(qwen, tmp_path, kind, row, columns=columns).all()
    if kind == "prompts":
        assert (item.messages, item.answer) == ([ASKED], "4")
    else:
        assert item[0].token_ids.tolist() == encode_whole(qwen, TALK) and list_trained(qwen, item[0]) == ENDS


def test_a_form_of_the_recipe_wins_and_is_checked(qwen, tmp_path):
    both = {"messages": TALK, "problem": "1+1=", "solution": "2"}
    for form, talk in (("ours", TALK), ("question_answer", LONG[:2])):
        [[sample]] = load(qwen, tmp_path, "conversations", both, form=form).all()
        assert sample.prompt.messages == talk
    wrong = {
        "alpaca": "form alpaca needs rows with instruction and output or response, and no row is of that form",
        "verl": "form verl is for prompts, for main_rl.py",
        "shargpt": "form shargpt is none of .*did you mean 'sharegpt'",
    }
    for form, words in wrong.items():
        with pytest.raises(UserError, match=words):
            load(qwen, tmp_path, "conversations", both, form=form)
    extra = {"prompt": [ASKED], "reward_model": GROUND, "extra_info": {"short": "four"}}
    [prompt] = load(qwen, tmp_path, "prompts", extra, form="verl", columns={"answer": "extra_info.short"}).all()
    assert (prompt.messages, prompt.answer) == ([ASKED], "four")


def test_the_start_says_what_is_read_and_what_is_not(qwen, tmp_path):
    row = {"prompt": [ASKED], "reward_model": GROUND, "ability": "m"}
    [note] = load(qwen, tmp_path, "prompts", row).sources[0].notes
    assert note.endswith(
        "x.jsonl is of form verl (recognised): messages = prompt, answer = reward_model.ground_truth; in extra: "
        "ability, reward_model"
    )
    [note] = load(qwen, tmp_path, "prompts", {"messages": Q, "solution": "4"}).sources[0].notes
    assert "the column solution may hold one: write answer: solution into columns" in note


LATE = {
    "system": {"messages": TALK} | {"system": None},
    "input": {"instruction": "Add.", "output": "3"},
}


@pytest.mark.parametrize("column", LATE)
def test_a_column_that_comes_late_is_read_too(qwen, tmp_path, column):
    """No recognition has looked at rows after the first 200; a column may begin there, as in joined data sets."""
    rows = [LATE[column]] * 200 + [LATE[column] | {column: "Be brief."}]
    *_, last = load(qwen, tmp_path, "conversations", rows).all()
    assert "Be brief." in qwen.hf.decode(last[0].token_ids.tolist())


def test_a_late_column_on_disk_stops_the_run(qwen, tmp_path):
    rows = [LATE["system"]] * 300 + [LATE["system"] | {"system": "Be brief."}]
    with pytest.raises(UserError, match=r"row 300 has system, .* move a row with system to the beginning"):
        load(qwen, tmp_path, "conversations", rows, lazy=True).all()
    load(qwen, tmp_path, "conversations", rows, lazy=True, form="ours").all()


JUNK: list[Any] = [None, 5, [], {}, "", "[", [[1]], {"from": [], "value": 3}, [{"role": ["x"], "content": "y"}], [None]]


def spoil(value: Any, random: Random) -> Any:
    """The value with one thing somewhere in it replaced."""
    if not value or not isinstance(value, dict | list) or random.random() < 0.3:
        return random.choice(JUNK)
    if isinstance(value, dict):
        return value | {(key := random.choice([*value])): spoil(value[key], random)}
    i = random.randrange(len(value))
    return [*value[:i], spoil(value[i], random), *value[i + 1 :]]


@pytest.mark.parametrize("kind", ["conversations", "pairs", "unpaired", "scored", "prompts"])
def test_a_broken_row_is_invalid_and_no_traceback(kind):
    """Of each form, rows after the first 200, which no recognition has looked at."""
    replies = {"pairs": PAIRS, "unpaired": UNPAIRED, "scored": SCORED}
    cases = ({"conversations": CONVERSATIONS | PLAIN, "prompts": PROMPTS} | replies)[kind]
    random = Random(0)
    for case in cases.values():
        fit = find_form(kind, [case[0]], key="data.train=x", path="x")
        for _ in range(60):
            row = spoil(case[0] | {"images": random.choice([[], ["a.png"], [None]])}, random)
            if isinstance(row, dict):
                find_form_or_refuse(kind, row)
                with suppress(InvalidRow):
                    convert_row(fit, row)


def find_form_or_refuse(kind: Any, row: dict[str, Any]) -> None:
    with suppress(UserError):
        find_form(kind, [row], key="data.train=x", path="x")


def test_every_form_of_the_table_is_tested():
    tested = {("conversations", c[1]) for c in [*CONVERSATIONS.values(), *PLAIN.values()]}
    tested |= {("pairs", c[1]) for c in PAIRS.values()} | {("unpaired", c[1]) for c in UNPAIRED.values()}
    tested |= {("scored", c[1]) for c in SCORED.values()}
    tested |= {("prompts", c[1]) for c in PROMPTS.values()}
    tested |= {("conversations", "tokens"), ("conversations", "stepwise"), ("pairs", "hh_rlhf")}
    assert {(form.kind, form.name) for form in FORMS} - tested == {("prompts", "messages_system")}
