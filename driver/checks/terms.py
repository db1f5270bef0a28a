"""Check the terms of an algorithm against the data set: its demonstrations and its sources."""

from __future__ import annotations

from algs.base import Algorithm
from configs.schema import RLConfig
from core.errors import UserError
from core.types.samples import Prompt
from data_feeds.feed import Feed


def check_sources(alg: Algorithm, prompts: Feed[Prompt]) -> None:
    """Raise UserError for a term of a source that the data lack, and for a source of which no term trains."""
    there = {p.source for p in prompts.all()}
    for term in alg.terms:
        if absent := sorted((term.sources or frozenset()) - there):
            raise UserError(
                f"the term {term.name} of {type(alg).__name__} is for the source {absent[0]!r}, and data.train has "
                f"{', '.join(sorted(there))}: name the sources as data.train does"
            )
    covered = {source for term in alg.terms for source in (there if term.sources is None else term.sources)}
    if alg.terms and (missing := sorted(there - covered)):
        raise UserError(f"no term of {type(alg).__name__} trains on the source {missing[0]!r} of data.train: add one")


def check_demonstrated(cfg: RLConfig, alg: Algorithm, prompts: Feed[Prompt]) -> None:
    """Raise UserError for demonstrations that nothing trains on or scores, and for an algorithm that lacks them."""
    who, given = type(alg).__name__, [p for p in prompts.all() if p.demonstration]
    imitates = any(term.on == "demonstrated" for term in alg.terms)
    if not given:
        if imitates:
            raise UserError(
                f"{who} has a term on demonstrated tokens, and no row of data.train has a column demonstration: add "
                "it, or name the column that holds the replies in data.train columns ({demonstration: ...})"
            )
        return
    if not imitates and not any(callable(term.on) for term in alg.terms):
        raise UserError(
            f"data.train has the column demonstration (as in {given[0].id}), and {who} trains on none: use an "
            "algorithm with a term on demonstrated tokens (alg.name=chord), or remove the column"
        )
    scorer = "reward.function=environment" if cfg.reward.function == "environment" else "rollout.agent"
    if cfg.reward.function == "environment" or cfg.rollout.agent is not None:
        raise UserError(
            f"{scorer} scores episodes that were played, and the demonstrations of data.train (as of {given[0].id}) "
            "are text: use a reward function of text, or remove the column demonstration"
        )
