"""The device of this process, and devices in one normal form."""

from __future__ import annotations

import torch


def find_device() -> str:
    """Return the GPU of this process with its number, such as "cuda:0", or "cpu"."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def normalize_device(device: str) -> torch.device:
    """Return a device as tensors name theirs: a tensor on "cuda" says "cuda:0", and compares equal to no "cuda".

    >>> normalize_device("cpu:0")
    device(type='cpu')
    """
    return torch.empty(0, device=device).device
