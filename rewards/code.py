"""Code with tests (Python), run in a sandbox: docs/how_to/code_rewards.md.

    reward: {function: code, settings: {timeout_s: 5}, weights: {correct: 1.0, passed: 0.2}}

    correct   1 if every test passes
    passed    fraction of the tests that pass
    ran       1 if the code runs at all: it loads without an error, or one of its runs ends with exit code 0

The row's tests are in one of two columns:

    tests     assertions about names of the code, each a test: ["assert add(1, 2) == 3", ...]; or the text of a file, in
              which each function test_... and each assert outside functions is one; with a function check(candidate),
              the column entry_point names what is given to it
    pairs     [{"stdin": "1 2\\n", "stdout": "3\\n"}, ...]: the code is a program; each pair is a test

The code of a reply is its last block between ``` marks, or without a mark all of it.
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
    """Run the tests. sandbox: bubblewrap, or a server's address. timeout_s: of all tests of a sample together.

    at_once: runs of pairs at the same time. Raises ValueError for a row without tests, SandboxUnavailable where the
    sandbox fails.
    """
    suite = read_suite(prompt.id, prompt.extra)
    code = find_code(messages[-1]["content"])
    limits = Limits(seconds=timeout_s, memory_mib=memory_mib)
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
    """Raise UserError where code cannot be run, or a setting has no sense. deadline_s: reward.timeout_s."""
    for name, value, least in (("timeout_s", timeout_s, 0.1), ("memory_mib", memory_mib, 32), ("at_once", at_once, 1)):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= least:
            raise UserError(f"reward.settings.{name} must be a number from {least:g} on, found {value!r:.80}")
    if timeout_s + SANDBOX_MARGIN_S > deadline_s:
        raise UserError(
            f"reward.settings.timeout_s={timeout_s:g} leaves the tests no {SANDBOX_MARGIN_S:g} s of reward.timeout_s="
            f"{deadline_s:g}, so code that hangs would be a failed sample and not a wrong one: raise reward.timeout_s"
        )
    check_sandbox(sandbox)


def prepare(*, sandbox: str = "bubblewrap", **others: object) -> None:
    """Try the sandbox on every machine of a run."""
    check_sandbox(sandbox)
