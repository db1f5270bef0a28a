"""Find engines and environments by name or by path."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from core.errors import UserError
from core.loading import FileSpec, load_module, resolve
from core.types import Prompt
from rollouts.envs import ENVIRONMENTS, Env

if TYPE_CHECKING:
    pass


OUR_ENGINES = ["hf", "vllm"]


def engine_class_of(spec: FileSpec | None) -> Any:
    """The class `Engine` of a file of the user's; None for one of ours."""
    if spec is None:
        return None
    module = load_module(spec)
    if not hasattr(module, "Engine"):
        raise UserError(f"rollout.engine={spec.path} defines no class Engine")
    return module.Engine


def environment_of(spec: FileSpec | None, name: str) -> Callable[[Prompt], Env]:
    if spec is None:
        return ENVIRONMENTS[name]
    module = load_module(spec)
    if not hasattr(module, "Environment"):
        raise UserError(f"rollout.env={name} defines no class Environment")
    return module.Environment


def by_path(name: str, known: list[str], *, key: str) -> FileSpec | None:
    """None for one of ours, the file for somebody else's."""
    if name in known:
        return None
    if not name.endswith(".py"):
        raise UserError(f"{key}={name!r} is neither one of {', '.join(known)} nor the path of a Python file")
    return resolve(name, "rollouts", key=key)
