"""How trainers lay out the rows of a forward pass, which decides how the driver plans micro-batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Layout of the rows that all models of a trainer take."""

    padded: bool
    """Whether rows are padded to the longest of their micro-batch."""
    shares_prefixes: bool
    """Whether samples of a group share their common beginnings; never with padded rows."""
