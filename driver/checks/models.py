"""Checks of the models that a run loads, before anything starts."""

from __future__ import annotations

from typing import Any

from torch import nn

from algs.base import Algorithm
from algs.measures import list_read, plan_measures
from algs.teachers import check_teachers, list_paths
from configs.eval_schema import EvalConfig
from configs.schema import RLConfig, RunConfig
from configs.trainer_schema import ModelConfig
from core.errors import UserError
from data_feeds.chat.tokenizer import ChatTokenizer
from modeling.attention import refuse_sequence_parallel
from modeling.experts import list_blocks
from modeling.freeze import check_scales, find_frozen
from modeling.hf_config import check_model_folder, max_positions, meta_model, read_config
from modeling.layout_forecast import build_small
from modeling.load import check_weights
from modeling.lora import check_lora
from modeling.merge import check_base, is_adapter
from modeling.nf4 import check_quantization
from modeling.pretrained import runs_own_code
from modeling.routes import RouterHook, check_mixture
from rollouts.registry import load_engine_class, resolve_engine
from trainers.compiled import check_compile
from trainers.optimizer_probe import check_optimizer


def check_policy(
    model: ModelConfig, tokenizer: ChatTokenizer, opponent: str | None = None, *, longest: int | None = None
) -> None:
    """Raise UserError if model files do not match the config, or token ids lack an embedding.

    opponent: folder of a frozen model that samples from the same tokens, or of an adapter of the policy's model.
    longest: largest number of tokens that it reads.
    """
    if opponent is not None and is_adapter(opponent):
        check_base(opponent, model.path, key="rollout.opponent", trust_remote_code=model.trust_remote_code)
    elif opponent is not None:
        use = "play with the same tokens"
        check_frozen(opponent, tokenizer, model, key="rollout.opponent", use=use, longest=longest)
    check_weights(model.path, trust_remote_code=model.trust_remote_code)
    _check_vocabulary(model.path, tokenizer, key="model.path", trusts=model.trust_remote_code)


def check_room(cfg: RLConfig | EvalConfig) -> None:
    """Raise UserError if prompt and completion may exceed the model's maximum positions."""
    positions = max_positions(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    if positions is not None and cfg.longest_sample > positions:
        raise UserError(
            f"one sample may reach {cfg.longest_sample} tokens (data.max_prompt_tokens + rollout.max_new_tokens), and "
            f"model.path={cfg.model.path} has {positions} positions: lower one of the two"
        )


def check_trainer(cfg: RunConfig, alg: Algorithm) -> None:
    """Raise UserError for an adapter, frozen parts, ranks or an optimizer with which the models cannot be trained."""
    check_lora(cfg.model, cfg.trainer)
    if cfg.model.quantization is not None:
        check_quantization(cfg.model)
    check_freeze(cfg, alg)
    check_sequence_parallel(cfg, alg)
    replays_routes = False
    if isinstance(cfg, RLConfig) and cfg.rollout.router_replay != "off":
        check_router_replay(cfg)
        replays_routes = True
    if cfg.trainer.compile:
        check_compile(cfg.trainer, cfg.model, is_sharded=cfg.backend == "ray", replays_routes=replays_routes)
    check_optimizer(
        cfg.trainer,
        is_sharded=cfg.backend == "ray",
        has_adapter=cfg.model.lora is not None,
        is_cleared=any(teacher.with_optimizer for teacher in alg.teachers.values()),
    )


def check_sequence_parallel(cfg: RunConfig, alg: Algorithm) -> None:
    """Raise UserError if some model, trained or frozen, does not support sequence parallelism."""
    size, trusts = cfg.trainer.sequence_parallel, cfg.model.trust_remote_code
    if size == 1:
        return
    for key, path in (("model.path", cfg.model.path), *(("alg", path) for path in list_paths(alg.teachers))):
        config = read_config(path, key=key, trust_remote_code=trusts)
        if why := refuse_sequence_parallel(config, size):
            raise UserError(f"trainer.sequence_parallel={size}, and {key}={path}: {why}")


def check_freeze(cfg: RunConfig, alg: Algorithm) -> None:
    """Raise UserError if trainer.freeze or lr_scales names unknown parameters, or freeze all.

    A reward model is checked at loading, and so are an adapter's names.
    """
    freeze, scales, images = cfg.trainer.freeze, cfg.trainer.lr_scales, cfg.model.images
    if (freeze or scales) and alg.model_kind != "reward":
        model = meta_model(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
        frozen = find_frozen(model, freeze, images=images, path=cfg.model.path)
        if cfg.model.lora is None:
            check_scales(model, scales, frozen, images=images, path=cfg.model.path)


def check_router_replay(cfg: RLConfig) -> None:
    """Raise UserError if rollout.router_replay cannot work with the model's blocks of experts."""
    model, key = cfg.model, f"rollout.router_replay={cfg.rollout.router_replay}"
    empty = meta_model(model.path, trust_remote_code=model.trust_remote_code)
    check_mixture(list_blocks(empty), f"model.path={model.path}", key=key)
    # without a small model, the model itself is checked when it is loaded
    small = build_small(model.path, attention=model.attention, trust_remote_code=model.trust_remote_code)
    if isinstance(small, nn.Module) and list_blocks(small):
        RouterHook(small, small, device="cpu", key=key)


def check_teacher_models(
    alg: Algorithm, tokenizer: ChatTokenizer, model: ModelConfig, *, longest: int | None = None
) -> None:
    """Raise UserError for a teacher that cannot be loaded, or whose vocabulary differs from the policy's.

    Columns and measures of models must have names that exist. longest: largest number of tokens of a sample; None if
    the rows are not read yet.
    """
    plan_measures(alg)
    check_teachers(alg.teachers, list_read(alg))
    # a teacher with a prompt of its own grades no sample that it cannot read whole
    whole = {teacher.path for teacher in alg.teachers.values() if teacher.prompt is None}
    for frozen in list_paths(alg.teachers):
        room = longest if frozen in whole else None
        use = "compute log-probabilities of the same tokens"
        check_frozen(frozen, tokenizer, model, key="alg", use=use, longest=room)


def check_frozen(
    path: str, tokenizer: ChatTokenizer, model: ModelConfig, *, key: str, use: str, longest: int | None
) -> None:
    """Raise UserError for a frozen model that cannot be loaded, or whose vocabulary differs from the policy's.

    use: a verb phrase, the use of the model with the policy's tokens. longest: largest number of tokens that it reads.
    """
    trusts = model.trust_remote_code
    check_model_folder(path, key=key, trust_remote_code=trusts)
    positions = max_positions(path, trust_remote_code=trusts)
    if longest is not None and positions is not None and longest > positions:
        raise UserError(
            f"a sample may reach {longest} tokens, and {key} names the model {path}, which has {positions} positions: "
            "lower data.max_tokens (supervised) or rollout.max_new_tokens, or take another model"
        )
    # plain: its chat template is never used, and may be missing.
    own = ChatTokenizer(path, "plain", key=key, trust_remote_code=trusts)
    if tokenizer.hf.get_vocab() != own.hf.get_vocab():
        raise UserError(
            f"{key} names the model {path}, whose vocabulary is not that of model.path={model.path}, so it cannot "
            f"{use}: take one with the same tokenizer"
        )
    check_weights(path, key=key, trust_remote_code=trusts)
    _check_vocabulary(path, tokenizer, key=key, trusts=trusts)


def check_user_code(cfg: RunConfig) -> None:
    """Raise UserError if trainer or engine cannot run the policy's own code (model.trust_remote_code)."""
    if not cfg.model.trust_remote_code:
        return
    model: Any = meta_model(cfg.model.path, trust_remote_code=True)
    if not runs_own_code(model):
        return
    if model.get_output_embeddings() is None:
        raise UserError(
            f"model.path={cfg.model.path} comes with code whose get_output_embeddings() returns nothing, and the head "
            "must be found: let it return the layer that makes the logits"
        )
    if isinstance(cfg, RLConfig):
        load_engine_class(resolve_engine(cfg.rollout.engine)).check_user_code(model, path=cfg.model.path)


def _check_vocabulary(path: str, tokenizer: ChatTokenizer, *, key: str, trusts: bool) -> None:
    config = read_config(path, key=key, trust_remote_code=trusts).get_text_config()
    rows = getattr(config, "vocab_size", None)
    if rows is None:
        raise UserError(f"{key}={path}: its config has no vocab_size, the number of its embeddings: add it")
    # An id beyond the embeddings would be an index error, on a GPU a device assertion that names nothing.
    largest = max(tokenizer.hf.get_vocab().values())
    if largest >= rows:
        raise UserError(
            f"{key}={path}: its tokenizer has ids up to {largest}, and the model has {rows} embeddings: resize them "
            "(model.resize_token_embeddings), or use the tokenizer that the model was trained with"
        )
