"""Obligation (j): cutting an episode into samples must not change loss or gradient.

A harness that rewrites the history turns an episode into several samples. Here made-up episodes are cut so that every
token keeps its context, and loss and gradient must stay equal. A token trained on in one sample is context in the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import get_args

import numpy as np

from algs.base import Algorithm
from algs.check import fixtures
from algs.check.instruments import with_settings
from algs.check.update import (
    SAME,
    WHOLE,
    NotApplicable,
    ObligationFailed,
    Split,
    describe_difference,
    describe_updates,
    find_largest_difference,
    max_abs,
    update_on_groups,
)
from core.types.samples import Group, LossNorm, Sample

LAYOUTS = [WHOLE, Split(max_tokens=1000, ranks=1, padded=False, shared=True)]
SPLITS = [Split(max_tokens=60, ranks=2, padded=False), Split(max_tokens=60, ranks=1, padded=False, shared=True)]
"""Splits for episodes of several samples, which may need more tokens."""


def may_be_cut_into_samples(alg: Algorithm) -> str:
    """Compare loss and gradient of whole episodes and of cut episodes."""
    if reads_observed(alg):
        raise NotApplicable("a term is on observed tokens, which an episode of several samples does not tell")
    step, worst, ways = fixtures.made_up_step(alg), 0.0, 0
    norms = [norm for norm in get_args(LossNorm) if norm != alg.loss_norm]
    others = [other for norm in norms if (other := with_settings(alg, {"loss_norm": norm})) is not None]
    trials = [(alg, False), (alg, True), *((other, True) for other in others)]
    for this, stale in trials:
        whole = update_on_groups(this, step, step.groups, stale=stale)
        for (how, cut), layout in WAYS if this is alg else WAYS[-1:]:
            got = update_on_groups(this, step, [cut(group) for group in step.groups], stale=stale, split=layout)
            said = describe_difference(step, got.gradient, whole.gradient)
            if not said and abs(got.loss - whole.loss) > SAME * max(1.0, abs(whole.loss)):
                said = f"the loss is {got.loss:.6g} instead of {whole.loss:.6g}"
            if said:
                where = f"{describe_updates(stale)}, loss_norm {this.loss_norm}, {how}"
                raise ObligationFailed(f"{where}: {said} with one sample per episode")
            apart = find_largest_difference(got.gradient, whole.gradient)[0] / (max_abs(whole.gradient) or 1.0)
            worst, ways = max(worst, apart), ways + 1
    return f"{ways} cuts and layouts, {1 + len(others)} loss norms, at most {worst:.0e} of the gradient apart"


def reads_observed(alg: Algorithm) -> bool:
    """Tell whether a term of the algorithm is on observed tokens."""
    return any(term.on == "observed" for term in alg.terms)


def cut_after_every_turn(group: Group) -> Group:
    """Return each turn as a sample with all tokens before it; samples of different episodes are interleaved."""
    cut = [
        [make_branch(s, episode, [k]) for k in range(len(s.spans))] if len(s.spans) > 1 else [s]
        for episode, s in enumerate(group)
    ]
    return [own[k] for k in range(max(map(len, cut))) for own in cut if k < len(own)]


def cut_in_alternation(group: Group) -> Group:
    """Return two samples per episode that alternate in turns; the later sample comes first."""
    branches: Group = []
    for episode, s in enumerate(group):
        turns = range(len(s.spans))
        parts = [[*turns[1::2]], [*turns[0::2]]] if len(turns) > 1 else []
        branches += [replace(make_branch(s, episode, own), turn_numbers=tuple(own)) for own in parts] or [s]
    # the later sample first: the order in which samples arrive must not matter
    return branches[::-1]


CUTS: dict[str, Callable[[Group], Group]] = {
    "episodes cut after every turn": cut_after_every_turn,
    "episodes of two branches in alternation": cut_in_alternation,
}
WAYS = [*product(CUTS.items(), LAYOUTS)]
"""All ways for the algorithm itself; only the last, which mixes most, for other loss norms."""


def make_branch(sample: Sample, episode: int, turns: Sequence[int]) -> Sample:
    """Return an episode up to the last of these turns, with only these turns trained on."""
    spans = sample.spans
    is_end = turns[-1] == len(spans) - 1
    end = len(sample.token_ids) if is_end else spans[turns[-1]][1]
    own = np.zeros(end, dtype=np.bool_)
    for k in turns:
        own[slice(*spans[k])] = True
    return replace(
        sample,
        token_ids=sample.token_ids[:end].copy(),
        action_mask=own,
        # as a rollout writes context: log-probability 0 and version -1
        rollout_logp=np.where(own, sample.rollout_logp[:end], 0.0),
        versions=np.where(own, sample.versions[:end], -1).astype(sample.versions.dtype),
        columns={name: values[:end].copy() for name, values in sample.columns.items()},
        # only the last sample of an episode can have been cut off by the budget
        stop=sample.stop if is_end else "eos",
        episode=episode,
        turns=tuple(spans[k] for k in turns),
        turn_rewards=tuple(sample.turn_rewards[k] for k in turns) if sample.turn_rewards else (),
    )
