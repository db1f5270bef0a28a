"""Tests of a row's code: parsed from the row's columns, and run in a sandbox."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from core.text.json_text import decode_json
from rewards.replies import cut_reasoning
from rewards.sandbox import Limits, Ran, Sandbox, SandboxUnavailable
from rewards.sandbox.base import last_line

JUDGE = Path(__file__).parent / "sandbox" / "inside" / "unit_tests.py"
# \Z: a reply that was cut off has no closing fence.
FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
# A process killed by signal n has the exit code 128 + n.
BY_SIGNAL = 128
SHORTEST_RUN = 0.05
"""Minimum time left to start another run, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Tests of one row: assertions, or pairs of input and output."""

    id: str
    """Id of the row, for errors."""
    tests: tuple[str, ...] = ()
    """Python statements that raise if the code is wrong."""
    setup: str = ""
    """Python code that runs before the tests."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Standard input of a program, and the expected output."""


def find_code(reply: str) -> str:
    r"""Return the last code block of a reply after its reasoning, closed or not, or all of it if there is none.

    >>> find_code("First\n```python\nx = 1\n```\nor rather\n```\nx = 2\n```\nas asked")
    'x = 2\n'
    >>> find_code("<think>\n```\nx = 1\n```\n</think>No code.")
    'No code.'
    """
    reply = cut_reasoning(reply)
    blocks = FENCE.findall(reply)
    return blocks[-1] if blocks else reply


def read_suite(row: str, extra: Mapping[str, Any]) -> Suite:
    """Parse a row's tests. Raises ValueError if they are missing or malformed."""
    pairs, tests, setup = _read_pairs(row, extra.get("pairs")), extra.get("tests"), extra.get("setup")
    if pairs:
        return Suite(id=row, pairs=tuple(_read_pair(row, pair) for pair in pairs))
    if isinstance(tests, str):
        suite = _split_file(row, tests, extra.get("entry_point"))
    elif not isinstance(tests, list | tuple | None):
        raise ValueError(f"{row}: tests must be a list of texts, or the text of a file, found {tests!r:.80}")
    else:
        suite = Suite(id=row, tests=tuple(tests or ()), setup=setup or "")
    if not suite.tests:
        raise ValueError(f"{row} has no tests: give it a column tests, or a column pairs")
    _parse_python(row, suite.setup)
    for test in suite.tests:
        # a broken test would count as wrong code, and an empty one as right code
        if all(map(_does_nothing, _parse_python(row, test).body)):
            raise ValueError(f"{row}: a test has no statement, so that any code passes: {test!r:.80}")
    return suite


def _does_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _read_pair(row: str, pair: Any) -> tuple[str, str]:
    try:
        stdin, stdout = pair["stdin"], pair["stdout"]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{row}: pairs must be objects with stdin and stdout, found {pair!r:.80}") from error
    if not isinstance(stdin, str) or not isinstance(stdout, str):
        raise ValueError(
            f"{row}: stdin and stdout of pairs must be text, found {pair!r:.80}: join a list of lines with line breaks"
        )
    return stdin, stdout


def _read_pairs(row: str, given: Any) -> Any:
    # a list may be stored as JSON text
    if not isinstance(given, str):
        return given
    try:
        return decode_json(given)
    except ValueError as error:
        raise ValueError(f"{row}: pairs is no JSON: {given:.80}") from error


def _parse_python(row: str, source: object) -> ast.Module:
    if not isinstance(source, str):
        raise ValueError(f"{row}: tests and setup must be texts, found {source!r:.80}")
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{row}: a test is no Python: {source:.80}") from error


def _split_file(row: str, text: str, entry_point: Any) -> Suite:
    tree = _parse_python(row, text)
    # in pytest's style: functions test_... and asserts at the top level
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    tests = [f"{name}()" for name in functions if name.startswith("test")]
    if "check" in functions and entry_point:
        tests.append(f"check({entry_point})")
    tests += [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assert)]
    # Asserts are no part of the setup: there, the first failure would fail all tests.
    setup = "\n".join(ast.unparse(node) for node in tree.body if not isinstance(node, ast.Assert))
    return Suite(id=row, tests=tuple(tests), setup=setup)


async def run_asserts(box: Sandbox, code: str, suite: Suite, limits: Limits) -> tuple[list[bool], bool]:
    """Return each test's result, and whether the code loads. Raises ValueError for a test that cannot be judged."""
    # only the judge knows it, so the code cannot print results of its own
    nonce = secrets.token_hex(16)
    given = {"code": code, "tests": suite.tests, "setup": suite.setup, "nonce": nonce}
    ran = await box.run(
        ["python3", JUDGE.name], files={JUDGE.name: JUDGE.read_bytes()}, stdin=json.dumps(given).encode(), limits=limits
    )
    # [:-1]: the text after the last line break is empty, or a line cut off by a kill
    lines = [line.removeprefix(nonce) for line in ran.stdout.decode(errors="replace").split("\n")[:-1] if nonce in line]
    if ran.killed_for == "output":  # by the results: neither the code nor a test can print there
        raise SandboxUnavailable(f"{suite.id}: the results of {len(suite.tests)} tests exceed the sandbox's output")
    if not lines:
        _check_judge(ran)
        return [False] * len(suite.tests), False
    results = [json.loads(line) for line in lines]
    told, passed = results[-1], [result["passed"] for result in results]
    if told["unsuited"]:
        raise ValueError(f"{suite.id}: a test cannot be judged: {told['unsuited'][0]}")
    # a killed run has no results for the remaining tests
    return passed + [False] * (len(suite.tests) - len(passed)), bool(told["ran"])


def _check_judge(ran: Ran) -> None:
    """Raise SandboxUnavailable if the judge did not start, unless a limit or the code itself killed it."""
    if ran.killed_for is None and ran.exit_code is not None and ran.exit_code < BY_SIGNAL:
        raise SandboxUnavailable(f"the tests could not be run, exit code {ran.exit_code}: {last_line(ran.stderr)}")


async def run_pairs(
    box: Sandbox, code: str, pairs: tuple[tuple[str, str], ...], limits: Limits, *, until: float, at_once: int
) -> tuple[list[bool], bool]:
    """Run the program for each pair, until the monotonic clock reaches `until`. Return which agree, and whether any
    exits with code 0."""
    # each run is a sandbox with a memory limit of its own, so their number bounds the memory
    places = asyncio.Semaphore(at_once)

    async def run_one(stdin: str, expected: str) -> tuple[bool, bool]:
        async with places:
            # all pairs share one time limit, so a program that always hangs costs it once
            left = until - time.monotonic()
            if left < SHORTEST_RUN:
                return False, False
            ran = await box.run(
                ["python3", "main.py"],
                files={"main.py": code.encode(errors="replace")},
                stdin=stdin.encode(),
                limits=replace(limits, seconds=left),
            )
        ended = ran.exit_code == 0
        # a program that prints the right answer and then crashes is wrong
        return ended and trim_lines(ran.stdout.decode(errors="replace")) == trim_lines(expected), ended

    outcomes = await asyncio.gather(*[run_one(*pair) for pair in pairs])
    return [agrees for agrees, _ in outcomes], any(ended for _, ended in outcomes)


def trim_lines(text: str) -> list[str]:
    r"""Return the lines without trailing white space, and without trailing empty lines.

    >>> trim_lines("1 2 \n3\n\n") == trim_lines("1 2\n3")
    True
    """
    return [line.rstrip() for line in text.rstrip().split("\n")]
