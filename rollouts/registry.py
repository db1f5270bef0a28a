"""Find engines and environments by name or by path."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from core.loading import FileSpec, classes_below, load_class, resolve
from rollouts.engines.base import Engine
from rollouts.envs.base import Env


def resolve_engine(name_or_path: str) -> FileSpec:
    """Return the file that `rollout.engine` names."""
    return resolve(name_or_path, "rollouts.engines", offers=_has_engine, key="rollout.engine")


def load_engine_class(spec: FileSpec) -> type[Engine]:
    cls: Any = Engine  # a Protocol is no class to a type checker
    return load_class(spec, cls, key="rollout.engine")


def resolve_env(name_or_path: str) -> FileSpec:
    """Return the file that `rollout.env` names."""
    return resolve(name_or_path, "rollouts.envs", offers=_has_env, key="rollout.env")


def load_env_class(spec: FileSpec) -> type[Env]:
    return load_class(spec, Env, key="rollout.env")


def _has_engine(module: ModuleType) -> bool:
    return len(classes_below(module, Engine)) == 1


def _has_env(module: ModuleType) -> bool:
    return len(classes_below(module, Env)) == 1
