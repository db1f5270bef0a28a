"""The reward of code with tests: credit, code that cheats, and a sandbox that is not there."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import pytest

from core.errors import UserError
from core.types.samples import Prompt
from rewards import check_reward, load_reward, resolve_reward
from rewards.code_tests import read_suite
from rewards.rewarder import Rewarder
from rewards.sandbox import Bubblewrap, HttpSandbox, Limits, SandboxUnavailable
from unit_tests.helpers.needs_sandbox import needs_sandbox
from unit_tests.helpers.one_reward import one_reward
from unit_tests.helpers.posts import serve_posts

pytestmark = pytest.mark.one_core

RIGHT = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(10, 5) == 15"]
ALL, NONE = {"correct": 1.0, "passed": 1.0, "ran": 1.0}, {"correct": 0.0, "passed": 0.0, "ran": 1.0}


def judge(reply: str, settings: dict[str, Any] | None = None, **extra: Any) -> dict[str, float]:
    prompt = Prompt(id="row/0", messages=[], extra=extra or {"tests": TESTS})
    score = load_reward(resolve_reward("code"), settings or {})
    return score(prompt, [{"role": "assistant", "content": reply}])


@needs_sandbox
@pytest.mark.parametrize(
    ("reply", "parts"),
    [
        (RIGHT, ALL),
        (f"Here it is:\n```python\n{RIGHT}```\nDone.", ALL),
        (f"```python\ndef add(a, b): return 0\n```\nNo:\n```python\n{RIGHT}", ALL),
        ("def add(a, b):\n    return abs(a) + b\n", {"correct": 0.0, "passed": 2 / 3, "ran": 1.0}),
        ("def add(a, b):\n    return a +\n", NONE | {"ran": 0.0}),
        ("def sub(a, b):\n    return a - b\n", NONE),
        ("", NONE),
    ],
)
def test_credit_for_assertions(reply, parts):
    assert judge(reply) == pytest.approx(parts)


CHEATS = {
    "ends before the tests": "import os\nos._exit(0)",
    "exits before the tests": "raise SystemExit(0)",
    "ends in a test": "import os\ndef add(a, b): os._exit(0)",
    "prints what passing looks like": 'print(\'{"ran": true, "passed": true, "unsuited": []}\' * 9)',
    "agrees with everything": "class Yes:\n    def __eq__(self, other): return True\ndef add(a, b): return Yes()",
    "is a number that agrees": "class Yes(int):\n    __eq__ = lambda self, other: True\ndef add(a, b): return Yes(99)",
    "changes builtins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.compile = builtins.exec = print",
    "changes what exceptions mean": "import sys\nsys.excepthook = sys.exit\nAssertionError = ValueError",
    "compared a builtin": "def all(x): return True\ndef any(x): return True\ndef add(a, b): return 0",
    "writes modules for the judge": (
        "for name in ('math', 'ast', 'json', 'importlib', 'random', 'encodings', 'sitecustomize'):\n"
        "    open(f'{name}.py', 'w').write('import os\\nos._exit(0)')\n"
        "import math\ndef add(a, b): return 0"
    ),
    "looks for the tests": (
        "import gc, os, sys\n"
        "seen = [str(o) for o in gc.get_objects()] + sys.argv + [open(f).read() for f in os.listdir('.')]\n"
        "found = any('add' + chr(40) + '10' in s for s in seen)\n"
        "def add(a, b): return a + b if found else 0"
    ),
    "looks for the tests in other processes": (
        "import ctypes, os\n"
        "libc, memory = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "def attach(): return libc.ptrace(16, os.getppid(), 0, 0)\n"
        "try: found = open(f'/proc/{os.getppid()}/mem', 'rb').read(1)\n"
        "except OSError: found = attach() == 0\n"
        "def add(a, b): return a + b if found else 0"
    ),
    "stops the judge": "import os, signal\nfor n in range(1, 32):\n    if n != 19: os.kill(os.getppid(), n)",
    "answers twice": (
        "import os\n"
        "for n in range(3, 20):\n"
        '    try: os.write(n, b\'{"value": ["bool", true]}\\n\' * 50)\n'
        "    except OSError: pass\n"
        "def add(a, b): return 0"
    ),
    "writes to every handle": (
        'import os\nline = b\'{"ran": true, "passed": true, "unsuited": []}\\n\'\n'
        "for n in range(20):\n"
        "    try: os.write(n, line)\n"
        "    except OSError: pass"
    ),
    "returns more than fits": "def add(a, b): return 'x' * 10**8",
    "returns what nobody can read": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
}


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_code_that_cheats_gets_nothing(name):
    parts = judge(
        CHEATS[name], tests=["assert add(1, 2) == 3", "assert add(4, 5) == 9", "assert all([add(10, 5) == 15])"]
    )
    assert (parts["correct"], parts["passed"]) == (0.0, 0.0)


@needs_sandbox
def test_tests_that_were_never_reached_have_not_passed():
    """Code that ends the judge, or hangs, in its second test has passed one of three, and is not correct."""
    ends = "import os\ndef add(a, b):\n    if a < 0: os.kill(os.getppid(), 9)\n    return a + b\n"
    assert judge(ends) == pytest.approx({"correct": 0.0, "passed": 1 / 3, "ran": 1.0})


@needs_sandbox
def test_right_code_passes_however_many_tests_its_row_has():
    """Neither results nor what a test prints fill the output, which would end the run before the last test."""
    prints = "print('x' * 2**20)\nassert add(1, 2) == 3"
    assert judge(RIGHT, tests=[*TESTS * 500, prints]) == ALL


@needs_sandbox
def test_an_error_that_is_expected_is_no_way_to_end_the_process():
    raises = "try:\n    root(-1)\n    assert False\nexcept ValueError: pass"
    anything = "try:\n    root(-1)\nexcept Exception: pass\nelse: assert False"
    bare = "try:\n    root(-1)\nexcept: pass\nelse: assert False"
    right = "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5"
    assert judge(right, tests=[raises, anything, bare, "assert root(4) == 2"]) == ALL
    for test in (raises, anything, bare):
        assert judge("import os\ndef root(x): os._exit(0)", tests=[test])["passed"] == 0


@needs_sandbox
def test_values_objects_and_errors_reach_the_tests_as_they_are():
    code = """
import math
from collections import Counter
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __repr__(self): return f"Stack({self.items})"
    def __str__(self): return "+".join(map(str, self.items))
    def __lt__(self, other): return len(self) < len(other)
    def __bool__(self): return self.items != [0]
def same(x): return x
def count(words): return Counter(words)
def naturals():
    n = 0
    while True:
        yield n
        n += 1
class Odd(Exception): pass
def fail(): raise Odd("no")
"""
    values = (
        "[1, -2**200, 1.5, float('inf'), True, None, 'ä\\n', b'\\xff', (1, (2,)), {3}, frozenset({4}), {(1, 2): [3j]}]"
    )
    tests = [
        f"for v in {values}: assert same(v) == v and type(same(v)) is type(v)",
        "assert same(float('nan')) != same(float('nan'))",
        "assert count(['a', 'b', 'a']) == {'a': 2, 'b': 1}",
        "s = Stack(); s.push(1).push([2]); assert len(s) == 2 and s.items == [1, [2]] and s[1] == [2] and [2] in s",
        "assert Stack().push(1) == Stack().push(1) and Stack().push(1) != Stack() and Stack() != []",
        "assert list(Stack().push(5)) == [5] and repr(Stack()) == 'Stack([])'",
        "assert str(Stack().push(1).push(2)) == f'{Stack().push(1).push(2)}' == '1+2'",
        "assert Stack() < Stack().push(1) and not Stack() < Stack() and not Stack().push(1) < Stack()",
        "assert Stack() and not Stack().push(0)",
        "steps = naturals(); assert (next(steps), next(steps)) == (0, 1)",
        "from itertools import islice\nassert list(islice(naturals(), 3)) == [0, 1, 2]",
        "try:\n    fail()\nexcept RuntimeError as error: assert 'Odd: no' in str(error)\nelse: assert False",
        "assert math.isclose(same(0.1) + 0.2, 0.3)",
    ]
    assert judge(code, tests=tests) == ALL


@needs_sandbox
def test_tests_may_be_a_file():
    file = """
LARGE = 10 ** 3
def helper(a): return add(a, a)
def test_helper(): assert helper(2) == 4
def test_large(): assert add(LARGE, 1) == 1001
assert add(0, 0) == 0
def check(candidate): assert candidate(1, 1) == 2
"""
    assert judge(RIGHT, tests=file, entry_point="add") == ALL
    assert len(read_suite("0", {"tests": file, "entry_point": "add"}).tests) == 4
    assert judge("def add(a, b): return 4", tests=file, entry_point="add")["passed"] == 0.25


@needs_sandbox
@pytest.mark.slow
def test_what_passed_before_a_limit_counts():
    hangs = "def add(a, b):\n    while a > 1: pass\n    return a + b"
    assert judge(hangs, {"timeout_s": 2}, tests=["assert add(1, 1) == 2", "assert add(2, 1) == 3"])["passed"] == 0.5
    hoards = "def add(a, b):\n    return a + b if a < 2 else len(bytes(10**10))"
    assert judge(hoards, tests=["assert add(1, 1) == 2", "assert add(2, 1) == 3"])["passed"] == 0.5


@needs_sandbox
@pytest.mark.slow
def test_programs_are_compared_by_their_output():
    pairs = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "2 2\n", "stdout": "4"}, {"stdin": "", "stdout": ""}]
    adds = "try: print(sum(map(int, input().split())))\nexcept EOFError: pass"
    assert judge(adds, pairs=pairs) == ALL
    assert judge("print(3, end='   ')", pairs=json.dumps(pairs)) == pytest.approx(NONE | {"passed": 1 / 3})
    assert judge("print(3); raise SystemExit(1)", pairs=pairs) == NONE | {"ran": 0.0}
    assert judge("while True: pass", {"timeout_s": 1}, pairs=pairs * 3) == NONE | {"ran": 0.0}


@needs_sandbox
def test_a_module_that_the_tests_lack_is_no_zero():
    with pytest.raises(ValueError, match="row/0: a test cannot be judged: there is no module nowhere in the sandbox"):
        judge("def add(a, b): return 0", tests=TESTS, setup="def near(a, b):\n    import nowhere.linalg as l")
    other = "try:\n    import nowhere\nexcept ImportError: nowhere = None\nimport math, os.path"
    assert judge("import nowhere\n" + RIGHT, tests=TESTS, setup=other) == NONE | {"ran": 0.0}, "a module of the code"
    assert judge(RIGHT, tests=TESTS, setup=other) == ALL


@needs_sandbox
def test_a_test_that_cannot_be_judged_is_no_zero():
    with pytest.raises(ValueError, match="row/0: a test cannot be judged: a function cannot be passed"):
        judge("def apply(f, x): return f(x)", tests=["assert apply(lambda x: x + 1, 2) == 3"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"timeout_s": 19.0}, "must be at least 2 s below reward.timeout_s=20"),
        ({"timeout_s": "x"}, "reward.settings.timeout_s must be a number from 0.1 on, found 'x'"),
        ({"at_once": 0}, "reward.settings.at_once must be a number from 1 on"),
        ({"memory_mib": float("nan")}, "reward.settings.memory_mib must be a number from 32 on"),
        *(({"sandbox": name}, "neither bubblewrap nor the address of a server") for name in ("docker", "ftp://x")),
        ({"sandbox": "http://127.0.0.1:9"}, "cannot be reached: ConnectionRefusedError"),
    ],
)
def test_settings_without_sense_are_refused_before_the_run(settings, says):
    with pytest.raises(UserError, match=says):
        check_reward(resolve_reward("code"), settings, 20.0)


def test_without_a_sandbox_a_run_does_not_start_and_a_sample_fails(refused, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    words = "error: bubblewrap, the sandbox for code, is not installed: `apt install", "never run without a sandbox"
    refused({"reward.function": "code"}, *words)
    prompt = Prompt(id="0", messages=[], extra={"tests": TESTS})
    with pytest.raises(SandboxUnavailable):
        load_reward(resolve_reward("code"), {})(prompt, [{"role": "assistant", "content": RIGHT}])


# ------------------------------------------------------------------------------------------------ a sandbox over HTTP


@contextmanager
def serve(**broken: Any) -> Iterator[str]:
    """A server that answers as SandboxFusion does, with what the local sandbox makes of the code."""

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        files = {name: base64.b64decode(content) for name, content in asked["files"].items()}
        commands = {"python": ["python3", "code"], "bash": ["bash", "code"]}
        ran = asyncio.run(
            Bubblewrap().run(
                commands[asked["language"]],
                files=files | {"code": asked["code"].encode()},
                stdin=(asked["stdin"] or "").encode(),
                limits=Limits(seconds=asked["run_timeout"], memory_mib=asked["memory_limit_MB"]),
            )
        )
        code = None if ran.exit_code is None else ran.exit_code if ran.exit_code < 128 else 128 - ran.exit_code
        return {
            "status": "Success" if code == 0 else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": {
                "status": "TimeLimitExceeded" if ran.killed_for == "time" else "Finished",
                "execution_time": ran.seconds,
                "return_code": code if ran.killed_for in (None, "time") else -9,
                "stdout": ran.stdout.decode(),
                "stderr": ran.stderr.decode(),
            },
            "files": {},
        }

    def reply(path: str, headers: Mapping[str, str], given: bytes) -> tuple[int, bytes]:
        asked = json.loads(given)
        broken.get("asked", []).append(asked)
        body = json.dumps(broken.get("answer") or answer(asked)).encode()
        return broken.get("status", 200) if path == "/run_code" else 404, body

    with serve_posts(reply) as url:
        yield url


@needs_sandbox
@pytest.mark.slow
def test_a_sandbox_over_http_runs_the_same():
    with serve() as url:
        box = HttpSandbox(url + "/run_code/")
        asyncio.run(box.check())
        run = lambda *command, **given: asyncio.run(box.run(command, **given))  # noqa: E731
        shown = run("cat", "-", "a b/c", files={"a b/c": b"2"}, stdin=b"1")
        assert (shown.exit_code, shown.stdout, shown.killed_for) == (0, b"12", None)
        assert run("python3", "x.py", files={"x.py": b"import os; os.abort()"}).exit_code == 134
        assert run("sleep", "600", limits=Limits(seconds=0.5)).killed_for == "time"
        printed = run("python3", "x.py", files={"x.py": b"print('x' * 999)"}, limits=Limits(output_bytes=99))
        assert printed.killed_for == "output"
        assert judge(RIGHT, {"sandbox": url}) == ALL
        for name in ("ends in a test", "agrees with everything", "prints what passing looks like"):
            assert judge(CHEATS[name], {"sandbox": url})["passed"] == 0
        check_reward(resolve_reward("code"), {"sandbox": url}, 20.0)


FINISHED = {"status": "Finished", "return_code": 0}


def test_a_server_is_told_code_files_and_limits():
    asked: list[dict[str, Any]] = []
    answer = {"status": "Success", "run_result": FINISHED | {"stdout": "12", "execution_time": 0.5}}
    given: dict[str, Any] = {
        "files": {"x.py": b"print(1)", "a/b": b"\xff"},
        "stdin": b"2",
        "limits": Limits(seconds=3, memory_mib=99),
    }
    with serve(answer=answer, asked=asked) as url:
        for command in (["python3", "x.py"], ["cat", "a b"]):
            ran = asyncio.run(HttpSandbox(url).run(command, **given))
            assert (ran.exit_code, ran.stdout, ran.stderr, ran.seconds) == (0, b"12", b"", 0.5)
    limits = {"compile_timeout": 3, "run_timeout": 3, "memory_limit_MB": 99}
    python, shell = ({"language": "python", "code": "print(1)"}, {"language": "bash", "code": "cat 'a b'"})
    files = {"a/b": base64.b64encode(b"\xff").decode()}
    assert asked[0] == python | limits | {"stdin": "2", "files": files}
    assert asked[1] == shell | limits | {
        "stdin": "2",
        "files": files | {"x.py": base64.b64encode(b"print(1)").decode()},
    }


@pytest.mark.slow
def test_a_server_that_is_gone_fails_the_sample():
    prompt = Prompt(id="0", messages=[], extra={"tests": TESTS})
    with serve() as url:
        pass
    plan = one_reward(resolve_reward("code"), {"sandbox": url})
    with closing(Rewarder(plan, 1, 20.0)) as pool, pytest.raises(UserError, match="cannot be reached"):
        asyncio.run(pool.compute_reward(prompt, [{"role": "assistant", "content": RIGHT}]))


@needs_sandbox
def test_a_sandbox_that_breaks_during_the_run_fails_the_sample(tmp_path, monkeypatch):
    real = next(path for path in os.environ["PATH"].split(":") if os.path.exists(f"{path}/bwrap"))
    (tmp_path / "bwrap").symlink_to(f"{real}/bwrap")
    monkeypatch.setenv("PATH", str(tmp_path))
    prompt = Prompt(id="0", messages=[], extra={"tests": TESTS})
    reply = [{"role": "assistant", "content": RIGHT}]
    with closing(Rewarder(one_reward(resolve_reward("code"), {}), 1, 20.0)) as pool:
        before = asyncio.run(pool.compute_reward(prompt, reply))
        (tmp_path / "bwrap").unlink()
        after = asyncio.run(pool.compute_reward(prompt, reply))
    assert before.reward_parts == ALL
    assert after.reward_parts == {} and after.failure.startswith("SandboxUnavailable: bubblewrap")
