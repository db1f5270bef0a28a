"""Pure parts of the rewards, each against a table: results and how they join, rubrics, suites, verdicts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from rewards.code_tests import Suite, read_suite
from rewards.judging.judge import join_votes, make_body
from rewards.judging.readings import Unreadable, read_verdict
from rewards.judging.settings import JudgeSettings
from rewards.rubric_rows import Item, add_up, read_rubric
from rewards.sandbox.base import Limits
from rewards.scored import Failed, RewardResult, Scored, Steps, merge_results, read_result

NOTE: dict[str, Any] = {"by": "j", "text": "t"}
RESULTS: list[tuple[Any, dict[str, Any]]] = [
    (0.5, {"reward_parts": {"correct": 0.5}}),
    ({"a": 1, "b": -1e9}, {"reward_parts": {"a": 1.0, "b": -1e9}}),
    (
        Scored(
            {"a": 1.0},
            turn_parts=[{"a": 0.5, "t": 1.0}, {"t": 2.0}],
            token_parts={"a": [0.25, 1], "k": [1.0, 2.0], "s": Steps("\n", [1, 3.0]), "t": [4.0]},
            notes=[{**NOTE, "seconds": 2}],
            counts={"calls": 2},
        ),
        {
            # shares of a part that the parts lack are a part of their own: of turns and of tokens together
            "reward_parts": {"a": 1.0, "t": 7.0, "k": 3.0, "s": 4.0},
            "turn_parts": ({"a": 0.5, "t": 1.0}, {"t": 2.0}),
            "token_parts": {"a": (0.25, 1.0), "k": (1.0, 2.0), "s": Steps("\n", (1.0, 3.0)), "t": (4.0,)},
            "notes": ({**NOTE, "seconds": 2},),
            "counts": {"calls": 2.0},
        },
    ),
    (Scored({}, turn_parts=[{"t": 1.0}, {}]), {"reward_parts": {"t": 1.0}, "turn_parts": ({"t": 1.0}, {})}),
    (True, {"failure": "f must return a dict of named numbers, it returned True"}),
    (None, {"failure": "f must return a dict of named numbers, it returned None"}),
    ({}, {"failure": "f must return a dict of named numbers, it returned {}"}),
    ({"a": 1.1e9}, {"failure": "f must return numbers up to 1e+09 by name, it returned 'a': 1100000000.0"}),
    ({"a": math.nan}, {"failure": "f must return numbers up to 1e+09 by name, it returned 'a': nan"}),
    ({"a": "1"}, {"failure": "f must return numbers up to 1e+09 by name, it returned 'a': '1'"}),
    ({3: 1.0}, {"failure": "f must return numbers up to 1e+09 by name, it returned 3: 1.0"}),
    (
        Scored({"a": 1.0}, turn_parts=[{"a": math.inf}]),
        {"failure": "turn_parts of f must return numbers up to 1e+09 by name, it returned 'a': inf"},
    ),
    (
        Scored({"a": 1.0}, token_parts={"a": [math.inf]}),
        {"failure": "token_parts of f must return numbers up to 1e+09 by name, it returned 'a': inf"},
    ),
    (
        Scored({"a": 1.0}, counts={"n": math.inf}),
        {"failure": "counts of f must return numbers up to 1e+09 by name, it returned 'n': inf"},
    ),
    (Scored({"a": 1.0}, notes="x"), {"failure": "notes of f must be a list, they are 'x'"}),
    *(
        (
            Scored({"a": 1.0}, notes=[note]),
            {"failure": f"a note of f must be an object with the texts by and text, it is {note!r}"},
        )
        for note in ("x", {"by": "j"}, {"by": 3, "text": "t"})
    ),
    *(
        (
            Scored({"a": 1.0}, notes=[{**NOTE, "seconds": seconds}]),
            {"failure": f"seconds of a note of f must be a number, they are {seconds!r}"},
        )
        for seconds in (True, "1")
    ),
    (
        Scored({"a": 1.0}, notes=[{**NOTE, "x": {1}}]),
        {"failure": "notes of f must be JSON: Object of type set is not JSON serializable"},
    ),
    (
        Failed(" no \n answer ", notes=[NOTE], counts={"calls": 1}),
        {"failure": "no answer", "notes": (NOTE,), "counts": {"calls": 1.0}},
    ),
    (Failed(""), {"failure": "the reward failed the sample, and did not say why"}),
    (Failed("x" * 301), {"failure": "x" * 300}),
    (Failed("why", notes="x"), {"failure": "why (notes of Failed must be a list, they are 'x')"}),
    ("x" * 400, {"failure": f"f must return a dict of named numbers, it returned {'x' * 400!r}"[:300]}),
]

DEEP = "[" * 5000
"""JSON that Python's parser refuses for its depth."""


@pytest.mark.parametrize(("returned", "result"), RESULTS)
def test_a_result_is_read_or_fails_the_sample_in_one_sentence(returned, result):
    assert read_result(returned, "f") == RewardResult(**result)


def test_only_the_middle_of_a_long_note_is_left_out():
    for n in (4000, 4001):
        text = "a" * (n // 2) + "b" * (n - n // 2)
        [note] = read_result(Scored({"a": 1.0}, notes=[{"by": "j", "text": text}]), "f").notes
        assert note == {"by": "j", "text": text if n == 4000 else f"{'a' * 2000} ... {'b' * 2000}"}


def test_results_of_several_functions_join_under_their_prefixes():
    one = RewardResult(
        reward_parts={"a": 1.0},
        turn_parts=({"a": 1.0}, {"a": 0.0}),
        token_parts={"a": (1.0,)},
        notes=(NOTE,),
        counts={"calls": 1.0, "x": 1.0},
    )
    two = RewardResult(reward_parts={"a": 2.0}, turn_parts=({}, {"b": 3.0}), notes=(NOTE,), counts={"calls": 2.0})
    none = RewardResult(reward_parts={"c": 4.0}, token_parts={"c": (5.0,)})
    assert merge_results([("", one)]) is one
    assert merge_results([("x/", one)]).reward_parts == {"x/a": 1.0}
    joined = merge_results([("x/", one), ("y/", two), ("", none)])
    assert joined == RewardResult(
        reward_parts={"x/a": 1.0, "y/a": 2.0, "c": 4.0},
        turn_parts=({"x/a": 1.0}, {"x/a": 0.0, "y/b": 3.0}),
        token_parts={"x/a": (1.0,), "c": (5.0,)},
        notes=(NOTE, NOTE),
        counts={"calls": 3.0, "x": 1.0},
    )
    about = {"notes": (NOTE,), "counts": {"calls": 1.0, "x": 1.0}}
    failed = [("", RewardResult(failure="first")), ("y/", RewardResult(failure="second")), ("x/", one)]
    assert merge_results(failed) == RewardResult(failure="first", **about)
    stopped = [("", RewardResult(stop="wrong key")), ("x/", one), ("", RewardResult(stop="later"))]
    assert merge_results(stopped) == RewardResult(stop="wrong key", **about)
    three = RewardResult(turn_parts=({}, {}, {}))
    said = "turn_parts of two functions are of 2 and 3 replies"
    assert merge_results([("x/", one), ("y/", three)]) == RewardResult(failure=said, **about)
    assert merge_results([*failed, ("y/", three)]).failure == "first"


def test_a_rubric_is_read_from_a_list_or_its_json():
    given = [
        {"criterion": "a", "points": 3},
        {"description": "b", "weight": -0.5},
        {"criterion": "c", "description": "d", "points": True, "weight": 1e6},
    ]
    items = [
        *(Item(criterion="a", points=3.0), Item(criterion="b", points=-0.5)),
        Item(criterion="c", points=1e6),
    ]
    assert read_rubric("row", {"rubric": given}) == read_rubric("row", {"rubric": json.dumps(given)}) == items
    missing = "row has no rubric: give it a column rubric, a list of criteria with points"
    cases: list[tuple[Any, str]] = [
        *((given, missing) for given in (None, [], {}, "[]", 3)),
        ("[", "row: rubric is no JSON: '['"),
        (DEEP, f"row: rubric is no JSON: {DEEP!r:.80}"),
        *(
            ([one], f"row: a criterion must have a text and points, found {one!r}")
            for one in ("x", {"criterion": " ", "points": 1}, {"criterion": "a"}, {"criterion": "a", "points": 1.1e6})
        ),
    ]
    for given, sentence in cases:
        with pytest.raises(ValueError) as refused:
            read_rubric("row", {"rubric": given})
        assert str(refused.value) == sentence


def test_points_that_are_met_are_divided_by_the_positive_ones():
    mixed = [Item(criterion="a", points=3), Item(criterion="b", points=1), Item(criterion="c", points=-2)]
    assert [add_up(mixed, met) for met in ([1, 1, 0], [1, 0, 0.5], [0, 0, 1])] == [1.0, 0.5, -0.5]
    mistakes = [Item(criterion="a", points=-3), Item(criterion="b", points=-1)]
    assert [add_up(mistakes, met) for met in ([0, 0], [1, 0], [1, 1])] == [1.0, 0.25, 0.0]
    assert add_up([Item(criterion="a", points=0)], [1.0]) == 1.0


FILE = "import math\n\ndef test_a():\n    pass\n\ndef check(f):\n    assert f() == 1\n\nx = 2\nassert x\n"
SUITES: list[tuple[dict[str, Any], Suite]] = [
    ({"tests": ["assert f()", "g()"], "setup": "x = 1"}, Suite(id="r", tests=("assert f()", "g()"), setup="x = 1")),
    ({"tests": ("f()",), "setup": None}, Suite(id="r", tests=("f()",))),
    ({"pairs": [{"stdin": "1", "stdout": "2"}]}, Suite(id="r", pairs=(("1", "2"),))),
    ({"pairs": '[{"stdin": "", "stdout": "2"}]', "tests": "x"}, Suite(id="r", pairs=(("", "2"),))),
    (
        {"tests": FILE, "entry_point": "solve"},
        Suite(
            id="r",
            tests=("test_a()", "check(solve)", "assert x"),
            setup="import math\ndef test_a():\n    pass\ndef check(f):\n    assert f() == 1\nx = 2",
        ),
    ),
]
NO_SUITES: list[tuple[dict[str, Any], str]] = [
    *(({"tests": tests}, "r has no tests: give it a column tests, or a column pairs") for tests in (None, [], "x = 1")),
    ({"tests": 3}, "r: tests must be a list of texts, or the text of a file, found 3"),
    ({"tests": [3]}, "r: tests and setup must be texts, found 3"),
    ({"tests": ["f()"], "setup": 3}, "r: tests and setup must be texts, found 3"),
    ({"tests": ["f("]}, "r: a test is no Python: f("),
    ({"tests": ["f()"], "setup": "f("}, "r: a test is no Python: f("),
    *(
        ({"tests": ["f()", test]}, f"r: a test has no statement, so that any code passes: {test!r}")
        for test in ("", "# x", "pass", "'x'")
    ),
    ({"pairs": "["}, "r: pairs is no JSON: ["),
    ({"pairs": DEEP}, f"r: pairs is no JSON: {DEEP:.80}"),
    ({"pairs": [3]}, "r: pairs must be objects with stdin and stdout, found 3"),
    ({"pairs": [{"stdin": "x"}]}, "r: pairs must be objects with stdin and stdout, found {'stdin': 'x'}"),
    (
        {"pairs": [{"stdin": ["x"], "stdout": "y"}]},
        "r: stdin and stdout of pairs must be text, found {'stdin': ['x'], 'stdout': 'y'}: join a list of lines with "
        "line breaks",
    ),
]


def test_tests_of_a_row_are_read_or_named():
    for extra, suite in SUITES:
        assert read_suite("r", extra) == suite, extra
    for extra, sentence in NO_SUITES:
        with pytest.raises(ValueError) as refused:
            read_suite("r", extra)
        assert str(refused.value) == sentence, extra


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"message": {"content": text}, **more}


def tag(value: object) -> str:
    return f"<verdict-k>{value}</verdict-k>"


def weigh(*pairs: tuple[str, float]) -> dict[str, Any]:
    top = [{"token": token, "logprob": math.log(p)} for token, p in pairs]
    return {"logprobs": {"content": [{"top_logprobs": top}]}}


NONE = "the judge stated no verdict in the form asked for"
SEVERAL = "the judge stated several verdicts that differ"
NO_LOGP = "the server reported no log-probabilities (logprobs, top_logprobs)"
LETTERS = {"verdict": "letter", "labels": {"A": 1.0, "B": 0.25, "C": 0.0}}
JSON, PROBABILITY = {"verdict": "json"}, {"verdict": "probability"}
VERDICTS: list[tuple[dict[str, Any], Any, float | str]] = [
    ({}, answer(f"so {tag(' 7.5 ')}"), 7.5),
    ({}, answer(f"{tag('number')} then {tag(1)}"), 1.0),
    ({}, answer(f"{tag(10)}{tag('10.0')}"), 10.0),
    ({}, answer(f"<think>{tag(3)}</think>{tag(4)}"), 4.0),
    ({}, answer(f"{tag(3)}{tag(4)}"), SEVERAL),
    ({}, answer("<verdict-j>3</verdict-j>"), NONE),
    ({}, answer(f"{tag(3)} {tag('many')}"), "the verdict 'many' is not of the form asked for"),
    ({}, answer(tag("1e1")), "the verdict '1e1' is not of the form asked for"),
    ({}, answer(tag(0.5)), "the verdict 0.5 is outside of scale"),
    ({}, answer(tag(10.5)), "the verdict 10.5 is outside of scale"),
    ({"scale": (-1, 1)}, answer(tag("-1")), -1.0),
    ({}, answer(tag(3), finish_reason="length"), "the verdict was cut off by max_tokens"),
    ({}, answer(" "), "the judge wrote nothing"),
    ({}, {"message": {"content": None}}, "the judge wrote nothing"),
    ({}, {"message": "x"}, "the judge wrote nothing"),
    (LETTERS, answer(tag("b")), 0.25),
    (LETTERS, answer(tag("D")), "the verdict 'D' is not of the form asked for"),
    (JSON, answer('x {"verdict_k": 7, "why": "{"} y'), 7.0),
    (JSON, answer('{"verdict_k": 7} {"a": {"verdict_k": 7.0}}'), 7.0),
    (JSON, answer('{"verdict_k": 7} {"verdict_k": 8}'), SEVERAL),
    (JSON, answer('{"verdict_k": 7, "verdict_k": 8}'), NONE),
    (JSON, answer('{"verdict_k": true}'), "the verdict True is not a number"),
    (JSON, answer('{"verdict_k": NaN}'), "the verdict nan is not a number"),
    (JSON, answer(f'{{"verdict_k": {10**400}}}'), f"the verdict {10**400!r:.60} is not a number"),
    (JSON, answer('{"verdict_j": 7}'), NONE),
    (PROBABILITY, weigh((" Yes", 0.6), ("no", 0.15), ("yes", 0.0001), ("x", 0.2)), 0.6001 / 0.7501),
    (PROBABILITY, weigh(("yes", 0.3), ("no", 0.2)), 0.6),
    (PROBABILITY, weigh(("yes", 0.3), ("no", 0.19)), "the judge's first word is neither yes nor no"),
    (PROBABILITY | {"words": ("ja", "nein")}, weigh(("ja", 0.5)), 1.0),
    (PROBABILITY, {}, NO_LOGP),
    (PROBABILITY, {"logprobs": {"content": []}}, NO_LOGP),
    (PROBABILITY, {"logprobs": {"content": [{"top_logprobs": [{"token": "x", "logprob": 1e6}]}]}}, NO_LOGP),
]


@pytest.mark.parametrize(("settings", "choice", "found"), VERDICTS)
def test_a_verdict_is_read_or_said_to_be_unreadable(settings, choice, found):
    read = JudgeSettings(base_url="http://h/v1", model="m", **settings)
    if isinstance(found, str):
        with pytest.raises(Unreadable) as refused:
            read_verdict(choice, read, "k")
        assert str(refused.value) == found
    else:
        assert read_verdict(choice, read, "k") == pytest.approx(found)


def test_votes_join_to_their_mean_or_the_most_frequent_label():
    number, letter = JudgeSettings(), JudgeSettings(**LETTERS)
    assert join_votes([1.0, 2.0, 6.0], number) == 3.0
    assert join_votes([1.0, 0.25, 0.25], letter) == 0.25
    assert join_votes([1.0, 0.25, 0.25, 1.0, 0.0], letter) == 0.625


def test_the_defaults_of_a_judge_and_a_sandbox_are_the_documented_ones():
    of_server = dict.fromkeys(("base_url", "model", "api_key_env", "prompt_file", "anchors"))
    assert JudgeSettings().model_dump() == {
        **of_server,
        **{"verdict": "number", "scale": (1.0, 10.0), "labels": {"A": 1.0, "B": 0.0}, "words": ("yes", "no")},
        **{"view": "last", "show_reasoning": False, "temperature": 0.0, "max_tokens": 1024, "extra": {}},
        **{"votes": 1, "seed": 0, "parse_retries": 2, "max_concurrency": 32, "timeout_s": 60.0, "outage_s": 120.0},
        **{"anchors_every": 512, "cache": True},
    }
    sizes = {"memory_mib": 512, "disk_mib": 64, "file_mib": 32, "files": 10_000, "processes": 32, "open_files": 256}
    assert asdict(Limits()) == {"seconds": 10.0, "output_bytes": 2**20, **sizes}
    bodies = [
        make_body(JudgeSettings(base_url="http://h/v1", model="m", **more), "text", vote=vote, attempt=attempt)
        for more, vote, attempt in (
            ({"temperature": 0.1}, 0, 0),
            ({"temperature": 0.1}, 0, 1),
            ({"temperature": 0.9, "max_tokens": None, "extra": {"top_k": 5}}, 1, 1),
            ({"temperature": None, "verdict": "probability"}, 0, 0),
        )
    ]
    seeds = [body.pop("seed") for body in bodies]
    assert len({*seeds}) == 3 and seeds[0] == seeds[3] and all(0 <= seed < 2**31 for seed in seeds)
    asked = {"model": "m", "messages": [{"role": "user", "content": "text"}]}
    assert bodies == [
        {**asked, "temperature": 0.1, "max_tokens": 1024},
        {**asked, "temperature": 0.7, "max_tokens": 1024},
        {**asked, "temperature": 0.9, "top_k": 5},
        {**asked, "max_tokens": 1, "logprobs": True, "top_logprobs": 20},
    ]
