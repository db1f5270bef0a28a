"""Recompute a captured update under the run's loss and others, for `python -m analysis.capture.replay`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from algs import load_algorithm
from algs.base import Algorithm
from algs.totals import prepare_update
from analysis.capture.compare import Comparison, compare_losses
from analysis.capture.gradient import Distance, Gradient, compute_update
from analysis.capture.losses import NamedLoss, credit_groups, parse_losses
from analysis.capture.snapshot import RunFacts, StepSnapshot, read_snapshot
from analysis.capture.token_maps import TokenMaps, describe_tokens, read_update
from analysis.capture.weights import load_trainer
from core.errors import UserError
from core.text.json_text import replace_non_finite
from core.types.samples import Group
from data_feeds.packing.batches import Plan, plan_update, token_weights
from trainers.local import LocalTrainer

TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2}
"""Largest difference of a loss and a norm that count as reproduced, by the dtype of the weights."""
ON_ANOTHER_DEVICE = 1e-3
"""Tolerance if only one of run and replay is on a CPU: CPU and GPU sum in a different order."""
OWN = "run"
"""Name of the run's own loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Findings of a replay."""

    snapshot: str
    step: int
    update: int
    reason: str
    algorithm: str
    code_changed: bool
    """True if the algorithm is a module of algs/ that is not the file which the run had."""
    weights: str
    """Source of the weights."""
    recorded: dict[str, float | None]
    """Loss and norm of the gradient in the run."""
    recomputed: dict[str, float]
    difference: float | None
    """Larger of the two differences; None if the run has no norm, because it skipped the update."""
    tolerance: float
    kl_anchor: str
    """Policy that the KL is taken to."""
    losses: list[Comparison]
    """The run's own first."""
    maps: TokenMaps | None = None
    """Token maps, if requested."""

    @property
    def is_reproduced(self) -> bool | None:
        return None if self.difference is None else self.difference <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON, without maps; numbers that are not finite become null."""
        facts = asdict(replace(self, maps=None)) | {"reproduced": self.is_reproduced}
        return replace_non_finite({name: value for name, value in facts.items() if name != "maps"})


def replay(
    folder: Path,
    given: Sequence[str | Mapping[str, Any]],
    *,
    model: str | None = None,
    update: int = 0,
    tolerance: float | None = None,
    with_maps: bool = False,
) -> Replay:
    """Compute a captured update under the run's loss and the given ones. Raises UserError for invalid input.

    model: folder with the weights, if the snapshot has none. tolerance: see TOLERANCE. with_maps: keep the numbers of
    every token.
    """
    snapshot = read_snapshot(folder)
    run, facts = snapshot.manifest.run, snapshot.manifest.updates
    if not 0 <= update < len(facts):
        raise UserError(f"--update {update}: the step has {len(facts)} updates, counted from 0")
    others = parse_losses(given, key="--alg", max_new_tokens=run.max_new_tokens)
    if several := [loss.name for loss in others if loss.alg.terms]:
        raise UserError(f"--alg: {several[0]} has several terms, which a replay cannot compare: leave it out")
    check_columns(others, snapshot)
    own = snapshot.with_state(load_algorithm(snapshot.alg_file, run.alg))
    others = [replace(loss, alg=snapshot.with_state(loss.alg)) for loss in others]
    trainer, weights = load_trainer(snapshot, update, model)
    groups = snapshot.groups_of(update, snapshot.groups)
    plan = snapshot.plan_of(update)
    # another kernel on this machine may need padded rows or unshared prefixes, which the recorded split does not fit
    if trainer.describe_layout() != run.layout:
        plan = plan_again(snapshot, trainer, own, groups)
    first = compute_update(trainer, own, plan, groups)
    of_kl, anchor = differentiate_kl(trainer, own, plan, groups)
    rows, tokens = [compare_losses(OWN, first, first, of_kl)], [describe_tokens(OWN, first, first)]
    for loss in others:
        credited = snapshot.groups_of(
            update, credit_groups(loss, snapshot.groups, stale=run.updates_per_step > 1)
        )  # over the whole step, as in a run
        credited = prepare_update(loss.alg, credited)
        again = compute_update(trainer, loss.alg, plan_again(snapshot, trainer, loss.alg, credited), credited)
        rows.append(compare_losses(loss.name, again, first, of_kl))
        tokens.append(describe_tokens(loss.name, again, first))
    recorded = facts[update]
    return Replay(
        snapshot=str(folder),
        step=snapshot.manifest.step,
        update=update,
        reason=snapshot.manifest.reason,
        algorithm=run.alg.get("name") or run.alg["file"],
        code_changed=snapshot.alg_file.sha256 != run.alg_file.sha256,
        weights=weights,
        recorded={"loss": recorded.loss, "grad_norm": recorded.grad_norm},
        recomputed={"loss": first.loss, "grad_norm": first.grad_norm},
        difference=measure_difference(recorded.loss, first.loss, recorded.grad_norm, first.grad_norm),
        tolerance=choose_tolerance(run, trainer.device) if tolerance is None else tolerance,
        kl_anchor=anchor,
        losses=rows,
        maps=TokenMaps(samples=read_update(snapshot, update), losses=tokens) if with_maps else None,
    )


def check_columns(losses: Sequence[NamedLoss], snapshot: StepSnapshot) -> None:
    """Raise UserError for a loss that needs columns which the snapshot does not hold."""
    there = {name for g in snapshot.groups for s in g for name in s.columns}
    for loss in losses:
        if lacking := sorted(loss.alg.required_columns - there):
            raise UserError(
                f"--alg: {loss.name} needs the column {lacking[0]}, which the run's algorithm did not compute and the "
                "snapshot does not hold: capture a run whose algorithm needs it"
            )


def differentiate_kl(trainer: LocalTrainer, own: Algorithm, plan: Plan, groups: list[Group]) -> tuple[Gradient, str]:
    """Return the gradient of the KL to an anchor, the reference model or else the engine's policy, and the name."""
    # without a reference model the sampling policy is the only other policy whose log-probabilities exist
    of_reference = "ref_logp" in own.required_columns
    # a mean over tokens, so that the KL change does not depend on the run's loss_norm
    by_sample = dict(zip((id(s) for g in groups for s in g), token_weights(groups, "token", horizon=1), strict=True))
    by_token = replace(plan, weights=[by_sample[id(s)] for s in plan.samples])
    distance = Distance(anchor="ref_logp" if of_reference else "rollout_logp")
    gradient = compute_update(trainer, distance, by_token, groups).gradient
    return gradient, "the reference model" if of_reference else "the engine's policy"


def plan_again(snapshot: StepSnapshot, trainer: LocalTrainer, alg: Algorithm, groups: list[Group]) -> Plan:
    """Split an update anew, on one rank: the gradient does not depend on the split."""
    layout = trainer.describe_layout()
    return plan_update(
        groups,
        alg.loss_norm,
        trainer.cfg.micro_batch_tokens,
        horizon=snapshot.manifest.run.max_new_tokens,
        padded=layout.padded,
        share_prefixes=layout.shares_prefixes,
        whole_groups=alg.whole_groups,
        whole_episodes=alg.whole_episodes,
    )


def measure_difference(loss: float, again: float, norm: float | None, norm_again: float) -> float | None:
    """Return the larger of two differences: relative for the norm, and for a loss above 1; else absolute.

    Infinite if a recomputed number is not finite; None if the run has no finite numbers.
    """
    if norm is None or not math.isfinite(loss):
        return None
    if not (math.isfinite(again) and math.isfinite(norm_again)):
        return math.inf
    # a policy loss is often close to 0, where a relative difference means nothing
    return max(abs(again - loss) / max(abs(loss), 1.0), abs(norm_again - norm) / max(norm, 1e-12))


def choose_tolerance(run: RunFacts, device: str) -> float:
    """Return the difference that counts as reproduced."""
    tolerance = TOLERANCE[run.model["dtype"]]
    # the wider tolerance never tightens that of bfloat16
    return tolerance if run.on_cpu == (device == "cpu") else max(tolerance, ON_ANOTHER_DEVICE)
