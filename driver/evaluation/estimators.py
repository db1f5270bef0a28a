"""Estimators of pass@k, pass^k and majority@k from n samples of a prompt, c of which pass, for k <= n.

    pass@k      probability that at least one of k samples passes: 1 - C(n-c, k) / C(n, k)
    pass^k      probability that all of k samples pass: C(c, k) / C(n, k)
    majority@k  probability that the most common answer of k samples passes

All are unbiased: their expectation does not depend on n (https://arxiv.org/abs/2107.03374 for pass@k).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def choose_ks(samples: int) -> list[int]:
    """Return the powers of two up to `samples`, and `samples` itself.

    >>> choose_ks(6)
    [1, 2, 4, 6]
    """
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that at least one of k samples passes, from c of n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that all of k samples pass, from c of n.

    >>> pass_hat_k(4, 2, 2) == 1 / 6
    True
    """
    return comb(c, k) / comb(n, k)


def majority_at_k(answers: Sequence[str], passes: Sequence[bool], k: int) -> float:
    """Estimate the probability that the most common answer of k samples passes.

    It averages over n // k consecutive blocks of k samples. Equally common answers share a block's vote. An answer that
    passes only in some samples counts by the fraction.

    >>> majority_at_k(["7", "7", "8", "8"], [True, True, False, False], 4)
    0.5
    """
    # Disjoint blocks are unbiased; an average over all subsets would have less variance, but C(n, k) terms.
    blocks = range(len(answers) // k)
    votes = (_count_vote(answers[b * k : (b + 1) * k], passes[b * k : (b + 1) * k]) for b in blocks)
    return sum(votes) / len(blocks)


def _count_vote(answers: Sequence[str], passes: Sequence[bool]) -> float:
    """Return the mean pass fraction of the most common answers."""
    cast: dict[str, list[bool]] = {}
    for answer, passed in zip(answers, passes, strict=True):
        cast.setdefault(answer, []).append(passed)
    most = max(map(len, cast.values()))
    winners = [sum(of) / len(of) for of in cast.values() if len(of) == most]
    return sum(winners) / len(winners)
