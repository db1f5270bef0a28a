"""Private parts of torch that forward passes access; see core/patches.py."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from core.patches import TORCH, Patch

PATCHES = (
    Patch(
        target="torch.utils._python_dispatch.TorchDispatchMode",
        reason="operations are replaced below autograd, whose backward pass must stay; torch.library cannot undo it",
        tested=TORCH,
        upstream="https://github.com/pytorch/pytorch/pull/110073",
    ),
)
