"""Read a recipe together with its algorithm and its engine: the keys that only they know are checked here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from algs import find_algorithm
from capture.losses import with_length_limit
from configs.load import apply_override, has_key, read_recipe, validate
from configs.renamed import find_renamed
from configs.schema import RLConfig, RunConfig
from core.errors import UserError
from core.loading import FileSpec
from core.ray_address import parse_address
from driver.check_engine import check_engine
from driver.dead_knobs import check_keys, list_given
from trackers import load_trackers

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[C]):
    """A valid configuration, and the file that holds its algorithm."""

    cfg: C
    alg_spec: FileSpec
    given: frozenset[str] = frozenset()
    """Keys that the recipe sets, dotted."""


def load_recipe(cls: type[C], recipe: str | Mapping[str, Any], overrides: Sequence[str]) -> Loaded[C]:
    """Validate a recipe, given as a file or as keys. Raises UserError that names the file or the key, and the fix."""
    raw = read_recipe(recipe)
    for item in overrides:
        apply_override(raw, item)
    is_rl = issubclass(cls, RLConfig)
    refuse_renamed(raw, is_rl=is_rl, is_known=lambda key: key.startswith("alg."))
    given = list_given(raw)
    cfg: C = validate(cls, raw, prefix="")
    if cfg.ray_address is not None:
        parse_address(cfg.ray_address)
    load_trackers(cfg.trackers)
    spec, alg_class = find_algorithm(cfg.alg)
    refuse_renamed(raw, is_rl=is_rl, is_known=lambda key: has_key(alg_class, key.split(".")[1:]))
    alg = validate(alg_class, cfg.alg, prefix="alg.")
    if isinstance(cfg, RLConfig):
        alg = with_length_limit(alg, cfg.rollout.max_new_tokens)
        check_engine(cfg)
    check_keys(cfg, alg, given)
    return Loaded(cfg=cfg.model_copy(update={"alg": alg.model_dump()}), alg_spec=spec, given=given)


def refuse_renamed(raw: Mapping[str, Any], *, is_rl: bool, is_known: Callable[[str], bool]) -> None:
    """Raise UserError for a key of an earlier version."""
    if renamed := find_renamed(raw, supervised=not is_rl, is_known=is_known):
        old, new = renamed
        raise UserError(f"{old} was renamed: write {new}")
