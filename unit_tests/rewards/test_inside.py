"""Programs of the sandbox, here outside of it with harmless code: unit tests, and pieces of a session."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rewards.sandbox.inside import cells, unit_tests
from rewards.sandbox.inside.unit_tests import Candidate, Gone, StandIn, Unsuited, decode, encode

NAN = float("nan")


class Named(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "another text"


class Many(list):
    def __iter__(self) -> Iterator[Any]:
        return iter([1, 2, 3])


VALUES: list[tuple[Any, Any]] = [
    (True, ["bool", True]),
    (False, ["bool", False]),
    (-255, ["int", "-0xff"]),
    (2**200, ["int", hex(2**200)]),
    (0.1, ["float", (0.1).hex()]),
    (-float("inf"), ["float", "-inf"]),
    (1.5 - 2j, ["complex", [(1.5).hex(), (-2.0).hex()]]),
    ("ä\n", ["str", "ä\n"]),
    (b"\xff\x00", ["bytes", "ff00"]),
    (None, ["NoneType", None]),
    ((1, (None,)), ["tuple", [["int", "0x1"], ["tuple", [["NoneType", None]]]]]),
    ([[], 1], ["list", [["list", []], ["int", "0x1"]]]),
    ({2}, ["set", [["int", "0x2"]]]),
    (frozenset({"a"}), ["frozenset", [["str", "a"]]]),
    ({(1,): [2]}, ["dict", [[["tuple", [["int", "0x1"]]], ["list", [["int", "0x2"]]]]]]),
]


def test_plain_values_are_written_and_read_as_they_are():
    for value, told in VALUES:
        assert encode(value, None) == told, value
        back = decode(json.loads(json.dumps(told)), None)
        assert back == value and type(back) is type(value)
    assert decode(encode(NAN, None), None) != NAN
    # of a subclass, the builtin's own value
    assert encode(Named("x"), None) == ["str", "x"] and encode(Many([7]), None) == ["list", [["int", "0x7"]]]
    assert decode(encode(OrderedDict(a=1), None), None) == {"a": 1}
    kept: list[Any] = []
    told = encode([object, 1], lambda value: kept.append(value) or len(kept))
    assert told == ["list", [["ref", 1], ["int", "0x1"]]] and kept == [object]
    assert decode(told, lambda number: f"object {number}") == ["object 1", 1]


CODE = """
import math
class Odd(Exception): pass
class Box:
    def __init__(self, items): self.items = items
    def __eq__(self, other): return self.items == other.items
    def __lt__(self, other): return len(self.items) < len(other.items)
    def __len__(self): return len(self.items)
    def __getitem__(self, at): return self.items[at]
    def __iter__(self): return iter(self.items)
    def __str__(self): return "+".join(map(str, self.items))
    def __repr__(self): return f"Box({self.items})"
    def __bool__(self): return self.items != [0]
    def __contains__(self, item): return True
    def add(self, item, *, times=1): self.items += [item] * times; return self
class Always:
    def __eq__(self, other): return "yes"
    def __lt__(self, other): return "yes"
    def __bool__(self): return True
def same(x): return x
def steps():
    yield 1
    yield Box([2])
def fails(kind, *words): raise {"ValueError": ValueError, "Odd": Odd, "UnicodeDecodeError": None}[kind](*words)
def decodes(): b"\\xff".decode()
def ends(): import os; os._exit(0)
def fills(n): return "x" * n
_hidden, __name = 1, 2
"""


@pytest.fixture
def candidate() -> Iterator[Candidate]:
    made = unit_tests.begin_candidate()
    yield made
    if not made.gone:
        made.end()
    os.waitpid(made._pid, 0)


def test_code_is_loaded_and_its_objects_stay_where_they_are(candidate):
    names = candidate.tell(do="load", code=CODE)
    assert names == ["Always", "Box", "Odd", "_hidden", "decodes", "ends", "fails", "fills", "math", "same", "steps"]
    make, same = candidate.do("name", "Box"), candidate.do("name", "same")
    one, two = make([1, [2]]), make([5])
    assert isinstance(one, StandIn) and isinstance(make, StandIn)
    assert one == make([1, [2]]) and one != two and one != [1, [2]] and one != 3
    assert two < one and not one < two and not one < 3
    assert len(one) == 2 and one[1] == [2] and [*one] == [1, [2]] and [2] in one and 9 not in one
    assert (str(one), repr(two)) == ("1+[2]", "Box([5])")
    assert one and not make([0])
    assert one.items == [1, [2]] and two.add(6, times=2).items == [5, 6, 6]
    assert same(one) == one and same({"a": (one, 1)})["a"][0] == one and hash(one) == hash(one)
    always = candidate.do("name", "Always")
    assert always() == always() and always() < always() and always(), "their truth is that of bool()"
    it = candidate.do("name", "steps")()
    assert next(it) == 1 and next(it) == make([2])
    with pytest.raises(StopIteration):
        next(it)
    assert [len([*candidate.do("name", "steps")()]) for _ in range(2)] == [2, 2]
    with pytest.raises(AttributeError, match=r"^__private__$"):
        _ = one.__private__
    with pytest.raises(Unsuited, match=r"^a function cannot be passed to the code under test$"):
        same(lambda: 1)
    with pytest.raises(Unsuited, match=r"^a object cannot be passed to the code under test$"):
        same(key=object())


def test_an_object_may_have_plain_values_for_steps(candidate):
    steps = "class Steps(list):\n    def __next__(self): return self.pop(0)\n"
    candidate.tell(do="load", code=f"{steps}class Box:\n    def __iter__(self): return Steps([1, 2])\n")
    assert [*candidate.do("name", "Box")()] == [1, 2]


def test_an_error_of_the_code_is_the_builtin_of_its_name_or_named(candidate):
    candidate.tell(do="load", code=CODE)
    fails = candidate.do("name", "fails")
    for call, kind, said in (
        (lambda: fails("ValueError", "negative"), ValueError, "negative"),
        (lambda: fails("ValueError", "x" * 300), ValueError, "x" * 200),
        (lambda: fails("Odd", "no"), RuntimeError, "Odd: no"),
        (lambda: fails("Else"), KeyError, "\"'Else'\""),
        (lambda: candidate.do("name", "nothing"), KeyError, "\"'nothing'\""),
        (lambda: candidate.tell(do="load", code="x ="), SyntaxError, "invalid syntax (solution.py, line 1)"),
    ):
        with pytest.raises(kind) as raised:
            call()
        assert type(raised.value) is kind and str(raised.value) == (said if kind is not KeyError else repr(eval(said)))
    with pytest.raises(RuntimeError, match=r"^UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"):
        candidate.do("name", "decodes")()
    for name in ("SystemExit", "KeyboardInterrupt", "print", "open"):  # no Exception, and no exception at all
        assert str(unit_tests._make_error(name, "x")) == f"{name}: x"
        assert type(unit_tests._make_error(name, "x")) is RuntimeError


@pytest.mark.parametrize("how", ["ends", "fills", "ends itself"])
def test_a_candidate_that_is_gone_stays_so(candidate, how):
    candidate.tell(do="load", code=CODE)
    fills, ends = candidate.do("name", "fills"), candidate.do("name", "ends")
    assert len(fills(2**22 - 100)) == 2**22 - 100, "a line of 4 MiB"
    with pytest.raises(Gone):
        fills(2**22) if how == "fills" else ends() if how == "ends" else candidate.tell(do="load", code="exit()")
    assert candidate.gone
    with pytest.raises(Gone):
        candidate.do("name", "same")
    if how == "fills":
        candidate.end()


def test_modules_that_are_missing_are_named_unless_there_is_another_way():
    sources = [
        "import json, no_b.c\nfrom no_a.x import y",
        "def f():\n    import no_c",
        "from . import z\nimport os.path",
    ]
    sources.append("try:\n    import no_d\nexcept ImportError: pass\nimport no_a")
    assert unit_tests.find_missing(sources) == [f"there is no module no_{n} in the sandbox" for n in "abc"]
    assert unit_tests.find_missing(["import math", "x = 1"]) == []


def test_tests_use_names_of_the_code_but_never_its_builtins_or_modules(candidate):
    there = candidate.tell(do="load", code=CODE + "def all(x): return True\nmath = 3\n")
    used = ["same(1); all([0]); math.pi; unknown", "Box([1])"]
    names = unit_tests.prepare_names(candidate, there, used)
    assert sorted(names) == ["Box", "__builtins__", "__name__", "math", "same"] and names["__name__"] == "tests"
    assert names["math"].pi > 3.1
    unsuited: list[str] = []
    for source, passes in (
        ("assert same(2) == 2", True),
        ("assert same(2) == 3", False),
        ("assert all([0])", False),
        ("x = same(4)", True),
        ("assert x == 4", True),
        ("raise SystemExit", False),
        ("x =", False),
        ("same(lambda: 1)", False),
        ("pass", True),
    ):
        assert unit_tests.run_test(candidate, source, names, unsuited) is passes, source
    assert unsuited == ["a function cannot be passed to the code under test"]
    names["ends"] = candidate.do("name", "ends")
    assert not unit_tests.run_test(candidate, "try:\n    ends()\nexcept BaseException: pass", names, unsuited)
    assert not unit_tests.run_test(candidate, "pass", names, unsuited)


@pytest.mark.parametrize(
    ("given", "results", "unsuited"),
    [
        ({"code": "def f(): return 1", "tests": ["assert f() == 1", "assert f() == 2"]}, [True, False], []),
        ({"code": "def f(): return 1", "tests": ["assert f() == g"], "setup": "g = f()"}, [True], []),
        ({"code": "def f(): return 1", "tests": ["assert f() == 1"], "setup": "raise ValueError"}, [False], []),
        ({"code": "def f(): return 1", "tests": ["f(print)", "f()"]}, [False, True], ["a builtin_function_or_method "]),
        ({"code": "x", "tests": ["pass"]}, None, []),
        ({"code": "import os; os._exit(0)", "tests": ["pass", "pass"]}, None, []),
        ({"code": "import os\nfor n in (1, 2): os.write(n, b'more\\n')", "tests": ["pass"]}, [True], []),
        (
            {"code": "", "tests": ["import no_a", "import heapq; print(1)"]},
            [False, True],
            ["there is no module no_a in"],
        ),
    ],
)
def test_the_judge_prints_a_line_for_each_test(given, results, unsuited, tmp_path):
    (program := tmp_path / "unit_tests.py").write_bytes(Path(unit_tests.__file__).read_bytes())
    (tmp_path / "heapq.py").write_text("raise SystemExit(9)")
    done = subprocess.run(
        [sys.executable, str(program)],
        input=json.dumps({"setup": "", "nonce": "N"} | given),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert all(line.startswith("N{") for line in lines)
    told = [json.loads(line[1:]) for line in lines]
    passed = results or [False] * len(given["tests"])
    assert [one["passed"] for one in told] == passed and {one["ran"] for one in told} == {results is not None}
    for one in told[-1]["unsuited"], unsuited:
        assert len(one) == len(unsuited)
    assert all(said.startswith(begin) for said, begin in zip(told[-1]["unsuited"], unsuited, strict=True))


# Pieces of a session ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "out"),
    [
        ("x = 3", ""),
        ("y * 2", "14\n"),
        ("print(1); 'a'", "1\n'a'\n"),
        ("None", ""),
        ("if y: print(y)", "7\n"),
        ("def f(): return y", ""),
        ("", ""),
        ("'a'\nz = 1", ""),
    ],
)
def test_a_piece_prints_the_value_of_its_last_expression(source, out, capsys):
    names: dict[str, Any] = {"y": 7}
    cells.run_cell(source, names)
    assert capsys.readouterr() == (out, "")


def test_a_piece_that_fails_shows_its_own_last_three_frames(capsys):
    names: dict[str, Any] = {}
    cells.run_cell("def f(n):\n    return f(n - 1) if n else 1 / 0\nf(5)", names)
    said = capsys.readouterr().err
    assert said.splitlines()[0].startswith("Traceback") and said.endswith("ZeroDivisionError: division by zero\n")
    assert len(re.findall("File ", said)) == 3 and __file__ not in said and "cells.py" not in said
    for source, end in (("x =", "SyntaxError: invalid syntax"), ("raise SystemExit(3)", "SystemExit: 3")):
        cells.run_cell(source, names)
        assert capsys.readouterr().err.splitlines()[-1] == end


@pytest.mark.parametrize("source", ["1 / 0", "x = 1 / 0"])
def test_a_piece_that_fails_shows_no_frame_of_ours(source, capsys):
    cells.run_cell(source, {})
    assert re.findall('File "(.*?)", line (.*?), in', capsys.readouterr().err) == [("cell", "1")]


@pytest.mark.parametrize("size", [0, 20_000, 20_001, 20_007])
def test_a_long_output_lacks_its_middle_and_is_cleared(size, tmp_path):
    handle = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    text = "".join(chr(97 + n % 26) for n in range(size))
    os.write(handle, text.encode())
    left_out = f"{text[:10_000]}\n... {size - 20_000} bytes are left out ...\n{text[-10_000:]}"
    assert cells.take_output(handle) == (text if size <= 20_000 else left_out)
    os.write(handle, b"\xffnext")
    assert cells.take_output(handle) == "\ufffdnext"
    os.close(handle)


def test_a_session_of_pieces_answers_each_with_all_that_it_printed(tmp_path):
    pieces = [
        ("x = 2", ""),
        ("print(x, end='')\nx + 1", "23\n"),
        ("import sys\n_ = sys.stderr.write('no end of line')", "no end of line"),
        ("print('out'); sys.stdout.flush(); print('err', file=sys.stderr)", "out\nerr\n"),
        ("import os\n_ = os.system('echo child')", "child\n"),
        ("sys.exit(3)", "SystemExit: 3\n"),
        ("x", "2\n"),
        ("import tempfile\nos.listdir(tempfile.gettempdir())", "[]\n"),
    ]
    asked = "".join(json.dumps({"source": source}) + "\n" for source, _ in pieces)
    done = subprocess.run(
        [sys.executable, cells.__file__],
        input=asked,
        # buffered, as in a sandbox; and the code sees this folder
        env={**os.environ, "PYTHONUNBUFFERED": "", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [json.loads(line)["output"] for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "") and said[:5] == [output for _, output in pieces[:5]]
    assert said[5].endswith(pieces[5][1]) and said[6:] == ["2\n", "[]\n"]
