"""Cache folder of the user: copies of remote files, and indices of large ones."""

from __future__ import annotations

import os
from pathlib import Path


def find_cache_folder(name: str) -> Path:
    """Return a folder below FEYNRL_CACHE, or else below ~/.cache/feynrl; it may not exist yet."""
    chosen = os.environ.get("FEYNRL_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "feynrl"
    return (Path(chosen) if chosen else base) / name
