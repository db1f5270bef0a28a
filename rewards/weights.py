"""Reward functions and weights of a recipe: from keys to functions, and from parts to one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from configs.judge_schema import JudgeConfig
from configs.rollout_schema import RewardConfig, RewardWeights, name_function
from core.errors import UserError
from rewards import RewardRun, RunJudge, resolve_reward
from rewards.kinds import find_kind
from rewards.scored import MAIN_PART
from rewards.several import NamedReward, RewardPlan


def plan_rewards(reward: RewardConfig, *, engines: int = 1, judge: JudgeConfig | None = None) -> RewardPlan:
    """Resolve the functions of a recipe. Raises UserError for an unknown function. engines: the most of the run."""
    groups = {source: tuple(name_function(n) for n in weights) for source, weights in reward.by_source.items()}
    if reward.function is not None:
        functions, otherwise = [name_reward("", reward.function, reward.settings, key="reward.function")], ("",)
    else:
        functions, otherwise = [], tuple(name_function(n) for n in reward.functions)
    for given in reward.function_names:
        key = "reward.functions" if given in reward.functions else "reward.by_source"
        name = name_function(given)
        functions.append(name_reward(name, given, reward.settings_of(name), key=key))
    run = RewardRun(engines=engines, judge=None if judge is None else describe_judge(judge))
    return RewardPlan(functions=tuple(functions), by_source=groups, otherwise=otherwise, run=run)


def describe_judge(judge: JudgeConfig) -> RunJudge:
    """Return the judge of the run for rewards, still without an address."""
    return RunJudge(
        model=judge.model,
        is_frozen=not judge.is_policy,
        is_greedy=not judge.is_policy and not judge.temperature,
        words=tuple(judge.allowed_tokens),
    )


def name_reward(name: str, name_or_path: str, settings: dict[str, Any], *, key: str = "reward") -> NamedReward:
    """Find a reward function, and read its kind."""
    spec = resolve_reward(name_or_path, key=key)
    return NamedReward(name=name, spec=spec, settings=settings, kind=find_kind(spec))


def weigh_parts(weights: Mapping[str, float], parts: Mapping[str, float]) -> float:
    """Return a sample's reward: the weighted sum of its parts. weights: of `find_weights`."""
    return sum(weight * parts[name] for name, weight in weights.items())


def find_weights(reward: RewardConfig, parts: Mapping[str, float], source: str) -> dict[str, float]:
    """Return the weight of each part that counts. Raises UserError for a missing part."""
    chosen = reward.by_source.get(source, reward.functions)
    found: dict[str, float] = {}
    for name, of_function in chosen.items():
        found |= _find_function_weights(name_function(name), of_function, parts)
    weights = _list_weights(reward, source)
    if missing := list_missing(reward, parts, source):
        raise UserError(
            f"reward.weights names {missing[0]!r}, but the reward returns only {', '.join(sorted(parts))}: "
            "correct the name"
        )
    # parts with a weight by name alone: those of a single function, and of the environment
    return found | {**weights}


def list_missing(reward: RewardConfig, parts: Mapping[str, float], source: str) -> list[str]:
    """List the parts with a weight by name that are not there."""
    return [name for name in _list_weights(reward, source) if name not in parts]


def weigh_turns(weights: Mapping[str, float], turns: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Return the weighted scores of each turn, or () without scores per turn. weights: of `find_weights`."""
    # parts without a weight are metrics only
    return tuple(sum(weights.get(name, 0.0) * value for name, value in parts.items()) for parts in turns)


def _list_weights(reward: RewardConfig, source: str) -> Mapping[str, float]:
    """Return the weights of parts by name, for the rows of a source."""
    # such rows have other functions, and `reward.weights` is about the parts of `reward.function`
    return {} if reward.function is not None and source in reward.by_source else reward.weights


def _find_function_weights(name: str, weights: RewardWeights, parts: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of a function's parts, under their names in the log."""
    # the prefix that merge_results has added
    own = {part.removeprefix(f"{name}."): value for part, value in parts.items() if part.startswith(f"{name}.")}
    if isinstance(weights, dict):
        if missing := [part for part in weights if part not in own]:
            raise UserError(
                f"the weights of the reward {name} name {missing[0]!r}, but it returns only {', '.join(sorted(own))}: "
                "correct the name"
            )
        return {f"{name}.{part}": weight for part, weight in weights.items()}
    if MAIN_PART not in own and len(own) != 1:
        raise UserError(
            f"the reward {name} has one weight and returns {', '.join(sorted(own))}: give every part that counts a "
            f"weight of its own ({name}: {{{min(own)}: {weights:g}}})"
        )
    return {f"{name}.{MAIN_PART if MAIN_PART in own else next(iter(own))}": weights}
