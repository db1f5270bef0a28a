"""Factory of the policy's frozen opponent in games (`rollout.opponent`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from configs.eval_schema import EvalConfig
from configs.rollout_schema import RolloutConfig
from configs.schema import RLConfig
from configs.trainer_schema import ModelConfig
from core.errors import UserError
from core.loading import FileSpec
from modeling.merge import is_adapter
from rollouts.engines.base import Engine, EngineConfig
from rollouts.opponents import OpponentSlot, ServedOpponent
from rollouts.registry import load_env_class


def check_game(cfg: RLConfig | EvalConfig, env_spec: FileSpec) -> None:
    """Raise UserError for an opponent that cannot play, or if the environment's class declares less than two sides."""
    rollout = cfg.rollout
    if rollout.opponent is None:
        return
    if rollout.opponent_every is not None:
        if isinstance(cfg, EvalConfig):
            raise UserError("rollout.opponent is policy, and an evaluation trains none: name the folder of a model")
        if cfg.model.quantization is not None:
            raise UserError(
                f"rollout.opponent is policy, and its engine would not round weights as model.quantization="
                f"{cfg.model.quantization} does: leave one of the two out"
            )
        if cfg.data.eval is not None:
            # right after a snapshot the policy would play itself, and win half of the games however good it is
            raise UserError(
                "rollout.opponent is policy, and data.eval would be played against another opponent each time: leave "
                "data.eval out, and compare checkpoints by main_eval.py with the folder of a model as rollout.opponent"
            )
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
) -> OpponentSlot | None:
    """Return the opponent of an engine's games, or None.

    policy: settings of the policy's engine. build: makes an engine hf.
    """
    if rollout.opponent is None:
        return None
    if rollout.is_opponent_served:
        server = ServedOpponent(
            rollout.opponent,
            temperature=rollout.temperature,
            timeout_s=rollout.timeout_s,
            engines=rollout.most_engines,
        )
        return OpponentSlot(server)

    def load(folder: str) -> Engine:
        return build(configure_opponent(folder, model, policy))

    if rollout.opponent_every is not None:
        return OpponentSlot(load(model.path), version=0, load=load)
    return OpponentSlot(load(rollout.opponent))


def configure_opponent(folder: str, model: ModelConfig, policy: EngineConfig) -> EngineConfig:
    """Return the settings of an engine hf with a folder's weights, which samples as the policy's engine does."""
    adapter = folder if is_adapter(folder) else None
    return replace(
        policy,
        # not the policy engine's folder: an evaluation merges an adapter into that
        model_path=folder if adapter is None else model.path,
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
