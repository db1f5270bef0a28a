r"""Extract the final answer of a reply, to count votes.

It may differ from the answer that the reward reads. Equal answers must become equal texts, and different answers
different texts.
"""

from __future__ import annotations

import re

from rewards.replies import cut_reasoning

BOX = re.compile(r"\\f?boxed\s*\{")
# Commas separate thousands only: 1,2 is two numbers.
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)


def find_final_answer(reply: str) -> str:
    r"""Return the last \boxed{...}; otherwise the text after the last "####", the last number, or the whole reply.

    White space is removed, but for a space between digits, as are the commas of a number. Reasoning does not count.

    >>> find_final_answer(r"so \boxed{\frac{1}{2}}."), find_final_answer("#### 1,200"), find_final_answer("3 + 4 is 7.")
    ('\\frac{1}{2}', '1200', '7')
    """
    reply = cut_reasoning(reply)
    found = _last_box(reply)
    if found is None and "####" in reply:
        found = reply.rpartition("####")[2].strip().partition("\n")[0]
    if found is None and (numbers := NUMBER.findall(reply)):
        found = numbers[-1]
    answer = (reply if found is None else found).strip()
    # Only of a number: in other answers, such as the tuple 1, 200, a comma has a meaning.
    if NUMBER.fullmatch(answer):
        return answer.replace(",", "")
    # A space stays between digits: 3 1/2 is not 31/2.
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(answer.split()))


def list_boxes(text: str) -> list[str]:
    r"""List the contents of closed, outermost boxes.

    >>> list_boxes(r"first \boxed{3}, then \boxed{\frac{1}{2}}, and \boxed{open")
    ['3', '\\frac{1}{2}']
    """
    found: list[str] = []
    after = 0
    for box in BOX.finditer(text):
        # A box within a box is a part of the outer answer.
        if box.start() >= after and (content := _read_box(text, box.end())) is not None:
            found.append(content)
            after = box.end() + len(content)
    return found


def _last_box(reply: str) -> str | None:
    """Return the content of the last closed box."""
    boxes = (_read_box(reply, box.end()) for box in reversed([*BOX.finditer(reply)]))
    return next((content for content in boxes if content is not None), None)


def _read_box(text: str, start: int) -> str | None:
    """Return the text from `start` to the brace that closes the box; None if it stays open."""
    depth = 1
    for at in range(start, len(text)):
        # A regular expression cannot match nested braces, such as those of \frac{1}{2}.
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    return None
