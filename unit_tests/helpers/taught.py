"""A tiny model that was taught to answer by a few digits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def teach_digits(trained: Any, tmp_path: Path, *, write: str = "{}", asked: str = "", **changes: Any) -> Path:
    """Train the tiny model on replies of one to six digits. Return the model's folder.

    trained: the fixture. write: form of every other reply. asked: the prompt, in place of sums. changes: to the recipe.
    """
    rng = random.Random(0)
    rows = []
    for i in range(2000):
        reply = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 6)))
        reply = write.format(reply) if i % 2 else reply
        turns = [
            {"role": "user", "content": asked or f"{rng.randint(0, 9)}+4="},
            {"role": "assistant", "content": reply},
        ]
        rows.append(json.dumps({"id": str(i), "messages": turns}))
    (tmp_path / "digits.jsonl").write_text("\n".join(rows) + "\n")
    sl = {"name": "taught", "data.train": str(tmp_path / "digits.jsonl"), "steps": 100, "rows_per_step": 32}
    sl |= {"trainer.lr": 3e-3, "trainer.warmup_updates": 10}
    return trained(sl | changes, kind="sl", name="taught") / "model"
