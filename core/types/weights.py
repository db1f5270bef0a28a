"""Types of exported weights: named tensors that travel together, and how much of a model is exported."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Bucket = list[tuple[str, Tensor]]
"""Named full tensors that travel together."""
ExportScope = Literal["whole", "adapter"]
"""Tensors to export: all weights of a model, with its adapter (if any) merged in; or the adapter alone."""
