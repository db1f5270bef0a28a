"""Proof obligations for an algorithm, on a CPU, in seconds.

    python -m algs.check grpo                          a module of this folder
    python -m algs.check my_loss.py temper=0.5         a file, with hyper-parameters

What is asked depends on the kind: (d) (f) (h) of policy gradients, (i) of algorithms that learn from given rows
(conversations, pairs of answers, labelled answers), and the others of all.
All numbers are float64, and the micro-batches are the real ones of data_feeds/packing.py. Exit code 0: all hold,
1: one fails, 2: a mistake in the file, the name or a hyper-parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from algs.base import Algorithm, PolicyGradient
from algs.check import fixtures as exhibit
from algs.check import instruments
from algs.check.bandit import learns_a_bandit
from algs.check.fixtures import Tables, World
from algs.check.instruments import changed
from algs.check.update import (
    CUTS,
    SAME,
    Broken,
    Outcome,
    any_difference,
    batches_of,
    credited,
    difference,
    furthest,
    gradient_of,
    losses,
    of_groups,
    outcome,
    plan_of,
    size_of,
    when,
    with_totals,
)
from core.types import Batch, LossNorm, Sample

STEP, BEND = 1e-4, 1e-3
"""Of a central difference, and of the largest slope: slopes to both sides further apart than this make a kink."""


class NotAsked(Exception):
    """Why an obligation is not asked of this algorithm."""


def does_not_depend_on_the_cut(alg: Algorithm) -> str:
    world, worst = exhibit.made_up_step(alg), 0.0
    norms = [norm for norm in get_args(LossNorm) if norm != alg.loss_norm]
    others = [other for norm in norms if (other := changed(alg, {"loss_norm": norm})) is not None]
    trials = [(alg, False, CUTS), (alg, True, CUTS), *((other, True, CUTS[1:2]) for other in others)]
    for this, stale, cuts in trials:
        whole = of_groups(this, world, world.groups, stale=stale).gradient
        for seed, cut in enumerate(cuts):
            got = of_groups(this, world, exhibit.shuffled(world.groups, seed), stale=stale, cut=cut).gradient
            if said := difference(world, got, whole):
                raise Broken(f"{when(stale)}, loss_norm {this.loss_norm}, {cut}: {said} in one piece")
            worst = max(worst, furthest(got, whole)[0] / (size_of(whole) or 1.0))
    ways = f"{sum(len(cuts) for _, _, cuts in trials)} cuts and orders, {1 + len(others)} loss norms"
    return f"{ways}, at most {worst:.0e} of the gradient apart"


def is_blind_to_what_is_not_learnt(alg: Algorithm) -> str:
    world = exhibit.made_up_step(alg)
    there: list[exhibit.Poisonable] = []
    for stale in (False, True):
        clean = credited(alg, world.groups, stale=stale)
        want = outcome(alg, batches_of(alg, clean, world.now), world.now)
        there = [n for n in exhibit.POISONABLE if exhibit.holds(clean[0][0], n)]
        for name in there:
            for bad in (math.nan, 1e6):
                late = exhibit.poisoned(clean, name, bad)
                early = credited(alg, exhibit.poisoned(world.groups, name, bad), stale=stale)
                for place, groups in (("after", late), ("before", early)):
                    got = outcome(alg, batches_of(alg, groups, world.now), world.now)
                    if said := any_difference(world, got, want):
                        raise Broken(f"{bad:g} in {name} where no token is learnt, put there {place} credit: {said}")
    return f"nan and 1e6 in {', '.join(there)} change no bit"


def has_the_gradient_of_its_loss(alg: Algorithm) -> str:
    world, done, kinks = exhibit.made_up_step(alg), 0, 0
    for stale in (False, True):
        [batch] = batches_of(alg, credited(alg, world.groups[:2], stale=stale), world.now)
        agreed, bent = compare_with_differences(alg, world, batch, where=when(stale))
        done, kinks = done + agreed, kinks + bent
    if not done:
        raise Broken(f"all {kinks} points stand at a kink, or the loss computes in less than float64: nothing is shown")
    excluded = f", {kinks} at a kink left out" if kinks else ""
    return f"central differences agree at {done} tokens{excluded}" + (": little is shown" if kinks > done else "")


def compare_with_differences(alg: Algorithm, world: World, batch: Batch, *, where: str) -> tuple[int, int]:
    """How many points agree, and how many stand at a kink."""
    tape = instruments.Tape()

    def at(tables: Tables) -> Tensor:
        with instruments.Held(tape):
            return torch.stack(losses(alg, batch, tables)).sum()

    leaves = {name: t.clone().requires_grad_() for name, t in world.now.items()}
    base = at(leaves)
    tape.full = True
    gradient = gradient_of(base, leaves)
    done, kinks, size = 0, 0, size_of(gradient)
    asked = {"logp": True, "entropy": alg.needs_entropy, "values": alg.value_lr is not None}
    for name in (n for n, yes in asked.items() if yes):
        for token in batch.labels.tolist():
            right, left = one_sided(at, leaves, name, token=token, base=float(base.detach()))
            if not abs(right - left) <= BEND * (abs(right) + abs(left) + size) + 1e-9:
                kinks += 1
                continue
            said, is_ = float(gradient[name][token]) if name in gradient else 0.0, (right + left) / 2
            if not abs(said - is_) <= BEND * (abs(is_) + size) + 1e-9:
                numbers = f"backward() says {said:.4g}, central differences with detached values held {is_:.4g}"
                raise Broken(f"{where}, by {name} at {world.where(token)}: {numbers}")
            done += 1
    return done, kinks


def one_sided(
    at: Callable[[Tables], Tensor], leaves: Tables, name: str, *, token: int, base: float
) -> tuple[float, float]:
    """Slopes to the right and to the left; nan if the loss took another path there."""

    def moved(by: float) -> float:
        table = leaves[name].detach().clone()
        table[token] += by
        return float(at(leaves | {name: table.requires_grad_()}).detach())

    try:
        return (moved(STEP) - base) / STEP, (base - moved(-STEP)) / STEP
    except instruments.OtherPath:
        return math.nan, math.nan


def is_a_policy_gradient(alg: Algorithm) -> str:
    if isinstance(alg, PolicyGradient) and alg.not_on_policy:
        raise NotAsked(f"declared: {alg.not_on_policy}")
    world = exhibit.made_up_step(alg)
    for stale in (False, True):
        [batch] = batches_of(alg, credited(alg, exhibit.on_policy(world), stale=stale), world.now)
        if not batch.tokens.has("advantage"):
            raise Broken("compute_advantages() set no advantage")
        want = torch.zeros_like(world.now["logp"])
        want[batch.labels] = -batch.tokens.weight * batch.tokens.advantage
        got = outcome(alg, [batch], world.now).gradient["logp"]
        if said := difference(world, {"logp": got}, {"logp": want}):
            factor = float((got * want).sum() / want.square().sum().clamp(min=1e-300))
            raise Broken(f"{said}, overall {factor:.3g} times as much (if that is meant, say so in not_on_policy)")
    return "at every token, with and without prox_logp"


def bears_the_corner_cases(alg: Algorithm) -> str:
    world = exhibit.made_up_step(alg)
    for stale in (False, True):
        for name, group in exhibit.CORNERS[exhibit.kind_of(alg)].items():
            expect_sound(of_groups(alg, world, [world.groups[group]], stale=stale), name)
        expect_no_effect_of_an_idle_rank(alg, world, stale=stale)
        expect_no_effect_of_failures(alg, world, stale=stale)
    return ", ".join(["an empty micro-batch", *exhibit.CORNERS[exhibit.kind_of(alg)], "failed samples"])


def expect_sound(got: Outcome, where: str) -> None:
    if not got.connected:
        raise Broken(f"{where}: the loss depends on the policy through detached values only, so backward() raises")
    if not (math.isfinite(got.loss) and math.isfinite(size_of(got.gradient))):
        raise Broken(f"{where}: the loss is {got.loss:g}, the largest gradient {size_of(got.gradient):g}")


def expect_no_effect_of_an_idle_rank(alg: Algorithm, world: World, *, stale: bool) -> None:
    groups = credited(alg, world.groups, stale=stale)
    batches = batches_of(alg, groups, world.now)
    empty = plan_of(alg, groups).idle(torch.float64)
    got = outcome(alg, with_totals(alg, [*batches, empty], world.now), world.now)
    expect_sound(got, "an empty micro-batch")
    if said := difference(world, got.gradient, outcome(alg, batches, world.now).gradient):
        raise Broken(f"an empty micro-batch: {said} without it")


def expect_no_effect_of_failures(alg: Algorithm, world: World, *, stale: bool) -> None:
    """One sibling failed in a group, and all of them in another."""

    def lost(s: Sample) -> Sample:
        return replace(s, reward=None, failure="timeout")

    groups = list(world.groups)
    groups[exhibit.USUAL] = [lost(groups[exhibit.USUAL][0]), *groups[exhibit.USUAL][1:]]
    groups[exhibit.EQUAL] = [lost(s) for s in groups[exhibit.EQUAL]]
    got = of_groups(alg, world, groups, stale=stale)
    expect_sound(got, "failed samples")
    alive = [left for g in groups if (left := [s for s in g if not s.failure])]
    if said := difference(world, got.gradient, of_groups(alg, world, alive, stale=stale).gradient):
        as_zero = [[replace(s, reward=s.reward or 0.0) for s in g] for g in groups]
        zero = of_groups(alg, world, as_zero, stale=stale).gradient
        hint = "" if difference(world, got.gradient, zero) else ": a failure counts as a reward of 0"
        raise Broken(f"failed samples: {said} without them{hint}")


def reads_what_it_declares(alg: Algorithm) -> str:
    world, declared = exhibit.made_up_step(alg), instruments.own_fields(alg)
    to_try = {name for name in declared if instruments.variants(alg, {}, name)}
    read, effective = set[str](), set[str]()
    for mode, here in instruments.modes(alg):
        before = everything(here, world, read)
        for name in to_try - effective:
            if any(differs(other, world, read, before=before) for other in instruments.variants(alg, mode, name)):
                effective.add(name)
        if read >= declared.keys() and effective >= to_try:
            break
    if unread := [name for name in declared if name not in read]:
        raise Broken(f"never read: {', '.join(unread)}")
    without = [name for name in declared if name in to_try - effective] + unheeded(alg, world)
    note = f"; note: no effect seen of {', '.join(without)}" if without else ""
    return (", ".join(declared) or "it declares none of its own") + note


def everything(alg: Algorithm, world: World, reads: set[str]) -> list[Any]:
    """All that an algorithm says about the made-up step, to be compared; notes what it reads to say it."""
    alg = instruments.noting_reads(alg, reads)
    said: list[Any] = [
        alg.required_columns,
        alg.needs_entropy,
        alg.frozen_models,
        alg.value_lr,
        [alg.accept_group(g) for g in world.groups],
    ]
    for stale in (False, True):
        got = of_groups(alg, world, world.groups, stale=stale)
        said += [got.loss, *(g.tolist() for g in got.gradient.values())]
    return said


def differs(alg: Algorithm, world: World, reads: set[str], *, before: list[Any]) -> bool:
    try:
        return everything(alg, world, reads) != before
    except Exception:  # a border: a value that the author did not think of, and it mattered
        return True


def unheeded(alg: Algorithm, world: World) -> list[str]:
    """Settings of every policy gradient that change nothing in this one."""
    plain = changed(alg, instruments.PLAIN) if isinstance(alg, PolicyGradient) else None
    if plain is None:
        return []
    before = of_groups(plain, world, world.groups, stale=True)
    others = [(name, changed(plain, mode)) for name, mode in instruments.SHARED.items()]
    after = [(name, of_groups(other, world, world.groups, stale=True)) for name, other in others if other is not None]
    return [name for name, got in after if not any_difference(world, got, before)]


def clips_on_the_right_side(alg: Algorithm) -> str:
    """Halve each bound: what moves must be on its side of ratio 1, and be what pushes further out on that side."""
    if not {"clip_low", "clip_high"} <= type(alg).model_fields.keys():
        raise NotAsked("it has no clip_low and clip_high")
    before = slopes_by_ratio(alg)
    for name, other, side in (("clip_high", "clip_low", 1.0), ("clip_low", "clip_high", -1.0)):
        value: float = instruments.value_of(alg, name)
        narrow = changed(alg, {name: value / 2})
        if narrow is None:
            raise NotAsked(f"{name}={value / 2:g} is refused")
        after, did = slopes_by_ratio(narrow), f"{name} from {value:g} to {value / 2:g}"
        moved = [at for at, slope in before.items() if abs(slope - after[at]) > SAME]
        for a, ratio in moved:
            if (ratio - 1) * side <= 0:
                numbers = f"from {before[a, ratio]:.4g} to {after[a, ratio]:.4g}"
                raise Broken(f"{did} moves the gradient at A={a:+g}, ratio {ratio:.4g} {numbers}: {other}'s side")
        if not any(a == side for a, _ in moved):
            raise Broken(f"{did} moves no gradient with A={side:+g} on its side of ratio 1")
    return f"halving one moves gradients on its own side of ratio 1 only ({len(before)} points)"


def slopes_by_ratio(alg: Algorithm) -> dict[tuple[float, float], float]:
    """Gradient by logp over weight, by (advantage, ratio to the old policy); engine and proximal policy agree."""
    away = torch.logspace(-4, 0.5, 60, dtype=torch.float64)
    ratios = torch.cat([(-away).exp(), away.exp()])
    groups, logp = exhibit.ratio_pairs(ratios)
    tables = {"logp": logp, "entropy": torch.ones_like(logp), "values": torch.zeros_like(logp)}
    [batch] = batches_of(alg, groups, tables)
    slopes = outcome(alg, [batch], tables).gradient["logp"] / batch.tokens.weight[0]
    return {(1.0 - 2 * (i % 2), float(ratios[i // 2])): slope for i, slope in enumerate(slopes.tolist())}


def prefers_what_the_rows_prefer(alg: Algorithm) -> str:
    """At the reference, a step downhill raises the learnt tokens of good answers and lowers those of bad ones."""
    world = exhibit.made_up_step(alg)
    groups = credited(alg, exhibit.on_policy(world), stale=False)
    gradient = outcome(alg, batches_of(alg, groups, world.now), world.now).gradient
    slopes = gradient["values" if alg.model_kind == "reward" else "logp"]
    moved = {"raised": 0, "lowered": 0}
    for s in (s for group in groups for s in group):
        wish = "lowered" if alg.rows != "conversations" and s.reward == 0 else "raised"
        for token in (t for t, yes in zip(s.token_ids, s.loss_mask, strict=True) if yes):
            slope = float(slopes[token])
            if not (slope < 0 if wish == "raised" else slope > 0):
                raise Broken(
                    f"the gradient at {world.where(token)} is {slope:.4g}: a step downhill should have {wish} it"
                )
            moved[wish] += 1
    return ", ".join(f"{n} tokens {how}" for how, n in moved.items() if n)


OBLIGATIONS: list[tuple[str, str, Callable[[Algorithm], str]]] = [
    ("a", "one gradient however a step is cut", does_not_depend_on_the_cut),
    ("b", "what is not learnt has no influence", is_blind_to_what_is_not_learnt),
    ("c", "backward() gives the gradient of the loss", has_the_gradient_of_its_loss),
    ("d", "on policy the gradient is -weight x advantage", is_a_policy_gradient),
    ("e", "corner cases are finite, a failure teaches nothing", bears_the_corner_cases),
    ("f", "it learns a bandit", learns_a_bandit),
    ("g", "every hyper-parameter is read", reads_what_it_declares),
    ("h", "clip_low and clip_high bind on their own side", clips_on_the_right_side),
    ("i", "it descends towards what the rows prefer", prefers_what_the_rows_prefer),
]
ASKED: dict[exhibit.Kind, str] = {
    "policy gradient": "abcdefgh",
    "conversations": "abcegi",
    "pairs": "abcegi",
    "unpaired": "abcegi",
}
