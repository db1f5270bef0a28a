"""Read a recipe together with its algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from configs.load import override, read_yaml, validate
from configs.schema import RunConfig
from core.loading import FileSpec

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[C]):
    """A valid configuration, and the file its algorithm lives in."""

    cfg: C
    alg_spec: FileSpec


def load_recipe(cls: type[C], path: str, overrides: list[str]) -> Loaded[C]:
    """Raises UserError naming the file or the key, and the mend."""
    from algs import find_algorithm

    raw = read_yaml(path)
    for item in overrides:
        override(raw, item)
    cfg = validate(cls, raw, prefix="")
    spec, alg_class = find_algorithm(cfg.alg)
    alg = validate(alg_class, cfg.alg, prefix="alg.")
    return Loaded(cfg=cfg.model_copy(update={"alg": alg.model_dump()}), alg_spec=spec)
