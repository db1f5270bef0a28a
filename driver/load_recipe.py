"""Read a recipe with its algorithm and engine, and check the keys that only they know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from algs import find_algorithm
from algs.base import Algorithm, PolicyGradient
from algs.objective import check_terms
from configs.data_schema import DataConfig
from configs.load import (
    apply_override,
    find_inherited,
    flatten_settings,
    naming_inherited,
    read_recipe,
    read_yaml,
    validate,
)
from configs.other_names import describe_other_value
from configs.schema import RLConfig, RunConfig
from core.cluster.ray_address import parse_address
from core.errors import UserError
from core.loading import FileSpec
from data_feeds.feed import Feed
from data_feeds.samplers.find import find_sampler
from driver.checks.engine import check_corrected, check_engine
from driver.checks.image_use import settle_images
from driver.checks.metric_names import check_metric_names
from driver.checks.unused_keys import check_keys
from driver.records.trackers import load_trackers

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[C]):
    """Valid configuration, with the algorithm of the section `alg`."""

    cfg: C
    alg: Algorithm
    alg_spec: FileSpec
    """File that defines the algorithm."""
    inherited: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Keys that the recipe has from its base recipes, each with the file."""
    why_text: str = ""
    """Reason why a model that sees is used for text, where model.images is auto."""


def load_recipe(cls: type[C], recipe: str | Mapping[str, Any], overrides: Sequence[str]) -> Loaded[C]:
    """Validate a recipe, given as a file or as keys. Raises UserError that names the file or key, and the fix."""
    raw, inherited = read_recipe(recipe), find_inherited(recipe)
    for item in overrides:
        apply_override(raw, item)
        inherited = {key: file for key, file in inherited.items() if not _sets(item, key)}
    with naming_inherited(inherited):
        loaded = _validate_all(cls, raw, given=frozenset(flatten_settings(raw)))
    return replace(loaded, inherited=inherited)


def _sets(override: str, key: str) -> bool:
    """Tell whether an override sets a key: itself, or its whole section."""
    return f"{key}.".startswith(f"{override.partition('=')[0]}.")


def load_config_of_run(cls: type[C], file: Path, overrides: Sequence[str]) -> Loaded[C]:
    """Validate the config.yaml written by a run. It contains every key, so unused keys are allowed."""
    raw = read_yaml(str(file))
    for item in overrides:
        apply_override(raw, item)
    return _validate_all(cls, raw, given=None)


def _validate_all(cls: type[C], raw: dict[str, Any], *, given: frozenset[str] | None) -> Loaded[C]:
    """Validate the keys of a recipe. given: keys set by the user; None: skip the check for unused keys."""
    cfg: C = validate(cls, raw, prefix="")
    if cfg.ray_address is not None:
        parse_address(cfg.ray_address)
    load_trackers(cfg.trackers)
    try:
        spec, alg_class = find_algorithm(cfg.alg)
    except UserError as error:
        if other := describe_other_value("alg.name", cfg.alg.get("name")):
            raise UserError(f"alg.name: {other}") from error
        raise
    alg, why_text = validate(alg_class, cfg.alg, prefix="alg."), ""
    if isinstance(cfg, RLConfig):
        # Only here are both known: the algorithm's section does not see `rollout`.
        alg = with_length_limit(alg, cfg.rollout.max_new_tokens)
        model = cfg.model
        images, why_text = settle_images(
            model.images, model.path, engine=cfg.rollout.engine, trust_remote_code=model.trust_remote_code
        )
        cfg = cfg.model_copy(update={"model": model.model_copy(update={"images": images})})
        check_engine(cfg)
        check_corrected(cfg, alg)
        if cfg.data.sampler is not None:
            # with the defaults of its settings, as the algorithm below
            settings = find_sampler(cfg.data.sampler)[1].model_dump()
            cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"sampler": settings})})
    check_terms(alg)
    check_metric_names(cfg, alg, spec)
    # A run's own config.yaml contains every key, used or not; only a recipe's keys are the user's intention.
    if given is not None:
        check_keys(cfg, alg, given)
    # With the algorithm's defaults, so that config.yaml and a checkpoint contain every hyper-parameter.
    cfg = cfg.model_copy(update={"alg": alg.model_dump()})
    return Loaded(cfg=cfg, alg=alg, alg_spec=spec, why_text=why_text)


def with_forms(loaded: Loaded[C], train: Feed[Any], held_out: Feed[Any] | None) -> Loaded[C]:
    """Return the recipe with the forms that its rows were found to have, and the sources that are lazy."""
    data = _with_forms(loaded.cfg.data, "train", train)
    if held_out is not None:
        data = _with_forms(data, "eval", held_out)
    return replace(loaded, cfg=loaded.cfg.model_copy(update={"data": data}))


def _with_forms(data: DataConfig, which: Literal["train", "eval"], feed: Feed[Any]) -> DataConfig:
    return data.with_forms(which, [source.form for source in feed.sources], [source.is_lazy for source in feed.sources])


def with_length_limit(alg: Algorithm, max_new_tokens: int) -> Algorithm:
    """Return the algorithm with `overlong.max_tokens` set: by default it is the rollout's token budget."""
    if not isinstance(alg, PolicyGradient) or alg.overlong.mode != "penalty" or alg.overlong.max_tokens is not None:
        return alg
    overlong = alg.overlong.model_dump() | {"max_tokens": max_new_tokens}
    return validate(type(alg), alg.model_dump() | {"overlong": overlong}, prefix="alg.")
