"""Row layout of a trainer's forward passes, by which the driver plans micro-batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Row layout that all models of a trainer support."""

    padded: bool
    """Whether rows are padded to the longest of the micro-batch."""
    shares_prefixes: bool
    """Whether samples of a group share common prefixes; never with padded rows."""
