"""Check the demonstrations of an RL data set against the algorithm and the reward."""

from __future__ import annotations

from algs.base import Algorithm
from configs.schema import RLConfig
from core.errors import UserError
from core.types.samples import Prompt
from data_feeds.feed import Feed


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
