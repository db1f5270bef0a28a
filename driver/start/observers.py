"""All observers there are, by the key of the recipe that asks for them. Those of analysis/ are loaded here, by name.

Nothing else in the path of a training step imports analysis/: a clone without it trains as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial

from configs.schema import RLConfig
from core.loading import needs_part
from driver.load_recipe import Loaded
from driver.rl.observers import ObserverPlan
from trainers.observers import ObserverFactory
from trainers.source_losses import SourceLosses

OF_A_RUN: dict[str, tuple[Callable[[RLConfig], bool], str]] = {
    "compare_losses": (lambda cfg: bool(cfg.compare_losses), "analysis.compared_losses.observer"),
    "capture": (lambda cfg: cfg.capture.is_on, "analysis.capture.observer"),
}
"""Whether a recipe asks for it, and the module whose `plan_observer` returns its ObserverPlan. They are called in this
order: a snapshot holds the metrics of the compared losses."""


def plan_observers(loaded: Loaded[RLConfig]) -> dict[str, ObserverPlan]:
    """Return the observers that a recipe asks for. Raises UserError for what cannot be observed in this run."""
    asked = {key: module for key, (is_asked, module) in OF_A_RUN.items() if is_asked(loaded.cfg)}
    return {key: load_plan(key, module, loaded) for key, module in asked.items()}


def load_plan(key: str, module: str, loaded: Loaded[RLConfig]) -> ObserverPlan:
    """Return the observer of a key, which a module of analysis/ defines. Raises PartMissing where that is gone."""
    with needs_part(key):
        found = importlib.import_module(module)
    return found.plan_observer(loaded)


def observe_sources(sources: Sequence[str]) -> dict[str, ObserverFactory]:
    """Return the observer of the losses of a mixture's sources; none where the data is no mixture."""
    return {"sources": partial(SourceLosses, sources=tuple(sources))} if sources else {}
