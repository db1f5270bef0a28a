"""Checkpoints of sharded models with torch's distributed checkpointing; any number of ranks can read them.

The files are safetensors, which hold numbers only. A rank writes the rows that it has, and reads those that it wants.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from core.errors import UserError, first_line
from trainers.row_shards import as_part_of

WEIGHTS = "weights"
"""Prefix of weight names; optimizer states have the optimizer's state name as prefix, such as exp_avg."""

WIDE: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64}
"""Dtypes of an optimizer's numbers that are no tensors. Its tensors have others, as torch's do."""


def write_state(state: dict[str, Tensor], folder: Path) -> None:
    """Write sharded tensors by name; every rank is called."""
    checkpoint.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def list_saved(folder: Path) -> dict[str, Tensor]:
    """Return the tensors that `write_state` wrote, by name, on the meta device: with shape and dtype, and no values."""
    with reading_shards(folder):
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: torch.empty(t.size, dtype=t.properties.dtype, device="meta") for name, t in found.items()}


def is_saved(value: object) -> bool:
    """Return whether `from_saved` returns an optimizer's state as `to_saved` took it. None needs no saving."""
    if isinstance(value, Tensor):
        return value.ndim > 0 or value.dtype not in WIDE.values()
    return value is None or type(value) in WIDE


def to_saved(parameter: Tensor, held: Tensor, value: Tensor | float) -> Tensor:
    """Return an optimizer's state as `write_state` takes it. held: this rank's part of the parameter.

    A state of the parameter's shape is sharded like it. Other states, such as tables of values, are whole: an optimizer
    that keeps them needs whole parameters (trainers/optimizer_probe.py). Numbers become tensors of a wide dtype.
    """
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=WIDE[type(value)])
    if value.ndim and value.shape == held.shape:
        return as_part_of(parameter, value)
    return value.clone()  # a table may be shared by all parameters, and safetensors takes no shared memory


def from_saved(value: Tensor) -> Tensor | float:
    """Return a state in the type that it had before `to_saved`."""
    return value.item() if value.ndim == 0 and value.dtype in WIDE.values() else value


def read_state(state: dict[str, Tensor], folder: Path) -> None:
    """Read the files of `write_state` into tensors in place. Collective; the number of ranks may differ."""
    with reading_shards(folder):
        checkpoint.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the whole weights that all ranks wrote, by name, in one process."""
    with reading_shards(folder):
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        state = {
            key: torch.empty(tensor.size, dtype=tensor.properties.dtype)
            for key, tensor in found.items()
            if key.startswith(f"{WEIGHTS}.")
        }
        checkpoint.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {key.removeprefix(f"{WEIGHTS}."): tensor for key, tensor in state.items()}


@contextmanager
def reading_shards(folder: Path) -> Generator[None]:
    """Convert errors of damaged files into UserError naming `folder`."""
    from safetensors import SafetensorError

    try:
        yield
    except CheckpointException as error:  # no subclass of Exception; it holds the error of every rank that has one
        reason = first_line(next(iter(error.failures.values()))[0])
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        reason = first_line(error)
    else:
        return
    raise UserError(
        f"resume: {folder} cannot be read ({reason}): the checkpoint is damaged, resume from an earlier one"
    )
