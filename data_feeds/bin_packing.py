"""How sequences are dealt over micro-batches and ranks: a matter of memory and speed, never of the gradient."""

from __future__ import annotations

from collections.abc import Callable

from core.errors import RunStopped

COST_IS_SQUARE_AT = 12_288
"""Tokens of a sequence at which attention costs as much as everything else; see cost_of."""


def cost_of(n: int) -> float:
    """What n tokens in one sequence cost, in tokens: n + n^2 / 12288.

    A layer of width d spends some 24 d^2 operations on a token outside attention and, causally, 2 n d inside it:
    a ratio of n / 12 d. The width is taken to be 1024 whatever the model: in a short sequence the square hardly
    counts, and in a long one it says what matters, that one of 2n tokens costs more than two of n.
    """
    return n + n * n / COST_IS_SQUARE_AT


def cut(sizes: list[int], max_tokens: int, *, ranks: int = 1, padded: bool = True) -> list[list[int]]:
    """Cut units (sequences, say) into micro-batches of at most `max_tokens`; returns indices into `sizes`.

    Rank r takes every `ranks`-th micro-batch from the r-th on: as many as every other, so that all run the same
    number of forward passes, and of about the same cost. A micro-batch without a unit is possible where there
    are fewer units than ranks.

    `padded` counts rows x longest row, what a padded layout really holds, and keeps units of like length together;
    else the sum of lengths counts, and every micro-batch gets long ones and short ones.
    """
    if not sizes:
        raise RunStopped(
            "an update has no token to learn from: its samples failed, or the algorithm left them out (overlong.mode)"
        )
    longest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    if (longest := sizes[longest_first[0]]) > max_tokens:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit trainer.micro_batch_tokens={max_tokens}: raise it"
        )

    def cost(chosen: list[int]) -> float:
        if padded:
            return len(chosen) * cost_of(sizes[chosen[0]]) if chosen else 0.0
        return sum(cost_of(sizes[i]) for i in chosen)

    by_cut = _of_like_length if padded else _mixed
    return _deal(by_cut(sizes, longest_first, max_tokens, ranks), ranks, cost)


def _of_like_length(sizes: list[int], longest_first: list[int], max_tokens: int, ranks: int) -> list[list[int]]:
    """Neighbours in length share a micro-batch: as few of them as fit, and the largest as small as may be."""

    def bins(cap: int) -> list[list[int]]:
        filled: list[list[int]] = []
        for i in longest_first:
            if not filled or (len(filled[-1]) + 1) * sizes[filled[-1][0]] > cap:
                filled.append([])
            filled[-1].append(i)
        return filled

    wanted = -(-len(bins(max_tokens)) // ranks) * ranks
    low, high = sizes[longest_first[0]], max_tokens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(bins(middle)) <= wanted else (middle + 1, high)
    even = bins(low)
    return even + [[] for _ in range(wanted - len(even))]


def _mixed(sizes: list[int], longest_first: list[int], max_tokens: int, ranks: int) -> list[list[int]]:
    """As few micro-batches as are found to fit, each of about the same cost."""
    n = -(-sum(sizes) // max_tokens // ranks) * ranks
    while (filled := _spread(sizes, longest_first, max_tokens, n)) is None:
        n += ranks  # ends: with one for every unit they all have room
    return filled


def _spread(sizes: list[int], longest_first: list[int], max_tokens: int, n: int) -> list[list[int]] | None:
    """The longest that is left goes where the least cost is so far, of those with room; None if none has."""
    filled: list[list[int]] = [[] for _ in range(n)]
    held, costs = [0] * n, [0.0] * n
    for i in longest_first:
        b = min((b for b in range(n) if held[b] + sizes[i] <= max_tokens), key=costs.__getitem__, default=None)
        if b is None:
            return None
        filled[b].append(i)
        held[b] += sizes[i]
        costs[b] += cost_of(sizes[i])
    return filled


def _deal(bins: list[list[int]], ranks: int, cost: Callable[[list[int]], float]) -> list[list[int]]:
    """The same micro-batches, interleaved for the ranks: the costliest first, to who has least and is not full."""
    each = len(bins) // ranks
    hands: list[list[list[int]]] = [[] for _ in range(ranks)]
    held = [0.0] * ranks
    for chosen in sorted(bins, key=cost, reverse=True):
        rank = min((r for r in range(ranks) if len(hands[r]) < each), key=held.__getitem__)
        hands[rank].append(chosen)
        held[rank] += cost(chosen)
    return [hand[n] for n in range(each) for hand in hands]
