"""Registry of engines, environments and agents, by name or by path."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from configs.rollout_schema import AgentConfig
from core.errors import UserError, quote
from core.loading import FileSpec, classes_below, load_class, needs_part, resolve
from core.types.messages import ToolSpec
from data_feeds.chat.tool_specs import check_tools
from data_feeds.rows.invalid_rows import InvalidRow
from rollouts.engines.base import Engine
from rollouts.envs.base import Env

if TYPE_CHECKING:
    from rollouts.agents.task import AgentPlan


def resolve_engine(name_or_path: str) -> FileSpec:
    """Return the file of `rollout.engine`."""
    return resolve(name_or_path, "rollouts.engines", offers=_has_engine, key="rollout.engine")


def load_engine_class(spec: FileSpec) -> type[Engine]:
    cls: Any = Engine  # a Protocol is no class to a type checker
    return load_class(spec, cls, key="rollout.engine")


def resolve_env(name_or_path: str) -> FileSpec:
    """Return the file of `rollout.env`."""
    return resolve(name_or_path, "rollouts.envs", offers=_has_env, key="rollout.env")


def load_env_class(spec: FileSpec) -> type[Env]:
    """Load an environment's class. Raises UserError if `step` expects text instead of a ParsedReply."""
    found = load_class(spec, Env, key="rollout.env")
    # with postponed evaluation, annotations are strings
    if str in _list_hints(found.step) or "str" in _list_hints(found.step):
        raise UserError(
            f"rollout.env: {spec.path}: {found.__name__}.step takes the reply as text, and it is given a ParsedReply: "
            "read reply.message['content'], and return a list of messages"
        )
    return found


def list_env_tools(cls: type[Env], *, max_turns: int) -> list[ToolSpec]:
    """Return the class-level tools of an environment.

    Raises UserError for invalid tools, and for tools with max_turns=1, since the policy would never see the results.
    """
    # a tool result is a turn of its own, and the first reply would be the last
    if max_turns < cls.least_turns:
        raise UserError(
            f"rollout.max_turns is {max_turns}, so the policy would never see what {cls.__name__} answers, such as "
            f"the results of its tools: set it to the number of replies that an episode may have, {cls.least_turns} or "
            "more"
        )
    tools: Any = cls.tools
    if not isinstance(tools, list | tuple):  # a property: they are known once an episode begins
        return []
    try:
        check_tools(tools)
    except InvalidRow as error:
        raise UserError(f"rollout.env: {cls.__name__}.tools: {error}") from error
    return [*tools]


def _list_hints(step: Any) -> list[Any]:
    return [hint for name, hint in getattr(step, "__annotations__", {}).items() if name != "return"]


def resolve_agent(agent: AgentConfig) -> AgentPlan:
    """Return the code of `rollout.agent`. Raises UserError for a missing file or program."""
    # agents are an optional part: a clone without their folder works for other recipes
    with needs_part("rollout.agent"):
        from rollouts.agents.task import HOST_KEY, AgentPlan

    plan = AgentPlan(folder=os.getcwd(), serve=agent.serve, timeout_s=agent.timeout_s, on_timeout=agent.on_timeout)
    if agent.file is not None:
        spec = resolve(agent.file, "rollouts.agents", offers=lambda _: False, key="rollout.agent.file")
        return replace(plan, file=spec)
    if agent.address:
        return replace(plan, address=tuple(agent.address), key=os.environ.get(HOST_KEY, ""))
    if shutil.which(agent.command[0]) is None:
        raise UserError(
            f"rollout.agent.command: there is no program {quote(agent.command[0])}: give its path, or install it"
        )
    return replace(plan, command=tuple(agent.command))


def _has_engine(module: ModuleType) -> bool:
    return len(classes_below(module, Engine)) == 1


def _has_env(module: ModuleType) -> bool:
    return len(classes_below(module, Env)) == 1
