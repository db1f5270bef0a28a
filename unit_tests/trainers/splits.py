"""One step of every algorithm, cut in many ways: micro-batches, ranks, layouts, shared prefixes, and a real model.

python -m unit_tests.trainers.splits [--write]        prints the table of docs/reference/splits.md, and writes it

The derivative of a token is compared to the bit by `algs.check`, obligation (m), whose forward pass gives every cut the
same numbers. Here the model computes them, in float32, so a gradient may differ by rounding.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from algs import list_algorithms
from algs.base import Algorithm, assign_advantages
from algs.check.checker import check
from algs.totals import prepare_update
from core.types.samples import Batch, Group
from data_feeds.packing.batches import plan_update
from unit_tests.helpers.local_trainers import trainer_of
from unit_tests.helpers.variants import NEEDED
from unit_tests.pretend_cuda.steps import LAYOUTS, Case, Models, make_algorithm, make_groups, read_master, score

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "splits.md"
CLOSE = 2e-5
"""Largest difference of a gradient that is rounding, as a part of its norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Way to cut a step."""

    layout: str
    max_tokens: int = 90
    ranks: int = 1


WHOLE = Way(layout="padded", max_tokens=10_000)
WAYS = {
    "micro-batches": Way(layout="padded"),
    "2 ranks": Way(layout="padded", ranks=2),
    "4 ranks": Way(layout="packed", ranks=4),
    "packed": Way(layout="packed", max_tokens=10_000),
    "packed micro-batches": Way(layout="packed"),
    "shared prefixes": Way(layout="shared", max_tokens=10_000),
    "shared, 2 ranks": Way(layout="shared", ranks=2),
}


def measure(name: str, models: Models) -> dict[str, float]:
    """Return the difference of the gradient from that in one piece, as a part of its norm, by way."""
    case = Case(alg=name, layout="padded", max_tokens=10_000)
    alg = make_algorithm(case, models)
    trainer = trainer_of(models.find("tiny"), alg, **LAYOUTS["padded"])
    torch.manual_seed(0)
    groups = score(case, alg, trainer, make_groups(case, alg, models))
    groups = prepare_update(alg, assign_advantages(alg, groups))
    want = compute_gradient(alg, groups, WHOLE, models)
    found = {way: compute_gradient(alg, groups, WAYS[way], models) for way in WAYS}
    return {way: float((got - want).norm() / want.norm()) for way, got in found.items()}


def compute_gradient(alg: Algorithm, groups: list[Group], way: Way, models: Models) -> Tensor:
    """Return the gradient of one update, [parameters]."""
    attention = "sdpa" if way.layout == "padded" else "auto"
    trainer = trainer_of(models.find("tiny"), alg, attention=attention, **LAYOUTS[way.layout])
    if trainer.critic is not None:  # else all values are 0
        head: Any = trainer.critic.model.score
        head.weight.data.copy_(torch.linspace(-1, 1, head.in_features)[None])
    before = read_master(trainer)
    trainer.step([cut(alg, groups, way)])
    return before - read_master(trainer)


def cut(alg: Algorithm, groups: list[Group], way: Way) -> list[Batch]:
    """Return the micro-batches of all ranks: their gradients add up, in one process or in several."""
    plan = plan_update(
        groups,
        alg.loss_norm,
        way.max_tokens,
        ranks=way.ranks,
        horizon=10,
        padded=way.layout == "padded",
        share_prefixes=way.layout == "shared",
        whole_groups=alg.whole_groups,
        whole_episodes=alg.whole_episodes,
        terms=alg.terms,
    )
    return [batch for rank in plan.batches() for batch in rank]


def main() -> None:
    """Print the table, with --write also into the page. Exit code 1 where a cut changes a gradient or a derivative."""
    torch.set_num_threads(1)
    wrong: list[str] = []
    rows = [f"| algorithm | {' | '.join(WAYS)} | derivative of each token |", f"|---{'|---' * (len(WAYS) + 1)}|"]
    print(*rows, sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder))
        for name in list_algorithms():
            apart = measure(name, models)
            [bits] = check(name, NEEDED.get(name), letters="m")
            same = "equal" if bits.detail.endswith(": equal") else bits.detail
            rows.append(f"| {name} | {' | '.join(f'{value:.0e}' for value in apart.values())} | {same} |")
            print(rows[-1])
            if max(apart.values()) > CLOSE or bits.status != "ok":
                wrong.append(name)
    print(f"\n{len(list_algorithms())} algorithms; beyond rounding: {', '.join(wrong) or 'none'}")
    if sys.argv[1:] == ["--write"]:
        text = PAGE.read_text(encoding="utf-8").partition("\n| algorithm |")[0]
        PAGE.write_text("\n".join([text, *rows, ""]), encoding="utf-8")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
