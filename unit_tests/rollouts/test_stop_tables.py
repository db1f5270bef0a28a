"""Stops of a recipe, in tables: the tokens that end a turn, and the whole sentences of what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from core.errors import RunStopped, UserError
from rollouts.stops import Stops, StopStrings, check_stops, join_turn


@dataclass
class Letters:
    """Tokenizer with a token per letter; those below 3 are special, and not in a text."""

    stop_token_ids: list[int] = field(default_factory=lambda: [2, 1])
    turn_end: list[int] = field(default_factory=lambda: [2, 13])
    end_in_letters: str = ""
    written_ids: frozenset[int] = frozenset(range(3, 200))

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids if i >= 3)

    def encode(self, text: str) -> list[int]:
        return [ord(c) if c != "#" else 0 for c in text]


def ids_of(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_tokens_that_end_a_reply_are_the_models_and_the_recipes():
    stops = Stops(Letters(), [], [90, 5, 2])
    assert (stops.token_ids, stops.own, stops.strings) == ((1, 2, 5, 90), frozenset({1, 2}), None)
    assert stops.close_turn([65, 2]) == [] and stops.close_turn([65, 1]) == []
    assert stops.close_turn([65, 90]) == [2, 13] and stops.close_turn([2, 65]) == [2, 13]
    stops.check_completion(ids_of("any"), "length")  # without stop strings nothing can be missed


@pytest.mark.parametrize(
    ("text", "stop", "said"),
    [
        ("no", "eos", ""),
        ("no", "length", ""),
        ("my end", "eos", ""),
        ("my END", "length", ""),
        ("my end", "length", "the engine returned a stop string (rollout.stop) as if it had not seen it"),
        (
            "my end.",
            "eos",
            "the engine went on sampling after a stop string (rollout.stop): correct its generate()",
        ),
        (
            "halt it",
            "length",
            "the engine went on sampling after a stop string (rollout.stop): correct its generate()",
        ),
    ],
)
def test_a_completion_ends_with_its_stop_string(text, stop, said):
    stops = Stops(Letters(), ["end", "halt"], [])
    if not said:
        return stops.check_completion(ids_of(text), stop)
    with pytest.raises(RunStopped) as raised:
        stops.check_completion(ids_of(text), stop)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("reply", "closing", "following", "joined"),
    [
        ([5, 2], [], [2, 7, 8], [7, 8]),
        ([5, 2], [], [7, 2], [7, 2]),
        ([5, 2], [], [2], []),
        ([5, 2], [], [], []),
        ([5, 6], [2], [6, 7], [2, 6, 7]),
        ([2, 5], [], [2, 7], [2, 7]),
    ],
)
def test_a_turn_that_the_reply_has_begun_is_not_begun_again(reply, closing, following, joined):
    assert join_turn(reply, closing, following) == joined


def test_the_window_has_the_bytes_of_the_longest_stop_string():
    assert StopStrings(["abc", "ää", "x"], Letters().decode, ()).window == 4 + 8


@pytest.mark.parametrize("silent", [0, 35, 36, 37, 44, 45, 100])
def test_tokens_without_text_do_not_hide_a_stop_string(silent):
    strings = StopStrings(["z"], Letters().decode, Letters().written_ids)
    assert strings.find_end([65, *[0] * silent, ord("z"), 66]) == silent + 2
    halves = StopStrings(["yz"], Letters().decode, Letters().written_ids)
    ids = [65, ord("y"), *[0] * silent, ord("z"), 66]
    assert halves.find_end(ids) == silent + 3
    assert halves.find_end(ids, start=silent + 2) == silent + 3
    assert halves.find_end(ids[:-2]) is None


@pytest.mark.parametrize(
    ("tokenizer", "strings", "token_ids", "said"),
    [
        (Letters(), [], [], ""),
        (Letters(), ["ab", "c"], [0, 3, 199], ""),
        (Letters(end_in_letters="<end>"), ["ab", "end"], [], ""),
        (
            Letters(end_in_letters="<end>"),
            ["<end>."],
            [],
            "the chat template ends a turn with <end>, which is no token of this model's tokenizer, so no reply would "
            "stop there: add it to the tokenizer, name another token in data.end_of_turn, or add the text to "
            "rollout.stop",
        ),
        (
            Letters(),
            ["ab", "c\ufffd"],
            [],
            "rollout.stop names c\ufffd, which stands for an unfinished character: leave it out",
        ),
        (
            Letters(),
            ["ab", "c#d"],
            [],
            "rollout.stop names c#d, which is never in the text of a reply: special tokens are not part of it; name "
            "the token in rollout.stop_token_ids",
        ),
        (Letters(), [], [3, -1], "rollout.stop_token_ids names -1, and the tokenizer has ids from 0 to 199"),
        (Letters(), [], [3, 200], "rollout.stop_token_ids names 200, and the tokenizer has ids from 0 to 199"),
        (
            Letters(),
            [],
            [3, 1],
            "rollout.stop_token_ids names 1, which ends a reply of this model anyway: leave it out",
        ),
    ],
)
def test_a_stop_that_never_occurs_is_refused_with_the_fix(tokenizer, strings, token_ids, said):
    if not said:
        return check_stops(tokenizer, strings, token_ids, 200)
    with pytest.raises(UserError) as refused:
        check_stops(tokenizer, strings, token_ids, 200)
    assert str(refused.value) == said
