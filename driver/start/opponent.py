"""Factory of the policy's frozen opponent in games (`rollout.opponent`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from configs.rollout_schema import RolloutConfig
from configs.trainer_schema import ModelConfig
from core.errors import UserError
from core.loading import FileSpec
from modeling.merge import is_adapter
from rollouts.engines.base import Engine, EngineConfig
from rollouts.opponents import ServedOpponent
from rollouts.registry import load_env_class


def check_game(rollout: RolloutConfig, env_spec: FileSpec) -> None:
    """Raise UserError if there is an opponent, and the environment's class declares less than two sides."""
    if rollout.opponent is None:
        return
    env = load_env_class(env_spec)
    sides: object = env.sides
    if isinstance(sides, int) and sides < 2:  # a property: they are known once an episode begins
        raise UserError(
            f"rollout.opponent needs a game of two sides or more, and {env.__name__}.sides is {sides}: set rollout.env "
            "to a game, declare its sides in the class, or leave rollout.opponent out"
        )


def name_opponent(rollout: RolloutConfig) -> dict[str, str]:
    """Return the path of the opponent's model by key, for the comparison of machines."""
    return {} if rollout.opponent_folder is None else {"rollout.opponent": rollout.opponent_folder}


def build_opponent(
    rollout: RolloutConfig, model: ModelConfig, policy: EngineConfig, build: Callable[[EngineConfig], Engine]
) -> Engine | ServedOpponent | None:
    """Return the opponent of an engine's games, or None.

    policy: settings of the policy's engine. build: makes an engine hf.
    """
    if rollout.opponent is None:
        return None
    if rollout.is_opponent_served:
        return ServedOpponent(
            rollout.opponent,
            temperature=rollout.temperature,
            timeout_s=rollout.timeout_s,
            engines=rollout.most_engines,
        )
    return build(configure_opponent(rollout, model, policy))


def configure_opponent(rollout: RolloutConfig, model: ModelConfig, policy: EngineConfig) -> EngineConfig:
    """Return the settings of an engine hf with the opponent's weights, which samples as the policy's engine does."""
    assert rollout.opponent is not None
    adapter = rollout.opponent if is_adapter(rollout.opponent) else None
    return replace(
        policy,
        # not the policy engine's folder: an evaluation merges an adapter into that
        model_path=rollout.opponent if adapter is None else model.path,
        adapter=adapter,
        starts_empty=False,
        lora=None,
        quantization=None,
        options={},
        routes=False,
        tensor_parallel_size=1,
        over_nccl=False,
        over_ipc=False,
    )
