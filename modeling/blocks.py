"""Transformer blocks of a model: the layers of its stacks, decoder layers and those of a vision tower."""

from __future__ import annotations

from torch import nn

from core.errors import UserError
from core.patches import list_block_classes


def find_blocks(model: nn.Module, *, use: str, fix: str) -> list[nn.Module]:
    """Return the transformer blocks: outermost members of module lists that contain an unsplittable module.

    transformers names the classes of such modules (`_no_split_modules`). use: key and verb that need blocks. fix: what
    to set instead. Raises UserError if there are none.
    """
    kept = {name for m in model.modules() for name in list_block_classes(m)}
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for stack in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        if stack in inside:
            continue
        for block in stack:
            # of the base classes, too: FSDP2 makes a class of its own from that of a unit
            if any(base.__name__ in kept for m in block.modules() for base in type(m).__mro__):
                blocks.append(block)
                inside.update(block.modules())
    if not blocks:
        raise UserError(
            f"{use} a model block by block, and {type(model).__name__} does not say what its blocks are "
            f"(_no_split_modules): {fix}"
        )
    return blocks
