"""Reward of Python code with tests, executed in a sandbox: docs/how_to/code_rewards.md.

    reward: {function: code, settings: {timeout_s: 5}, weights: {correct: 1.0, passed: 0.2}}

    correct   1 if every test passes
    passed    fraction of the tests that pass
    ran       1 if the code runs at all: it loads without an error, or a program exits with code 0

The tests are in one of two columns of the row:

    tests     assertions about names of the code, each a test: ["assert add(1, 2) == 3", ...]; or the text of a file,
              with a test for each function test_... and each assert outside functions. A function check(candidate) is
              called with the name in the column entry_point
    pairs     [{"stdin": "1 2\\n", "stdout": "3\\n"}, ...]: the code is a program; each pair is a test

The code of a reply is the last block between ``` marks, or without marks the whole reply.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from core.errors import UserError
from core.timing.deadlines import SANDBOX_MARGIN_S
from rewards.code_tests import Suite, find_code, read_suite, run_asserts, run_pairs
from rewards.sandbox import Limits, check_sandbox, make_sandbox

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt


def score(
    prompt: Prompt,
    messages: list[Message],
    *,
    sandbox: str = "bubblewrap",
    timeout_s: float = 10.0,
    memory_mib: int = 512,
    at_once: int = 2,
) -> dict[str, float]:
    """Run the tests. sandbox: bubblewrap, or a server's URL. timeout_s: limit of all tests of a sample together.

    at_once: concurrent runs of pairs. Raises ValueError for a row without tests, and SandboxUnavailable if the sandbox
    fails.
    """
    suite = read_suite(prompt.id, prompt.extra)
    code = find_code(messages[-1]["content"])
    limits = Limits(seconds=timeout_s, memory_mib=memory_mib)
    # each call has a new event loop: a reward worker is a process without one
    passed, ran = asyncio.run(_run(suite, code, sandbox, limits, at_once))
    return {"correct": float(all(passed)), "passed": sum(passed) / len(passed), "ran": float(ran)}


async def _run(suite: Suite, code: str, sandbox: str, limits: Limits, at_once: int) -> tuple[list[bool], bool]:
    box = make_sandbox(sandbox)
    if suite.pairs:
        until = time.monotonic() + limits.seconds
        return await run_pairs(box, code, suite.pairs, limits, until=until, at_once=at_once)
    return await run_asserts(box, code, suite, limits)


def check(
    deadline_s: float,
    *,
    sandbox: str = "bubblewrap",
    timeout_s: float = 10.0,
    memory_mib: int = 512,
    at_once: int = 2,
) -> None:
    """Raise UserError for an invalid setting, or if the sandbox does not work. deadline_s: reward.timeout_s."""
    for name, value, least in (("timeout_s", timeout_s, 0.1), ("memory_mib", memory_mib, 32), ("at_once", at_once, 1)):
        # a bool is an int in Python, and a nan compares as false
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= least:
            raise UserError(f"reward.settings.{name} must be a number from {least:g} on, found {value!r:.80}")
    if timeout_s + SANDBOX_MARGIN_S > deadline_s:
        raise UserError(
            f"reward.settings.timeout_s={timeout_s:g} must be at least {SANDBOX_MARGIN_S:g} s below reward.timeout_s="
            f"{deadline_s:g}, or code that hangs fails the sample instead of scoring 0: raise reward.timeout_s"
        )
    check_sandbox(sandbox)


def prepare(*, sandbox: str = "bubblewrap", **others: object) -> None:
    """Check the sandbox on every machine of a run."""
    check_sandbox(sandbox)
