"""Rows to prompts and samples: nothing is dropped in silence, and what is learnt is what will be sampled."""

import json

import pytest

from core.errors import UserError
from data_feeds.chats import load_chats
from data_feeds.prompts import PromptFeed, load_prompts
from data_feeds.tokenizer import ChatTokenizer

LIMITS = {"key": "data.train", "max_prompt_tokens": 20, "seed": 0}


@pytest.fixture(scope="module")
def chat(tiny_path) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


def jsonl(path, rows) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_too_long_prompts_are_left_out_and_counted(chat, tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"id": "long", "messages": [user("1" * 30)]}, {"messages": [user("1+1=")]}])
    feed = load_prompts(path, chat, **LIMITS)
    assert [p.id for p in feed.prompts] == ["1"]
    assert (feed.dropped, feed.example) == (1, "long")


def test_a_feed_draws_every_row_once_per_pass_in_an_order_of_its_own(chat, tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"id": i, "messages": [user(f"{i}+1=")], "answer": i + 1} for i in range(9)])
    feed = load_prompts(path, chat, **LIMITS)
    passes = [[feed.draw(t).id for t in range(n * 9, n * 9 + 9)] for n in range(3)]
    assert all(sorted(p) == sorted(map(str, range(9))) for p in passes)
    assert passes[0] != passes[1] != passes[2]
    assert passes[0] != [PromptFeed(feed.prompts, seed=1).draw(t).id for t in range(9)]
    assert feed.draw(3) == feed.draw(3), "a function of the ticket alone"
    assert feed.prompts[4].answer == "5"


def test_what_is_learnt_is_what_the_policy_would_say(chat):
    conversation = [user("1+1="), assistant("2"), user("2+2="), assistant("4")]
    ids, mask = chat.learnt_turns(conversation)
    spoken = [i for i, m in zip(ids, mask, strict=True) if m]
    assert spoken == [*chat.encode("2"), chat.hf.eos_token_id, *chat.encode("4"), chat.hf.eos_token_id]
    first = chat.render(conversation[:1])
    assert ids[: len(first)] == first, "the prompt of training is the prompt of sampling"
    assert not any(mask[: len(first)])


def test_a_later_turn_is_rendered_as_training_would_see_it(chat):
    """render + reply + render_turn equals the ids of the whole conversation, up to where the policy speaks again."""
    conversation = [user("1+1="), assistant("2"), user("2+2="), assistant("4")]
    ids, mask = chat.learnt_turns(conversation)
    played = chat.render(conversation[:1]) + chat.encode("2") + [chat.hf.eos_token_id]
    played += chat.render_turn(conversation[2])
    assert ids[: len(played)] == played
    assert mask[len(played)]


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny_path):
    tokenizer = ChatTokenizer(tiny_path, "chat")
    tokenizer.hf.chat_template = "{{ messages | length }}" + tokenizer.hf.chat_template
    with pytest.raises(UserError, match="rewrites earlier turns"):
        tokenizer.learnt_turns([user("1"), assistant("2"), user("3"), assistant("4")])


def test_a_tokenizer_without_a_template_names_the_setting(tiny_path, tmp_path):
    ChatTokenizer(tiny_path, "chat").save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"data\.template=plain"):
        ChatTokenizer(str(tmp_path), "chat")
    plain = ChatTokenizer(str(tmp_path), "plain")
    assert plain.render([user("1+1=")]) == plain.encode("1+1=")


def test_rows_without_a_reply_and_rows_too_long_are_counted_apart(chat, tmp_path):
    rows = [
        {"messages": [user("1+1="), assistant("2")]},
        {"messages": [user("1+1=")]},
        {"messages": [user("1" * 30), assistant("2")]},
    ]
    feed = load_chats(jsonl(tmp_path / "x.jsonl", rows), chat, key="data.train", max_tokens=20, seed=0)
    assert (len(feed.samples), feed.no_reply, feed.rows.dropped) == (1, 1, 1)
