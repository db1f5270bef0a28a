"""Actions as tokens: a number becomes one of n equal bins, and a bin a token `<act_0>`, `<act_1>`, ...

A language policy generates them as words, and `rollout.allowed_tokens` excludes all other tokens. A tokenizer must
contain them as ordinary tokens: replies lack special tokens, unless `rollout.skip_special_tokens` is false.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

# No leading zeros: <act_07> would be a second text for the same bin.
_TOKEN = re.compile(r"<act_(0|[1-9]\d{0,8})>")


class NotActions(ValueError):
    """Reason why a reply is not a sequence of action tokens, as a clause."""


def list_action_tokens(n: int) -> list[str]:
    """List the texts of the first `n` action tokens.

    >>> list_action_tokens(3)
    ['<act_0>', '<act_1>', '<act_2>']
    """
    return [f"<act_{i}>" for i in range(n)]


def write_action_tokens(bins: Sequence[int]) -> str:
    """Encode bins as a reply.

    >>> write_action_tokens([4, 0])
    '<act_4><act_0>'
    """
    return "".join(f"<act_{i}>" for i in bins)


def read_action_tokens(reply: str) -> list[int]:
    """Parse the bins of a reply. Raises NotActions for any other text.

    >>> read_action_tokens("<act_4><act_0> ")
    [4, 0]
    """
    said = reply.strip()
    if rest := _TOKEN.sub("", said).strip():
        raise NotActions(f"{rest[:40]!r} is no action token such as <act_0>")
    return [int(number) for number in _TOKEN.findall(said)]


def find_bins(values: ArrayLike, low: ArrayLike, high: ArrayLike, n: int) -> list[int]:
    """Map values to `n` equal bins from low to high, clipping values outside.

    >>> find_bins([-1.0, 0.0, 0.99, 7.0], -1.0, 1.0, 4)
    [0, 2, 3, 3]
    """
    lowest = np.asarray(low, np.float64)
    share = (np.asarray(values, np.float64) - lowest) / (np.asarray(high, np.float64) - lowest)
    # Clipped, because `high` itself would fall into a bin n that does not exist.
    return np.clip(np.floor(share * n), 0, n - 1).astype(int).reshape(-1).tolist()


def find_centres(bins: Sequence[int], low: ArrayLike, high: ArrayLike, n: int) -> NDArray[np.float64]:
    """Return the centre value of each bin, [k].

    >>> find_centres([0, 3], -1.0, 1.0, 4).tolist()
    [-0.75, 0.75]
    """
    low = np.asarray(low, np.float64).reshape(-1)
    return low + (np.asarray(bins) + 0.5) / n * (np.asarray(high, np.float64).reshape(-1) - low)
