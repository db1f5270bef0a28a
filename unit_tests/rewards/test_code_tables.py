"""Tests of a row's code, judged by a sandbox that gives scripted results: which pass, and whose fault a failure is."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from core.errors import UserError
from core.types.samples import Prompt
from rewards import code
from rewards.code_tests import JUDGE, Suite, find_code, run_asserts, run_pairs, trim_lines
from rewards.sandbox import Limits, Ran, SandboxUnavailable
from unit_tests.helpers.posts import serve_posts

SUITE = Suite(id="row/7", tests=("assert f()", "g()", "h()"), setup="x = 1")
LIMITS = Limits(seconds=3.0, memory_mib=99, processes=7)


def ran_of(code: int | None = 0, stdout: bytes = b"", stderr: bytes = b"", killed_for: Any = None) -> Ran:
    return Ran(exit_code=code, stdout=stdout, stderr=stderr, seconds=0.5, killed_for=killed_for)


class Box:
    """Sandbox that gives the result of a function, and notes what it was asked for."""

    def __init__(self, answer: Callable[[bytes], Ran]) -> None:
        self.answer, self.asked, self.now, self.most = answer, list[dict[str, Any]](), 0, 0

    async def run(self, command: Any, *, files: Any = None, stdin: bytes = b"", limits: Limits | None = None) -> Ran:
        self.asked.append({"command": command, "files": files, "stdin": stdin, "limits": limits})
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(3):
            await asyncio.sleep(0)
        self.now -= 1
        return self.answer(stdin)

    async def check(self) -> None: ...


def tell(*passed: bool, ran: bool = True, unsuited: tuple[str, ...] = (), end: str = "", **more: Any) -> Any:
    """Answer with a line for each test. end: what stands behind the lines."""

    def answer(stdin: bytes) -> Ran:
        nonce = json.loads(stdin)["nonce"]
        lines = [f"{nonce}{json.dumps({'ran': ran, 'passed': one, 'unsuited': unsuited})}\n" for one in passed]
        return ran_of(stdout=("noise\n" + "".join(lines) + end.replace("NONCE", nonce)).encode(), **more)

    return answer


def judge(answer: Any) -> tuple[list[bool], bool]:
    return asyncio.run(run_asserts(Box(answer), "code", SUITE, LIMITS))


CUT = 'NONCE{"ran": true, "passed": true, "unsuited": []}'
RESULTS: list[tuple[Any, tuple[list[bool], bool]]] = [
    (tell(True, False, True), ([True, False, True], True)),
    (tell(True, False, True, ran=False), ([True, False, True], False)),
    (tell(True), ([True, False, False], True)),
    (tell(False, end=CUT), ([False, False, False], True)),
    (tell(True, code=None, killed_for="time"), ([True, False, False], True)),
    (lambda _: ran_of(None, killed_for="memory"), ([False] * 3, False)),
    (lambda _: ran_of(None, killed_for="time"), ([False] * 3, False)),
    (lambda _: ran_of(128), ([False] * 3, False)),
    (lambda _: ran_of(137), ([False] * 3, False)),
    (tell(end=CUT, code=139), ([False] * 3, False)),
]


@pytest.mark.parametrize(("answer", "found"), RESULTS)
def test_a_test_has_passed_if_its_whole_line_says_so(answer, found):
    assert judge(answer) == found


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (
            tell(True, code=None, killed_for="output"),
            SandboxUnavailable,
            "row/7: the results of 3 tests exceed the sandbox's output",
        ),
        (
            lambda _: ran_of(1, stderr=b"a\nno python\n"),
            SandboxUnavailable,
            "the tests could not be run, exit code 1: no python",
        ),
        (lambda _: ran_of(127), SandboxUnavailable, "the tests could not be run, exit code 127: "),
        (tell(end=CUT), SandboxUnavailable, "the tests could not be run, exit code 0: "),
        (
            tell(True, True, unsuited=("first", "second")),
            ValueError,
            "row/7: a test cannot be judged: first",
        ),
    ],
)
def test_what_is_not_the_fault_of_the_code_is_no_result(answer, kind, says):
    with pytest.raises(kind) as raised:
        judge(answer)
    assert str(raised.value) == says


def test_the_judge_gets_code_tests_and_a_word_that_nobody_else_knows():
    box = Box(tell(True, True, True))
    for _ in range(2):
        asyncio.run(run_asserts(box, "x = 'ä'", SUITE, LIMITS))
    one, other = (json.loads(asked["stdin"]) for asked in box.asked)
    assert one["nonce"] != other["nonce"] and len(one.pop("nonce")) == 32
    assert one == {"code": "x = 'ä'", "tests": ["assert f()", "g()", "h()"], "setup": "x = 1"}
    assert box.asked[0]["command"] == ["python3", "unit_tests.py"] and box.asked[0]["limits"] is LIMITS
    assert box.asked[0]["files"] == {"unit_tests.py": JUDGE.read_bytes()}


PAIRS = (("2", "4"), ("3", "9\n"), ("0", "x"), ("5", "25"), ("7", "49"))


def square(stdin: bytes) -> Ran:
    """Print the square of the input; fail at 0, and crash after the answer at 5."""
    n = int(stdin)
    return ran_of(1) if n == 0 else ran_of(3 if n == 5 else 0, f"{n * n} \n\n".encode())


def run_programs(answer: Any, *, seconds: float = 60.0, at_once: int = 2) -> tuple[Box, tuple[list[bool], bool]]:
    box = Box(answer)
    until = time.monotonic() + seconds
    return box, asyncio.run(run_pairs(box, "print(1)", PAIRS, LIMITS, until=until, at_once=at_once))


def test_programs_agree_with_the_outputs_of_their_pairs():
    box, found = run_programs(square)
    assert found == ([True, True, False, False, True], True)
    assert [asked["stdin"] for asked in box.asked] == [b"2", b"3", b"0", b"5", b"7"]
    assert all(asked["command"] == ["python3", "main.py"] for asked in box.asked)
    assert all(asked["files"] == {"main.py": b"print(1)"} for asked in box.asked)
    for asked in box.asked:
        assert 50 < asked["limits"].seconds <= 60 and asked["limits"].memory_mib == 99
        assert asked["limits"].processes == 7
    assert run_programs(lambda _: ran_of(1, b"4"))[1] == ([False] * 5, False), "none has ended well"
    assert run_programs(lambda _: ran_of(None, b"4", killed_for="time"))[1] == ([False] * 5, False)
    assert run_programs(lambda _: ran_of(0, b"4"))[1] == ([True, False, False, False, False], True)


def test_half_a_character_in_a_program_is_no_failure_of_its_sample():
    """As JSON can hold it; no file can."""
    box = Box(square)
    code, until = json.loads(r'"print(1)  # \ud83d"'), time.monotonic() + 60
    assert asyncio.run(run_pairs(box, code, PAIRS[:1], LIMITS, until=until, at_once=1)) == ([True], True)
    assert box.asked[0]["files"] == {"main.py": b"print(1)  # ?"}


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_so_many_programs_run_at_once_and_no_more(at_once: int):
    assert run_programs(square, at_once=at_once)[0].most == at_once


def test_without_time_no_program_is_started():
    for seconds in (-1.0, 0.0, 0.04):
        box, found = run_programs(square, seconds=seconds)
        assert (box.asked, found) == ([], ([False] * 5, False))
    assert len(run_programs(square, seconds=0.9)[0].asked) == 5


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("\n \n", [""]),
        ("1 2 \n3\t\n\n", ["1 2", "3"]),
        ("  1\n\n2", ["  1", "", "2"]),
    ],
)
def test_white_space_at_the_ends_of_lines_does_not_count(text, lines):
    assert trim_lines(text) == lines


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("x = 1", "x = 1"),
        ("```\nx\n```", "x\n"),
        ("a\n  ```python title=x\nx\n  ```\nb", "x\n"),
        ("```\nx\n```\n```\ny\n```", "y\n"),
        ("```\nx\n```\n```py\ny\nz", "y\nz"),
        ("a ```x``` b", "a ```x``` b"),
        ("<think>```\nx\n```</think>y", "y"),
    ],
)
def test_the_code_is_the_last_block_of_a_reply(reply, found):
    assert find_code(reply) == found


@pytest.fixture
def server() -> Iterator[dict[str, Any]]:
    """The address of a sandbox's server, what it was asked, and how it answers the input of a program."""
    says: dict[str, Any] = {"asked": [], "answer": lambda stdin: ran_of(stdout=b"42")}

    def answer(path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        asked = json.loads(body)
        says["asked"].append(asked)
        ran = says["answer"](asked["stdin"].encode())
        told = {"status": "Finished", "return_code": ran.exit_code, "stdout": ran.stdout.decode()}
        return 200, json.dumps({"status": "Success", "run_result": told}).encode()

    with serve_posts(answer) as says["url"]:
        yield says


def score(server: dict[str, Any], extra: dict[str, Any], **settings: Any) -> dict[str, float]:
    replies = ("```\nx\n```", "```\ny = 2\n```")
    messages: Any = [{"role": "assistant", "content": reply} for reply in replies]
    return code.score(Prompt(id="row/7", messages=[], extra=extra), messages, sandbox=server["url"], **settings)


def test_the_parts_are_of_all_tests_of_their_share_and_of_the_run(server):
    tests = {"tests": ["f()", "g()", "h()", "i()"]}
    for passed, parts in (
        ((True, True, True, True), {"correct": 1.0, "passed": 1.0, "ran": 1.0}),
        ((True, False, True, True), {"correct": 0.0, "passed": 0.75, "ran": 1.0}),
        ((False,), {"correct": 0.0, "passed": 0.0, "ran": 1.0}),
    ):
        server["answer"] = tell(*passed)
        assert score(server, tests, timeout_s=4.0, memory_mib=77) == parts
    asked = server["asked"][0]
    assert (asked["run_timeout"], asked["memory_limit_MB"], json.loads(asked["stdin"])["code"]) == (4.0, 77, "y = 2\n")
    server["answer"] = square
    pairs = {"pairs": [{"stdin": stdin, "stdout": stdout} for stdin, stdout in PAIRS]}
    assert score(server, pairs, at_once=3) == {"correct": 0.0, "passed": 0.6, "ran": 1.0}
    assert server["asked"][-1]["code"] == "y = 2\n" and 9 < server["asked"][-1]["run_timeout"] <= 10
    assert server["asked"][-1]["memory_limit_MB"] == 512


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"timeout_s": 0.1}, None),
        ({"timeout_s": 18}, None),
        ({"memory_mib": 32, "at_once": 1}, None),
        ({"timeout_s": 0.09}, "reward.settings.timeout_s must be a number from 0.1 on, found 0.09"),
        ({"memory_mib": 31}, "reward.settings.memory_mib must be a number from 32 on, found 31"),
        ({"at_once": 0}, "reward.settings.at_once must be a number from 1 on, found 0"),
        ({"at_once": True}, "reward.settings.at_once must be a number from 1 on, found True"),
        ({"at_once": "2"}, "reward.settings.at_once must be a number from 1 on, found '2'"),
        ({"timeout_s": float("nan")}, "reward.settings.timeout_s must be a number from 0.1 on, found nan"),
        (
            {"timeout_s": 18.5},
            "reward.settings.timeout_s=18.5 must be at least 2 s below reward.timeout_s=20, or code that hangs fails "
            "the sample instead of scoring 0: raise reward.timeout_s",
        ),
    ],
)
def test_settings_of_code_are_checked_with_the_sandbox(settings, says, server):
    if says is None:
        code.check(20.0, sandbox=server["url"], **settings)
        assert [asked["code"] for asked in server["asked"]] == ["print(6 * 7)"]
        return
    with pytest.raises(UserError) as raised:
        code.check(20.0, sandbox=server["url"], **settings)
    assert str(raised.value) == says and server["asked"] == []


def test_every_machine_checks_its_sandbox(server):
    code.prepare(sandbox=server["url"], timeout_s=3.0)
    server["answer"] = lambda stdin: ran_of(1, b"41")
    with pytest.raises(UserError) as raised:
        code.prepare(sandbox=server["url"])
    assert str(raised.value) == f"the sandbox {server['url']} cannot run Python: exit code 1 "
