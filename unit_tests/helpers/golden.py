"""The fixtures and numbers of an independent oracle, and batches made of them."""

import json
from pathlib import Path

import torch

from algs.base import Algorithm
from core.types.arrays import DOUBLE
from core.types.samples import Prompt, Sample, make_sample
from data_feeds.packing.batches import pack, token_weights

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_losses.json").read_text())

RL = GOLDEN["fixtures"]["rl"]
PREF = GOLDEN["fixtures"]["pref"]
TOLERANCES = [(torch.float64, 1e-9), (torch.float32, 2e-5)]


def samples_of(name: str, poison: float | None = None) -> list[list[Sample]]:
    """The fixture as groups of Samples: two prompt tokens before each response, one token of another after it."""
    hyper = GOLDEN["cases"][name]["hyperparameters"]
    # the unbiased KL is weighted by pi / pi_rollout, and the oracle's by pi / pi_old
    rollout = "old" if name == "grpo/unbiased_kl_v32" else "beh"
    columns = {"ref_logp": "ref", "teacher_logp": "tea", "values": "old_values", "returns": "returns"}
    if name != "reinforce/rollout_is_token":  # there the proximal policy is the current one
        columns["prox_logp"] = "old"
    advantage = hyper.get("advantages", "adv").replace("seq_adv", "adv")
    groups: dict[int, list[Sample]] = {}
    for b, mask in enumerate(RL["mask"]):
        live = [t for t, m in enumerate(mask) if m]
        bad = 0.0 if poison is None else poison

        def column(key: str, b=b, live=live, bad=bad) -> list[float]:
            return [bad, bad, *(RL[key][b][t] for t in live), bad]

        sample = make_sample(
            dtype=DOUBLE,
            prompt=Prompt(id=str(RL["prompt"][b]), messages=[]),
            token_ids=[5] * (len(live) + 3),
            action_mask=[False, False, *[True] * len(live), False],
            rollout_logp=column(rollout),
            versions=[-1] * (len(live) + 3),
            reward=RL["rewards"][b],
            advantage=column(advantage),
            columns={name: column(key) for name, key in columns.items()},
        )
        groups.setdefault(RL["prompt"][b], []).append(sample)
    return list(groups.values())


def batch_of(name: str, alg: Algorithm, dtype, poison: float | None = None):
    groups = samples_of(name, poison)
    if name == "opd/policy_gradient":
        groups = alg.compute_advantages(groups)
    horizon = GOLDEN["cases"][name]["hyperparameters"].get("loss_const", 1)
    weights = token_weights(groups, alg.loss_norm, horizon=int(horizon))
    return pack([s for g in groups for s in g], weights, dtype=dtype)


def live(rows: list[list[float]], dtype: torch.dtype, *, fixture=RL) -> torch.Tensor:
    """The learnt entries of a [B, T] table, [M]."""
    cells = zip((x for row in rows for x in row), (m for row in fixture["mask"] for m in row), strict=True)
    return torch.tensor([x for x, m in cells if m], dtype=dtype)
