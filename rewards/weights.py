"""Reward functions and weights of a recipe: from keys to functions, and from parts to one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from configs.rollout_schema import RewardConfig, RewardWeights, name_function
from core.errors import UserError
from rewards import resolve_reward
from rewards.several import NamedReward, RewardPlan

MAIN_PART = "correct"
"""Part with the weight if a function returns several parts and has a single weight."""


def plan_rewards(reward: RewardConfig) -> RewardPlan:
    """Resolve the functions of a recipe. Raises UserError for an unknown function."""
    groups = {source: tuple(name_function(n) for n in weights) for source, weights in reward.by_source.items()}
    if reward.function is not None:
        only = NamedReward(
            name="", spec=resolve_reward(reward.function, key="reward.function"), settings=reward.settings
        )
        functions, otherwise = [only], ("",)
    else:
        functions, otherwise = [], tuple(name_function(n) for n in reward.functions)
    for given in reward.function_names:
        key = "reward.functions" if given in reward.functions else "reward.by_source"
        name = name_function(given)
        settings = reward.settings_of(name)
        functions.append(NamedReward(name=name, spec=resolve_reward(given, key=key), settings=settings))
    return RewardPlan(functions=tuple(functions), by_source=groups, otherwise=otherwise)


def weigh_parts(reward: RewardConfig, parts: Mapping[str, float], source: str) -> float:
    """Return a sample's reward: the weighted sum of its parts. Raises UserError for a missing part."""
    chosen = reward.by_source.get(source, reward.functions)
    total = sum(_weigh_function(name_function(name), weights, parts) for name, weights in chosen.items())
    weights = _list_weights(reward, source)
    if missing := [name for name in weights if name not in parts]:
        raise UserError(
            f"reward.weights names {missing[0]!r}, but the reward returns only {', '.join(sorted(parts))}: "
            "correct the name"
        )
    # parts with a weight by name alone: those of a single function, and of the environment
    return total + sum(weight * parts[name] for name, weight in weights.items())


def weigh_turns(reward: RewardConfig, turns: Sequence[Mapping[str, float]], source: str) -> tuple[float, ...]:
    """Return the weighted scores of each turn, or () if the environment has no scores per turn."""
    weights = _list_weights(reward, source)
    # parts without a weight are metrics only
    return tuple(sum(weights.get(name, 0.0) * value for name, value in parts.items()) for parts in turns)


def _list_weights(reward: RewardConfig, source: str) -> Mapping[str, float]:
    """Return the weights of parts by name, for the rows of a source."""
    # such rows have other functions, and `reward.weights` is about the parts of `reward.function`
    return {} if reward.function is not None and source in reward.by_source else reward.weights


def _weigh_function(name: str, weights: RewardWeights, parts: Mapping[str, float]) -> float:
    # the prefix that RewardPlan.load has added
    own = {part.removeprefix(f"{name}."): value for part, value in parts.items() if part.startswith(f"{name}.")}
    if isinstance(weights, dict):
        if missing := [part for part in weights if part not in own]:
            raise UserError(
                f"the weights of the reward {name} name {missing[0]!r}, but it returns only {', '.join(sorted(own))}: "
                "correct the name"
            )
        return sum(weight * own[part] for part, weight in weights.items())
    if MAIN_PART not in own and len(own) != 1:
        raise UserError(
            f"the reward {name} has one weight and returns {', '.join(sorted(own))}: give every part that counts a "
            f"weight of its own ({name}: {{{min(own)}: {weights:g}}})"
        )
    return weights * own.get(MAIN_PART, next(iter(own.values())))
