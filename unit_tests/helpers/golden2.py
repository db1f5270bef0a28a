"""Fixtures and numbers of the second oracle, whose masks have gaps, and batches made of them."""

import json
from pathlib import Path

import torch

from algs.base import Algorithm
from core.types.arrays import DOUBLE
from core.types.samples import Batch, Group, Prompt, make_sample
from data_feeds.packing.batches import pack, token_weights

GOLDEN2 = json.loads((Path(__file__).parents[1] / "data" / "golden_losses2.json").read_text())
CASES2 = GOLDEN2["cases"]
RL2, PREF2 = GOLDEN2["fixtures"]["rl"], GOLDEN2["fixtures"]["pref"]
COLUMNS = {"ref_logp": "ref", "teacher_logp": "tea", "prox_logp": "old"}


def rl_groups(advantage: str | None, poison: float) -> list[Group]:
    """The responses as groups of samples, each with two prompt tokens before it. advantage: column, None for none."""
    groups: dict[int, Group] = {}
    for b, mask in enumerate(RL2["mask"]):

        def column(key: str, b=b, mask=mask) -> list[float]:
            own = RL2[key][b]
            own = own if isinstance(own, list) else [own] * len(mask)
            return [poison, poison, *(x if m else poison for x, m in zip(own, mask, strict=True))]

        sample = make_sample(
            dtype=DOUBLE,
            prompt=Prompt(id=str(RL2["prompt"][b]), messages=[]),
            token_ids=[5] * (len(mask) + 2),
            action_mask=[False, False, *map(bool, mask)],
            rollout_logp=column("beh"),
            versions=[-1] * (len(mask) + 2),
            reward=RL2["rewards"][b],
            reward_parts={f"part{k}": part[b] for k, part in enumerate(RL2["parts"])},
            advantage=None if advantage is None else column(advantage),
            columns={name: column(key) for name, key in COLUMNS.items()},
        )
        groups.setdefault(RL2["prompt"][b], []).append(sample)
    return list(groups.values())


def pref_groups(poison: float) -> list[Group]:
    """The pairs, chosen first."""
    rows: Group = []
    for b, mask in enumerate(PREF2["mask"]):
        column = [poison, poison, *(x if m else poison for x, m in zip(PREF2["ref"][b], mask, strict=True))]
        rows.append(
            make_sample(
                dtype=DOUBLE,
                prompt=Prompt(id=str(b // 2), messages=[]),
                token_ids=[5] * len(column),
                action_mask=[False, False, *map(bool, mask)],
                rollout_logp=[poison] * len(column),
                versions=[-1] * len(column),
                reward=1.0 - b % 2,
                columns={"ref_logp": column, "prox_logp": [poison] * len(column)},
            )
        )
    return [rows[i : i + 2] for i in range(0, len(rows), 2)]


def batch_of_groups(alg: Algorithm, groups: list[Group], dtype: torch.dtype) -> Batch:
    weights = token_weights(groups, alg.loss_norm, horizon=5)
    numbers = [n for n, g in enumerate(groups) for _ in g] if alg.whole_groups else None
    return pack([s for g in groups for s in g], weights, groups=numbers, dtype=dtype)
