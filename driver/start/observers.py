"""Registry of observers, by the recipe key that enables them. Observers in analysis/ are loaded here, by name.

Nothing else in the path of a training step imports analysis/, so a clone without it can train.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial

from configs.schema import RLConfig
from core.loading import needs_part
from driver.load_recipe import Loaded
from driver.rl.observers import ObserverPlan
from trainers.meter import SourceLosses
from trainers.observers import ObserverFactory

OF_A_RUN: dict[str, tuple[Callable[[RLConfig], bool], str]] = {
    "batch_invariant": (lambda cfg: cfg.rollout.batch_invariant, "driver.rl.invariance"),
    "compare_losses": (lambda cfg: bool(cfg.compare_losses), "analysis.compared_losses.observer"),
    "capture": (lambda cfg: cfg.capture.is_on, "analysis.capture.observer"),
    "profile": (lambda cfg: bool(cfg.profile.steps), "analysis.profile.observer"),
}
"""Condition on the recipe, and the module with `plan_observer`, by key. Observers are called in this order: a step
snapshot contains the metrics of the compared losses."""


def plan_observers(loaded: Loaded[RLConfig]) -> dict[str, ObserverPlan]:
    """Return the observer plans that a recipe enables. Raises UserError if this run does not support an observer."""
    asked = {key: module for key, (is_asked, module) in OF_A_RUN.items() if is_asked(loaded.cfg)}
    return {key: load_plan(key, module, loaded) for key, module in asked.items()}


def load_plan(key: str, module: str, loaded: Loaded[RLConfig]) -> ObserverPlan:
    """Return the observer plan of a key from a module of analysis/. Raises PartMissing without that module."""
    with needs_part(key):
        # By name, because an import statement would make analysis/ a requirement of every run.
        found = importlib.import_module(module)
    return found.plan_observer(loaded)


def observe_sources(sources: Sequence[str]) -> dict[str, ObserverFactory]:
    """Return the observer of losses per source of a data mixture; {} for data that is not a mixture."""
    return {"sources": partial(SourceLosses, sources=tuple(sources))} if sources else {}
