"""Refuse keys that a recipe sets but nothing reads, before the start.

RULES state when schema keys have no effect, TERM_RULES when keys of policy-gradient terms have none. Other
hyper-parameters belong to the author of the algorithm: `python -m algs.check` fails if one is never read.

Keys for the place and size of a run (engines, memory, deadlines, transports) have no rule: recipes keep them when they
run on another machine or under `backend: local`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from algs.base import Algorithm, PolicyGradient
from configs.data_schema import SourceConfig
from configs.schema import RLConfig, RunConfig, SLConfig
from core.errors import UserError
from driver.start.devices import shares_devices

ONE_TABLE = (".parquet", ".jsonl", ".csv", ".arrow", ".feather", ".jsonl.gz", ".csv.gz")
"""Ends of the names of files that have no splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Keys, with the condition under which they have no effect."""

    keys: tuple[str, ...]
    is_unused: Callable[[Any], bool]
    """Whether the keys have no effect under this configuration (for TERM_RULES: under this algorithm)."""
    why: str


def _is_text_model(cfg: RunConfig) -> bool:
    """Tell whether the model is known to have no vision part. It may also not exist yet."""
    from modeling.hf_config import ModelUnreadable, read_config, vision_family

    try:
        config = read_config(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    # A recipe may name a model that is created later; then the key may be of use.
    except ModelUnreadable:
        return False
    return vision_family(config) is None


RULES = (
    Rule(keys=("max_resumes",), is_unused=lambda cfg: cfg.on_failure == "stop", why="on_failure is stop"),
    Rule(keys=("ship_code",), is_unused=lambda cfg: cfg.ray_address is None, why="ray_address is unset"),
    Rule(keys=("checkpoint.keep",), is_unused=lambda cfg: not cfg.checkpoint.every, why="checkpoint.every is 0"),
    Rule(
        keys=("data.eval_rows",),
        is_unused=lambda cfg: cfg.data.eval is None or cfg.data.held_out_rows > 0,
        why="data.eval is unset, or says with from_train how many rows it has",
    ),
    Rule(
        keys=("trainer.betas", "trainer.eps"),
        is_unused=lambda cfg: cfg.trainer.optimizer not in ("adamw", "muon"),
        why="trainer.optimizer is neither adamw nor muon",
    ),
    Rule(
        keys=("trainer.weight_decay",),
        is_unused=lambda cfg: cfg.trainer.is_optimizer_named,
        why="an optimizer named by its path has trainer.optimizer_settings for it",
    ),
    Rule(
        keys=("trainer.optimizer_settings",),
        is_unused=lambda cfg: cfg.trainer.optimizer in ("adamw", "sgd"),
        why="trainer.optimizer is adamw or sgd, which have keys of their own",
    ),
    Rule(
        keys=("trainer.zero_stage", "trainer.deepspeed"),
        is_unused=lambda cfg: cfg.trainer.strategy == "fsdp2",
        why="trainer.strategy is fsdp2",
    ),
    Rule(
        keys=("trainer.offload",),
        is_unused=lambda cfg: cfg.trainer.strategy == "deepspeed",
        why="trainer.strategy is deepspeed, which has zero_optimization in trainer.deepspeed for it",
    ),
    Rule(
        keys=("trainer.share_prefixes",),
        is_unused=lambda cfg: cfg.trainer.layout == "padded",
        why="trainer.layout is padded, and only packed rows share",
    ),
    Rule(
        keys=("data.max_image_pixels", "model.lora.vision"),
        is_unused=lambda cfg: cfg.model.images == "off" or _is_text_model(cfg),
        why="model.path is a text model, or used as one",
    ),
    Rule(keys=("model.images",), is_unused=_is_text_model, why="model.path is a text model, or used as one anyway"),
    Rule(
        keys=("rollout.max_turns",),
        is_unused=lambda cfg: (
            isinstance(cfg, RLConfig) and cfg.rollout.env == "single_turn" and cfg.rollout.agent is None
        ),
        why="rollout.env is single_turn, which ends after one reply",
    ),
    Rule(
        keys=("weight_sync.whole_every",),
        is_unused=lambda cfg: isinstance(cfg, RLConfig) and not cfg.weight_sync.delta,
        why="weight_sync.delta is false",
    ),
    Rule(
        keys=("rollout.sleep_mode",),
        is_unused=lambda cfg: isinstance(cfg, RLConfig) and cfg.placement == "separate",
        why="placement is separate, and the engines never sleep",
    ),
    Rule(
        keys=("rollout.restarts",),
        is_unused=lambda cfg: (
            isinstance(cfg, RLConfig) and shares_devices(cfg) and (cfg.judge is None or cfg.judge.is_policy)
        ),
        why="placement is colocate, where the death of an engine ends the run (on_failure: resume goes on by itself)",
    ),
    Rule(
        keys=("capture.weights",),
        is_unused=lambda cfg: not cfg.capture.is_on,
        why="neither capture.every nor on is set",
    ),
    Rule(keys=("capture.most",), is_unused=lambda cfg: not cfg.capture.on, why="capture.on is empty"),
    Rule(keys=("capture.kl_above",), is_unused=lambda cfg: "kl" not in cfg.capture.on, why="capture.on has no kl"),
    Rule(
        keys=("capture.grad_norm_times",),
        is_unused=lambda cfg: "grad_norm" not in cfg.capture.on,
        why="capture.on has no grad_norm",
    ),
    Rule(
        keys=("profile.trace", "profile.memory"),
        is_unused=lambda cfg: not cfg.profile.steps,
        why="profile.steps is empty",
    ),
    Rule(
        keys=("eval_samples", "eval_pass_reward"),
        is_unused=lambda cfg: cfg.data.eval is None,
        why="data.eval is unset",
    ),
    Rule(
        keys=("alg.credit",),
        is_unused=lambda cfg: (
            isinstance(cfg, RLConfig) and cfg.alg.get("credit") == "turn" and cfg.rollout.max_turns == 1
        ),
        why="rollout.max_turns is 1, and the one turn is the episode",
    ),
)
"""Rules for the schema. A test has a recipe for each key."""
TERM_RULES = (
    Rule(
        keys=("alg.kl.place", "alg.kl.estimator"),
        is_unused=lambda alg: alg.kl.coef == 0,
        why="alg.kl.coef is 0, and there is no penalty",
    ),
    Rule(
        keys=("alg.schedules.kl.coef",),
        is_unused=lambda alg: alg.kl.target is not None,
        why="alg.kl.target moves the coefficient",
    ),
    Rule(keys=("alg.kl.horizon",), is_unused=lambda alg: alg.kl.target is None, why="alg.kl.target is unset"),
    Rule(
        keys=("alg.adaptive_entropy.delta", "alg.adaptive_entropy.high"),
        is_unused=lambda alg: alg.adaptive_entropy.target is None,
        why="alg.adaptive_entropy.target is unset",
    ),
    Rule(
        keys=("alg.entropy_coef", "alg.schedules.entropy_coef"),
        is_unused=lambda alg: alg.adaptive_entropy.target is not None,
        why="alg.adaptive_entropy.target is set, and the weight begins at 0",
    ),
    Rule(
        keys=("alg.overlong.max_tokens", "alg.overlong.buffer", "alg.overlong.coef"),
        is_unused=lambda alg: alg.overlong.mode != "penalty",
        why="alg.overlong.mode is not penalty",
    ),
    Rule(
        keys=("alg.correction.mode", "alg.correction.high"),
        is_unused=lambda alg: alg.correction.level == "none",
        why="alg.correction.level is none",
    ),
    Rule(
        keys=("alg.correction.drift_from",),
        is_unused=lambda alg: alg.correction.max_drift is None,
        why="alg.correction.max_drift is unset",
    ),
    Rule(
        keys=("alg.correction.low",),
        is_unused=lambda alg: alg.correction.level == "none" or alg.correction.mode == "truncate",
        why="alg.correction.mode is truncate, or its level none, and no weight has a lower bound",
    ),
    Rule(
        keys=("alg.correction.token_high",),
        is_unused=lambda alg: alg.correction.level != "geometric" or alg.correction.mode != "mask",
        why="only alg.correction.level: geometric with mode: mask caps single tokens",
    ),
)
"""Rules for the terms in algs/terms.py. A test has a recipe for each key."""


def check_keys(cfg: RunConfig, alg: Algorithm, given: frozenset[str]) -> None:
    """Raise UserError for a key of the recipe that has no effect.

    given: dotted keys that the recipe sets.
    """
    # Only policy gradients have these terms. A key of such a name elsewhere has a meaning of its own.
    of_terms = TERM_RULES if isinstance(alg, PolicyGradient) else ()
    for rule, about in (*((rule, cfg) for rule in RULES), *((rule, alg) for rule in of_terms)):
        for key in rule.keys:
            if is_given(key, given) and rule.is_unused(about):
                raise UserError(f"{key} is set and would not be read, because {rule.why}: leave it out")
    for name in alg.schedules:
        if is_given(f"alg.{name}", given):
            raise UserError(
                f"alg.{name} is set and would not be read, because alg.schedules has it: leave one of them out"
            )
    if isinstance(cfg, SLConfig) and alg.rows != "conversations" and is_given("data.train_on", given):
        raise UserError(
            "data.train_on is set and would not be read: this algorithm trains on the last reply of each row, whatever "
            "data.train_on is: leave it out"
        )
    if cfg.model.lora is not None and alg.value_lr is None and is_given("trainer.freeze", given):
        raise UserError(
            "trainer.freeze is set and would not be read, because with model.lora all weights are frozen anyway, and "
            "model.lora.targets and model.lora.vision choose the layers with an adapter: leave it out"
        )
    if is_given("eval_reward.judge_budget", given):
        raise UserError(
            "eval_reward.judge_budget is set and would not be read, because reward.judge_budget counts the judges of "
            "both rewards: leave it out"
        )
    _check_sources(cfg)


def _check_sources(cfg: RunConfig) -> None:
    """Raise UserError for a source's key without effect, given its file format or the number of sources."""
    both: tuple[tuple[str, Any], ...] = (("data.train", cfg.data.train), ("data.eval", cfg.data.eval))
    for key, value in both:
        sources = value if isinstance(value, list) else [value]
        for source in sources:
            if not isinstance(source, SourceConfig):
                continue
            # Of a source, pydantic knows which fields were written and which have their defaults.
            own = source.model_fields_set
            if "split" in own and source.path.endswith(ONE_TABLE):
                raise UserError(f"{key}: split is set and would not be read, because {source.path} is one file")
            if "ratio" in own and len(sources) == 1:
                raise UserError(f"{key}: ratio is set and would not be read, because there is no other source")
            if "lazy" in own and key == "data.eval":
                raise UserError(f"{key}: lazy is set and would not be read, because every row is measured")
            if "replacement" in own and key == "data.eval":
                raise UserError(f"{key}: replacement is set and would not be read, because every row is measured once")


def is_given(key: str, given: frozenset[str]) -> bool:
    """Tell whether the recipe sets this key or a key below it."""
    return any(one == key or one.startswith(f"{key}.") for one in given)
