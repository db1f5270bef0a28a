"""Keyed permutations of row numbers that need no memory."""

from __future__ import annotations

import hashlib
from functools import lru_cache

ROUNDS = 4
_BITS_64 = 2**64 - 1


def permute(index: int, n: int, key: str) -> int:
    """Return the place of `index` in a random permutation of 0..n-1; each key is another permutation.

    A Feistel network over the next power of four. Results of n or more are mapped again (cycle walking), on average
    fewer than four times. It is a bijection whatever the rounds do, and with four of them it looks random.
    """
    half = ((n - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    keys = _round_keys(key)
    while True:
        left, right = index >> half, index & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        index = left << half | right
        if index < n:
            return index


@lru_cache(maxsize=1024)
def _round_keys(key: str) -> tuple[int, ...]:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "big") for i in range(0, 8 * ROUNDS, 8))


def _mix(value: int) -> int:
    """Return 32 bits of a hash of an integer, as of splitmix64."""
    value = value * 0x9E3779B97F4A7C15 & _BITS_64
    value = (value ^ value >> 32) * 0xD6E8FEB86659FD93 & _BITS_64
    return value >> 32
