"""Answers of tasks, read by the rewards of this folder: gsm8k, mathvista, reasoning_gym, calls and sums."""

from __future__ import annotations

import json
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import UserError
from core.types.samples import Prompt
from rewards import (
    arithmetic,
    function_calls,
    gsm8k,
    math_verify,
    mathvista,
    reasoning_gym,
)


def prompt_of(**more: Any) -> Prompt:
    return Prompt(id="row/7", messages=[], **more)


def reply(text: str, **more: Any) -> Any:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize(
    ("text", "number", "is_marked"),
    [
        ("", None, False),
        ("#### none\nthen 3", 3, False),
        ("1 2 3", 3, False),
        ("#### 1 2\n3", 1, True),
        (r"\boxed{} #### 4", 4, True),
        (r"#### 4 \boxed{}", 4, True),
        (r"\boxed{1} \boxed{2}", 2, True),
        (r"\boxed{1, 2} 5", None, True),
        (r"\boxed {7}", 7, True),
        (r"\boxed{-\frac{3}{4}}", Fraction(-3, 4), True),
        (r"\boxed{2\frac{1}{4}}", Fraction(9, 4), True),
        (r"\boxed{\frac{1}{2} + 3}", Fraction(7, 2), True),
        (r"\boxed{-(2 - 5)}", 3, True),
        (r"\boxed{2 ** 3}", None, True),
        (r"\boxed{1 + 2 ** 3}", None, True),
        (r"\boxed{7 - 2 \text{ apples}}", 5, True),
        (r"\boxed{a = 3 + 4 = 7}", 7, True),
        ("$1,234.50 and -.5", Fraction(-1, 2), False),
        ("3/4 of 8/6", Fraction(4, 3), False),
        ("1/0", 0, False),
    ],
)
def test_gsm8k_finds_the_last_answer_and_whether_it_was_marked(text, number, is_marked):
    assert gsm8k.find_answer(text) == (None if number is None else Fraction(number), is_marked)
    assert gsm8k.until_closed("a{b}c}d") == "a{b}c" and gsm8k.until_closed("a{b") == "a{b"


def test_gsm8k_scores_the_last_message():
    turns: list[Any] = [reply("#### 6"), {"role": "user", "content": "Are you sure?"}, reply("#### 7")]
    assert gsm8k.score(prompt_of(answer="#### 7"), turns) == {"correct": 1.0, "format": 1.0}


CHOICE = {"question_type": "multi_choice", "answer_type": "text", "choices": ["tokyo", "Osaka ", "B"]}


@pytest.mark.parametrize(
    ("extra", "answer", "said", "correct"),
    [
        (CHOICE, "B", "The answer is: B.", 1.0),
        (CHOICE, "Osaka ", "answer = *osaka*", 0.0),  # the row's answer is stripped, and its choice is not
        (CHOICE, "B", r"\boxed{\textbf{(C)} b}", 1.0),
        (CHOICE, "B", "D", 0.0),
        (CHOICE, "tokyo", "(A) Tokyo.", 1.0),
        (CHOICE, "tokyo", "$A$", 1.0),
        (CHOICE, "tokyo", "A: x", 0.0),
        ({"answer_type": "float", "precision": 2}, "1.25", r"\fbox{1.254}", 1.0),
        ({"answer_type": "float", "precision": "0"}, "2", "about 1.6", 1.0),
        ({"answer_type": "integer"}, "7", "so 7\n", 1.0),
        ({"answer_type": "integer"}, "7", "7\nnone", 0.0),
        ({"answer_type": "text", "question_type": "free_form"}, "7", "Answer: 7.0", 1.0),
        ({"answer_type": "list"}, "[1, 2]", "answer is [2] or [1, 2]", 0.0),
        ({"answer_type": "list"}, "[1, 2]", "it is [1,2].", 1.0),
        ({"answer_type": "list"}, "none", "none", 0.0),
    ],
)
def test_mathvista_reads_the_form_that_a_row_asks_for(extra, answer, said, correct):
    assert mathvista.score(prompt_of(answer=answer, extra=extra), [reply("x"), reply(said)]) == {"correct": correct}
    made = "make the rows by data_prep.mathvista"
    for changed, given, why in (
        ({"answer_type": "other"}, answer, f"row/7 has no answer, or the answer_type 'other': {made}"),
        ({}, " ", f"row/7 has no answer, or the answer_type {extra['answer_type']!r}: {made}"),
        *(({key: None}, answer, f"row/7 has no {key}: {made}") for key in ("choices", "precision") if key in extra),
    ):
        with pytest.raises(ValueError) as raised:
            mathvista.score(prompt_of(answer=given, extra=extra | changed), [reply(said)])
        assert str(raised.value) == why


def test_a_task_of_reasoning_gym_is_scored_by_its_last_harmless_answer(monkeypatch):
    asked: list[Any] = []

    def make_scorer(name: str, settings: str) -> Any:
        def scored(answer: str, entry: dict[str, Any]) -> float:
            asked.append((name, settings, answer, entry))
            if answer == "odd":
                raise ValueError
            return 0.5

        return scored

    monkeypatch.setattr(reasoning_gym, "make_scorer", make_scorer)
    row = {"dataset": "zebra", "settings": {"b": 1, "a": 2}, "entry": {"answer": {"tuple": [1, [{"tuple": []}]]}}}

    def score(said: str, **more: Any) -> dict[str, float]:
        return reasoning_gym.score(prompt_of(answer=json.dumps(row | more)), [reply("<answer>9</answer>"), reply(said)])

    assert score("<answer>1</answer><think><answer>0</answer></think> <answer>\n2 </answer>") == {
        "correct": 0.5,
        "format": 1.0,
    }
    assert asked == [("zebra", '{"a": 2, "b": 1}', "2", {"answer": (1, [()])})]
    assert score("<answer>odd</answer>") == {"correct": 0.0, "format": 1.0}
    assert score("<answer>3</answer> or <answer>4</answer>")["correct"] == 0.5 and asked[-1][2] == "4"
    asked.clear()
    assert score("2") == {"correct": 0.0, "format": 0.0}
    assert score("<answer>().x</answer>", dataset="n_queens") == {"correct": 0.0, "format": 1.0} and asked == []
    for answer in ("3", "[]", '{"dataset": 1}', "{"):
        with pytest.raises(UserError) as raised:
            reasoning_gym.score(prompt_of(answer=answer), [reply("")])
        assert str(raised.value) == (
            "reward.function=reasoning_gym: the row row/7 is not of data_prep.reasoning_gym: its answer must hold "
            "dataset, settings and entry as JSON: make the rows again"
        )
    entry = {"a": (1, [2.5, "x", None, True]), 3: SimpleNamespace, "t": {"tuple": [1]}}
    packed = reasoning_gym.pack(entry)
    assert packed["a"] == {"tuple": [1, [2.5, "x", None, True]]} and packed["3"] == str(SimpleNamespace)
    assert reasoning_gym.unpack(packed)["a"] == entry["a"] and reasoning_gym.unpack({"tuple": [1], "b": 2}) == {
        "tuple": [1],
        "b": 2,
    }


@pytest.mark.parametrize(
    ("name", "answer", "is_harmless"),
    [
        *(("countdown", answer, yes) for answer, yes in (("(3 + 4) * 2 / 1.5", True), ("2**3", False), ("x", False))),
        *(
            ("simple_integration", answer, yes)
            for answer, yes in (
                *(("x**12 + exp(2*x)", True), ("x**123", False), ("2^(3)", False), ("2**x**2", False), ("a.b", False)),
                *(("x^99 + 3", True), ("ab", False), ("1.5*x", True), ("1. x", False)),
            )
        ),
        *(
            ("n_queens", answer, yes)
            for answer, yes in (("[[1, 0]]", True), ("_ Q\nQ _", True), ("f(x)", False), ("ABCDE", True), ("F", False))
        ),
        *(("zebra", answer, True) for answer in ("f(x)", "")),
    ],
)
def test_an_answer_that_may_be_code_is_not_passed_on(name, answer, is_harmless):
    assert reasoning_gym.is_harmless(name, answer) is is_harmless


def test_arithmetic_and_calls_want_their_answer():
    row = prompt_of(answer="12", extra={"call": {"name": "add", "arguments": {"a": 1}}})
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    for messages, parts in (
        ([reply("", tool_calls=[call]), reply(" 12 ")], (1.0, 1.0)),
        ([reply("", tool_calls=[{"function": {"name": "no", "arguments": {}}}, call]), reply("12")], (1.0, 1.0)),
        ([reply("", tool_calls=[call]), reply("13")], (0.0, 1.0)),
        ([reply("12")], (0.0, 0.0)),
        ([reply("12", tool_calls=[call])], (0.0, 1.0)),
        ([reply("", tool_calls=[{"function": {"name": "add", "arguments": {"a": 2}}}]), reply("12")], (0.0, 0.0)),
        ([reply("", tool_calls=[{"function": {"name": "sub", "arguments": {"a": 1}}}]), reply("12")], (0.0, 0.0)),
        ([reply("", tool_calls=[{"function": {"name": "add", "arguments": {"a": True}}}]), reply("12")], (0.0, 0.0)),
        ([reply("", tool_calls=[{"function": {"name": "add", "arguments": {"a": 1.0}}}]), reply("12")], (1.0, 1.0)),
    ):
        assert function_calls.score(row, messages) == dict(zip(("correct", "called"), parts, strict=True))
    for lacks in (prompt_of(answer="12"), prompt_of(answer=" ", extra=row.extra)):
        with pytest.raises(ValueError, match=r"^row/7 has no call or no answer$"):
            function_calls.score(lacks, [reply("")])
    assert arithmetic.score(row, [reply("1"), reply("12\n")]) == {"correct": 1.0}


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"2\sqrt{3}.", r"\boxed{2\sqrt{3}}"),
        (r"so \fbox{3} and \boxed{4}", r"so \boxed{3} and \boxed{4}"),
        ("$x=3$ or $x=5$", r"\boxed{x=3 or x=5}"),
        ("the sum is $7$", r"\boxed{7}"),
        (r"\(7\)", r"\boxed{7}"),
        ("12 bananas", r"\boxed{12}"),
        ("-1,200.5 miles per hour", r"\boxed{-1,200.5}"),
        ("1/2 cup", r"\boxed{1/2}"),
        ("3 and 4", r"\boxed{3 and 4}"),
        ("4.5e33", r"\boxed{4.5 \times 10^{33}}"),
        ("2E-05", r"\boxed{2 \times 10^{-5}}"),
        ("Tuesday", r"\boxed{\text{Tuesday}}"),
        ("no solution", r"\boxed{\text{no solution}}"),
        ("abc", r"\boxed{abc}"),
        ("infinity", r"\boxed{infinity}"),
        ("2pi", r"\boxed{2\pi }"),
        ("3\u2212\u221a2", r"\boxed{3-\sqrt 2}"),
        ("30\u00b0, 60\u00b0", r"\boxed{30^\circ , 60^\circ }"),
    ],
)
def test_a_ground_truth_is_written_as_a_reply_would_state_it(answer, gold):
    assert math_verify.write_gold(answer) == gold


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        *((answer, f"the answer {answer!r} is empty, or its braces do not match") for answer in (" ", ".", "{3", "3}")),
        (
            "first $3$ and then $4$",
            "the answer 'first $3$ and then $4$' is a sentence with several formulas: write the answer alone",
        ),
        ("3 million dollars", "the answer '3 million dollars' has a part of its number in words: write it in digits"),
    ],
)
def test_a_ground_truth_that_is_not_clear_is_named(answer, says):
    with pytest.raises(ValueError) as raised:
        math_verify.write_gold(answer)
    assert str(raised.value) == says
    with pytest.raises(ValueError) as raised:
        math_verify.score(prompt_of(answer=answer), [reply("3")])
    assert str(raised.value) == f"{says} (row row/7)"
