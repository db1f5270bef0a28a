"""Large libraries without what they import, where it is installed, for features that nothing here uses.

On two cores it is a fifth of the time to the first sample: the driver, each trainer and each engine pay for it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

UNUSED = ("is_sklearn_available", "is_scipy_available")
"""Questions of transformers: before assisted generation by thresholds, and before losses of object detection."""


@contextmanager
def lean_transformers() -> Generator[None]:
    """Let transformers be imported without scikit-learn and scipy, which come with mlflow and take 1.5 s."""
    from transformers import utils

    usual = {name: getattr(utils, name) for name in UNUSED}
    for name in UNUSED:
        setattr(utils, name, _is_not_there)
    try:
        yield
    finally:
        for name in UNUSED:
            setattr(utils, name, usual[name])


def _is_not_there() -> bool:
    return False


@contextmanager
def without_mlflow() -> Generator[None]:
    """Let DeepSpeed be imported without mlflow, which its autotuner would take where it is installed, for 1.3 s.

    Not for a process with trackers: it could not import mlflow meanwhile.
    """
    modules: dict[str, Any] = sys.modules
    is_absent = "mlflow" not in modules
    if is_absent:
        modules["mlflow"] = None  # Python's way to say that it cannot be imported
    try:
        yield
    finally:
        if is_absent:
            del modules["mlflow"]
