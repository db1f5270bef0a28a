"""Base of samplers, the history that they read, and their two ways to choose.

    class Newest(Sampler):
        def choose(self, pool, history, *, count, rng):
            return take_best(pool, -history.drawn[pool], count)

A sampler is a pure function: the same arguments give the same rows, so neither overlap nor a resume changes them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from core.errors import RunStopped, UserError, name_error
from core.strict_model import StrictModel

Rows = NDArray[np.int64]
"""Numbers of rows in a source."""
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Results of the N rows of one source, an array [N] each. Samplers get a copy that cannot be written.

    `drawn` counts all earlier choices. The others are of finished groups below a ticket that depends on the step alone.
    """

    drawn: Rows
    """Number of times that the row was chosen."""
    groups: Rows
    """Number of finished groups with a reward."""
    samples: Numbers
    """Number of samples with a reward. Those of a group lose weight with each later group of the row: `forget`."""
    passed: Numbers
    """Number of samples that passed, with the same weights."""
    last_rate: Numbers
    """Pass rate of the last group; 0 without one."""
    spread: Numbers
    """Mean absolute difference between reward and group mean in the last group; 0 without one."""

    @staticmethod
    def empty(rows: int) -> History:
        """Return the history before the first group."""
        drawn, groups = np.zeros((2, rows), dtype=np.int64)
        samples, passed, last_rate, spread = np.zeros((4, rows))
        return History(drawn=drawn, groups=groups, samples=samples, passed=passed, last_rate=last_rate, spread=spread)

    @property
    def seen(self) -> NDArray[np.bool_]:
        """[N], True for rows with a finished group."""
        return self.groups > 0

    def view(self) -> History:
        """Return the same arrays, read-only."""
        views = {field.name: getattr(self, field.name).view() for field in fields(History)}
        for view in views.values():
            view.setflags(write=False)
        return History(**views)


class Sampler(StrictModel):
    """Base of every sampler. Fields are settings that a recipe may set; only `choose` is required."""

    name: str = ""
    file: str = ""
    """Path of a Python file with a Sampler, instead of `name`."""
    pass_reward: float = 1.0
    """Minimum reward of a sample that counts as passed."""
    forget: float = Field(0.9, gt=0, le=1)
    """Weight of a row's earlier results after each new group of the row; 1: nothing is forgotten."""

    @abstractmethod
    def choose(self, pool: Rows, history: History, *, count: int, rng: np.random.Generator) -> Rows:
        """Return `count` rows of `pool`.

        pool: rows of the next draws without a sampler, in their order; rows may come twice. Up to 100,000 rows, it has
        all of them; of larger sources 8 rows for each that is needed. rng: seeded by run, source and step.
        """


def take_best(pool: Rows, scores: NDArray[np.generic], count: int) -> Rows:
    """Return the `count` rows of the pool with the highest scores; equal scores in the pool's order.

    scores: [len(pool)]. Rows come again only if the pool has fewer than `count`.
    """
    rows, first = np.unique(pool, return_index=True)
    order = np.lexsort((first, -scores[first].astype(np.float64)))
    return np.resize(rows[order], count)


def take_weighted(pool: Rows, weights: Numbers, count: int, rng: np.random.Generator) -> Rows:
    """Return `count` rows of the pool at random, with probabilities proportional to `weights` [len(pool)].

    Without replacement, unless fewer than `count` rows have a weight above 0. Raises RunStopped if none has.
    """
    rows, first = np.unique(pool, return_index=True)
    kept = weights[first] > 0
    rows, weight = rows[kept], weights[first][kept]
    if not len(rows):
        raise RunStopped("data.sampler: no row is left that the sampler would draw: loosen its settings")
    # Gumbel's trick: the largest of log w + noise are a sample without replacement (Efraimidis and Spirakis, 2006)
    keys = np.log(weight) + rng.gumbel(size=len(rows))
    return np.resize(rows[np.argsort(-keys, kind="stable")], count)


def choose_rows(sampler: Sampler, pool: Rows, history: History, *, count: int, rng: np.random.Generator) -> Rows:
    """Return the rows that a sampler chooses. Raises UserError for a wrong number, or rows outside of the pool."""
    key = f"data.sampler={sampler.name or sampler.file}"
    try:
        found = np.asarray(sampler.choose(pool, history.view(), count=count, rng=rng))
    except (UserError, RunStopped):
        raise
    except Exception as error:  # a border: a sampler is the user's code
        raise UserError(f"{key}: choose() raised {name_error(error)}") from error
    if found.shape != (count,) or found.dtype.kind not in "iu":
        raise UserError(
            f"{key}: choose() must return {count} whole numbers, and returned an array of {found.dtype} with the shape "
            f"{list(found.shape)}"
        )
    if len(outside := np.setdiff1d(found, pool)):
        raise UserError(f"{key}: choose() returned the row {outside[0]}, which is not in the pool: return rows of it")
    return found.astype(np.int64)
