"""Trackers: destinations of a run's metrics, found by name or by the path of a file."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import ModuleType

from configs.tracking_schema import TrackingConfig
from core.errors import UserError
from core.loading import classes_below, load_class, resolve
from driver.records.trackers.base import Tracker


def load_trackers(names: Sequence[str]) -> dict[str, type[Tracker]]:
    """Load tracker classes by name. Raises UserError for an unknown or duplicate name."""
    found: dict[str, type[Tracker]] = {}
    for name in names:
        if name in found:
            raise UserError(f"trackers: {name} is given twice: name it once")
        spec = resolve(name, "driver.records.trackers", offers=_is_tracker, key="trackers")
        found[name] = load_class(spec, Tracker, key="trackers")
    return found


def check_trackers(names: Sequence[str], settings: TrackingConfig) -> None:
    """Raise UserError for a tracker that cannot start: a missing package, or a missing password."""
    for name, cls in load_trackers(names).items():
        if missing := [package for package in cls.packages if importlib.util.find_spec(package) is None]:
            raise UserError(
                f"trackers: {name} needs the package {missing[0]}, which is not installed: {cls.install}, or leave "
                f"{name} out"
            )
        if refused := cls.refuse(settings):
            raise UserError(f"trackers: {refused}")


def _is_tracker(module: ModuleType) -> bool:
    return bool(classes_below(module, Tracker))
