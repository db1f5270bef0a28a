"""Texts to ids and masks: without offsets, in calls of about a million characters, and beside what is added."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import BatchEncoding

from data_feeds.chat.encoding import CHARS_AT_ONCE, encode_after, encode_pieces, find_added_ids, mask_by_offsets
from data_feeds.chat.tokenizer import ChatTokenizer
from unit_tests.helpers.chat_families import assistant, user
from unit_tests.helpers.sentences import tell


class Letters:
    """Tokenizer without offsets: one token per letter, and one for "ab"."""

    def __call__(self, texts: list[str], **settings: bool) -> Any:
        assert settings["add_special_tokens"] is False
        return BatchEncoding({"input_ids": [self.encode(text, add_special_tokens=False) for text in texts]})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text.replace("ab", "Z")]


T, F = True, False


@pytest.mark.parametrize(
    ("text", "learnt", "mask"),
    [
        ("xxabyy", [range(2, 4)], [F, F, T, F, F]),
        ("xxabyy", [range(0, 2), range(4, 5)], [T, T, F, T, F]),
        ("xxabyy", [range(0, 6)], [T] * 5),
        ("xxabyy", [range(2, 2)], [F] * 5),
        ("xxabyy", [], [F] * 5),
        ("xxabyy", True, [T] * 5),
        ("xxabyy", False, [F] * 5),
        ("", True, []),
    ],
)
def test_a_tokenizer_without_offsets_counts_the_tokens_before(text, learnt, mask):
    others: list[Any] = [("ab", True), ("c", [range(0, 1)])]
    [first, (ids, found), last] = encode_pieces(Letters(), [others[0], (text, learnt), others[1]])
    assert (ids, found) == ([ord(letter) for letter in text.replace("ab", "Z")], mask)
    assert (first, last) == (([90], [T]), ([99], [T]))


@pytest.mark.parametrize("learnt", [range(3, 5), range(2, 3)])
def test_a_range_that_begins_or_ends_inside_a_token_needs_offsets(learnt):
    assert tell(lambda: encode_pieces(Letters(), [("xxabyy", [learnt])])) == (
        "the tokenizer of this model gives no offsets, and writes the beginning of a conversation with other tokens "
        "than the whole: take a tokenizer of the library tokenizers (tokenizer.json)"
    )


class Counts:
    """Tokenizer that gives the length of a text as its only token."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, texts: list[str], **settings: bool) -> Any:
        self.calls.append(len(texts))
        return BatchEncoding({"input_ids": [[len(text)] for text in texts]})


@pytest.mark.parametrize(
    ("sizes", "calls"),
    [
        ([3, 0, 2], [3]),
        ([CHARS_AT_ONCE, 1], [1, 1]),
        ([CHARS_AT_ONCE - 1, 1, 1], [2, 1]),
        ([CHARS_AT_ONCE - 2, 1, CHARS_AT_ONCE + 5, 2], [3, 1]),
        ([CHARS_AT_ONCE, CHARS_AT_ONCE - 1, 1, 2], [1, 2, 1]),
        # memory grows with the characters of a call
        ([600_000] * 3, [2, 1]),
        ([], []),
    ],
)
def test_texts_are_encoded_about_a_million_characters_at_once(sizes, calls):
    hf = Counts()
    text = "x" * (CHARS_AT_ONCE + 5)
    found = encode_pieces(hf, [(text[:size], True) for size in sizes])
    assert (hf.calls, found) == (calls, [([size], [True]) for size in sizes])


class Marked:
    """Tokenizer that writes "a" as two tokens, and marks around a text."""

    def __init__(self, before: list[int], after: list[int]):
        self.before, self.after = before, after

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [token for letter in text for token in (ord(letter), 1)]
        return [*self.before, *ids, *self.after] if add_special_tokens else ids


@pytest.mark.parametrize(("before", "after"), [([], []), ([7], []), ([], [8]), ([7, 97], [97, 8]), ([1], [1])])
def test_ids_around_a_text_are_found_whatever_it_is_written_as(before, after):
    assert find_added_ids(Marked(before, after)) == (before, after)


def test_a_text_after_another_begins_behind_its_last_token():
    hf = Marked([7], [8])
    assert encode_after(hf, "xy", "z") == [ord("z"), 1] and encode_after(hf, "", "z") == [ord("z"), 1]
    assert encode_after(hf, "xy", "") == []


@pytest.mark.parametrize(
    ("places", "spans", "added", "mask"),
    [
        # three tokens that write one character: all of them are its turn's
        ([(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)], [range(1, 2)], {}, [F, T, T, T, F]),
        # the token before begins in the turn before: it is the earlier one's alone
        ([(0, 3), (3, 4)], [range(0, 2), range(3, 4)], {}, [T, T]),
        ([(0, 2), (2, 4), (4, 5)], [range(0, 3), range(3, 5)], {1}, [T, T, T]),
        ([(0, 2), (0, 2), (2, 3)], [range(1, 3)], {}, [T, T, T]),
        # a header's token reaches into the turn
        ([(0, 2), (2, 4), (4, 5)], [range(3, 5)], {}, [F, T, T]),
        ([(0, 2), (2, 4), (4, 5)], [range(3, 5)], {1}, [F, F, T]),
        ([(0, 2), (2, 3), (4, 5)], [range(3, 5)], {}, [F, F, T]),
        # the order of the ranges plays no role
        ([(0, 1), (1, 2), (2, 3)], [range(2, 3), range(0, 1)], {}, [T, F, T]),
        ([], [range(0, 1)], {}, []),
    ],
)
def test_tokens_at_the_edges_of_a_range(places, spans, added, mask):
    ids = list(range(len(places)))
    assert mask_by_offsets(ids, places.__getitem__, spans, added) == mask


def test_marks_of_a_plain_tokenizer_are_written_once(tmp_path):
    from unit_tests.helpers.made_tokenizers import make_hf

    make_hf("never", ["<s>", "</s>"], eos="</s>", bos="<s>", adds_bos=True, adds_eos=True).save_pretrained(tmp_path)
    plain = ChatTokenizer(str(tmp_path), "plain")
    [bos, eos] = plain.hf.convert_tokens_to_ids(["<s>", "</s>"])
    assert plain.added_ids == ([bos], [eos])
    it = plain.encode("It is")
    pieces: list[Any] = [
        ("It is", True),
        ("<s>It is</s>", True),
        ("It is", False),
        ("It is", [range(0, 2)]),
        ("", True),
    ]
    found = plain.encode_pieces(pieces)
    assert found[0] == ([bos, *it, eos], [True] * (len(it) + 2))
    assert found[1] == found[0]
    assert found[4] == ([bos, eos], [True, True])
    assert found[2] == ([bos, *it], [False] * (len(it) + 1))
    assert found[3][0] == [bos, *it] and found[3][1][0] is False and any(found[3][1])
    assert plain.mask_turns([user("It"), assistant(" is")], "last_reply")[0][-1] == eos
