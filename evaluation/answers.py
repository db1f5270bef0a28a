r"""Find the final answer in a reply, to count votes.

It need not be what the reward reads: equal answers must become equal texts, and different ones different texts.
"""

from __future__ import annotations

import re

BOX = re.compile(r"\\f?boxed\s*\{")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.ASCII)


def find_final_answer(reply: str) -> str:
    r"""Return the last \boxed{...}; else what follows the last "####"; else the last number; else the whole reply.

    White space does not count, nor do the commas of a number.

    >>> find_final_answer(r"so \boxed{\frac{1}{2}}."), find_final_answer("#### 1,200"), find_final_answer("3 + 4 is 7.")
    ('\\frac{1}{2}', '1200', '7')
    """
    found = _last_box(reply)
    if found is None and "####" in reply:
        found = reply.rpartition("####")[2].strip().partition("\n")[0]
    if found is None and (numbers := NUMBER.findall(reply)):
        found = numbers[-1]
    plain = "".join((reply if found is None else found).split())
    return plain.replace(",", "") if NUMBER.fullmatch(plain) else plain


def _last_box(reply: str) -> str | None:
    """Return what the last closed box holds."""
    for start in reversed([box.end() for box in BOX.finditer(reply)]):
        depth = 1
        for at in range(start, len(reply)):
            depth += {"{": 1, "}": -1}.get(reply[at], 0)
            if depth == 0:
                return reply[start:at]
    return None
