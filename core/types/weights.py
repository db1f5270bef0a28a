"""Types of exported weights: buckets of named tensors, and the scope of an export."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Bucket = list[tuple[str, Tensor]]
"""Named full tensors, transferred together."""
ExportScope = Literal["whole", "adapter"]
"""Tensors to export: all weights of a model, with any adapter merged in; or only the adapter."""
