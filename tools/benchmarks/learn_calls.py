"""Function calls in one turn, for tools/benchmarks/learn_vs_trl.py: the questions of data_prep.function_calls.

The reply is the call as JSON text. The model learns this form by supervised training on a careless teacher's calls, of
which 6 in 10 are wrong, so that it begins at a reward of about 0.3 (see data_prep/function_calls.py). The reward is
`arithmetic`, which compares the reply with the answer word for word.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_prep import function_calls

WRONG_SHARE = 0.6
SUPERVISED: dict[str, Any] = {
    "name": "learn-calls",
    "backend": "local",
    "steps": 30,
    "rows_per_step": 16,
    "display": "quiet",
    "alg": {"name": "sft"},
    "trainer": {"lr": 1e-4, "lr_schedule": "cosine", "warmup_updates": 4, "micro_batch_tokens": 2048},
}


def make_calls(folder: Path, *, train: int, held_out: int, sft: int) -> None:
    """Write train.jsonl, eval.jsonl and sft.jsonl, without a question twice."""
    made = function_calls.make(train=train, held_out=held_out, sft=sft, wrong_share=WRONG_SHARE)
    for split, rows in made.items():
        function_calls.write_jsonl(folder / f"{split}.jsonl", [make_row(row, taught=split == "sft") for row in rows])


def make_row(row: dict[str, Any], *, taught: bool) -> dict[str, Any]:
    """Return the question with the expected call as its answer, or with the teacher's call as the reply."""
    question, *turns = row["messages"]
    if not taught:
        return {"id": row["id"], "messages": [question], "answer": json.dumps(row["call"])}
    reply = json.dumps(turns[0]["tool_calls"][0]["function"])
    return {"id": row["id"], "messages": [question, {"role": "assistant", "content": reply}]}


def warm_up(model: Path, folder: Path) -> None:
    """Train the model on `folder`/sft.jsonl, and save it in `folder`/sft."""
    import main_sl

    file = folder / "sft.json"
    places = {"run_dir": str(folder / "runs"), "save_to": str(folder / "sft")}
    data = {"data": {"train": str(folder / "sft.jsonl"), "max_tokens": 96}}
    file.write_text(json.dumps(SUPERVISED | places | data | {"model": {"path": str(model), "dtype": "float32"}}))
    main_sl.run(str(file), [])
