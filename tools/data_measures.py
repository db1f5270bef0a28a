"""Measures of texts for tools/data_report.py: lengths, duplicates, and overlap by n-grams."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SHINGLE = 5
"""Words of a shingle, the unit of near duplicates."""
HASHES, BANDS = 64, 16
"""Hash functions of a signature, and the bands that it is cut into: rows with an equal band are compared."""
PRIME = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Rows with a property, and examples of them."""

    rows: list[int]
    """Numbers of the rows."""
    of: list[int]
    """For each, the number of the row that it is like, in its own list or in the list that it is compared with."""


def split_words(text: str) -> list[str]:
    """Return the words and numbers of a text, in lower case.

    >>> split_words("What is 2+2, then?")
    ['what', 'is', '2', '2', 'then']
    """
    return re.findall(r"\w+", text.lower())


def find_quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Return minimum, quantiles and maximum of lengths."""
    names = {"least": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "most": 1.0}
    return {name: int(np.quantile(lengths, q, method="higher")) for name, q in names.items()}


def count_bins(lengths: Sequence[int], bins: int = 24) -> tuple[list[int], list[int]]:
    """Return the counts of a histogram of lengths, and the edges of the bins; [bins] and [bins + 1]."""
    counts, edges = np.histogram(lengths, bins=min(bins, max(1, max(lengths) - min(lengths))))
    return counts.tolist(), [int(edge) for edge in edges]


def find_copies(texts: Sequence[str]) -> Found:
    """Find rows whose text is that of an earlier row, but for case and white space."""
    first: dict[str, int] = {}
    found = Found(rows=[], of=[])
    for i, text in enumerate(texts):
        plain = " ".join(text.lower().split())
        if (earlier := first.setdefault(plain, i)) != i:
            found.rows.append(i)
            found.of.append(earlier)
    return found


def find_near_copies(texts: Sequence[str], *, at_least: float = 0.8) -> Found:
    """Find rows that share `at_least` of their shingles with an earlier row (Jaccard), and are no exact copies.

    MinHash with locality-sensitive hashing: of pairs with a similarity of 0.8, over 99 % are compared. Texts of fewer
    words than a shingle are left out.
    """
    exact = set(find_copies(texts).rows)
    random = np.random.default_rng(0)
    a = random.integers(1, PRIME, size=(HASHES, 1), dtype=np.uint64)
    b = random.integers(0, PRIME, size=(HASHES, 1), dtype=np.uint64)
    buckets: dict[tuple[int, bytes], list[int]] = {}
    shingles: dict[int, set[int]] = {}
    found = Found(rows=[], of=[])
    for i, text in enumerate(texts):
        words = split_words(text)
        if i in exact or len(words) < SHINGLE:
            continue
        own = {zlib.crc32(" ".join(words[j : j + SHINGLE]).encode()) for j in range(len(words) - SHINGLE + 1)}
        signature = ((a * np.array([*own], dtype=np.uint64) + b) % np.uint64(PRIME)).min(axis=1).astype(np.uint32)
        keys = [(n, band.tobytes()) for n, band in enumerate(signature.reshape(BANDS, -1))]
        earlier = dict.fromkeys(j for key in keys for j in buckets.get(key, []))
        like = next((j for j in earlier if len(own & shingles[j]) >= at_least * len(own | shingles[j])), None)
        if like is not None:
            found.rows.append(i)
            found.of.append(like)
            continue
        # only rows that are like no earlier one are kept, so buckets stay short
        shingles[i] = own
        for key in keys:
            buckets.setdefault(key, []).append(i)
    return found


def find_overlap(texts: Sequence[str], held_out: Sequence[str], *, n: int) -> Found:
    """Find rows that share `n` successive words with a held-out text, or all words of a shorter one."""
    grams: dict[int, dict[tuple[str, ...], int]] = {}
    for i, text in enumerate(held_out):
        words = split_words(text)
        size = min(n, len(words))
        for j in range(len(words) - size + 1 if size else 0):
            grams.setdefault(size, {}).setdefault(tuple(words[j : j + size]), i)
    found = Found(rows=[], of=[])
    for i, text in enumerate(texts):
        words = split_words(text)
        for size, known in grams.items():
            pieces = (tuple(words[j : j + size]) for j in range(len(words) - size + 1))
            # a few words alone say little: a short text must be all of the row
            hit = next((known[p] for p in pieces if p in known and (size == n or len(words) == size)), None)
            if hit is not None:
                found.rows.append(i)
                found.of.append(hit)
                break
    return found
