"""Per-token arrays: dtypes, validation, JSON, and transfer between processes.

    token ids, versions    int32
    masks                  bool
    floats                 float32 in a run, float64 in tests of exactness

Sums over many tokens use float64 or wider, whatever the dtype of the terms.
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
PackedArrays = list[NDArray[Any]] | tuple[bytes, list[np.dtype[Any]]]
SHORT = 1024
"""Length up to which `pack_arrays` copies."""


def check_column(name: str, column: Any, dtype: np.dtype[Any], length: int, *, several: bool = False) -> None:
    """Check an array's dtype and length, and make it read-only. Raises UserError otherwise.

    several: whether it may have several numbers per token, [L, K].
    """
    if not isinstance(column, np.ndarray) or column.dtype != dtype:
        found = f"an array of {column.dtype}" if isinstance(column, np.ndarray) else type(column).__name__
        raise UserError(
            f"{name} of a Sample must be a numpy array of {dtype}, found {found}; use Sample.with_advantage() for a "
            "number or an array of any floats, or make_sample() of core/types/samples.py for lists"
        )
    if column.shape[:1] != (length,) or column.ndim > 1 + several:
        raise UserError(
            f"the arrays of a Sample must have one length: token_ids has {length}, {name} has the shape "
            f"{list(column.shape)}"
        )
    # As Ray returns them: code that writes into an array must fail in a local run too.
    column.setflags(write=False)


def to_column(values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert a list or array to `dtype`. Raises ValueError if an integer or boolean would change."""
    # numpy would cut 1.5 to 1, and read 2 as True, without a word; so the result is compared.
    column = np.array(values, dtype=dtype)
    if dtype.kind != "f" and not np.array_equal(column, values):
        raise ValueError(f"{values!r:.60} cannot be written as {dtype}")
    return column


def find_true(mask: Mask) -> tuple[slice | NDArray[np.intp], int]:
    """Return the places [n] where a mask is True, and n. A single run, as of one reply, is a slice, and copies nothing.

    >>> find_true(np.array([False, True, True]))
    (slice(1, 3, None), 2)
    >>> find_true(np.array([True, False, True]))
    (array([0, 2]), 2)
    """
    n = int(np.count_nonzero(mask))
    first = int(mask.argmax()) if n else 0
    # counted again only if something follows: n places from the first one to the end are a run
    is_run = first + n == len(mask) or np.count_nonzero(mask[first : first + n]) == n
    return (slice(first, first + n) if is_run else np.flatnonzero(mask)), n


def pack_arrays(arrays: Sequence[NDArray[Any]]) -> PackedArrays:
    """Return arrays [L] for pickling: short ones as one string of bytes with their dtypes, others as they are.

    A thousand numbers are copied faster than their array is pickled. The widest dtype comes first, so that all of them
    are aligned in the string.
    """
    if not 0 < len(arrays[0]) <= SHORT:
        return [*arrays]
    return b"".join([array.tobytes() for array in arrays]), [array.dtype for array in arrays]


def unpack_arrays(packed: PackedArrays) -> Sequence[NDArray[Any]]:
    """Invert `pack_arrays`. Arrays from a string are read-only."""
    if isinstance(packed, list):
        return packed
    data, dtypes = packed
    n, begin = len(data) // sum([dtype.itemsize for dtype in dtypes]), 0
    arrays: list[NDArray[Any]] = []
    for dtype in dtypes:
        arrays.append(np.frombuffer(data, dtype, n, begin))
        begin += n * dtype.itemsize
    return arrays


def is_equal(one: Any, other: Any) -> bool:
    """Compare two field values: arrays, mappings of arrays, or anything else."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(one[name], other[name]) for name in one)
    return one == other


def to_json(value: Any) -> Any:
    """Convert a field's value to JSON; an array becomes its bytes in base64.

    >>> to_json(np.array([1, 2], dtype=np.int32))
    {'dtype': '<i4', 'base64': 'AQAAAAIAAAA='}
    """
    if isinstance(value, np.ndarray):
        # Little-endian whatever the machine, so that a file can be read on any other.
        little = value.astype(value.dtype.newbyteorder("<"))
        return {"dtype": little.dtype.str, "base64": base64.b64encode(little.tobytes()).decode()}
    return {name: to_json(v) for name, v in value.items()} if isinstance(value, dict) else value


def from_json(value: Any) -> Any:
    """Invert `to_json`."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "base64"}:
        found = np.frombuffer(base64.b64decode(value["base64"]), dtype=value["dtype"])
        # torch accepts arrays in the machine's own byte order only.
        return found.astype(found.dtype.newbyteorder("="), copy=False)
    return {name: from_json(v) for name, v in value.items()}


@cache
def list_fields(record: type[Any]) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, cached, because `fields` builds a new list per call."""
    return tuple(f.name for f in fields(record))


def without_tensors(record: Any) -> dict[str, Any]:
    """Return the record's fields that are there and not None; CPU tensors become arrays on the same memory.

    pickle's protocol 5 transfers array memory without a copy; a tensor would be copied several times.
    """
    there = ((name, getattr(record, name, None)) for name in list_fields(type(record)))
    return {name: v.numpy() if isinstance(v, Tensor) else v for name, v in there if v is not None}


def with_tensors(kind: type[Record], given: Mapping[str, Any]) -> Record:
    """Rebuild the record of `without_tensors`; read-only arrays are copied."""
    # Memory shared between processes is read-only, and a loss may write into its tokens. So such arrays are copied.
    there = {
        name: torch.from_numpy(v if v.flags.writeable else v.copy()) if isinstance(v, np.ndarray) else v
        for name, v in given.items()
    }
    return kind(**there)
