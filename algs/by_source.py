"""An algorithm per source of a mixture, each with settings and a loss_norm of its own.

    alg: {by_source: {gsm8k: {name: grpo}, chat: {name: sft}}, coefs: {chat: 0.5}}

    L = sum over sources s of   coef_s  L_s(tokens of s)

Each L_s is a mean over the tokens, sequences or prompts of that source: coefficients balance the sources, and not
how many tokens each has. Algorithms of reinforcement learning train on sampled tokens, those of supervised learning on
the source's demonstrations (the column demonstration of its rows).

Others: prime-rl routes by environment with one count per component, as here; verl's several teachers share one count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from pydantic import Field, model_validator
from torch import Tensor

from algs import load_nested
from algs.base import Algorithm, Metrics, PolicyGradient, Term, assign_advantages
from algs.teachers import Teacher
from core.errors import RunStopped
from core.types.measures import Measure
from core.types.samples import Group, Policy, ScoredColumn, Tokens
from core.types.terms import TokenLoss

OF_EACH = (*(name for name in PolicyGradient.model_fields if name not in Algorithm.model_fields), "loss_norm")


class BySource(PolicyGradient):
    by_source: dict[str, dict[str, Any]] = Field(min_length=1)
    """Settings of the algorithm of each source, like a section `alg`."""
    coefs: dict[str, float] = Field({})
    """Coefficients of sources; 1 for the others."""

    @model_validator(mode="after")
    def can_be_mixed(self) -> BySource:
        fields = type(self).model_fields
        if given := [name for name in OF_EACH if getattr(self, name) != fields[name].default]:
            raise ValueError(f"{given[0]} is a setting of each source's algorithm: set it in by_source")
        if unknown := sorted(self.coefs.keys() - self.by_source.keys()):
            raise ValueError(f"coefs names {unknown[0]}, which by_source has not: name one of its sources")
        others = set[str]()
        for source, alg in self.algorithms.items():
            where = f"by_source.{source}: {type(alg).__name__}"
            if alg.value_lr is not None or alg.model_kind == "reward" or type(alg).totals is not Algorithm.totals:
                raise ValueError(f"{where} has a value model or totals, which a mixture cannot train: use another")
            if alg.has_state or alg.schedules or type(alg).prepare_update is not Algorithm.prepare_update:
                raise ValueError(f"{where} changes from step to step or update to update: use it in a run of its own")
            for name in alg.teachers.keys() | alg.measures.keys():
                if alg.teachers.get(name) != self.teachers.get(name) or name in alg.measures.keys() & others:
                    raise ValueError(f"{where} has another {name} than a source after it: use one of them alone")
            others |= alg.measures.keys()
            if not isinstance(alg, PolicyGradient) and alg.rows != "conversations":
                raise ValueError(f"{where} compares completions of given rows: use it in a run of its own")
            if isinstance(alg, PolicyGradient) and alg.overlong.mode == "penalty" and alg.overlong.max_tokens is None:
                raise ValueError(f"{where} has overlong.mode penalty without max_tokens: set overlong.max_tokens")
        return self

    @property
    def algorithms(self) -> dict[str, Algorithm]:
        """Algorithm of each source."""
        return {source: self._loaded[source] for source in self.by_source}

    @cached_property
    def _loaded(self) -> dict[str, Algorithm]:
        return {source: load_nested(settings, f"by_source.{source}") for source, settings in self.by_source.items()}

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(term for source, alg in self.algorithms.items() for term in self._list_terms(source, alg))

    def _list_terms(self, source: str, alg: Algorithm) -> Iterator[Term]:
        default = Term("", alg.loss, on="sampled" if isinstance(alg, PolicyGradient) else "demonstrated")
        for term in alg.terms or (default,):
            yield replace(
                term,
                name=f"{source}.{term.name}" if term.name else source,
                # the source's own correction, KL and entropy
                loss=partial(alg.objective, of_term=term.loss) if term.on == "sampled" else term.loss,
                norm=term.norm or alg.loss_norm,
                coef=term.coef * self.coefs.get(source, 1.0),
                sources=frozenset({source}),
            )

    def objective(self, policy: Policy, tokens: Tokens, of_term: TokenLoss | None = None) -> tuple[Tensor, Metrics]:
        return (of_term or self.loss)(policy, tokens)

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Raise an error: every token has the loss of a source."""
        raise AssertionError("every token is in a term of its source")

    @property
    def whole_groups(self) -> bool:
        return any(alg.whole_groups for alg in self.algorithms.values())

    @property
    def whole_episodes(self) -> bool:
        return any(alg.whole_episodes for alg in self.algorithms.values())

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return frozenset[ScoredColumn]().union(*(alg.required_columns for alg in self.algorithms.values()))

    @property
    def needs_entropy(self) -> bool:
        return any(alg.needs_entropy for alg in self.algorithms.values())

    @property
    def needs_siblings(self) -> bool:
        return any(isinstance(alg, PolicyGradient) and alg.needs_siblings for alg in self.algorithms.values())

    @property
    def not_on_policy(self) -> str:
        sampling = (alg for alg in self.algorithms.values() if isinstance(alg, PolicyGradient))
        return next((alg.not_on_policy for alg in sampling if alg.not_on_policy), "")

    @property
    def teachers(self) -> dict[str, Teacher]:
        return {name: teacher for alg in self.algorithms.values() for name, teacher in alg.teachers.items()}

    @property
    def measures(self) -> dict[str, Measure]:
        return {name: measure for alg in self.algorithms.values() for name, measure in alg.measures.items()}

    def accept_group(self, group: Group) -> bool:
        return self._choose(group).accept_group(group)

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        credited: dict[int, Group] = {}
        for alg in self.algorithms.values():
            own = [group for group in groups if self._choose(group) is alg]
            if isinstance(alg, PolicyGradient):
                done = assign_advantages(alg, own)
            else:
                done = [[s.with_advantage(0.0) for s in group] for group in own]
            credited |= zip(map(id, own), done, strict=True)
        return [credited[id(group)] for group in groups]

    def _choose(self, group: Group) -> Algorithm:
        """Return the algorithm of a group's source."""
        source = group[0].prompt.source
        if source not in self.algorithms:
            raise RunStopped(f"alg.by_source has no algorithm for the source {source!r}: add it")
        return self.algorithms[source]
