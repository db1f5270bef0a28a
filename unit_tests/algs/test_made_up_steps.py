"""The made-up data of algs.check is always the same, so that a failure occurs again at the same token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algs.base import Algorithm
from algs.check import fixtures
from algs.chord import CHORD
from algs.dpo import DPO
from algs.grpo import GRPO
from algs.kto import KTO
from algs.offline_dro import OfflineDRO
from algs.sft import SFT
from core.types.samples import Sample

STEPS = Path(__file__).parent.parent / "data" / "made_up_steps.json"
ALGORITHMS: dict[str, Algorithm] = {
    "policy gradient": GRPO(),
    "conversations": SFT(),
    "pairs": DPO(),
    "unpaired": KTO(),
    "scored": OfflineDRO(),
    "demonstrations": CHORD(),
}


def digest(values: Any) -> float:
    """Sum of all numbers, each with a weight of its own."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    return round(float(flat @ np.cos(np.arange(len(flat)))), 6)


def describe(s: Sample) -> str:
    """Sample in one line, of each array a digest."""
    stored = [digest(np.concatenate(found)) for name, found in s.prompt.extra.items() if name != "topk_tokens"]
    columns = [f"{name} {digest(values)}" for name, values in sorted(s.columns.items())]
    mask = "".join(map(str, s.action_mask.astype(int)))
    return (
        f"{s.prompt.id} {s.token_ids.tolist()} {mask} {s.origin} {s.stop} {s.reward} {s.completion} {s.turn_rewards} "
        f"rollout {digest(s.rollout_logp)} {digest(s.versions)} {' '.join(columns)} stored {stored}"
    )


def describe_step(kind: str) -> dict[str, Any]:
    step = fixtures.made_up_step(ALGORITHMS[kind])
    return {
        "now": {name: digest(table) for name, table in step.now.items()},
        "samples": [describe(sample) for group in step.groups for sample in group],
    }


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_made_up_step_is_always_the_same(kind):
    """`python -m unit_tests.algs.test_made_up_steps` writes it."""
    assert describe_step(kind) == json.loads(STEPS.read_text())[kind]


if __name__ == "__main__":
    STEPS.write_text(json.dumps({kind: describe_step(kind) for kind in ALGORITHMS}, indent=1) + "\n")
