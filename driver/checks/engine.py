"""Check a recipe against the engine's capabilities."""

from __future__ import annotations

from algs.base import Algorithm, PolicyGradient
from algs.by_source import BySource
from configs.eval_schema import EvalConfig, EvalModelConfig
from configs.rollout_schema import RolloutConfig
from configs.schema import RLConfig
from configs.trainer_schema import ModelConfig
from core.errors import UserError, quote
from core.types.allowed_tokens import AllowedTokens
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.rows.episodes import Sampling
from driver.checks.image_use import settle_eval_images
from driver.checks.invariance import check_batch_invariant
from driver.start.devices import uses_gpus
from modeling.hf_config import meta_model, needs_images, read_config
from rollouts.allowed_tokens import resolve_allowed_tokens
from rollouts.engines.base import Capabilities
from rollouts.registry import load_engine_class, resolve_engine
from rollouts.stops import Stops, check_stops


def check_engine(cfg: RLConfig | EvalConfig) -> None:
    """Raise UserError for a key that needs a capability the engine lacks."""
    name = f"rollout.engine={cfg.rollout.engine}"
    engine = load_engine_class(resolve_engine(cfg.rollout.engine))
    engine.check_options(cfg.rollout.vllm, cfg.rollout)
    can = engine.capabilities
    # Other processes receive weights by broadcasts at least.
    if cfg.backend == "ray" and not can.broadcast:
        raise UserError(f"{name} runs in the driver's process only: set backend to local, or take another engine")
    if cfg.rollout.quantization is not None:
        engine.check_quantization(cfg.rollout, dtype=cfg.model.dtype, on_gpu=uses_gpus(cfg))
    where = {"on_gpu": uses_gpus(cfg), "aborts": isinstance(cfg, RLConfig) and cfg.weight_sync.pause_mode == "abort"}
    if cfg.rollout.batch_invariant:
        check_batch_invariant(cfg, name, can)
    if cfg.rollout.is_truncated:
        engine.check_truncation(cfg.rollout, **where)
    if cfg.rollout.router_replay != "off" and isinstance(cfg, RLConfig):
        engine.check_routes(cfg.rollout, **where)
    if cfg.rollout.tensor_parallel_size != 1 and not can.tensor_parallel:
        raise UserError(f"{name} has no tensor parallelism: set rollout.tensor_parallel_size to 1")
    if cfg.rollout.stop and not can.stop_strings:
        raise UserError(
            f"rollout.stop is set, and {name} does not look for stop strings: end a completion where "
            "EngineConfig.stop_strings says, as in rollouts/engines/hf.py, and say so in its capabilities"
        )
    if isinstance(cfg, RLConfig) and cfg.rollout.top_k == 1:
        raise UserError(
            "rollout.top_k is 1, which leaves the policy no choice: every log-probability and every gradient would be "
            "0; set it to 2 or more, or to 0 for all tokens"
        )
    if isinstance(cfg, EvalConfig):
        return  # its weights never change
    if cfg.placement == "colocate" and not can.sleep:
        raise UserError(
            f"placement is colocate, and {name} does not sleep while the trainer has the device: add sleep and wake, "
            "as in rollouts/engines/hf.py, and say so in its capabilities, or set placement to separate"
        )
    transport = cfg.weight_sync.transport
    if transport == "nccl" and not can.nccl:
        raise UserError(f"{name} takes no weights over NCCL: set weight_sync.transport to auto")
    if transport in ("direct", "disk") and not can.chunks:
        raise UserError(
            f"weight_sync.transport is {transport}, and {name} takes no weights in chunks: add begin_chunks and "
            "load_chunk, as in rollouts/engines/hf.py, and say so in its capabilities, or set the transport to auto"
        )
    if cfg.weight_sync.delta:
        check_delta(cfg, name, can)
    if cfg.weight_sync.lora == "adapter" and cfg.rollout.quantization is not None:
        raise UserError(
            "weight_sync.lora=adapter and rollout.quantization together have not been tried: set weight_sync.lora to "
            "merged"
        )
    if cfg.weight_sync.lora == "adapter":
        engine.check_adapter(engine=cfg.rollout.engine, dtype=cfg.model.dtype, on_gpu=uses_gpus(cfg))


def check_delta(cfg: RLConfig, name: str, can: Capabilities) -> None:
    """Raise UserError if engine and trainer share a device, or the engine does not decode deltas."""
    if cfg.placement == "colocate":
        raise UserError(
            "weight_sync.delta is true, and placement is colocate, where both are on the same device: leave it out"
        )
    if not can.deltas:
        raise UserError(
            f"weight_sync.delta is true, and {name} does not decode deltas: pass what it receives through a "
            "DeltaDecoder, as in rollouts/engines/hf.py, and say so in its capabilities, or leave it out"
        )


def check_corrected(cfg: RLConfig, alg: Algorithm) -> None:
    """Raise UserError if a loss lacks the correction that a rounded engine needs, or has a bound that never applies."""
    of_sources = alg.algorithms if isinstance(alg, BySource) else {}
    each = {f"alg.by_source.{name}": own for name, own in of_sources.items()} or {"alg": alg}
    for key, own in each.items():
        if not isinstance(own, PolicyGradient):
            continue
        is_rounded = cfg.rollout.quantization is not None and not own.anchored_on_rollout
        if is_rounded and own.correction.level == "none":
            raise UserError(
                f"rollout.quantization is {cfg.rollout.quantization}, so the engine samples from another policy than "
                f"the trainer's, and {key}.correction.level is none: set it to token"
            )
        is_first = cfg.updates_per_step == 1 and "prox_logp" not in alg.required_columns
        if own.correction.max_drift is not None and own.correction.drift_from == "prox" and is_first:
            raise UserError(
                f"{key}.correction.drift_from is prox, and with updates_per_step: 1 that is the policy itself, which "
                "never drifts: set it to rollout, or leave it out"
            )


def check_rounded(model: ModelConfig | EvalModelConfig, rollout: RolloutConfig) -> None:
    """Raise UserError if the engine cannot round the model's layers. The model must have been checked."""
    if rollout.quantization is not None:
        engine = load_engine_class(resolve_engine(rollout.engine))
        engine.check_rounded(rollout, meta_model(model.path, trust_remote_code=model.trust_remote_code))


def check_images(cfg: RLConfig | EvalConfig) -> None:
    """Raise UserError if the engine cannot run this family of models, or its images."""
    path, trusts = cfg.model.path, cfg.model.trust_remote_code
    # a recipe's value is settled when it is read
    images = cfg.model.images if isinstance(cfg, RLConfig) else settle_eval_images(cfg)[0]
    config = read_config(path, trust_remote_code=trusts)
    engine = load_engine_class(resolve_engine(cfg.rollout.engine))
    engine.check_family(config.model_type, path=path, dtype=cfg.model.dtype)
    if not needs_images(path, trust_remote_code=trusts, images=images):
        return
    if not engine.capabilities.images:
        raise UserError(
            f"model.path={quote(path)} is a vision-language model, and rollout.engine={cfg.rollout.engine} does not "
            "support images: set rollout.engine to vllm or hf"
        )
    engine.check_images(config, path=path)


def check_sampling(cfg: RLConfig | EvalConfig, tokenizer: ChatTokenizer) -> AllowedTokens:
    """Return the allowed tokens. Raises UserError for a stop or an allowed token that can never occur."""
    rollout = cfg.rollout
    check_stops(tokenizer, rollout.stop, rollout.stop_token_ids, tokenizer.vocabulary)
    # Stop tokens are always allowed: without one, no reply could end before the budget.
    stops = Stops(tokenizer, rollout.stop, rollout.stop_token_ids)
    allowed_tokens = resolve_allowed_tokens(tokenizer, rollout.allowed_tokens, stops.token_ids)
    written = tokenizer.written_ids if rollout.allowed_tokens else frozenset[int]()
    if unseen := [text for text in rollout.allowed_tokens if not written.issuperset(tokenizer.encode(text))]:
        raise UserError(
            f"rollout.allowed_tokens names {quote(unseen[0])}, a special token, which rewards and environments do not "
            "see: set rollout.skip_special_tokens to false"
        )
    if (
        not allowed_tokens.is_everything
        and not load_engine_class(resolve_engine(rollout.engine)).capabilities.allowed_tokens
    ):
        why = "rollout.allowed_tokens is set" if rollout.allowed_tokens else "the model reads images"
        raise UserError(
            f"{why}, and rollout.engine={rollout.engine} samples from all tokens: restrict it to "
            "EngineConfig.allowed_tokens, as in rollouts/engines/hf.py, and say so in its capabilities"
        )
    return allowed_tokens


def make_sampling(cfg: RLConfig, allowed: AllowedTokens) -> Sampling:
    """Return how the policy samples, for the rows whose episodes are recorded already."""
    return Sampling(
        max_new_tokens=cfg.rollout.max_new_tokens,
        temperature=cfg.rollout.temperature,
        allowed=allowed,
        allowed_texts=tuple(cfg.rollout.allowed_tokens),
        is_truncated=cfg.rollout.is_truncated,
    )
