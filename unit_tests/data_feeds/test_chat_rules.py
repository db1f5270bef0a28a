"""Pieces of the chat tokenizer, whole: ends of turns, trained turns, masks by characters and ids of calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_feeds.chat.encoding import encode_after, find_added_ids, join_encoded, mask_by_offsets
from data_feeds.chat.parsed_reply import PlainParser, finish_reply, refuse_reply, rename_taken
from data_feeds.chat.turn_ends import TurnEnd, common_start, find_turn_end
from data_feeds.chat.turns import count_written, find_turns, write_begun_reply
from unit_tests.helpers.chat_families import assistant, user
from unit_tests.helpers.sentences import tell

SYSTEM: Any = {"role": "system", "content": "s"}
TALK: list[Any] = [SYSTEM, user("q"), assistant("a"), user("r"), assistant("b"), user("t")]


def test_trained_turns_are_those_named_unless_a_turn_says_otherwise():
    said: list[Any] = [*TALK[:2], TALK[2] | {"train": True}, TALK[3], TALK[4] | {"train": False}, TALK[5]]
    table: dict[Any, tuple[set[int], int, set[int], int]] = {
        # of TALK and of `said`: the trained turns, and the number of turns that are written
        "everything": ({*range(6)}, 6, {0, 1, 2, 3, 5}, 6),
        "last_reply": ({4}, 5, {2}, 5),
        ("assistant",): ({2, 4}, 5, {2}, 5),
        ("user", "system"): ({0, 1, 3, 5}, 6, {0, 1, 2, 3, 5}, 6),
        (): (set(), 5, {2}, 5),
    }
    for on, (plain, n, own, m) in table.items():
        assert (find_turns(TALK, on), count_written(TALK, on)) == (plain, n), on
        assert (find_turns(said, on), count_written(said, on)) == (own, m), on
    assert count_written([user("q")], ()) == 0 and find_turns([user("q")], "last_reply") == set()


def make_template(*, after: str = "</a>", last: str | None = None, before: str = "<u>", question_ends: str = "") -> Any:
    """A template that writes `after` behind earlier replies, and `last` behind the last one."""

    def write(messages: list[Any], reply_next: bool) -> str:
        text = ""
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                ends = last if last is not None and i == len(messages) - 1 else after
                text += f"<a>{message['content']}{ends}"
            else:
                text += f"{before}{message['content']}{question_ends}"
        return text + "<a>" * reply_next

    return write


TOKENS = ("<u>", "<a>", "</a>", "</s>", "<h>")


@pytest.mark.parametrize(
    ("template", "end"),
    [
        # what the template writes, and (text, when, is a token, closing, ends, number after the last, in history)
        ({}, ("</a>", "after", True, "</a>", ("</a>", "</s>"), 1, "")),
        ({"last": "</a></s>"}, ("</a>", "after", True, "</a>", ("</a>", "</s>"), 2, "")),
        ({"last": "</s>", "after": "<h>"}, ("</s>", "after", True, "<h>", ("</s>",), 1, "<h>")),
        ({"after": "<h></a>"}, ("</a>", "after", True, "<h></a>", ("</a>", "</s>"), 1, "")),
        ({"after": "\n", "last": ""}, ("<u>", "next", True, "", ("<u>", "</s>"), 0, "")),
        ({"after": " END ", "before": "U:"}, ("END", "after", False, " END", ("END", "</s>"), 1, "")),
        ({"after": "", "before": ""}, ("</s>", "never", True, "", ("</s>",), 0, "")),
    ],
    ids=str,
)
def test_the_end_of_a_turn_is_what_the_template_writes(template, end):
    found = find_turn_end(make_template(**template), tokens=TOKENS, stops=["</s>"], named=None)
    assert found == TurnEnd(
        **dict(zip(("text", "written", "is_token", "closing", "ends", "n_after", "in_history"), end, strict=True))
    )


def test_an_end_that_the_recipe_names_is_a_token():
    write = make_template()
    named = find_turn_end(write, tokens=TOKENS, stops=["</s>"], named="<h>")
    assert (named.text, named.written, named.ends) == ("<h>", "never", ("<h>", "</s>"))
    assert tell(lambda: find_turn_end(write, tokens=TOKENS, stops=["</s>"], named="<x>")) == (
        "data.end_of_turn=<x> is not a token of this model's tokenizer: name one, or add it to it"
    )
    token: dict[str, Any] = {"is_token": True, "closing": ""}
    end = TurnEnd(text="</a>", written="after", ends=("</a>", "</s>"), n_after=2, in_history="<h>", **token)
    assert [end.cut_reply(text) for text in ("x</a> </s>\n", "x</a></a></a>", "x ", "</a>x")] == [1, 5, 1, 5]
    once = TurnEnd(text="<u>", written="next", ends=("<u>",), n_after=0, in_history="", **token)
    assert [once.cut_reply(text) for text in ("x ", "x<u>")] == [2, 4]
    assert [end.find_end(text, 1) for text in ("x</a>y", "x\n</s>", "xy</a>", "x<h>")] == [5, 6, None, None]
    assert end.find_end("x<h>", 1, in_history=True) == 4
    assert [common_start(*pair) for pair in (("abc", "abd"), ("ab", "abc"), ("", "a"), ("b", "a"))] == [
        *("ab", "ab", "", "")
    ]


def test_a_begun_reply_goes_on_where_it_stands():
    write = make_template()
    assert write_begun_reply(write, [user("q"), assistant("a ")]) == "<u>q<a>a "

    def think(messages: list[Any], reply_next: bool) -> str:
        return write(messages, False) + "<a><think>\n" * reply_next

    assert write_begun_reply(think, [user("q"), assistant("<think>\nso")]) == "<u>q<a><think>\nso"
    assert write_begun_reply(think, [user("q"), assistant("<think>so")]) == "<u>q<a><think>\nso"
    assert write_begun_reply(think, [user("q"), assistant("so")]) == "<u>q<a>so"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
def test_a_token_is_trained_on_if_it_begins_in_a_trained_range(sizes, data):
    """Tokens that tile the text, and ranges that begin where tokens do."""
    begins = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    a, b = sorted(data.draw(st.tuples(st.sampled_from(begins), st.sampled_from(begins))))
    mask = mask_by_offsets([5] * len(sizes), lambda n: (begins[n], begins[n + 1]), [range(a, b)], ())
    assert mask == [a <= begin < b for begin in begins[:-1]]


def test_a_token_across_the_border_is_trained_on_unless_it_was_added():
    places = [(0, 2), (2, 5), (5, 6), (6, 9)]

    def find(*spans: range, added: tuple[int, ...] = ()) -> list[bool]:
        return mask_by_offsets([0, 1, 2, 3], places.__getitem__, [*spans], added)

    assert find(range(3, 6)) == [False, True, True, False]
    assert find(range(3, 6), added=(1,)) == [False, False, True, False]
    assert find(range(6, 9), range(0, 2)) == [True, False, False, True]
    assert find(range(0, 3), range(4, 6)) == [True, True, True, False]
    assert find(range(5, 5)) == [False] * 4


class Letters:
    """Tokenizer of letters that writes "ab" as one token, with marks around a text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(c) for c in text.replace("ab", "Z")]
        return [1, *ids, 2, 3] if add_special_tokens else ids


def test_texts_are_encoded_as_they_are_in_place():
    hf = Letters()
    assert encode_after(hf, "a", "bc") == [*map(ord, "c")] and encode_after(hf, "", "bc") == [*map(ord, "bc")]
    assert encode_after(hf, "a", "") == encode_after(hf, "", "") == []
    assert find_added_ids(hf) == ([1], [2, 3])
    assert join_encoded([([1], [True]), ([], []), ([2, 3], [False, True])]) == ([1, 2, 3], [True, False, True])


def test_ids_of_calls_are_new_in_a_conversation_and_alike_everywhere():
    calls: list[Any] = [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": 1}}]
    reply = finish_reply([1, 2], content="c", reasoning="r", calls=calls, tools=[])
    message = reply.message
    ids = [one["id"] for one in message.get("tool_calls", [])]
    assert [one["function"] for one in message.get("tool_calls", [])] == calls
    assert (message["content"], message.get("reasoning")) == ("c", "r")
    assert [one[6:] for one in ids] == ["000", "001"] and {len(one) for one in ids} == {9}
    assert reply.problem == "There is no function f; there is none."
    assert finish_reply([1], content="c", reasoning="", calls=[], tools=[]).message == assistant("c")
    assert rename_taken(message, [user("q")]) is message and rename_taken(assistant("x"), [message]) == assistant("x")
    again = rename_taken(message, [message])
    new = [one["id"] for one in again.get("tool_calls", [])]
    assert (
        not {*new} & {*ids} and rename_taken(message, [message]) == again and [one[6:] for one in new] == ["000", "001"]
    )
    third = rename_taken(message, [message, again])
    assert len({*ids, *new, *(one["id"] for one in third.get("tool_calls", []))}) == 6
    refused = refuse_reply("x", "why")
    assert (refused.message, refused.problem) == (assistant("x"), "why")
    plain = PlainParser().parse([1], "x", [])
    assert (plain.message, plain.problem) == (assistant("x"), "")
