"""Proof obligations of an algorithm, on a CPU, in seconds.

    python -m algs.check grpo                          a module of this folder
    python -m algs.check my_loss.py temper=0.5         a file, with hyper-parameters

(d) (f) (h) (j) to (l) apply to policy gradients, (i) to algorithms on given rows (conversations, pairs, unpaired
rows), (o) to algorithms with measures, (p) to those with terms, and the others to all. All numbers are float64, and
micro-batches are the real ones of data_feeds/packing/batches.py. Exit code 0: all hold, 1: some fail, 2: a mistake in
the file, the name or a hyper-parameter. With schedules, the algorithm is that of the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from algs.base import Algorithm, PolicyGradient
from algs.check import fixtures, instruments
from algs.check.bandit import learns_a_bandit
from algs.check.chunks import does_not_depend_on_the_chunk
from algs.check.cuts import SPLITS as BRANCHED_SPLITS
from algs.check.cuts import cut_in_alternation, may_be_cut_into_samples, reads_observed
from algs.check.declared import reads_what_it_declares
from algs.check.distributions import NOW, SIZE
from algs.check.fixtures import MadeUpStep, Tables
from algs.check.instruments import with_settings, with_terms
from algs.check.off_policy import binds_outwards, clips_on_the_right_side, corrects_the_engine_once
from algs.check.partitions import changes_no_bit
from algs.check.replay import replays_its_state
from algs.check.terms import keeps_its_terms_apart
from algs.check.update import (
    SPLITS,
    NotApplicable,
    ObligationFailed,
    Outcome,
    compute_advantages,
    compute_gradient,
    compute_losses,
    describe_any_difference,
    describe_difference,
    describe_updates,
    find_largest_difference,
    make_plan,
    max_abs,
    plan_batches,
    run_update,
    update_on_groups,
    with_totals,
)
from algs.measures import plan_measures
from core.types.samples import Batch, LossNorm, Sample, Tokens

# with float64 a difference over 1e-4 has some 1e-12 of rounding, far below the bound
STEP, BEND = 1e-4, 1e-3
"""Step size of a central difference; and the fraction by which one-sided slopes may differ, otherwise it is a kink."""


def does_not_depend_on_the_split(alg: Algorithm) -> str:
    """Compare the gradient of the whole step with that of several splits into micro-batches and ranks."""
    step, worst = fixtures.made_up_step(alg), 0.0
    may_branch = isinstance(alg, PolicyGradient) and not reads_observed(alg)
    branched = [cut_in_alternation(g) for g in step.groups] if may_branch else []
    norms = [norm for norm in get_args(LossNorm) if norm != alg.loss_norm]
    others = [other for norm in norms if (other := with_settings(alg, {"loss_norm": norm})) is not None]
    groups = step.groups
    trials = [(alg, False, groups, SPLITS), (alg, True, groups, SPLITS)]
    trials += [(other, True, groups, SPLITS[1:2]) for other in others]
    trials += [(alg, True, branched, BRANCHED_SPLITS)] if branched else []
    for this, stale, groups, splits in trials:
        whole = update_on_groups(this, step, groups, stale=stale).gradient
        for seed, split in enumerate(splits):
            # Shuffled too: the order in which groups finish must not matter.
            got = update_on_groups(this, step, fixtures.shuffle_groups(groups, seed), stale=stale, split=split).gradient
            if said := describe_difference(step, got, whole):
                raise ObligationFailed(
                    f"{describe_updates(stale)}, loss_norm {this.loss_norm}, {split}: {said} in one piece"
                )
            worst = max(worst, find_largest_difference(got, whole)[0] / (max_abs(whole) or 1.0))
    ways = f"{sum(len(splits) for *_, splits in trials)} splits and orders, {1 + len(others)} loss norms"
    return f"{ways}, at most {worst:.0e} of the gradient apart"


def ignores_untrained_tokens(alg: Algorithm) -> str:
    """Write nan and 1e6 at untrained tokens; loss and gradient must stay equal to the last bit."""
    step = fixtures.made_up_step(alg)
    there: list[fixtures.PoisonableColumn] = []
    for stale in (False, True):
        clean = compute_advantages(alg, step.groups, stale=stale)
        want = run_update(alg, plan_batches(alg, clean, step.now), step.now)
        there = fixtures.list_poisonable(clean[0][0])
        for name in there:
            for bad in (math.nan, 1e6):
                late = fixtures.poison_column(clean, name, bad)
                early = compute_advantages(alg, fixtures.poison_column(step.groups, name, bad), stale=stale)
                # After: the loss could read it. Before: compute_advantages could.
                for place, groups in (("after", late), ("before", early)):
                    got = run_update(alg, plan_batches(alg, groups, step.now), step.now)
                    if said := describe_any_difference(step, got, want):
                        where = f"{bad:g} in {name} at tokens that are not trained on, set {place} compute_advantages"
                        raise ObligationFailed(f"{where}: {said}")
    return f"nan and 1e6 in {', '.join(there)} change no bit"


def has_the_gradient_of_its_loss(alg: Algorithm) -> str:
    """Compare the gradient of backward() with central differences."""
    step, done, kinks = fixtures.made_up_step(alg), 0, 0
    for stale in (False, True):
        [batch] = plan_batches(alg, compute_advantages(alg, step.groups[:2], stale=stale), step.now)
        agreed, bent = compare_with_differences(alg, step, batch, where=describe_updates(stale))
        done, kinks = done + agreed, kinks + bent
    if not done:
        raise ObligationFailed(
            f"all {kinks} points are kinks, or the loss computes in less than float64: nothing is shown"
        )
    excluded = f", {kinks} kinks excluded" if kinks else ""
    weak = ": weak evidence, most points are kinks" if kinks > done else ""
    return f"central differences agree at {done} tokens{excluded}{weak}"


def compare_with_differences(alg: Algorithm, step: MadeUpStep, batch: Batch, *, where: str) -> tuple[int, int]:
    """Return the number of points that agree, and of kinks."""
    tape = instruments.Tape()

    def loss_at(tables: Tables) -> Tensor:
        with instruments.ReplayDetached(tape):
            return torch.stack(compute_losses(alg, batch, tables)).sum()

    leaves = {name: t.clone().requires_grad_() for name, t in step.now.items()}
    base = loss_at(leaves)
    tape.full = True
    gradient = compute_gradient(base, leaves)
    done, kinks, size = 0, 0, max_abs(gradient)
    compared = {"logp": True, "entropy": alg.needs_entropy, "values": alg.value_lr is not None}
    compared[NOW] = bool(plan_measures(alg).live.keys() - {"entropy"})
    for name in (n for n, yes in compared.items() if yes):
        for token in batch.labels.tolist():
            right, left = one_sided_slopes(loss_at, leaves, name, token=token, base=float(base.detach()))
            # At a kink the two slopes differ, and backward() may return either; the point proves nothing.
            if not abs(right - left) <= BEND * (abs(right) + abs(left) + size) + 1e-9:
                kinks += 1
                continue
            by_backward, slope = (
                float(gradient[name][pick(token, name)]) if name in gradient else 0.0,
                (right + left) / 2,
            )
            if not abs(by_backward - slope) <= BEND * (abs(slope) + size) + 1e-9:
                numbers = (
                    f"backward() says {by_backward:.4g}, central differences with detached values held {slope:.4g}"
                )
                raise ObligationFailed(f"{where}, by {name} at {step.locate_token(token)}: {numbers}")
            done += 1
    return done, kinks


def pick(token: int, name: str) -> tuple[int, ...]:
    """Return the place in a table that is moved for a token: of its logits, one after the other."""
    return (token, token // SIZE % SIZE) if name == NOW else (token,)


def one_sided_slopes(
    loss_at: Callable[[Tables], Tensor], leaves: Tables, name: str, *, token: int, base: float
) -> tuple[float, float]:
    """Return the slopes to the right and to the left; nan if the loss branched differently."""

    def loss_moved_by(by: float) -> float:
        table = leaves[name].detach().clone()
        table[pick(token, name)] += by
        return float(loss_at(leaves | {name: table.requires_grad_()}).detach())

    try:
        return (loss_moved_by(STEP) - base) / STEP, (base - loss_moved_by(-STEP)) / STEP
    except instruments.OtherPath:
        return math.nan, math.nan


def is_a_policy_gradient(alg: Algorithm) -> str:
    """Compare the on-policy gradient with -weight x advantage at every token."""
    if isinstance(alg, PolicyGradient) and alg.not_on_policy:
        raise NotApplicable(f"declared: {alg.not_on_policy}")
    step = fixtures.made_up_step(alg)
    for stale in (False, True):
        groups = compute_advantages(alg, fixtures.make_on_policy(step), stale=stale)
        # of the other terms it is not claimed
        this = with_terms(alg, tuple(t for t in alg.terms if t.on == "sampled")) if alg.terms else alg
        [batch] = plan_batches(this, groups, step.now)
        want = torch.zeros_like(step.now["logp"])
        for coef, labels, tokens in list_sampled(this, batch):
            # d/dlogp of -weight A ratio at ratio 1
            want[labels] -= coef * tokens.weight * tokens.advantage
        got = run_update(this, [batch], step.now).gradient["logp"]
        if said := describe_difference(step, {"logp": got}, {"logp": want}):
            factor = float((got * want).sum() / want.square().sum().clamp(min=1e-300))
            raise ObligationFailed(
                f"{said}, overall {factor:.3g} times as much (if that is meant, say so in not_on_policy)"
            )
    return "at every token, with and without prox_logp"


def list_sampled(alg: Algorithm, batch: Batch) -> list[tuple[float, Tensor, Tokens]]:
    """Return coefficient, labels and tokens of each term on sampled tokens, or of the whole algorithm."""
    if not alg.terms:
        return [(1.0, batch.labels, batch.tokens)]
    own = [(term.coef, batch.terms[term.name]) for term in alg.terms]
    return [(coef, batch.labels[found.at], found.tokens) for coef, found in own]


def handles_corner_cases(alg: Algorithm) -> str:
    """Check for finite numbers in corner cases, and that idle ranks and failed samples have no effect."""
    step = fixtures.made_up_step(alg)
    for stale in (False, True):
        for name, group in fixtures.CORNERS[fixtures.get_kind(alg)].items():
            expect_sound(update_on_groups(alg, step, [step.groups[group]], stale=stale), name)
        expect_no_effect_of_an_idle_rank(alg, step, stale=stale)
        expect_no_effect_of_failures(alg, step, stale=stale)
    return ", ".join(["an empty micro-batch", *fixtures.CORNERS[fixtures.get_kind(alg)], "failed samples"])


def expect_sound(got: Outcome, where: str) -> None:
    """Raise ObligationFailed if the loss has no gradient, or if loss or gradient is not finite."""
    if not got.connected:
        raise ObligationFailed(
            f"{where}: the loss depends on the policy through detached values only, so backward() raises"
        )
    if not (math.isfinite(got.loss) and math.isfinite(max_abs(got.gradient))):
        raise ObligationFailed(f"{where}: the loss is {got.loss:g}, the largest gradient {max_abs(got.gradient):g}")


def expect_no_effect_of_an_idle_rank(alg: Algorithm, step: MadeUpStep, *, stale: bool) -> None:
    groups = compute_advantages(alg, step.groups, stale=stale)
    batches = plan_batches(alg, groups, step.now)
    empty = make_plan(alg, groups).make_idle_batch(torch.float64)
    got = run_update(alg, with_totals(alg, [*batches, empty], step.now), step.now)
    expect_sound(got, "an empty micro-batch")
    if said := describe_difference(step, got.gradient, run_update(alg, batches, step.now).gradient):
        raise ObligationFailed(f"an empty micro-batch: {said} without it")


def expect_no_effect_of_failures(alg: Algorithm, step: MadeUpStep, *, stale: bool) -> None:
    """Compare gradients with failed samples (one in a group, and a whole group) and without them."""

    def fail_sample(s: Sample) -> Sample:
        return replace(s, reward=None, failure="timeout")

    groups = list(step.groups)
    groups[fixtures.USUAL] = [fail_sample(groups[fixtures.USUAL][0]), *groups[fixtures.USUAL][1:]]
    groups[fixtures.EQUAL] = [fail_sample(s) for s in groups[fixtures.EQUAL]]
    got = update_on_groups(alg, step, groups, stale=stale)
    expect_sound(got, "failed samples")
    alive = [left for g in groups if (left := [s for s in g if not s.failure])]
    if said := describe_difference(step, got.gradient, update_on_groups(alg, step, alive, stale=stale).gradient):
        as_zero = [[replace(s, reward=s.reward or 0.0) for s in g] for g in groups]
        zero = update_on_groups(alg, step, as_zero, stale=stale).gradient
        # The usual mistake gets a hint: `reward or 0.0` turns a timeout into the worst answer.
        hint = "" if describe_difference(step, got.gradient, zero) else ": a failure counts as a reward of 0"
        raise ObligationFailed(f"failed samples: {said} without them{hint}")


def prefers_what_the_rows_prefer(alg: Algorithm) -> str:
    """Check the gradient's signs at the reference.

    A step downhill must raise the trained tokens of good completions and lower those of bad completions.
    """
    step = fixtures.made_up_step(alg)
    groups = compute_advantages(alg, fixtures.make_on_policy(step), stale=False)
    gradient = run_update(alg, plan_batches(alg, groups, step.now), step.now).gradient
    slopes = gradient["values" if alg.model_kind == "reward" else "logp"]
    if alg.measures and not slopes.any():
        raise NotApplicable("it compares distributions, and the rows' own tokens have no say")
    moved = {"raised": 0, "lowered": 0}
    for s in (s for group in groups for s in group):
        wish = "lowered" if alg.rows != "conversations" and s.reward == 0 else "raised"
        for token in (t for t, yes in zip(s.token_ids, s.loss_mask, strict=True) if yes):
            slope = float(slopes[token])
            # a step downhill goes against the slope
            if not (slope < 0 if wish == "raised" else slope > 0):
                raise ObligationFailed(
                    f"the gradient at {step.locate_token(token)} is {slope:.4g}: a step downhill should have {wish} it"
                )
            moved[wish] += 1
    return ", ".join(f"{n} tokens {how}" for how, n in moved.items() if n)


OBLIGATIONS: list[tuple[str, str, Callable[[Algorithm], str]]] = [
    ("a", "the gradient does not depend on how a step is split", does_not_depend_on_the_split),
    ("b", "tokens that are not trained on have no influence", ignores_untrained_tokens),
    ("c", "backward() gives the gradient of the loss", has_the_gradient_of_its_loss),
    ("d", "on policy the gradient is -weight x advantage", is_a_policy_gradient),
    ("e", "corner cases are finite, failed samples have no effect", handles_corner_cases),
    ("f", "it learns a bandit", learns_a_bandit),
    ("g", "every hyper-parameter is read", reads_what_it_declares),
    ("h", "clip_low and clip_high bind on their own side", clips_on_the_right_side),
    ("i", "the gradient points to what the rows prefer", prefers_what_the_rows_prefer),
    ("j", "an episode may be cut into several samples", may_be_cut_into_samples),
    ("k", "the engine is corrected once", corrects_the_engine_once),
    ("l", "far from ratio 1 the gradient keeps its direction, and a clip binds outwards", binds_outwards),
    ("m", "no partition of the rows, on any ranks, changes a bit", changes_no_bit),
    ("n", "a resumed run has the state of one that was not stopped", replays_its_state),
    ("o", "measures do not depend on the chunk", does_not_depend_on_the_chunk),
    ("p", "the terms of the objective do not touch each other", keeps_its_terms_apart),
]
APPLICABLE: dict[fixtures.Kind, str] = {
    "policy gradient": "abcdefghjklmnop",
    "conversations": "abcegimnop",
    "pairs": "abcegimnop",
    "unpaired": "abcegimnop",
    # not (i): a completion is compared with the others of its row
    "scored": "abcegmnop",
}
