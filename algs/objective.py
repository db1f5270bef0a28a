"""Objective of a micro-batch: the loss of an algorithm, or the losses of its terms, as one number per token.

Every caller minimises (batch.tokens.weight x loss).sum(). An algorithm without terms has that loss. With terms it is

    loss_t = sum over the terms k that have token t of   coef_k  w_k,t / w_t  loss_k,t

where w_t is the weight of token t in the first term that has it. So a coefficient multiplies and enters no denominator,
and with terms on different tokens each has its own loss and weight, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from algs.base import Algorithm
from algs.totals import Totals, measure_near
from algs.validate import Metrics, check_per_token
from core.errors import RunStopped, UserError
from core.types.arrays import list_fields
from core.types.batch import Batch, Policy, TermTokens, Tokens
from core.types.samples import Group
from core.types.terms import Term, find_term_tokens

LOSS, COEF = "term/{}/loss", "term/{}/coef"
"""Metrics of a term."""


@dataclass(slots=True, kw_only=True)
class Objective:
    """Loss and metrics of the M tokens of a micro-batch."""

    loss: Tensor
    """[M], with gradient."""
    metrics: Metrics = field(default_factory=dict)
    """[M] each; empty with terms, whose metrics are of fewer tokens."""
    of_terms: list[tuple[Tensor, Metrics]] = field(default_factory=list[tuple[Tensor, Metrics]])
    """Weight and metrics of each term's tokens, [m] each."""

    @staticmethod
    def of_loss(alg: Algorithm, returned: Any, tokens: Tokens) -> Objective:
        """Return the objective of an algorithm without terms, from what its `objective` returned, checked."""
        loss, metrics = check_per_token(alg, returned, tokens)
        return Objective(loss=loss, metrics=metrics | measure_near(tokens))

    def detach(self) -> Objective:
        """Return the same without gradient."""
        of_terms = [(weight, _detach(metrics)) for weight, metrics in self.of_terms]
        return Objective(loss=self.loss.detach(), metrics=_detach(self.metrics), of_terms=of_terms)


def _detach(metrics: Metrics) -> Metrics:
    return {name: value.detach() for name, value in metrics.items()}


def compute_objective(alg: Algorithm, policy: Policy, batch: Batch) -> Objective:
    """Compute the objective of a micro-batch. Raises UserError for a loss that is not one number per token."""
    if not batch.terms:
        return Objective.of_loss(alg, alg.objective(policy, batch.tokens), batch.tokens)
    weight = batch.tokens.weight
    done = Objective(loss=torch.zeros_like(policy.logp))
    for term in alg.terms:
        own = batch.terms[term.name]
        loss, metrics = _compute_term(alg, term, select(policy, own.at), own.tokens)
        done.loss = done.loss.index_add(0, own.at, term.coef * (own.tokens.weight / weight[own.at]).to(loss) * loss)
        done.of_terms.append((own.tokens.weight, metrics | _describe(term, loss)))
    return done


def _compute_term(alg: Algorithm, term: Term, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
    """Return a term's loss and metrics, [m] each."""
    if term.on == "sampled":
        # corrected, with KL and entropy, and its metrics have the names that they have without terms
        loss, metrics = check_per_token(alg, alg.objective(policy, tokens, term.loss), tokens)
        return loss, metrics | measure_near(tokens)
    loss, metrics = check_per_token(alg, term.loss(policy, tokens), tokens)
    return loss, {f"term/{term.name}/{name}": value for name, value in metrics.items()}


def _describe(term: Term, loss: Tensor) -> Metrics:
    coef = torch.full_like(loss.detach(), term.coef)
    return {LOSS.format(term.name): loss, COEF.format(term.name): coef}


def select(policy: Policy, at: Tensor) -> Policy:
    """Return the policy at some of the tokens, [M] -> [m]."""

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[at]
        return {name: take(own) for name, own in value.items()} if isinstance(value, dict) else value

    return Policy(**{name: take(getattr(policy, name)) for name in list_fields(Policy)})


def view_first(policy: Policy, batch: Batch) -> tuple[Policy, Tokens]:
    """Return the tokens that `totals` reads: all, or those of the first term."""
    if not batch.terms:
        return policy, batch.tokens
    first = next(iter(batch.terms.values()))
    return select(policy, first.at), first.tokens


def add_totals(batch: Batch, totals: Totals) -> Batch:
    """Return the batch with the totals of the update, which every term reads; `first` is of the first term's tokens."""
    if not batch.terms:
        return replace(batch, tokens=totals.add_to(batch.tokens))
    first = next(iter(batch.terms))
    terms = {
        name: TermTokens(
            at=own.at,
            tokens=totals.add_to(own.tokens) if name == first else own.tokens.replace(totals=totals.reduced),
        )
        for name, own in batch.terms.items()
    }
    return replace(batch, terms=terms)


def add_terms(means: Mapping[str, float]) -> dict[str, float]:
    """Add the objective's value, `loss`, to the means of its terms; a term without tokens is 0."""
    prefix, suffix = COEF.split("{}")
    names = [name.removeprefix(prefix).removesuffix(suffix) for name in means if name.startswith(prefix)]
    own = [n for n in names if COEF.format(n) in means and LOSS.format(n) in means]
    return {**means, **({"loss": sum(means[COEF.format(n)] * means[LOSS.format(n)] for n in own)} if own else {})}


def check_demonstrations(alg: Algorithm, groups: list[Group]) -> None:
    """Raise RunStopped for a demonstration that the algorithm does not train on."""
    given = [s for g in groups for s in g if s.origin == "demonstration" and not s.failure]
    if given and not any(find_term_tokens(s, t.on, t.sources).any() for s in given for t in alg.terms):
        raise RunStopped(
            f"{given[0].prompt.id} has a demonstration, and {type(alg).__name__} trains on none: use an algorithm with "
            "a term on demonstrated tokens (alg.name=chord), or remove the column demonstration from the data set"
        )


def check_terms(alg: Algorithm) -> None:
    """Raise UserError for terms that the framework cannot train."""
    names = [term.name for term in alg.terms]
    if len({*names}) < len(names):
        raise UserError(f"{type(alg).__name__}: two terms have the same name, found {names}: rename one")
    if not names:
        return
    if alg.value_lr is not None or alg.model_kind == "reward":
        raise UserError(f"{type(alg).__name__}: a value or reward model has no terms: leave `terms` out")
