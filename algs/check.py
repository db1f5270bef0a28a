"""Proof obligations for an algorithm, on a CPU, in seconds.

    python -m algs.check grpo                          a module of this folder
    python -m algs.check my_loss.py temper=0.5         a file, with hyper-parameters

What is asked depends on the kind: (d) (f) (h) of policy gradients, (i) of algorithms that learn from given rows
(conversations, pairs of answers, labelled answers), and the others of all.
All numbers are float64, and the micro-batches are the real ones of data_feeds/packing.py. Exit code 0: all hold,
1: one fails, 2: a mistake in the file, the name or a hyper-parameter.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from algs import check_data as exhibit
from algs import find_algorithm
from algs.base import Algorithm, PolicyGradient
from algs.check_data import Tables, World, changed
from configs.load import override, validate
from core.cli import guarded
from core.types import Batch, Group, LossNorm, Policy, Sample, Scored
from data_feeds.packing import Plan, plan_update


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    max_tokens: int
    ranks: int
    padded: bool

    def __str__(self) -> str:
        return f"micro-batches of at most {self.max_tokens} tokens on {self.ranks} ranks"


HORIZON = 7
WHOLE = Cut(max_tokens=1000, ranks=1, padded=True)
CUTS = [
    Cut(max_tokens=20, ranks=1, padded=True),
    Cut(max_tokens=45, ranks=3, padded=False),
    Cut(max_tokens=40, ranks=17, padded=True),  # more ranks than samples: some of them stand idle
]
SAME = 1e-6
"""Of the largest gradient: two that are further apart differ. A loss may compute in float32 inside."""
STEP, BEND = 1e-4, 1e-3
"""Of a central difference, and of the largest slope: slopes to both sides further apart than this make a kink."""
UPDATES, LEARNT, SLANT = 40, 0.5, 0.4


class Broken(Exception):
    """An obligation does not hold: where, and by which numbers."""


class NotAsked(Exception):
    """Why an obligation is not asked of this algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    letter: str
    title: str
    status: Literal["ok", "FAILED", "not asked"]
    said: str
    """What was shown, which numbers failed, or why it is not asked."""

    def __str__(self) -> str:
        return f"({self.letter}) {self.status:9} {self.title}: {self.said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one update computes."""

    loss: float
    gradient: Tables
    """By what is trained: for tables laid back onto samples, however they were packed."""
    connected: bool
    """False if backward() would raise, because the loss of a micro-batch does not depend on what is trained."""


def credited(alg: Algorithm, groups: list[Group], *, stale: bool) -> list[Group]:
    """What credit makes of the columns that are declared; stale: a step of several updates, so prox_logp is there."""
    return alg.credit(exhibit.shown(groups, alg.needs | frozenset[Scored]({"prox_logp"} if stale else ())))


def batches_of(
    alg: Algorithm, groups: list[Group], tables: Tables, *, cut: Cut = WHOLE, horizon: int = HORIZON
) -> list[Batch]:
    """The micro-batches of all ranks, with totals."""
    plan = plan_of(alg, groups, cut=cut, horizon=horizon)
    return with_totals(alg, [batch for rank in plan.batches(torch.float64) for batch in rank], tables)


def plan_of(alg: Algorithm, groups: list[Group], *, cut: Cut = WHOLE, horizon: int = HORIZON) -> Plan:
    whole = alg.whole_groups
    size = cut.max_tokens * (2 if whole else 1)  # for it holds two answers
    return plan_update(
        groups,
        alg.loss_norm,
        size,
        ranks=cut.ranks,
        horizon=horizon,
        padded=cut.padded,
        whole_groups=whole,
    )


@torch.no_grad()
def with_totals(alg: Algorithm, batches: list[Batch], tables: Tables) -> list[Batch]:
    """As trainers/step.py adds them up."""
    if type(alg).totals is Algorithm.totals:
        return batches
    parts = [alg.totals(policy_on(alg, b, tables), b.tokens) for b in batches]
    totals = {name: torch.stack([p[name] for p in parts]).sum(0) for name in parts[0]}
    return [replace(b, tokens=replace(b.tokens, totals=totals)) for b in batches]


def policy_on(alg: Algorithm, batch: Batch, tables: Tables) -> Policy:
    at = batch.labels
    return Policy(logp=tables["logp"][at], entropy=tables["entropy"][at] if alg.needs_entropy else None)


def losses(alg: Algorithm, batch: Batch, tables: Tables) -> list[Tensor]:
    """What a trainer calls backward() on: the policy's loss, and the value model's if there is one."""
    if alg.trains == "reward":
        loss, metrics = alg.value_loss(tables["values"][batch.labels], batch.tokens)
    else:
        loss, metrics = alg.objective(policy_on(alg, batch, tables), batch.tokens)
    terms, per_token = [loss], {"the loss": loss, **metrics}
    if alg.value_lr is not None:
        value_loss, metrics = alg.value_loss(tables["values"][batch.labels], batch.tokens)
        terms, per_token = [loss, value_loss], per_token | {"the value loss": value_loss, **metrics}
    for name, value in per_token.items():
        if value.shape != batch.labels.shape:
            raise Broken(
                f"{name} has shape {list(value.shape)}, expected one value per learnt token, "
                f"{list(batch.labels.shape)}: return it unreduced, the framework weighs and adds up"
            )
    return [(term * batch.tokens.weight).sum() for term in terms]


def outcome(alg: Algorithm, batches: list[Batch], tables: Tables, *, by: Tables | None = None) -> Outcome:
    """One update: forward and backward of every micro-batch. `by` is what is trained, the tables if left out."""
    if by is None:
        by = tables = {name: t.detach().clone().requires_grad_() for name, t in tables.items()}
    gradient = {name: torch.zeros_like(t) for name, t in by.items()}
    loss, connected = 0.0, True
    for batch in batches:
        terms = losses(alg, batch, tables)
        total = torch.stack(terms).sum()
        loss, connected = loss + float(total.detach()), connected and all(term.requires_grad for term in terms)
        for name, g in gradient_of(total, by).items():
            gradient[name] += g
    return Outcome(loss=loss, gradient=gradient, connected=connected)


def gradient_of(total: Tensor, by: Tables) -> Tables:
    """Without the tables that it does not depend on."""
    if not total.requires_grad:
        return {}
    slopes = cast(Iterable[Tensor | None], torch.autograd.grad(total, list(by.values()), allow_unused=True))
    return {name: g for name, g in zip(by, slopes, strict=True) if g is not None}


def of_groups(alg: Algorithm, world: World, groups: list[Group], *, stale: bool, cut: Cut = WHOLE) -> Outcome:
    return outcome(alg, batches_of(alg, credited(alg, groups, stale=stale), world.now, cut=cut), world.now)


def size_of(gradient: Tables) -> float:
    return float(torch.stack([g.abs().max() for g in gradient.values()]).max()) if gradient else 0.0


def furthest(got: Tables, want: Tables) -> tuple[float, str, int]:
    """The largest difference, and the table and the token where it is."""
    gaps = {name: (g - want[name]).abs().nan_to_num(nan=math.inf) for name, g in got.items()}
    return max((float(gap.max()), name, int(gap.argmax())) for name, gap in gaps.items())


def difference(world: World, got: Tables, want: Tables) -> str:
    """Where two gradients are furthest apart; "" if they agree."""
    gap, name, token = furthest(got, want)
    if gap <= SAME * size_of(want) + 1e-15:
        return ""
    numbers = f"{got[name][token]:.4g} instead of {want[name][token]:.4g}"
    return f"the gradient by {name} at {world.where(token)} is {numbers}"


def when(stale: bool) -> str:
    return "several updates per step" if stale else "one update per step"


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


def any_difference(world: World, got: Outcome, want: Outcome) -> str:
    if got.loss == want.loss and all(torch.equal(got.gradient[name], g) for name, g in want.gradient.items()):
        return ""
    numbers = f"the loss is {got.loss:.6g} instead of {want.loss:.6g}"
    return difference(world, got.gradient, want.gradient) or numbers


def has_the_gradient_of_its_loss(alg: Algorithm) -> str:
    world, done, kinks = exhibit.made_up_step(alg), 0, 0
    for stale in (False, True):
        [batch] = batches_of(alg, credited(alg, world.groups[:2], stale=stale), world.now)
        agreed, bent = compare_with_differences(alg, world, batch, where=when(stale))
        done, kinks = done + agreed, kinks + bent
    if not done:
        raise Broken(f"all {kinks} points stand at a kink, or the loss computes in less than float64: nothing is shown")
    left_out = f", {kinks} at a kink left out" if kinks else ""
    return f"central differences agree at {done} tokens{left_out}" + (": little is shown" if kinks > done else "")


def compare_with_differences(alg: Algorithm, world: World, batch: Batch, *, where: str) -> tuple[int, int]:
    """How many points agree, and how many stand at a kink."""
    tape = exhibit.Tape()

    def at(tables: Tables) -> Tensor:
        with exhibit.Held(tape):
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
    except exhibit.OtherPath:
        return math.nan, math.nan


def is_a_policy_gradient(alg: Algorithm) -> str:
    if isinstance(alg, PolicyGradient) and alg.not_on_policy:
        raise NotAsked(f"declared: {alg.not_on_policy}")
    world = exhibit.made_up_step(alg)
    for stale in (False, True):
        [batch] = batches_of(alg, credited(alg, exhibit.on_policy(world), stale=stale), world.now)
        if batch.tokens.advantage is None:
            raise Broken("credit() gave no advantage")
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


def learns_a_bandit(alg: Algorithm) -> str:
    start, end = 1 / len(exhibit.PAYOFF), bandit(alg, slant=0.0)
    numbers = f"in {UPDATES} updates the best arm's probability went from {start:.2f} to {end:.2f}"
    if not end >= LEARNT:
        raise Broken(f"{numbers}, expected {LEARNT} or more")
    # Told, not asked: a correction may rightly refuse to learn from such exhibit.
    return f"{numbers}; to {bandit(alg, slant=SLANT):.2f} with an engine {SLANT} nats off and two updates per step"


def bandit(alg: Algorithm, *, slant: float) -> float:
    """Probability of the best arm in the end, by plain SGD. The engine's logits are off by up to `slant`."""
    draw = torch.Generator().manual_seed(0)
    logits, value = torch.zeros(len(exhibit.PAYOFF), dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    tilt = slant * torch.linspace(1, -1, len(logits), dtype=torch.float64)
    start, per_step = logits.log_softmax(-1), 2 if slant else 1
    for _ in range(UPDATES // per_step):
        now = bandit_tables(logits, value)
        scored: dict[Scored, Tensor] = {"prox_logp": now["logp"], "ref_logp": start, "teacher_logp": exhibit.TEACHER}
        scored["values"] = now["values"]
        groups = [g for g in exhibit.bandit_answers(logits + tilt, scored, draw) if alg.keep(g)]
        groups = credited(alg, groups, stale=per_step > 1)
        for _ in range(per_step if groups else 0):
            trained = {"logits": logits.clone().requires_grad_(), "value": value.clone().requires_grad_()}
            tables = bandit_tables(**trained)
            slopes = outcome(alg, batches_of(alg, groups, tables, horizon=1), tables, by=trained).gradient
            logits, value = logits - slopes["logits"], value - 0.1 * slopes["value"]
    return float(logits.softmax(-1)[exhibit.BEST])


def bandit_tables(logits: Tensor, value: Tensor) -> Tables:
    """[arms] each: label k of the bandit is arm k."""
    logp = logits.log_softmax(-1)
    return {"logp": logp, "entropy": -(logp.exp() * logp).sum().expand(len(logp)), "values": value.expand(len(logp))}


def reads_what_it_declares(alg: Algorithm) -> str:
    world, declared = exhibit.made_up_step(alg), exhibit.own_fields(alg)
    to_try = {name for name in declared if exhibit.variants(alg, {}, name)}
    read, effective = set[str](), set[str]()
    for mode, here in exhibit.modes(alg):
        before = everything(here, world, read)
        for name in to_try - effective:
            if any(differs(other, world, read, before=before) for other in exhibit.variants(alg, mode, name)):
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
    alg = exhibit.noting_reads(alg, reads)
    said: list[Any] = [alg.needs, alg.needs_entropy, alg.frozen, alg.value_lr, [alg.keep(g) for g in world.groups]]
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
    plain = changed(alg, exhibit.PLAIN) if isinstance(alg, PolicyGradient) else None
    if plain is None:
        return []
    before = of_groups(plain, world, world.groups, stale=True)
    others = [(name, changed(plain, mode)) for name, mode in exhibit.SHARED.items()]
    after = [(name, of_groups(other, world, world.groups, stale=True)) for name, other in others if other is not None]
    return [name for name, got in after if not any_difference(world, got, before)]


def clips_on_the_right_side(alg: Algorithm) -> str:
    """Halve each bound: what moves must be on its side of ratio 1, and be what pushes further out on that side."""
    if not {"clip_low", "clip_high"} <= type(alg).model_fields.keys():
        raise NotAsked("it has no clip_low and clip_high")
    before = slopes_by_ratio(alg)
    for name, other, side in (("clip_high", "clip_low", 1.0), ("clip_low", "clip_high", -1.0)):
        value: float = exhibit.value_of(alg, name)
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
    slopes = gradient["values" if alg.trains == "reward" else "logp"]
    moved = {"raised": 0, "lowered": 0}
    for s in (s for group in groups for s in group):
        wish = "lowered" if alg.rows != "conversations" and s.reward == 0 else "raised"
        for token in (t for t, yes in zip(s.token_ids, s.learnt, strict=True) if yes):
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
    "labelled": "abcegi",
}


def check(what: str | type[Algorithm], settings: dict[str, Any] | None = None) -> list[Result]:
    """The obligations of an algorithm, by its name, its file or its class, under these hyper-parameters."""
    alg: Algorithm = validate(what if isinstance(what, type) else found(what), settings or {}, prefix="")
    asked = [o for o in OBLIGATIONS if o[0] in ASKED[exhibit.kind_of(alg)]]
    return [examined(alg, letter, title, obligation=holds) for letter, title, holds in asked]


def found(name: str) -> type[Algorithm]:
    is_file = name.endswith(".py") or "/" in name
    return find_algorithm({"file" if is_file else "name": name})[1]


def examined(alg: Algorithm, letter: str, title: str, *, obligation: Callable[[Algorithm], str]) -> Result:
    told = partial(Result, letter=letter, title=title)
    try:
        return told(status="ok", said=obligation(alg))
    except Broken as error:
        return told(status="FAILED", said=str(error))
    except NotAsked as error:
        return told(status="not asked", said=str(error))
    except Exception as error:  # a border: this is the author's code, whatever it raises
        return told(status="FAILED", said=f"{type(error).__name__}: {error} ({place_of(error, alg)})")


def place_of(error: Exception, alg: Algorithm) -> str:
    """The last line that ran in the algorithm's own file, or at all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == sys.modules[type(alg).__module__].__file__]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m algs.check", description="Proof obligations for an algorithm.")
    parser.add_argument("algorithm", metavar="FILE_OR_NAME", help="a file, or a module of algs/")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="hyper-parameters, such as clip_high=0.3")
    args = parser.parse_args(argv)
    settings: dict[str, Any] = {}
    for item in args.settings:
        override(settings, item)
    began, cls = time.monotonic(), found(args.algorithm)
    results = check(cls, settings)
    alone = "" if issubclass(cls, PolicyGradient) else "supervised, so (d) (f) (h) are not asked"
    print(f"{cls.__name__}, {alone or 'a policy gradient'}", *results, sep="\n")
    failed = [f"({r.letter})" for r in results if r.status == "FAILED"]
    verdict = f"{len(failed)} of {len(results)} FAILED: {' '.join(failed)}" if failed else "all that is asked holds"
    print(f"{verdict} ({time.monotonic() - began:.1f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(guarded(partial(run, sys.argv[1:])))
