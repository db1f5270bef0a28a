"""Reductions of per-token values over an update, equal to the bit however it is split into micro-batches and ranks.

    count(x)                  number of tokens; of a mask, those where it is True
    exact_sum(x)              sum, rounded once at the end
    kth(x, k=10)              the 10th largest value;  kth(x, fraction=0.2): the smallest value of the largest fifth
    quantile(x, 0.8)          linear interpolation between neighbouring order statistics
    largest(x)                the largest value
    gather(x, ids)            a value per sequence or group: those of the whole update, ascending

`Algorithm.totals` returns or yields them by name. Only integers are added over ranks. Equal values share their fate if
a loss compares with the result (`>=`), and never with an index. The host waits for the device once for each exact_sum
and each gather, and for no other reduction.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Collective = Generator[Tensor, Tensor, T]
"""Computation that yields this rank's part of a sum over the ranks, and is sent the sum."""

EXPONENTS = (32, 0, -32, -64)
"""Powers of two of the limbs of an exact sum: values up to 2^64, in units of 2^-64."""
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Reduction over all tokens of an update, seen from a micro-batch."""

    kind: Literal["count", "sum", "kth", "quantile", "gather"]
    values: Tensor
    """[M] float, detached."""
    where: Tensor | None = None
    """[M] bool, True for the tokens that count; None: all."""
    at: float | None = None
    """Place of an order statistic: k, or a fraction of the tokens for kth; the quantile."""
    is_fraction: bool = False
    """True if `at` is a fraction."""
    ids: Tensor | None = None
    """[M] int64, sequence or group of each token, for gather."""

    @property
    def live(self) -> Tensor:
        """True for the tokens that count, [M] bool."""
        return torch.ones_like(self.values, dtype=torch.bool) if self.where is None else self.where

    @property
    def keeps_values(self) -> bool:
        """True if the values are compared with the result later, as those of an order statistic."""
        return self.kind in ("kth", "quantile", "gather")

    @property
    def compared(self) -> Tensor:
        """Values with NaN, which no comparison selects, where a token does not count, [M]."""
        return self.values if self.where is None else self.values.masked_fill(~self.where, math.nan)

    @property
    def rule(self) -> tuple[str, float | None, bool]:
        """Kind and place, the same in every micro-batch."""
        return self.kind, self.at, self.is_fraction


Stage = Mapping[str, Tensor | Reduction]
"""Reductions by name. A tensor is added in floating point, so its last bits depend on the split."""
Stages = Generator[Stage, dict[str, Tensor], None]
"""Stages one after another; each is sent all results so far."""


def count(x: Tensor) -> Reduction:
    """Count the tokens of the update, or of a mask [M] bool the tokens where it is True; an integer."""
    return Reduction(kind="count", values=x.detach())


def exact_sum(x: Tensor, where: Tensor | None = None) -> Reduction:
    """Sum x [M] over the update, in float64; NaN if a value is not finite, or as large as 2^64."""
    return Reduction(kind="sum", values=x.detach(), where=where)


def kth(x: Tensor, *, k: int | None = None, fraction: float | None = None, where: Tensor | None = None) -> Reduction:
    """Find the k-th largest value of x [M] in the update, k = 1 for the largest; NaN if no token counts.

    fraction: k is this part of the tokens that count, rounded down, at least 1. Of fewer than k values: the smallest.
    Raises ValueError unless either k or fraction is given.
    """
    if (k is None) == (fraction is None):
        raise ValueError("kth() needs either k or fraction")
    if (k is not None and k < 1) or (fraction is not None and not 0 <= fraction <= 1):
        raise ValueError(f"kth() needs k >= 1 or a fraction in [0, 1], found k={k}, fraction={fraction}")
    at = float(k) if k is not None else fraction
    return Reduction(kind="kth", values=x.detach(), where=where, at=at, is_fraction=k is None)


def largest(x: Tensor, where: Tensor | None = None) -> Reduction:
    """Find the largest value of x [M] in the update; NaN if no token counts."""
    return kth(x, k=1, where=where)


def quantile(x: Tensor, q: float, where: Tensor | None = None) -> Reduction:
    """Find the q-quantile of x [M] in the update, linear as in numpy.quantile; NaN if no token counts."""
    if not 0 <= q <= 1:
        raise ValueError(f"quantile() needs q in [0, 1], found {q}")
    return Reduction(kind="quantile", values=x.detach(), where=where, at=q)


def gather(x: Tensor, ids: Tensor, where: Tensor | None = None) -> Reduction:
    """Collect a value per sequence or group of the update, ascending.

    ids: [M] int64, `tokens.seq_ids` or `tokens.group_ids`. x [M] has the same value at all tokens of an id; where:
    those of the ids that count.
    """
    return Reduction(kind="gather", values=x.detach(), where=where, ids=ids)


def reduce_parts(parts: Sequence[Reduction], *, rank: int, ranks: int) -> Collective[Tensor]:
    """Reduce the same reduction of all micro-batches of a rank, and over the ranks; 0-d, or [n] for gather."""
    first = parts[0]
    # to select the values that count, the host would wait for their number
    values, live = torch.cat([part.values for part in parts]), torch.cat([part.live for part in parts])
    match first.kind:
        case "count":
            return (yield (values if values.dtype == torch.bool else torch.ones_like(values)).sum().to(torch.int64))
        case "sum":
            return (yield from _sum_exactly(values.where(live, 0.0)))
        case "gather":
            firsts, counts = zip(*map(_take_first, parts), strict=True)
            return (yield from _gather(torch.cat(firsts), torch.cat(counts), rank=rank, ranks=ranks))
        case _:
            assert first.at is not None
            return (yield from _find_order_statistic(values, live, first))


def _sum_exactly(values: Tensor) -> Collective[Tensor]:
    """Add values as integers, a limb of 32 bits each, so that the order of addition has no effect."""
    values = values.double()
    fits = values.abs() < 2.0**64  # false for NaN
    rest, sign = values.abs().where(fits, 0.0), values.sign()
    sums = [(~fits).sum()]
    for exponent in EXPONENTS:
        unit = 2.0**exponent
        # exact but for the last: a float is cut at a bit of its mantissa
        limb = (rest / unit).floor() if exponent != EXPONENTS[-1] else (rest / unit).round()
        rest = rest - limb * unit
        sums.append((limb * sign.where(fits, 0.0)).to(torch.int64).sum())
    n_unfit, *limbs = (yield torch.stack(sums)).tolist()
    total = sum(limb << (exponent - EXPONENTS[-1]) for limb, exponent in zip(limbs, EXPONENTS, strict=True))
    # division of integers rounds once
    return values.new_tensor(math.nan if n_unfit else total / (1 << -EXPONENTS[-1]))


def _find_order_statistic(values: Tensor, live: Tensor, rule: Reduction) -> Collective[Tensor]:
    assert rule.at is not None
    # the numbers stay on the device, so that the host waits for none
    n, n_nan = (yield torch.stack([live.sum(), (live & values.isnan()).sum()])).unbind()
    if rule.kind == "kth":
        k = (rule.at * n.double()).long().clamp(min=1) if rule.is_fraction else n.clamp(max=int(rule.at))
        found = yield from _select_kth(values, live, k)
    else:
        place = rule.at * (n - 1).double()  # among the ascending values, from 0
        below = place.floor()
        low = yield from _select_kth(values, live, n - below.long())
        high = yield from _select_kth(values, live, (n - below.long() - 1).clamp(min=1))
        between = low + (place - below).to(values.dtype) * (high - low)
        found = low.where(place == below, between)  # else of two infinite values the difference is NaN
    return found.where((n > 0) & (n_nan == 0), math.nan)


def _select_kth(values: Tensor, live: Tensor, k: Tensor) -> Collective[Tensor]:
    """Select the k-th largest of all ranks' live values by their bits, 8 a round from the top, counting each digit.

    k: int64, 0-d, on the device.
    """
    integer, width = INTEGERS[values.dtype], 8 * values.element_size()
    bits = (values + 0.0).view(integer)  # -0 becomes 0
    top = 1 << (width - 1)
    # in the order of the values if read as unsigned: negative floats count down
    keys = torch.where(bits < 0, ~bits, bits ^ -top)
    each = live.long()
    chosen: list[Tensor] = []
    for shift in range(width - 8, -1, -8):
        digits = ((keys >> shift) & 255).long()
        # unlike bincount it does not ask for the largest digit
        counts = yield each.new_zeros(256).scatter_add(0, digits, each)
        from_top = counts.flip(0).cumsum(0)
        place = (from_top < k).sum()
        k = k - (from_top * (from_top < k)).max()
        each = each * (digits == 255 - place)
        chosen.append((255 - place) << shift)
    key = torch.stack(chosen).sum()
    return torch.where((key >> (width - 1)) & 1 == 1, key & (top - 1), ~key).to(integer).view(values.dtype)


def _take_first(part: Reduction) -> tuple[Tensor, Tensor]:
    """Return the value of each id from its first token, [M], and where it counts, [M] bool; other places are empty."""
    assert part.ids is not None
    order = torch.arange(len(part.values), device=part.values.device)
    begins = order.new_full((len(order),), len(order)).scatter_reduce(0, part.ids, order, "amin")
    live, begins = begins < len(order), begins.clamp(max=len(order) - 1)
    return part.values[begins], live if part.where is None else live & part.where[begins]


def _gather(values: Tensor, live: Tensor, *, rank: int, ranks: int) -> Collective[Tensor]:
    """Place the live values of each rank beside those of the others, and sort them."""
    sizes = torch.zeros(ranks, dtype=torch.int64, device=values.device)
    sizes[rank] = live.sum()
    counts: list[int] = (yield sizes).tolist()
    place = torch.zeros(sum(counts), dtype=torch.int64, device=values.device)
    begin = sum(counts[:rank])
    integer = INTEGERS[values.dtype]
    own = values[(~live).to(torch.int8).argsort(stable=True)]
    # as integers: the sum with zeros is exact; a rank of a sequence group that does not count finds no room
    place[begin : begin + counts[rank]] = own.view(integer).to(torch.int64)[: counts[rank]]
    return (yield place).to(integer).view(values.dtype).sort().values
