"""Read a recipe together with its algorithm and its engine: the keys that only they know are checked here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from algs import find_algorithm
from capture.losses import with_length_limit
from configs.load import apply_override, read_recipe, validate
from configs.renamed import find_renamed
from configs.schema import RLConfig, RunConfig
from core.errors import UserError
from core.loading import FileSpec
from core.ray_address import parse_address
from driver.dead_knobs import check_keys, list_given
from rollouts.engines.base import Capabilities
from rollouts.registry import load_engine_class, resolve_engine
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
    if renamed := find_renamed(raw, supervised=not issubclass(cls, RLConfig)):
        old, new = renamed
        raise UserError(f"{old} was renamed: write {new}")
    given = list_given(raw)
    cfg: C = validate(cls, raw, prefix="")
    if cfg.ray_address is not None:
        parse_address(cfg.ray_address)
    load_trackers(cfg.trackers)
    spec, alg_class = find_algorithm(cfg.alg)
    alg = validate(alg_class, cfg.alg, prefix="alg.")
    if isinstance(cfg, RLConfig):
        alg = with_length_limit(alg, cfg.rollout.max_new_tokens)
        check_engine(cfg, load_engine_class(resolve_engine(cfg.rollout.engine)).capabilities)
    check_keys(cfg, alg, given)
    return Loaded(cfg=cfg.model_copy(update={"alg": alg.model_dump()}), alg_spec=spec, given=given)


def check_engine(cfg: RLConfig, can: Capabilities) -> None:
    """Raise UserError for a key that asks the engine for what it cannot do."""
    name, transport = f"rollout.engine={cfg.rollout.engine}", cfg.weight_sync.transport
    if cfg.backend == "ray" and not can.broadcast:
        raise UserError(f"{name} runs in the trainer's process only: set backend to local, or take another engine")
    if cfg.rollout.tensor_parallel_size != 1 and not can.tensor_parallel:
        raise UserError(f"{name} has no tensor parallelism: set rollout.tensor_parallel_size to 1")
    if transport == "nccl" and not can.nccl:
        raise UserError(f"{name} takes no weights over NCCL: set weight_sync.transport to auto")
    if transport in ("direct", "disk") and not can.chunks:
        raise UserError(
            f"weight_sync.transport is {transport}, and {name} takes no weights in chunks: add begin_chunks and "
            "load_chunk, as in rollouts/engines/hf.py, and say so in its capabilities, or set the transport to auto"
        )
    if cfg.rollout.stop and not can.stop_strings:
        raise UserError(
            f"rollout.stop is set, and {name} does not look for stop strings: end a completion where "
            "EngineConfig.stop_strings says, as in rollouts/engines/hf.py, and say so in its capabilities"
        )
    if cfg.weight_sync.lora == "adapter" and not can.adapter:
        raise UserError(
            f"weight_sync.lora is adapter, and {name} does not sample with an adapter beside the weights: set "
            "rollout.engine to vllm, or weight_sync.lora to merged"
        )
