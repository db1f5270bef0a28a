"""Large libraries without what they import, where it is installed, for features that nothing here uses.

On two cores it is a fifth of the time to the first sample: the driver, each trainer and each engine pay for it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from core.replacing import replacing

SCIPY = "scipy"
"""What vLLM takes to resample sound, 1 s of each of its processes."""
UNUSED = ("is_sklearn_available", "is_scipy_available")
"""Questions of transformers: before assisted generation by thresholds, and before losses of object detection."""


@contextmanager
def lean_transformers() -> Generator[None]:
    """Let transformers be imported without scikit-learn and scipy, which come with mlflow and take 1.5 s."""
    from transformers import utils

    with replacing(utils, **dict.fromkeys(UNUSED, _is_not_there)):
        yield


def _is_not_there() -> bool:
    return False


@contextmanager
def without_package(name: str) -> Generator[None]:
    """Let the body import what takes this package only where it is installed; one that is imported already stays.

    Not for a process whose other threads need the package: they could not import it meanwhile.
    """
    modules: dict[str, Any] = sys.modules
    is_absent = name not in modules
    if is_absent:
        modules[name] = None  # Python's way to say that it cannot be imported
    try:
        yield
    finally:
        if is_absent:
            del modules[name]
