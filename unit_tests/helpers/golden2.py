"""Fixtures and numbers of the second oracle, whose masks have gaps, and batches made of them."""

import json
from pathlib import Path

import torch

from algs.base import Algorithm
from core.types.arrays import DOUBLE
from core.types.samples import Batch, Group, Prompt, make_sample
from data_feeds.packing.batches import pack, share_out, token_weights
from data_feeds.packing.terms import unite

GOLDEN2 = json.loads((Path(__file__).parents[1] / "data" / "golden_losses2.json").read_text())
CASES2 = GOLDEN2["cases"]
RL2, PREF2, LOGITS2 = (GOLDEN2["fixtures"][name] for name in ("rl", "pref", "logits"))
COLUMNS = {"ref_logp": "ref", "teacher_logp": "tea", "prox_logp": "old"}


def rl_groups(advantage: str | None, poison: float, *, demonstrates: str = "") -> list[Group]:
    """The responses as groups of samples, each with two prompt tokens before it. advantage: column, None for none.

    demonstrates: column of the fixture whose rows of 1 are demonstrations, which no policy sampled.
    """
    groups: dict[int, Group] = {}
    for b, mask in enumerate(RL2["mask"]):

        def column(key: str, b=b, mask=mask) -> list[float]:
            own = RL2[key][b]
            own = own if isinstance(own, list) else [own] * len(mask)
            return [poison, poison, *(x if m else poison for x, m in zip(own, mask, strict=True))]

        given, n = demonstrates and bool(RL2[demonstrates][b]), len(mask) + 2
        sample = make_sample(
            dtype=DOUBLE,
            prompt=Prompt(id=str(RL2["prompt"][b]), messages=[], source=str(RL2["source"][b])),
            token_ids=[5] * n,
            action_mask=[False, False, *map(bool, mask)],
            rollout_logp=[0.0] * n if given else column("beh"),
            versions=[-1] * n,
            origin="demonstration" if given else "policy",
            reward=RL2["rewards"][b],
            # the rows end in padding, which is no answer of an environment
            excluded=[True, True, *(not (m or e) for m, e in zip(mask, RL2["env"][b], strict=True))],
            reward_parts={f"part{k}": part[b] for k, part in enumerate(RL2["parts"])},
            advantage=None if advantage is None else column(advantage),
            # a demonstration has no log-probability of an old policy that a term may read
            columns={k: [poison] * n if given and k == "prox_logp" else column(own) for k, own in COLUMNS.items()}
            | {"prox.collision": column("sum_pi_sq")},
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


def rl_inputs(groups: list[Group], alg: Algorithm, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logp of the tokens of all terms, with gradient, and their places in the rows, [8, 5] bool."""
    shares = share_out(alg.terms, groups, alg.loss_norm, horizon=5)
    kept = torch.stack([torch.from_numpy(mask[2:].copy()) for mask in unite(shares)])
    return torch.tensor(RL2["logp"], dtype=dtype)[kept].requires_grad_(), kept


def batch_of_groups(alg: Algorithm, groups: list[Group], dtype: torch.dtype) -> Batch:
    weights = token_weights(groups, alg.loss_norm, horizon=5)
    numbers = [n for n, g in enumerate(groups) for _ in g] if alg.whole_groups else None
    terms = share_out(alg.terms, groups, alg.loss_norm, horizon=5)
    return pack([s for g in groups for s in g], weights, groups=numbers, terms=terms, dtype=dtype)


def table_of(key: str, dtype: torch.dtype) -> torch.Tensor:
    """A table of logits at the trained tokens, [M, V]."""
    mask = torch.tensor(LOGITS2["mask"], dtype=torch.bool)
    return torch.tensor(LOGITS2[key], dtype=dtype)[mask]


def stored_row(b: int) -> dict[str, list]:
    """What a row of the fixture of logits stores of its teacher, at the trained tokens."""
    counts = [(t, n) for t, n in enumerate(LOGITS2["topk_n"][b]) if LOGITS2["mask"][b][t]]
    found = {f"topk_{key}": [LOGITS2[f"topk_{key}"][b][t][:n] for t, n in counts] for key in ("ids", "logp")}
    return {"topk_tokens": [LOGITS2["labels"][b][t] for t, _ in counts], **found}


def logit_groups(temperature: float, poison: float) -> list[Group]:
    """The two rows of the fixture of logits, a group each; the proximal policy is the current one."""
    columns = {"prox_logp": "logits", "ref_logp": "ref_logits", "teacher_logp": "teacher_logits", "": "beh_logits"}
    groups: list[Group] = []
    for b, mask in enumerate(LOGITS2["mask"]):

        def column(values: list[float], mask=mask) -> list[float]:
            return [poison, poison, *(x if m else poison for x, m in zip(values, mask, strict=True))]

        scored: dict[str, list[float]] = {}
        for name, key in columns.items():
            logp = (torch.tensor(LOGITS2[key][b], dtype=torch.float64) / temperature).log_softmax(-1)
            scored[name] = column(logp.gather(-1, torch.tensor(LOGITS2["labels"][b])[:, None])[:, 0].tolist())
        rollout = scored.pop("")
        sample = make_sample(
            dtype=DOUBLE,
            prompt=Prompt(id=str(b), messages=[], extra=stored_row(b)),
            token_ids=[5, 5, *LOGITS2["labels"][b]],
            action_mask=[False, False, *map(bool, mask)],
            rollout_logp=rollout,
            versions=[-1] * (len(mask) + 2),
            reward=0.0,
            advantage=column(LOGITS2["adv"][b]),
            columns=scored,
        )
        groups.append([sample])
    return groups
