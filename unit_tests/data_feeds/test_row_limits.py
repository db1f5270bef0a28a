"""Rows at the limits of what can be read: recorded episodes, ratios, forms after the first rows, and other columns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.errors import UserError
from core.types.allowed_tokens import AllowedTokens
from core.types.samples import LOGP_ROUNDING
from data_feeds.rows.convert_form import build_turns, convert_row, count_images, list_images, place_images
from data_feeds.rows.episodes import Sampling, read_episodes
from data_feeds.rows.find_form import PROBED, FormFit, Probe, find_form, write_source
from data_feeds.rows.forms import Turns, list_names
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.mixture import Curriculum, Mixture, interleave_sources, whole_parts
from data_feeds.rows.values import check_characters, is_absent, parse_list, to_text
from unit_tests.helpers.chat_families import assistant, call, user
from unit_tests.helpers.sentences import tell


class Letters:
    """Tokenizer of ten letters."""

    vocabulary = 10

    def decode(self, ids: list[int]) -> str:
        return "".join("abcdefghij"[i] for i in ids)


FINE: dict[str, Any] = {"token_ids": [0, 1, 2], "logp": [None, -1.0, 0], "temperature": 1.0}


def read(given: Any, *, gaps: bool = False, longest: int = 3, prompt: Any = (0,), **sampling: Any) -> Any:
    keys: dict[str, Any] = {"max_new_tokens": 9} | sampling
    return read_episodes(given, [*prompt], Letters(), Sampling(**keys), longest, fills_gaps=gaps)


@pytest.mark.parametrize(
    ("change", "sampling"),
    [
        ({}, {}),
        ({"logp": [None, LOGP_ROUNDING, -1.7976931348623157e308]}, {}),
        ({"token_ids": [0, 9, 0]}, {}),
        ({"temperature": 1}, {}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"top_p": 1.0, "top_k": 0, "min_p": 0.0}, {}),
        ({"top_p": None, "completion": None}, {}),
        ({"allowed_tokens": ["c", "b"]}, {"allowed_texts": ("b", "c")}),
        ({}, {"allowed_texts": ("b", "c"), "allowed": AllowedTokens(allowed=(1, 2))}),
        ({"allowed_tokens": []}, {}),
        ({"completion": "bc", "stop": "turns"}, {}),
    ],
)
def test_an_episode_at_the_limits_is_read(change, sampling):
    [episode] = read([FINE | change], **sampling)
    assert episode.token_ids == (FINE | change)["token_ids"] and episode.stop == change.get("stop", "eos")
    assert all(type(logp) is float for logp in episode.logp if logp is not None)


SETS = "so the sets that its tokens were chosen from are unknown: an importance weight needs them"


@pytest.mark.parametrize(
    ("change", "sampling", "sentence"),
    [
        (
            {"logp": [None, 1.01 * LOGP_ROUNDING, 0]},
            {},
            f"an episode has the log-probability {1.01 * LOGP_ROUNDING!r}, where a finite number up to 0 is possible",
        ),
        (
            {"logp": [None, "-1", 0]},
            {},
            "an episode has the log-probability '-1', where a finite number up to 0 is possible",
        ),
        ({"token_ids": [0, 1.0, 2]}, {}, "an episode has the token id 1.0, and this vocabulary has 10"),
        ({"token_ids": [0, "b", 2]}, {}, "an episode has the token id 'b', and this vocabulary has 10"),
        ({"top_p": 0.99, "min_p": 0.1}, {}, f"an episode was sampled with top_p, {SETS}"),
        ({"min_p": 0.1}, {}, f"an episode was sampled with min_p, {SETS}"),
        ({"allowed_tokens": ["b", 3]}, {}, "an episode's allowed_tokens must be a list of texts, found ['b', 3]"),
        (
            {"temperature": 0.25},
            {"temperature": 0.5},
            "an episode was sampled at temperature 0.25, and rollout.temperature is 0.5: their log-probabilities "
            "cannot be compared; set rollout.temperature to it",
        ),
        (
            {"stop": None, "completion": []},
            {},
            "an episode's completion is text, and its stop eos, length or turns, found [], eos",
        ),
        ({"messages": [user("x")]}, {}, "episodes must end in an assistant turn, found a turn of user"),
        ({"messages": []}, {}, "episodes must be text or a list of {role, content} texts, found []"),
    ],
)
def test_an_episode_beyond_the_limits_is_one_sentence(change, sampling, sentence):
    assert tell(lambda: read([FINE | change], **sampling), InvalidRow) == sentence


def test_several_episodes_are_read_in_their_order():
    episodes = [
        FINE,
        {"completion": "zz", "token_ids": None, "logp": None, "stop": "length"},
        {"messages": [assistant("b"), user("so?"), assistant("c")], "completion": "bc"},
    ]
    first, second, third = read(episodes)
    assert (first.completion, second.completion, third.completion) == ("bc", "zz", "bc")
    assert (second.messages, second.stop, second.token_ids) == ([assistant("zz")], "length", [])
    assert len(third.messages) == 3
    [later] = read([FINE | {"logp": [None, None, -2]}], prompt=(0, 1))
    assert (later.completion, later.logp) == ("c", [None, None, -2.0])
    [text] = read([{"completion": "x"}], is_truncated=True)
    assert text.messages == [assistant("x")], "a text has no weight that truncation would change"
    for given in ("x", '{"completion": "x"}', {"completion": "x"}, 3):
        assert tell(lambda one=given: read(one), InvalidRow) == f"episodes must be a list of objects, found {given!r}"
    assert tell(lambda: read([FINE], longest=2), InvalidRow).startswith("3 tokens, more than ")


def test_a_null_of_an_episode_was_written_only_in_text():
    turn = assistant("", {**call("f"), "function": {"name": "f", "arguments": {"x": None}}})
    episode = {"messages": [turn]}
    assert "hold null" in tell(lambda: read([episode], gaps=True), InvalidRow)
    for given, gaps in ((json.dumps([episode]), True), (json.dumps([episode]), False), ([episode], False)):
        [made] = read(given, gaps=gaps)
        assert made.messages == [turn]


def test_ratios_are_exact_up_to_a_hundred_thousand_rows():
    assert whole_parts([0.99999, 0.00001], where="k") == (99_999, 1)
    assert tell(lambda: whole_parts([1.0, 0.00001], where="k")) == (
        "k: the ratios 1.0, 1e-05 are exact only over 100001 rows, and a mixture repeats after at most 100000: round "
        "them to fewer digits"
    )
    assert whole_parts([2.5, 0.0, 7.5], where="k") == (1, 0, 3)
    assert interleave_sources((2, 1, 2)) == [0, 2, 0, 1, 2] and interleave_sources((1, 3)) == [1, 1, 0, 1]


def test_a_curriculum_goes_on_in_each_source_where_it_was():
    plan = Curriculum(((3, Mixture((1, 0))), (2, Mixture((1, 1)))), Mixture((1, 3)))
    placed = [plan.place_ticket(ticket) for ticket in range(9)]
    assert placed == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (0, 4), (1, 3)]
    assert [plan.count_drawn(n) for n in (0, 3, 4, 5, 9)] == [[0, 0], [3, 0], [4, 0], [4, 1], [5, 4]]
    assert Mixture((2, 1)).count_drawn(7) == [5, 2]
    assert [Mixture((2, 1)).place_ticket(n) for n in (7, 8)] == [(0, 5), (1, 2)]


GOOD, ODD = {"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": 4}


def recognise(rows: list[Any], **given: Any) -> FormFit:
    return find_form("conversations", rows, key="data.train=x", path="x", **given)


def test_the_form_is_that_of_the_first_rows():
    assert recognise([*[GOOD] * PROBED, ODD]).name == "prompt_completion"
    assert tell(lambda: recognise([*[GOOD] * (PROBED - 1), ODD])) == (
        "data.train=x has the columns of form prompt_completion, and row 199 is of another form (its completion is 4): "
        "repair it, or write data.train: [{path: x, form: prompt_completion}], which counts such rows as invalid"
    )
    # a column that begins later is looked at alone
    late = recognise([*[GOOD] * PROBED, {"prompt": 3, "completion": 4, "system": "s"}])
    assert str(late) == "messages = system + prompt + completion" and "system" not in late.unseen
    assert "system" in recognise([GOOD] * 3).unseen and "prompt" not in recognise([GOOD]).unseen


def test_columns_of_rows_are_those_that_are_not_null():
    probe = Probe([{"a": {"b": 1}, "c": None, "d": 2}, {"a": None, "d": 3, "e.f": 4}])
    assert probe.columns == {"a", "d", "e.f"}
    assert probe.list_columns("c|d|a.b|a.x|e.f|z") == ["d", "a.b", "e.f"]
    assert probe.list_values("d") == [2, 3] and probe.list_values("a.b") == [1]
    same = Probe([{"a": 1, "b": 1}, {"a": 2, "b": 2}])
    assert same.is_equal("a", "b") and not Probe([{"a": 1, "b": 1}, {"a": 2, "b": 3}]).is_equal("a", "b")


def test_a_source_is_written_where_it_stands_in_the_recipe():
    assert write_source("data.train=x", "x", form="verl", columns="{a: b}") == (
        "data.train: [{path: x, form: verl, columns: {a: b}}]"
    )
    assert write_source("data.eval=x", "x", form="verl") == "data.eval: {path: x, form: verl}"
    assert write_source("data.train[1]=x", "x", form="verl") == "form: verl"


def test_names_of_forms_are_listed_once_in_their_order():
    assert list_names("scored") == ["ours"] and list_names("unpaired") == [
        *("ours", "prompt_completion", "openrlhf", "alpaca", "kto_tag", "sharegpt")
    ]
    assert list_names()[:3] == ["ours", "messages_system", "prompt_completion"]
    assert len(list_names()) == len({*list_names()})


SYSTEM = {"role": "system", "content": "s"}


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


MARKED = [SYSTEM, user("<image>a"), assistant("b<image>")]


def part(text: str = "") -> dict[str, Any]:
    return {"type": "text", "text": text} if text else {"type": "image"}


IMAGE = part()


def test_images_stand_where_the_marks_are():
    placed = place_images({"messages": MARKED, "x": 1}, 2, is_ours=True)
    assert placed == {
        "messages": [SYSTEM, turn("user", [IMAGE, part("a")]), turn("assistant", [part("b"), IMAGE])],
        "x": 1,
    }
    said = place_images(
        {"messages": "q", "chosen": [user("<image>")], "rejected": [user("a<image>b")]}, 1, is_ours=True
    )
    assert said["chosen"] == [{"role": "user", "content": [IMAGE]}]
    assert said["rejected"] == [{"role": "user", "content": [part("a"), IMAGE, part("b")]}]
    # all of them before the first question of another form, and nowhere else
    bare = [SYSTEM, user("q"), user("r")]
    before = place_images({"messages": bare}, 2, is_ours=False)["messages"]
    assert before == [SYSTEM, {"role": "user", "content": [IMAGE, IMAGE, part("q")]}, user("r")]
    assert place_images({"messages": bare}, 2, is_ours=True) == {"messages": bare}
    assert place_images({"messages": [SYSTEM]}, 2, is_ours=False) == {"messages": [SYSTEM]}
    assert place_images({"messages": "no mark"}, 2, is_ours=False) == {"messages": "no mark"}


def test_numbered_parts_of_images_are_in_order():
    numbered = [{"role": "user", "content": [IMAGE | {"index": 0}, IMAGE | {"index": 1}, part("a")]}]
    assert place_images({"messages": numbered}, 2, is_ours=True)["messages"] == [
        {"role": "user", "content": [IMAGE, IMAGE, part("a")]}
    ]
    for images, wrong in ((2, numbered[0]["content"][1::-1]), (3, numbered[0]["content"])):
        turns = [{"role": "user", "content": wrong}]
        numbers = [one["index"] for one in wrong if "index" in one]
        assert tell(lambda t=turns, n=images: place_images({"messages": t}, n, is_ours=True), InvalidRow) == (
            f"the parts of messages are of the images {numbers}: write them in order, from 0 on"
        )
    for images, column in ((1, "messages"), (3, "chosen")):
        assert tell(lambda n=images, c=column: place_images({c: MARKED}, n, is_ours=True), InvalidRow) == (
            f"it has {images} images, and 2 marks <image> in {column}: write one for each"
        )


def test_images_of_a_row_are_counted():
    assert [list_images(one) for one in ("a", ["a", "b"], '["a"]', None, {"bytes": None, "path": None}, [])] == [
        *(["a"], ["a", "b"], ["a"], [], [], [])
    ]
    assert count_images({"image": "a", "images": ["b", "c"], "x": ["d"]}) == 3 and count_images({}) == 0
    assert is_absent({"bytes": None}) and not is_absent({"bytes": b"", "path": None}) and not is_absent("")
    assert convert_row(recognise([GOOD]), {**GOOD, "videos": []})["messages"] == [user("q"), assistant("a")]


def test_turns_are_put_together_from_their_columns():
    both = Turns(system="s", history="h", user=("i", "j"), assistant="a")
    row = {"s": "S", "h": [["q", "r"]], "i": "I", "j": "J", "a": "A"}
    turns = [{"role": "system", "content": "S"}, user("q"), assistant("r"), user("I\nJ"), assistant("A")]
    assert build_turns(both, row) == turns
    assert build_turns(both, row | {"s": "", "h": [], "j": None}) == [user("I"), assistant("A")]
    assert build_turns(both, row | {"i": [user("x")]}) == [*turns[:3], user("x"), user("J"), assistant("A")]
    assert build_turns(both, {"i": "I"}) == "I" and build_turns(both, {"i": json.dumps([user("x")])}) == json.dumps(
        [user("x")]
    )
    assert build_turns(both, {"s": "S"}) == turns[:1] and build_turns(both, {"h": [["q", "r"]]}) == turns[1:3]
    assert build_turns(both, {}) is None
    whole = Turns(system="s", whole="w")
    talk = [turns[0], user("q")]
    assert build_turns(whole, {"s": "S", "w": talk}) == talk and build_turns(whole, {"s": "S", "w": []}) == talk[:1]
    assert build_turns(whole, {"w": talk}) == talk


@pytest.mark.parametrize(
    "keys", [("user", "assistant"), ("human", "assistant"), ("input", "output"), ("question", "answer")]
)
def test_a_question_and_its_reply_may_be_one_object(keys):
    asks, replies = keys
    row = {"conversation": [{asks: "q", replies: "a"}, {asks: "r", replies: "b"}]}
    fit = recognise([row])
    assert fit.name == "turn_pairs"
    made = convert_row(fit, row)["messages"]
    assert made == [user("q"), assistant("a"), user("r"), assistant("b")]


def test_ids_of_calls_that_a_row_has_are_kept():
    turns = [assistant("", call("f", "mine")), {"role": "tool", "content": "1", "tool_call_id": "mine"}, assistant("x")]
    assert build_turns(Turns(whole="w", assistant="a"), {"w": turns, "a": "y"}) == [*turns, assistant("y")]


def test_numbers_and_texts_of_a_row_are_written_as_usual():
    assert to_text(-(2**60), "x", "bad_id") == str(-(2**60)) and to_text(-3.0, "x", "bad_id") == "-3"
    assert to_text(-(2.0**53), "x", "bad_id") == "-9007199254740992.0"
    assert parse_list('\n [{"a": 1}]') == [{"a": 1}] and parse_list('"[1]"') is None
    for value in ("\ud800", {"a": ["\udfff"]}, {"\ud800": 1}):
        assert tell(lambda one=value: check_characters(one), InvalidRow).startswith("a text holds half of a character")
    check_characters({"a": ["\U0001f600", 3, None]})
    with pytest.raises(UserError, match="form alpaca needs rows with instruction and output or response"):
        recognise([GOOD], given="alpaca")
