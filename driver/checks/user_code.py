"""Checks of a model that ships its own code (model.trust_remote_code), before anything starts."""

from __future__ import annotations

from typing import Any

from configs.schema import RLConfig, RunConfig
from core.errors import UserError
from modeling.hf_config import meta_model
from modeling.pretrained import runs_own_code
from rollouts.registry import load_engine_class, resolve_engine


def check_user_code(cfg: RunConfig) -> None:
    """Raise UserError if trainer or engine cannot run the policy's own code, if there is any."""
    if not cfg.model.trust_remote_code:
        return
    model: Any = meta_model(cfg.model.path, trust_remote_code=True)
    if not runs_own_code(model):
        return
    if cfg.trainer.layout == "packed":
        raise UserError(
            "trainer.layout=packed needs attention that separates sequences, and no test covers the code that comes "
            f"with model.path={cfg.model.path}: set it to padded or auto"
        )
    if model.get_output_embeddings() is None:
        raise UserError(
            f"model.path={cfg.model.path} comes with code whose get_output_embeddings() returns nothing, and the head "
            "must be found: let it return the layer that makes the logits"
        )
    if isinstance(cfg, RLConfig):
        load_engine_class(resolve_engine(cfg.rollout.engine)).check_user_code(model, path=cfg.model.path)
