"""Generated function calls: a question about two numbers, three tools, one of which answers it, and the answer.

    python -m data_prep.function_calls --out data/tools --train 400 --eval 200

writes train.jsonl and eval.jsonl with the columns messages, tools, answer and call (the expected call). `--sft N` adds
sft.jsonl, with whole conversations: question, call, tool result, answer. `--wrong-share 0.6` makes the teacher
careless: in that share of rows it calls another tool or writes a wrong digit, and believes the result. A model trained
on it is right about as often, everywhere alike, with the right call as the mode. Reinforcement learning can improve
such a policy at once.

The model needs a template that writes tools: `python -m data_prep.tiny_model --tools`. The environment is number_tools,
and the reward is function_calls.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.types.messages import Message, ToolSpec
from data_prep.script import read_options, run_script, share, task_parser, write_task
from rollouts.envs.number_tools import TOOLS
from rollouts.tools.functions import make_spec

WORDS = {"add": ("sum", "total"), "sub": ("gap", "minus"), "max": ("top", "most"), "min": ("low", "least")}
"""Words of a question for each tool."""
OFFERED = 3
"""Number of tools per row."""
# Two digits each: _spoil changes one of four digits by position.
SMALLEST, LARGEST = 10, 99
OTHER_TOOL = 0.5
"""Share of wrong calls with another tool. The rest have a wrong digit."""

Problem = tuple[str, str, int, int]
"""Tool, word, and the two numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call of a tool with two numbers."""

    tool: str
    a: int
    b: int

    @property
    def result(self) -> str:
        return str(TOOLS[self.tool](self.a, self.b))

    def as_dict(self) -> dict[str, Any]:
        """Return the call as in a reply."""
        return {"name": self.tool, "arguments": {"a": self.a, "b": self.b}}


def make(*, train: int, held_out: int, sft: int = 0, wrong_share: float = 0.0, seed: int = 0) -> dict[str, list[Any]]:
    """Draw the splits "eval", "train" and "sft", in this order, so that eval depends only on the seed.

    No two rows share a question. Raises ValueError if there are too few.
    """
    rng = random.Random(seed)
    problems = _draw(held_out + train + sft, rng)
    splits = {"eval": problems[:held_out], "train": problems[held_out : held_out + train]}
    splits["sft"] = problems[held_out + train :]
    specs = {name: make_spec(function) for name, function in TOOLS.items()}
    rows = {
        # a generator per row: the tools offered with a question do not depend on the number of rows
        split: [_make_row(f"tools/{split}/{i}", p, specs, random.Random(f"{seed}/{p}")) for i, p in enumerate(ps)]
        for split, ps in splits.items()
    }
    return rows | {"sft": [_teach(row, wrong_share, rng) for row in rows["sft"]]}


def _draw(count: int, rng: random.Random) -> list[Problem]:
    numbers = LARGEST - SMALLEST + 1
    there_are = sum(map(len, WORDS.values())) * numbers**2
    if count > there_are:
        raise ValueError(f"{count} questions were asked for, there are {there_are}")
    # a dict and not a set, which would have another order in every process
    drawn: dict[Problem, None] = {}
    while len(drawn) < count:
        tool = rng.choice(list(WORDS))
        numbers_drawn = (rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST))
        drawn.setdefault((tool, rng.choice(WORDS[tool]), *numbers_drawn))
    return list(drawn)


def _make_row(row_id: str, problem: Problem, specs: dict[str, ToolSpec], rng: random.Random) -> dict[str, Any]:
    tool, word, a, b = problem
    offered = [tool, *rng.sample([name for name in TOOLS if name != tool], OFFERED - 1)]
    rng.shuffle(offered)
    call = Call(tool=tool, a=a, b=b)
    return {
        "id": row_id,
        "messages": [{"role": "user", "content": f"{word} {a} {b}"}],
        "tools": [specs[name] for name in offered],
        "answer": call.result,
        "call": call.as_dict(),
    }


def _teach(row: dict[str, Any], wrong_share: float, rng: random.Random) -> dict[str, Any]:
    """Return the row with the teacher's turns, and the result of the call."""
    wanted = row["call"]
    call = Call(tool=wanted["name"], **wanted["arguments"])
    if rng.random() < wrong_share:
        call = _spoil(call, [spec["function"]["name"] for spec in row["tools"]], rng)
    answers: list[Message] = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": call.as_dict()}],  # pyright: ignore
        },
        {"role": "tool", "content": call.result, "tool_call_id": "call_0", "name": call.tool},
        {"role": "assistant", "content": call.result},
    ]
    return row | {"messages": [*row["messages"], *answers]}


def _spoil(call: Call, offered: list[str], rng: random.Random) -> Call:
    """Return a wrong call: another offered tool, or one wrong digit."""
    if rng.random() < OTHER_TOOL:
        return Call(tool=rng.choice([name for name in offered if name != call.tool]), a=call.a, b=call.b)
    digits = list(f"{call.a}{call.b}")
    at = rng.randrange(len(digits))
    first = at % 2 == 0  # both numbers have two digits, and the first is never 0
    digits[at] = rng.choice([d for d in "123456789" + "0" * (not first) if d != digits[at]])
    return Call(tool=call.tool, a=int("".join(digits[:2])), b=int("".join(digits[2:])))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines. Missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


def main(argv: list[str] | None = None) -> None:
    parser = task_parser("data_prep.function_calls", __doc__, train=400, held_out=200, rows="questions")
    parser.add_argument("--wrong-share", type=share, default=0.0, help="share of SFT rows with a wrong call")
    write_task(parser, make, jsonl=True, write=write_jsonl, **read_options(parser, argv))


if __name__ == "__main__":
    run_script(main)
