"""Mathematical equality by the math-verify library (https://github.com/huggingface/Math-Verify).

    correct   1 if the reply's last answer is the same mathematical object as the ground truth

The library stops itself by SIGALRM, so this reward needs a process's main thread, which rewards/pool.py gives
it. What it cannot decide in time is wrong, not failed: otherwise a policy could learn to dodge a bad grade.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from math_verify import parse, verify

if TYPE_CHECKING:
    from core.types import Message, Prompt

TIMEOUT_S = 2


def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
    """Raise ValueError when the ground truth is no mathematics: then the row is wrong, not the reply."""
    expected = parse(prompt.answer, parsing_timeout=TIMEOUT_S) or parse(
        rf"\boxed{{{prompt.answer}}}", parsing_timeout=TIMEOUT_S
    )
    if not expected:
        raise ValueError(f"math-verify cannot read the answer {prompt.answer!r} of {prompt.id}")
    said = parse(messages[-1]["content"], parsing_timeout=TIMEOUT_S)
    return {"correct": float(verify(expected, said, timeout_seconds=TIMEOUT_S))}
