"""Forward passes on a CPU whose numbers at a token do not depend on the rest of the batch, to the bit.

Libraries choose the order of a sum, and the rounding of a function, by the shape of the whole tensor: a matrix product
by the number of rows, a vectorised loop by the remainder, and both by the number of threads. Inside `fixed_order` these
operations run on pieces of one shape, in one thread:

    mm, addmm               tiles of ROWS rows, the last filled with zeros
    mean, sum, logsumexp    contiguous rows of the last axis
    exp, silu, tanh, ...    a multiple of LANES numbers, so that none is in the remainder of the loop

All other operations of a dense model are exact, or work row by row. Attention is that of modeling/attention_fixed.py.
So two batches agree whatever else they contain, as in https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/.
The backward pass is outside, and as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from modeling.patches import TorchDispatchMode

ROWS = 16
"""Rows of a tile. A place in the tile must not matter, which `rollouts/engines/hf_support/invariance.py` measures."""
LANES = 64
"""Numbers that the widest vectorised loop computes at a time: 2 x 32 of bfloat16 with AVX-512."""

aten = torch.ops.aten


@contextmanager
def fixed_order() -> Generator[None]:
    """Run the body in fixed order: one thread, and operations in pieces of a fixed shape."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _FixedOrder():
            yield
    finally:
        torch.set_num_threads(threads)


class _FixedOrder(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = _IN_FIXED_ORDER.get(func)
        return func(*args, **kwargs or {}) if run is None else run(func, *args, **kwargs or {})


def _multiply(_operation: Any, rows: Tensor, matrix: Tensor) -> Tensor:
    return _by_tiles(rows, matrix, lambda tile, out: torch.mm(tile, matrix, out=out))


def _multiply_add(_operation: Any, bias: Tensor, rows: Tensor, matrix: Tensor, **factors: float) -> Tensor:
    return _by_tiles(rows, matrix, lambda tile, out: torch.addmm(bias, tile, matrix, out=out, **factors))


def _by_tiles(rows: Tensor, matrix: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Compute a matrix product tile by tile, [M, K] x [K, N] -> [M, N]."""
    n = len(rows)
    padded = pad(rows.contiguous(), (0, 0, 0, -n % ROWS))
    product = padded.new_empty(len(padded), matrix.shape[1])
    for tile, out in zip(padded.split(ROWS), product.split(ROWS), strict=True):
        multiply(tile, out)
    return product[:n]


def compute_elementwise(operation: Callable[..., Tensor], values: Tensor, *others: Any, **settings: Any) -> Tensor:
    """Compute a function of every number of `values`, [...] -> [...], on a multiple of LANES of them."""
    flat = values.contiguous().flatten()
    n = len(flat)
    return operation(pad(flat, (0, -n % LANES)), *others, **settings)[:n].view(values.shape)


def _reduce(operation: Any, values: Tensor, axes: list[int] | None, keepdim: bool = False, **settings: Any) -> Tensor:
    # another axis is left alone: no dense model adds over tokens
    return operation(values.contiguous(), axes, keepdim, **settings)


def _log_sum_exp(operation: Any, values: Tensor, axes: list[int], keepdim: bool = False) -> Tensor:
    if [axis % values.ndim for axis in axes] != [values.ndim - 1]:
        return operation(values, axes, keepdim)
    largest = values.amax(-1, keepdim=True)
    total = compute_elementwise(torch.exp, values - largest).sum(-1, keepdim=True)
    logs = compute_elementwise(torch.log, total) + largest
    return logs if keepdim else logs.squeeze(-1)


_ELEMENTWISE = (
    *(aten.exp, aten.exp2, aten.expm1, aten.log, aten.log1p, aten.log2, aten.sin, aten.cos, aten.tanh, aten.erf),
    *(aten.sigmoid, aten.silu, aten.gelu, aten.softplus, aten.elu, aten.mish, aten.rsqrt),
)
_IN_FIXED_ORDER: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _multiply,
    aten.addmm.default: _multiply_add,
    aten.mean.dim: _reduce,
    aten.sum.dim_IntList: _reduce,
    aten.logsumexp.default: _log_sum_exp,
    aten.pow.Tensor_Scalar: compute_elementwise,
    **{operation.default: compute_elementwise for operation in _ELEMENTWISE},
}
"""Operations whose usual order depends on the batch, with their replacements."""
