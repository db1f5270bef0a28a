"""Check the terms of an algorithm against the data set: demonstrations, recorded episodes and sources."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from algs.base import Algorithm, GroupRelative
from configs.schema import RLConfig
from core.errors import UserError
from core.types.messages import find_images
from core.types.samples import Prompt
from data_feeds.feed import Feed
from rewards import resolve_reward
from rewards.several import RewardPlan

TEXT_JUDGES = ("judge", "rubric")
"""Rewards that show prompt and reply to a judge as text."""


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


def check_given(cfg: RLConfig, alg: Algorithm, prompts: Feed[Prompt], rewards: RewardPlan) -> None:
    """Raise UserError for sources, replies or images of data.train that the algorithm or the reward cannot use."""
    check_sources(alg, prompts)
    check_demonstrated(cfg, alg, prompts)
    check_recorded(cfg, alg, prompts)
    # a file of the user's may return None for rows with images
    shown = [one for one in alg.teachers.values() if one.prompt is not None and not cfg.alg.get("file")]
    taught = (p for p in prompts.all() if any(not one.sources or p.source in one.sources for one in shown))
    if seen := next((p for p in taught if find_images(p.messages)), None):
        raise UserError(
            f"data.train has images (as in {seen.id}), and the teacher of {type(alg).__name__} reads text only: remove "
            "these rows, or use another algorithm"
        )
    check_judged(prompts.all(), "data.train", rewards)


def check_judged(prompts: Iterable[Prompt], key: str, *plans: RewardPlan | None) -> None:
    """Raise UserError for a row with images of which a judge would read the text alone. key: of the rows."""
    specs = [resolve_reward(name) for name in TEXT_JUDGES]
    seen = [prompt for prompt in prompts if find_images(prompt.messages)]
    for plan in (plan for plan in plans if plan is not None):
        for function in plan.functions:
            # a prompt_file may leave the question out; one that shows it fails the samples
            if function.spec not in specs or "prompt_file" in function.settings:
                continue
            if asked := next((p for p in seen if function.name in plan.list_names(p.source)), None):
                raise UserError(
                    f"{key} has images (as in {asked.id}), and the judge of {Path(function.spec.path).stem} reads text "
                    "only: use another reward for these rows, or remove them"
                )


def check_demonstrated(cfg: RLConfig, alg: Algorithm, prompts: Feed[Prompt]) -> None:
    """Raise UserError for demonstrations that nothing trains on or scores, and for an algorithm that lacks them."""
    who, given = type(alg).__name__, [p for p in prompts.all() if _has_demonstration(p)]
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
            f"data.train has demonstrations, or episodes without logp (as in {given[0].id}), and {who} trains on none: "
            "use an algorithm with a term on demonstrated tokens (alg.name=chord), or remove them; a weight of 1 for "
            "tokens of unknown log-probability would point the gradient elsewhere"
        )
    _check_scorer(cfg, given[0])


def _has_demonstration(prompt: Prompt) -> bool:
    return bool(prompt.demonstration) or any(not episode.token_ids for episode in prompt.recorded)


def check_recorded(cfg: RLConfig, alg: Algorithm, prompts: Feed[Prompt]) -> None:
    """Raise UserError for recorded episodes that the algorithm would weigh or compare wrongly."""
    given = [p for p in prompts.all() if any(episode.token_ids for episode in p.recorded)]
    if not given:
        return
    where = f"data.train has recorded episodes (as in {given[0].id})"
    # a method of another name may compare all samples of a group with one another
    overrides = type(alg).compute_advantages is not GroupRelative.compute_advantages
    if not isinstance(alg, GroupRelative) or overrides or alg.whiten or alg.credit == "turn":
        raise UserError(
            f"{where}, and {type(alg).__name__} has no baseline of the policy's own episodes to compare them with: use "
            "an algorithm of group means (alg.name=grpo, rloo), with alg.credit: episode and without alg.whiten"
        )
    if cfg.rollout.env != "single_turn":
        raise UserError(
            f"{where}, and rollout.env={cfg.rollout.env} may add messages and tools to the prompt, so they would be "
            "compared with episodes of another prompt: leave rollout.env out"
        )
    level = alg.correction.level
    if level != "sequence" and not alg.anchored_on_rollout:
        is_wrong = "weighs them by 1" if level == "none" else "is biased over a sequence"
        raise UserError(
            f"{where}, and alg.correction.level={level} {is_wrong}: set it to sequence (and alg.correction.high to "
            ".inf for the exact weight)"
        )
    if cfg.weight_sync.max_kl is not None:
        raise UserError(f"{where}, which are far from the policy, and weight_sync.max_kl would count them: unset it")
    _check_scorer(cfg, given[0])


def _check_scorer(cfg: RLConfig, prompt: Prompt) -> None:
    """Raise UserError if the reward cannot score episodes that the run does not play."""
    scorer = "reward.function=environment" if cfg.reward.function == "environment" else "rollout.agent"
    if cfg.reward.function == "environment" or cfg.rollout.agent is not None:
        raise UserError(
            f"{scorer} scores episodes that were played, and the demonstrations and recorded episodes of data.train "
            f"(as of {prompt.id}) are text: use a reward function of text, or remove them"
        )
