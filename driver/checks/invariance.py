"""Check that all parts of a recipe with `rollout.batch_invariant` have a fixed order."""

from __future__ import annotations

from configs.eval_schema import EvalConfig
from configs.schema import RLConfig
from core.errors import UserError
from driver.start.devices import uses_gpus
from modeling.hf_config import needs_images
from rollouts.engines.base import Capabilities


def check_batch_invariant(cfg: RLConfig | EvalConfig, name: str, can: Capabilities) -> None:
    """Raise UserError for a recipe in which engine and trainer would not compute the same bits. name: the engine's."""
    if isinstance(cfg, EvalConfig):
        raise UserError("rollout.batch_invariant is a claim about a trainer, and an evaluation has none: leave it out")
    for refused, why in _list_refused(cfg, name, can):
        if refused:
            raise UserError(f"rollout.batch_invariant is true, and {why}, or leave batch_invariant out")


def _list_refused(cfg: RLConfig, name: str, can: Capabilities) -> list[tuple[bool, str]]:
    """Return conditions, each with the reason and the fix: all parts whose sums have another order on one side."""
    model, rollout = cfg.model, cfg.rollout
    reads_images = needs_images(model.path, trust_remote_code=model.trust_remote_code, images=model.images)
    return [
        (not can.batch_invariant, f"{name} computes in another order than the trainer: set rollout.engine to hf"),
        (cfg.backend != "local", "the distributed trainers have no fixed order: set backend to local"),
        (uses_gpus(cfg), 'the fixed order is that of a CPU: hide the GPUs with CUDA_VISIBLE_DEVICES=""'),
        (
            cfg.max_staleness > 0,
            f"with max_staleness={cfg.max_staleness} an older policy draws tokens, which cannot be compared: set it "
            "to 0",
        ),
        (
            model.lora is not None,
            "engines have an adapter merged into the weights, which the trainer computes beside them: leave "
            "model.lora out",
        ),
        (rollout.quantization is not None, "rollout.quantization rounds the engine's layers: leave it out"),
        (
            rollout.is_truncated,
            "the trainer adds up the kept set where the engine adds up all tokens: leave rollout.top_p, top_k and "
            "min_p out",
        ),
        (rollout.router_replay != "off", "a mixture of experts has no fixed order: leave rollout.router_replay out"),
        (cfg.trainer.compile, "compiled blocks have no fixed order: leave trainer.compile out"),
        (model.attention != "auto", "it has an attention of its own: set model.attention to auto"),
        (reads_images, "images have no fixed order: set model.images to off"),
    ]
