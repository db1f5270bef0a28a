"""Copies of a rank's weights in a checkpoint, for trainers whose checkpoints fit one number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from core.errors import UserError
from trainers.checkpoint.state import rank_file, reading


def save_tensors(tensors: list[Tensor], folder: Path, *, rank: int) -> None:
    """Write a rank's tensors into a folder that all ranks share."""
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / rank_file(rank))


@torch.no_grad()
def load_tensors(tensors: list[Tensor], folder: Path, *, rank: int) -> None:
    """Read what `save_tensors` wrote into tensors in place. Raises UserError if it does not fit them."""
    with reading(folder / rank_file(rank)):
        saved: list[Tensor] = torch.load(folder / rank_file(rank), map_location="cpu", weights_only=True)
    if [t.shape for t in saved] != [t.shape for t in tensors]:
        raise UserError(f"resume: {folder} holds other weights than the policy's: resume with the model of that run")
    for tensor, found in zip(tensors, saved, strict=True):
        tensor.copy_(found)
