"""Mathematical equality by the math-verify library (https://github.com/huggingface/Math-Verify).

    correct   1 if the reply's last answer is the same mathematical object as the ground truth

The library's timeout uses SIGALRM, so this reward needs the main thread of a process, as in rewards/pool.py. A reply
that times out is wrong, not failed. Otherwise a policy could learn to avoid a bad reward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from math_verify import parse, verify

from core.timing.deadlines import MATH_VERIFY_TIMEOUT_S

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt


def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
    """Compare the last answer with the ground truth. Raises ValueError if the ground truth cannot be parsed."""
    # a data set's answers are often bare LaTeX, which the library parses only in a box
    expected = parse(prompt.answer, parsing_timeout=MATH_VERIFY_TIMEOUT_S) or parse(
        rf"\boxed{{{prompt.answer}}}", parsing_timeout=MATH_VERIFY_TIMEOUT_S
    )
    if not expected:
        raise ValueError(f"math-verify cannot read the answer {prompt.answer!r} of {prompt.id}")
    found = parse(messages[-1]["content"], parsing_timeout=MATH_VERIFY_TIMEOUT_S)
    return {"correct": float(verify(expected, found, timeout_seconds=MATH_VERIFY_TIMEOUT_S))}
