"""Shares of an objective's terms in an update: tokens, weights and columns of each, before any split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from core.errors import RunStopped
from core.types.arrays import Mask
from core.types.samples import Group, Sample
from core.types.terms import Has, Term, find_columns, find_term_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TermShare:
    """Tokens of a term in some samples of an update."""

    name: str
    masks: list[Mask]
    """[L] of each sample, True for tokens of the term."""
    weights: list[float]
    """Weight of each of these tokens, by sample."""
    has: Has
    """Columns that exist at all tokens of the term in the whole update."""

    def take(self, chosen: Sequence[int]) -> TermShare:
        """Return the share of these samples."""
        return replace(self, masks=[self.masks[i] for i in chosen], weights=[self.weights[i] for i in chosen])


def find_tokens(term: Term, groups: list[Group]) -> tuple[list[Mask], list[list[int]], Has]:
    """Return a term's tokens by sample, those that the denominator counts, [groups][samples], and the columns."""
    if term.on == "observed":
        _check_one_sample_each(term, groups)
    samples = [s for g in groups for s in g]
    masks = [find_term_tokens(s, term.on, term.sources) for s in samples]
    among = masks if term.among is None else [find_term_tokens(s, term.among, term.sources) for s in samples]
    if any((mask & ~counted).any() for mask, counted in zip(masks, among, strict=True)):
        raise RunStopped(f"the term {term.name} has tokens that its `among` does not count: it must count all of them")
    sizes = iter(int(np.count_nonzero(mask)) for mask in among)
    return masks, [[next(sizes) for _ in group] for group in groups], _find_has(term, samples, masks)


def has_tokens(groups: list[Group], terms: Sequence[Term]) -> bool:
    """Tell whether an update on these groups trains a token: of the policy, or of a term of the objective."""
    sampled = any(s.n_trained for group in groups for s in group)
    return sampled or any(mask.any() for term in terms for mask in find_tokens(term, groups)[0])


def _find_has(term: Term, samples: Sequence[Sample], masks: Sequence[Mask]) -> Has:
    """Return the columns that exist at all tokens of a term, decided by the whole update and not by a micro-batch."""
    match term.on:
        case "sampled":
            return "all"
        case "observed":
            return "none"
        case "demonstrated":
            return "no rollout"
        case _:
            found = {find_columns(s, mask) for s, mask in zip(samples, masks, strict=True)}
            order: tuple[Has, ...] = ("none", "no rollout", "all")
            return order[min((order.index(has) for has in found), default=2)]


def _check_one_sample_each(term: Term, groups: list[Group]) -> None:
    """Raise RunStopped for an episode of several samples."""
    for group in groups:
        numbers = Counter(s.episode for s in group if s.episode is not None)
        if numbers and max(numbers.values()) > 1:
            raise RunStopped(
                f"the term {term.name} is on observed tokens, and an episode of {group[0].prompt.id} has several "
                "samples, in which a reply of another sample cannot be told from what was observed: use an "
                "environment instead of an agent, or leave the term out"
            )


def unite(terms: Sequence[TermShare]) -> list[Mask]:
    """Return the tokens of all terms, [L] of each sample."""
    return [np.logical_or.reduce(masks) for masks in zip(*(term.masks for term in terms), strict=True)]


def find_places(term: TermShare, union: Sequence[Mask]) -> NDArray[np.intp]:
    """Return the places of a term's tokens among the tokens of all terms, [m], sample by sample."""
    return np.flatnonzero(np.concatenate([m[u] for m, u in zip(term.masks, union, strict=True)]))
