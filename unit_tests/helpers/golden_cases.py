"""A case of an oracle, run with any algorithm: its loss and its gradient beside the oracle's."""

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from algs.base import Algorithm
from algs.objective import add_totals, compute_objective, view_first
from algs.totals import Alone, prepare_update, sum_totals
from core.types.samples import Batch, Group, Policy
from data_feeds.packing.batches import pack, token_weights
from unit_tests.helpers.golden import GOLDEN, PREF, RL, batch_of, live
from unit_tests.helpers.golden2 import CASES2, PREF2, RL2, batch_of_groups, pref_groups, rl_groups
from unit_tests.helpers.golden_pairs import first_pairs
from unit_tests.helpers.golden_teachers import graded

CREDITED = ("advantage/", "lite_ppo/", "raft", "best_of_n/", "scalerl/")
"""Cases of the second oracle whose advantages are the algorithm's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    loss: Tensor
    gradient: Tensor
    """[M], by the log-probability of each trained token."""


def run_case(alg: Algorithm, file: str, name: str) -> tuple[Outcome, Outcome]:
    """Return what an algorithm makes of a case, and what the oracle says. file: golden_losses or golden_losses2."""
    case = (GOLDEN["cases"] if file == "golden_losses" else CASES2)[name]
    batch, logp, want = (_first if file == "golden_losses" else _second)(alg, name)
    logp = logp.requires_grad_()
    entropy, measures = None, {}
    if file == "golden_losses2":
        entropy = pick(RL2["ent"], RL2["mask"]) if alg.needs_entropy else None
        measures = {"collision": pick(PREF2["log_sum_pi_sq"], PREF2["mask"]).exp()} if name == "pref/wpo" else {}
    policy = Policy(logp=logp, entropy=entropy, measures=measures)
    [totals] = islice(sum_totals(alg, [view_first(policy, batch)], Alone()), 1)
    batch = add_totals(batch, totals)
    loss = (compute_objective(alg, policy, batch).loss * batch.tokens.weight).sum()
    loss.backward()
    assert logp.grad is not None
    told = Outcome(loss=torch.tensor(case["loss"], dtype=torch.float64), gradient=want)
    return Outcome(loss=loss.detach(), gradient=logp.grad), told


def pick(rows: list[list[float]], mask: list[list[int]]) -> Tensor:
    """The values of a table at the trained tokens, [M]."""
    cells = zip((x for row in rows for x in row), (m for row in mask for m in row), strict=True)
    return torch.tensor([x for x, m in cells if m], dtype=torch.float64)


def _first(alg: Algorithm, name: str) -> tuple[Batch, Tensor, Tensor]:
    if not name.startswith("dpo/"):
        want = GOLDEN["cases"][name]["grad"]["logp"]
        return batch_of(name, alg, torch.float64), live(RL["logp"], torch.float64), live(want, torch.float64)
    groups = alg.compute_advantages(first_pairs(name))
    weights = token_weights(groups, alg.loss_norm, horizon=1)
    kept = [(s, w, n) for n, g in enumerate(groups) for s in g for w in [weights.pop(0)] if w]
    samples, of_tokens, numbers = zip(*kept, strict=True)
    batch = pack([*samples], [*of_tokens], groups=[*numbers] if alg.whole_groups else None, dtype=torch.float64)
    at = {"logp": PREF["logp"], "grad": GOLDEN["cases"][name]["grad"]["logp"]}
    return batch, *(live(rows, torch.float64, fixture=PREF) for rows in at.values())


def _second(alg: Algorithm, name: str) -> tuple[Batch, Tensor, Tensor]:
    groups, table = _credit_second(alg, name)
    groups = prepare_update(alg, groups)
    kept = torch.cat([torch.from_numpy(s.loss_mask[2:].copy()) for g in groups for s in g])
    flat = [torch.tensor([x for row in rows for x in row], dtype=torch.float64) for rows in table]
    return batch_of_groups(alg, groups, torch.float64), *(values[kept] for values in flat)


def _credit_second(alg: Algorithm, name: str) -> tuple[list[Group], tuple[list[list[float]], list[list[float]]]]:
    case = CASES2[name]
    if name.startswith("pref/"):
        return alg.compute_advantages(pref_groups(0.0)), (PREF2["logp"], case["grad"]["logp"])
    if name.startswith(("opd/", "self/")):
        groups = alg.compute_advantages(graded(name, 0.0))
        return groups, (RL2["logp"], case["grad"]["logp"])
    given = "seq_adv" if name.startswith("dro/richemond") else case["hyperparameters"].get("advantages", "adv")
    groups = alg.compute_advantages(rl_groups(None, 0.0)) if name.startswith(CREDITED) else rl_groups(given, 0.0)
    return groups, (RL2["logp"], case["grad"]["logp"])
