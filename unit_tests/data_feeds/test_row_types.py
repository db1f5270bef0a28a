"""Rows beside the tools of an environment, under limits of two keys, and pairs whose prompts are not one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.data_schema import PromptDataConfig, RowDataConfig
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import Feed, load_groups, load_prompts
from data_feeds.rows.episodes import Sampling
from unit_tests.helpers.chat_families import ADD, FAMILIES, WEATHER, assistant, call, result, user
from unit_tests.helpers.sentences import tell


@pytest.fixture(scope="module")
def chat(tiny_path: str) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(chat: ChatTokenizer, path: Path, *rows: dict[str, Any], most: int = 20, **how: Any) -> Feed[Any]:
    data = PromptDataConfig(train=write(path / "x.jsonl", *rows), max_prompt_tokens=most, max_invalid_fraction=1.0)
    return load_prompts(data, "train", chat, seed=0, **how)


def why(feed: Feed[Any]) -> dict[str, str]:
    return {reason: case.why for reason, case in feed.sources[0].invalid.cases.items()}


def test_tools_of_the_environment_count_for_the_length_of_a_prompt(qwen, tmp_path):
    rows = [{"messages": [user("Which?")]}, {"messages": [user("Which one?")]}]
    n = len(qwen.render([user("Which?")], [WEATHER]))
    assert len(load(qwen, tmp_path, *rows, most=n - 1).all()) == 2
    feed = load(qwen, tmp_path, *rows, most=n, env_tools=[WEATHER])
    [prompt] = feed.all()
    assert prompt.messages == [user("Which?")] and prompt.tools == [], "the environment brings its own"
    assert why(feed) == {"too_long": f"{n + 4} tokens, more than data.max_prompt_tokens={n}"}


def test_a_call_of_the_environments_tool_may_stand_in_a_prompt(qwen, tmp_path):
    talk = [user("a"), assistant("", call("weather", place="Oslo")), result("3"), user("b")]
    rows = [{"messages": talk, "tools": [ADD]}, {"messages": [user("a")]}]
    assert len(load(qwen, tmp_path, *rows, most=2000, env_tools=[WEATHER]).all()) == 2
    feed = load(qwen, tmp_path, *rows, most=2000)
    assert why(feed) == {"bad_messages": "it calls weather, which is none of its tools"}
    bare = load(qwen, tmp_path, {"messages": talk}, most=2000)
    assert len(bare.all()) == 1, "a row without tools may tell of calls"


@pytest.mark.parametrize("column", ["demonstration", "episodes"])
def test_a_shown_reply_may_be_as_long_as_both_limits(chat, tmp_path, column):
    def row(n: int) -> dict[str, Any]:
        text = "2" * n
        return {"messages": [user("1")], column: text if column == "demonstration" else [{"completion": text}]}

    # a mark and a letter of the question, the reply's mark, and its end
    feed = load(chat, tmp_path, row(36), row(37), sampling=Sampling(max_new_tokens=20))
    assert len(feed.all()) == 1
    assert why(feed) == {"too_long": "41 tokens, more than data.max_prompt_tokens + rollout.max_new_tokens=40"}
    far = load(chat, tmp_path, row(36), row(9000), sampling=Sampling(max_new_tokens=20))
    assert why(far) == {"too_long": "41 tokens and more, over data.max_prompt_tokens + rollout.max_new_tokens=40"}
    long = load(chat, tmp_path, row(3), {"messages": [user("1" * 9000)]}, sampling=Sampling(max_new_tokens=20))
    assert why(long) == {"too_long": "21 tokens and more, over data.max_prompt_tokens=20"}


@pytest.mark.parametrize("lazy", [False, True])
def test_a_prompt_that_depends_on_the_reply_to_it_is_refused(qwen, tmp_path, lazy):
    row = {"messages": "q", "chosen": [assistant("", call("weather", place="Oslo"))], "rejected": "no"}
    source: Any = {"path": write(tmp_path / "x.jsonl", row), "lazy": lazy}
    data = RowDataConfig(train=[source], max_tokens=2000)
    qwen.hf.chat_template = "{{ 'CALLED' if messages[-1].tool_calls }}" + FAMILIES["qwen2.5"]
    try:
        assert tell(lambda: load_groups(data, "train", qwen, rows="pairs", seed=0)) == (
            f"data.train={tmp_path / 'x.jsonl'}, row 0: the chat template writes the prompt differently before the two "
            "replies, so they cannot be compared: use a template that only appends"
        )
    finally:
        qwen.hf.chat_template = FAMILIES["qwen2.5"]


def test_a_continued_prompt_is_read_where_the_recipe_says_so(chat, tmp_path):
    path = write(tmp_path / "x.jsonl", {"messages": [user("1+1="), assistant("It is")]})
    data = PromptDataConfig(train=path, continue_final_message=True)
    [prompt] = load_prompts(data, "train", chat, seed=0).all()
    assert prompt.messages == [user("1+1="), assistant("It is")]
    assert tell(lambda: load_prompts(PromptDataConfig(train=path), "train", chat, seed=0)).startswith(
        f"data.train={path}: none of 1 rows is valid: 1 ends_in_reply (such as row 0: it ends with an assistant turn"
    )


def test_a_pair_ends_in_replies_that_differ_in_more_than_space(chat, tmp_path):
    asked = {"messages": [user("q")]}

    def read(chosen: Any, rejected: Any) -> dict[str, str]:
        row = asked | {"chosen": chosen, "rejected": rejected}
        data = RowDataConfig(
            train=write(tmp_path / "x.jsonl", row, asked | {"chosen": "1", "rejected": "2"}), max_invalid_fraction=0.5
        )
        feed = load_groups(data, "train", chat, rows="pairs", seed=0)
        good, bad = feed.all()[-1]
        assert (good.reward, bad.reward, good.n_trained, bad.n_trained) == (1.0, 0.0, 2, 2)
        return why(feed)

    assert read("a", " a\n") == {"same_reply": "chosen and rejected are the same"}
    assert read("a", "b") == {}
    turns = [user("q"), assistant("x"), user("r"), assistant("a")]
    other = [user("q"), assistant("y"), user("r"), assistant("b")]
    assert read(turns, other) == {"not_one_prompt": "chosen and rejected differ before their last reply"}
