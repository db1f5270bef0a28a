"""Numbers of every token of an update under several losses: for the page of a replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.capture.compare import judge_tokens
from analysis.capture.gradient import Computed
from analysis.capture.snapshot import StepSnapshot
from analysis.capture.tokens import CapturedSample, read_snapshot_samples
from core.types.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """Per-token numbers of a loss over all samples of the update, concatenated; NaN for untrained tokens."""

    name: str
    slope: Floats
    """Derivative of the update's loss by the token's log-probability: a step makes the token likelier where it is
    negative."""
    clipped: Floats | None
    """1 for tokens that the loss reports as clipped, capped or masked, else 0; None without such a metric."""
    judged: Floats
    """OPPOSITE or ONE_SILENT (compare.py) for tokens that differ from the run's own loss, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMaps:
    """Samples of an update with the numbers of every loss."""

    samples: list[CapturedSample]
    losses: list[LossTokens]
    """The run's own first."""

    def spans(self) -> Iterator[tuple[CapturedSample, slice]]:
        """Yield every sample with the place of the tokens."""
        first = 0
        for sample in self.samples:
            after = first + len(sample.pieces)
            yield sample, slice(first, after)
            first = after


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Token that two losses treat differently."""

    sample: int
    """Number among the update's samples."""
    token: int
    """Number in the sample."""
    judged: int
    """OPPOSITE or ONE_SILENT."""
    of_run: float
    """Slope of the run's own loss; 0 for tokens that it does not train on."""
    of_loss: float


def describe_tokens(name: str, one: Computed, own: Computed) -> LossTokens:
    """Return the numbers of a loss; own: numbers of the run's loss."""

    def mark(values: NDArray[np.generic], counted: NDArray[np.bool_]) -> Floats:
        return np.where(counted, values, np.nan).astype(np.float32)

    return LossTokens(
        name=name,
        slope=mark(one.slopes, one.trained),
        clipped=None if one.clipped is None else mark(one.clipped, one.trained),
        judged=mark(judge_tokens(one, own), one.trained | own.trained),
    )


def read_update(snapshot: StepSnapshot, update: int) -> list[CapturedSample]:
    """Return the samples of an update with texts, in group order."""
    captured = read_snapshot_samples(snapshot.folder, snapshot.manifest.step)
    # the groups of StepSnapshot.groups_of: every n-th one, from the update's number on
    return [s for s in captured if s.group % snapshot.manifest.run.updates_per_step == update]


def list_disagreements(maps: TokenMaps, loss: LossTokens, most: int) -> list[Disagreement]:
    """Return the tokens on which a loss and the run's own disagree, at most `most`, those that differ most first."""
    # a token that only one of the losses trains on has the slope 0 under the other
    own, other = (np.nan_to_num(one.slope.astype(np.float64)) for one in (maps.losses[0], loss))
    places = np.flatnonzero(np.nan_to_num(loss.judged))
    # stable: equal differences keep the order of the tokens, so the list is the same every time
    worst = places[np.argsort(-np.abs(own[places] - other[places]), kind="stable")][:most]
    firsts = np.array([span.start for _, span in maps.spans()])
    # the last sample that begins at or before the token
    numbers = np.searchsorted(firsts, worst, side="right") - 1
    return [
        Disagreement(
            sample=int(number),
            token=int(place - firsts[number]),
            judged=int(loss.judged[place]),
            of_run=float(own[place]),
            of_loss=float(other[place]),
        )
        for place, number in zip(worst, numbers, strict=True)
    ]
