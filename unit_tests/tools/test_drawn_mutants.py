"""Bugs drawn by rule: what each rule does to a line, what a seed draws, and what the table says."""

from __future__ import annotations

import ast
from itertools import islice

import pytest

from tools.drawn_mutants.__main__ import ROOT, draw, find_explained, make_table, read_explained, wilson
from tools.drawn_mutants.rules import Edit, find_edits

CASES = {
    "comparison": ("y = a < b", ["y = a <= b", "y = a > b"]),
    "dropped not": ("y = not a", ["y = bool(a)"]),
    "and, or": ("y = a and b", ["y = a or b"]),
    "off by one": ("y = f(3)", ["y = f(2)", "y = f(4)"]),
    "constant": ("y = 0.5, 64, 2**9", ["y = 0.5, 129, 2**9", "y = 0.5, 64, (2**9) * 2 + 1", "y = 2.0, 64, 2**9"]),
    "operator": ("y = a * b", ["y = a / b"]),
    "swapped operands": ("y = a - b", ["y = (b) - (a)"]),
    "dropped statement": ("total += x", ["pass"]),
    "swapped arguments": ("y = f(a, b)", ["y = f(b, a)"]),
    "dropped argument": ("y = f(a, k=b)", ["y = f(a)"]),
    "axis": ("y = x.sum(dim=0)", ["y = x.sum(dim=-1)"]),
    "dropped element": ("y = [a, b]", ["y = [a]", "y = [b]"]),
    "condition": ("y = a if b else c", ["y = a if (not (b)) else c"]),
    "sign": ("y = -x", ["y = x"]),
}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_makes_the_bug_of_its_name(rule: str):
    source, wanted = CASES[rule]
    assert sorted(e.apply(source) for e in find_edits(source) if e.rule == rule) == wanted


def test_a_parameter_is_replaced_by_one_of_the_same_type_only():
    source = "def f(new: float, old: float, n: int):\n    return new / n\n"
    wrong = [e.apply(source) for e in find_edits(source) if e.rule == "wrong variable"]
    assert wrong == [source.replace("return new", "return old")]


def test_text_that_computes_nothing_is_left_alone():
    source = '"""1 < 2"""\nfrom a import b\n\ndef f(x: list[3]) -> T[4]:\n    """5"""\nRule = Callable[[X, Y], Z]\n'
    source += "Kind = Literal[1, 2]\nHeader = list[tuple[str, int]]\n__all__ = ['f', 'Rule']\n"
    assert find_edits(source) == []


def test_an_argument_that_only_guards_is_left_alone():
    rules = [edit.rule for edit in find_edits("y = zip(a, b, strict=True)\n")]
    assert rules == ["swapped arguments"]


def test_arguments_that_are_alike_are_not_swapped():
    assert [e for e in find_edits("y = f(a, a)\nz = torch.minimum(a, b)\n") if e.rule == "swapped arguments"] == []


def test_the_sentence_of_an_error_is_left_alone():
    source = 'raise ValueError(f"{a + 1}", b - 1)\n'
    assert [e.apply(source) for e in find_edits(source)] == ["pass\n"]


def test_a_line_of_many_bytes_is_cut_at_the_right_place():
    [edit] = [e for e in find_edits("é = a == 'ü'") if e.rule == "comparison"]
    assert edit.apply("é = a == 'ü'") == "é = a != 'ü'"


def test_a_seed_draws_the_same_bugs_each_on_a_line_of_its_own():
    sources = {"a.py": "x = 1\ny = x < 2\nz = f(x, y)\n", "b.py": "x = not 5\n"}
    one, two, other = (list(draw(sources, seed, 4)) for seed in (1, 1, 2))
    assert one == two != other
    assert len({(file, e.line) for file, e in one}) == 4
    for file, edit in one:
        ast.parse(edit.apply(sources[file]))
    assert len(list(islice(draw(sources, 1, 2), 9))) == 2


def test_the_table_has_wilsons_interval():
    low, high = wilson(90, 100)
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)  # statsmodels.stats.proportion.proportion_confint
    told = make_table({"algs": [True] * 9 + [False], "core": [True] * 10})
    assert told[1].split() == ["algs", "10", "90.0%", "59.6%", "to", "98.2%"]
    assert told[-1].split()[:3] == ["all", "20", "95.0%"]


def test_a_bug_without_a_reason_is_not_explained():
    assert find_explained("a.py", Edit("constant", 1, 0, 1, "2"), "1") == ""


def test_every_explained_bug_can_be_drawn():
    """One that cannot explains nothing: its line is another by now, or the rules are."""
    found: set[str] = set()
    for file in {file for file, *_ in read_explained()}:
        source = (ROOT / file).read_text()
        found |= {find_explained(file, edit, source) for edit in find_edits(source)}
    assert found - {""} == {*read_explained().values()}
