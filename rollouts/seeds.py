"""Sampling seeds of requests."""

from __future__ import annotations

import hashlib


def make_seed(run_seed: int, ticket: int, sibling: int, turn: int | str) -> int:
    """Return the sampling seed of a request, below 2^63. It is independent of time and engine.

    Siblings have consecutive seeds, as the samples of one request have in vLLM (`Engine.generate_group`).
    turn: number of the reply in the conversation, or a key for an agent's request without one.
    """
    digest = hashlib.blake2b(f"{run_seed}/{ticket}/{turn}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 2) + sibling  # 62 bits: with the sibling it must fit a signed integer
