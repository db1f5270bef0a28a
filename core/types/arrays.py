"""Arrays of one number per token: their dtypes, and how they cross the border of a process.

    token ids, versions    int32
    masks                  bool
    floats                 float32 in a run; float64 where a test of exactness asks for it

A sum over many tokens is taken in float64 or more, whatever the dtype of its terms.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import UserError

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]
Floats = NDArray[np.floating[Any]]

INTS, BOOLS, SINGLE, DOUBLE = np.dtype(np.int32), np.dtype(np.bool_), np.dtype(np.float32), np.dtype(np.float64)
Record = TypeVar("Record")


def check_column(name: str, column: Any, dtype: np.dtype[Any], length: int) -> None:
    """Raise UserError for anything but an array of this dtype and length; make it read-only."""
    if not isinstance(column, np.ndarray) or column.dtype != dtype:
        found = f"an array of {column.dtype}" if isinstance(column, np.ndarray) else type(column).__name__
        raise UserError(
            f"{name} of a Sample must be a numpy array of {dtype}, found {found}: Sample.with_advantage() takes a "
            "number or an array of any floats, make_sample() of core/types/samples.py takes lists"
        )
    if column.shape != (length,):
        raise UserError(
            f"the arrays of a Sample must have one length: token_ids has {length}, {name} has the shape "
            f"{list(column.shape)}"
        )
    column.setflags(write=False)


def to_column(values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a list, or an array, as an array of `dtype`; ValueError where an integer or a bool would change."""
    column = np.array(values, dtype=dtype)
    if dtype.kind != "f" and not np.array_equal(column, values):
        raise ValueError(f"{values!r:.60} cannot be written as {dtype}")
    return column


def repeat_runs(values: NDArray[Any], counts: Sequence[int]) -> NDArray[Any]:
    """Return each value as often as its count says, as np.repeat, which is slow where the runs are long.

    >>> repeat_runs(np.array([7, 8]), [1, 3]).tolist()
    [7, 8, 8, 8]
    """
    repeated = np.empty(sum(counts), dtype=values.dtype)
    end = 0
    for value, n in zip(values, counts, strict=True):
        repeated[end : end + n] = value
        end += n
    return repeated


def is_equal(one: Any, other: Any) -> bool:
    """Compare two values of a field: arrays, mappings of arrays, or anything else."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(one[name], other[name]) for name in one)
    return one == other


def to_json(value: Any) -> Any:
    """Return a value of a field for JSON: an array as its bytes, in base64.

    >>> to_json(np.array([1, 2], dtype=np.int32))
    {'dtype': '<i4', 'base64': 'AQAAAAIAAAA='}
    """
    if isinstance(value, np.ndarray):
        little = value.astype(value.dtype.newbyteorder("<"))
        return {"dtype": little.dtype.str, "base64": base64.b64encode(little.tobytes()).decode()}
    return {name: to_json(v) for name, v in value.items()} if isinstance(value, dict) else value


def from_json(value: Any) -> Any:
    """Return what `to_json` was given."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "base64"}:
        found = np.frombuffer(base64.b64decode(value["base64"]), dtype=value["dtype"])
        return found.astype(found.dtype.newbyteorder("="), copy=False)
    return {name: from_json(v) for name, v in value.items()}


@cache
def list_fields(record: type[Any]) -> tuple[str, ...]:
    """Return the names of a dataclass's fields; `fields` makes its list anew at every call, which is for every row."""
    return tuple(f.name for f in fields(record))


def without_tensors(record: Any) -> dict[str, Any]:
    """Return the fields of a record that are there, tensors on the CPU as arrays of the same memory.

    pickle's protocol 5 hands the memory of an array over as it is; a tensor would be copied several times.
    """
    there = {name: getattr(record, name) for name in list_fields(type(record)) if hasattr(record, name)}
    return {name: v.numpy() if isinstance(v, Tensor) else v for name, v in there.items()}


def with_tensors(kind: type[Record], given: Mapping[str, Any]) -> Record:
    """Return the record of `without_tensors`.

    Memory that is shared with other processes is read-only, and a loss may write into its tokens: it is copied.
    """
    there = {
        name: torch.from_numpy(v if v.flags.writeable else v.copy()) if isinstance(v, np.ndarray) else v
        for name, v in given.items()
    }
    return kind(**there)
