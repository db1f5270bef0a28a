"""Obligation (g): every hyper-parameter is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from algs.base import Algorithm, PolicyGradient
from algs.check import fixtures, instruments
from algs.check.fixtures import MadeUpStep
from algs.check.instruments import record_reads, with_settings
from algs.check.replay import make_up_step_seen
from algs.check.update import ObligationFailed, describe_any_difference, update_on_groups
from algs.teachers import check_teachers


def reads_what_it_declares(alg: Algorithm) -> str:
    """Check that every hyper-parameter of the algorithm's file is read; list those without visible effect."""
    step, declared = fixtures.made_up_step(alg), instruments.list_own_fields(alg)
    to_try = {name for name in declared if instruments.list_variants(alg, {}, name)}
    read, effective = set[str](), set[str]()
    for mode, variant in instruments.list_modes(alg):
        before = collect_outputs(variant, step, read)
        # a setting may act in some modes only, so the others are tried until it shows an effect
        for name in to_try - effective:
            if any(
                output_differs(other, step, read, before=before) for other in instruments.list_variants(alg, mode, name)
            ):
                effective.add(name)
        if read >= declared.keys() and effective >= to_try:
            break
    if unread := [name for name in declared if name not in read]:
        raise ObligationFailed(f"never read: {', '.join(unread)}")
    without = [name for name in declared if name in to_try - effective] + find_ignored_settings(alg, step)
    note = f"; note: no effect seen of {', '.join(without)}" if without else ""
    return (", ".join(declared) or "it declares none of its own") + note


def collect_outputs(alg: Algorithm, step: MadeUpStep, reads: set[str]) -> list[Any]:
    """Compute all outputs of the algorithm on the made-up step, and record the settings it reads."""
    alg = record_reads(alg, reads)
    outputs: list[Any] = [
        alg.required_columns,
        alg.needs_entropy,
        *describe_teachers(alg, step),
        alg.value_lr,
        [alg.accept_group(g) for g in step.groups],
    ]
    for stale in (False, True):
        got = update_on_groups(alg, step, step.groups, stale=stale)
        outputs += [got.loss, *(g.tolist() for g in got.gradient.values())]
    if alg.has_state:  # a hyper-parameter may be read after a step only, or change the steps after it
        moved = alg.after(make_up_step_seen(alg, step, 0))
        got = update_on_groups(moved, step, step.groups, stale=False)
        state = {name: np.asarray(value).tolist() for name, value in moved.state.items()}
        outputs += [state, got.loss, *(g.tolist() for g in got.gradient.values())]
    return outputs


def describe_teachers(alg: Algorithm, step: MadeUpStep) -> list[Any]:
    """Return the teachers, and the prompts that they have of their own on the made-up step."""
    teachers = alg.teachers
    check_teachers(teachers, alg.required_columns)
    # two functions are never equal, so their results are compared
    plain = {name: replace(t, prompt=None if t.prompt is None else list, when=None) for name, t in teachers.items()}
    return [plain, [t.prompt(s, g) for t in teachers.values() if t.prompt for g in step.groups for s in g]]


def output_differs(alg: Algorithm, step: MadeUpStep, reads: set[str], *, before: list[Any]) -> bool:
    """Tell whether the algorithm's outputs differ from `before`; an exception counts as a difference."""
    try:
        return collect_outputs(alg, step, reads) != before
    except Exception:  # a border: a value that the author did not think of, and it mattered
        return True


def find_ignored_settings(alg: Algorithm, step: MadeUpStep) -> list[str]:
    """List shared policy-gradient settings that have no effect in this algorithm."""
    # without the shared terms: each of them is switched on alone, and must change something
    plain = with_settings(alg, instruments.PLAIN) if isinstance(alg, PolicyGradient) else None
    if plain is None:
        return []
    before = update_on_groups(plain, step, step.groups, stale=True)
    others = [(name, with_settings(plain, mode)) for name, mode in instruments.SHARED.items()]
    after = [
        (name, update_on_groups(other, step, step.groups, stale=True)) for name, other in others if other is not None
    ]
    return [name for name, got in after if not describe_any_difference(step, got, before)]
