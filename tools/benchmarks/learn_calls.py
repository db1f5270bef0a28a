"""Function calls in one turn, for tools/benchmarks/learn_vs_trl.py: a question about two numbers, and the call as JSON.

Four turns before the question show a call of each function. SmolLM2-135M-Instruct copies their form, and often names
another function, so that it begins at a reward of about 0.2. The reward is `arithmetic`, which compares the reply with
the answer word for word.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from data_prep.function_calls import write_jsonl

FORMS = {
    "sub": "{a} minus {b}",
    "max": "the larger of {a} and {b}",
    "add": "the sum of {a} and {b}",
    "min": "the smaller of {a} and {b}",
}
"""Question that each function answers."""
SHOWN = {"sub": (7, 2), "max": (5, 8), "add": (3, 4), "min": (9, 6)}
"""Numbers of the examples. Those of the rows have two digits."""
TASK = "Answer with a call of add, sub, max or min, and nothing else."


def make_calls(folder: Path, *, train: int, held_out: int) -> None:
    """Write train.jsonl and eval.jsonl, without a question twice."""
    rng, drawn = random.Random(0), dict[tuple[str, int, int], None]()
    while len(drawn) < train + held_out:
        drawn.setdefault((rng.choice(list(FORMS)), rng.randint(10, 99), rng.randint(10, 99)))
    rows = [make_row(f"calls/{i}", *problem) for i, problem in enumerate(drawn)]
    # the training rows last: a folder with them is complete
    write_jsonl(folder / "eval.jsonl", rows[:held_out])
    write_jsonl(folder / "train.jsonl", rows[held_out:])


def make_row(name: str, function: str, a: int, b: int) -> dict[str, Any]:
    """Return a row whose answer is the call."""
    messages = [{"role": "system", "content": TASK}]
    for shown, numbers in SHOWN.items():
        messages += [ask(shown, *numbers), {"role": "assistant", "content": write_call(shown, *numbers)}]
    return {"id": name, "messages": [*messages, ask(function, a, b)], "answer": write_call(function, a, b)}


def ask(function: str, a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": FORMS[function].format(a=a, b=b)}


def write_call(function: str, a: int, b: int) -> str:
    """Return the JSON text of a call.

    >>> write_call("add", 3, 4)
    '{"name": "add", "arguments": {"a": 3, "b": 4}}'
    """
    return json.dumps({"name": function, "arguments": {"a": a, "b": b}})
