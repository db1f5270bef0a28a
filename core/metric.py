"""Declaration of a metric: name, unit and meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Amount = Literal["tokens", "samples", "groups", "rows", "steps", "turns", "calls", "seconds", "nats", "bytes"]
Unit = Amount | Literal["", "fraction", "tokens/s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Metric's name, unit and meaning."""

    name: str
    unit: Unit
    meaning: str
    logged_by: str
    """Kind of run, or algorithm, that logs it."""

    def matches(self, name: str) -> bool:
        """Tell whether `name` matches this metric's name, placeholders included.

        >>> Metric(name="reward/<part>", unit="", meaning="", logged_by="").matches("reward/correct")
        True
        """
        pattern = re.sub(r"<\w+>", "[^/]+", re.escape(self.name).replace(r"\<", "<").replace(r"\>", ">"))
        return re.fullmatch(pattern, name) is not None
