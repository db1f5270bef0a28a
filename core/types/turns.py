"""Turns of an episode: token span, reward and number of each reply of the policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.errors import UserError
from core.types.arrays import Mask

Spans = tuple[tuple[int, int], ...]
"""Token spans [begin, end)."""


def find_runs(mask: Mask) -> Spans:
    """Return the maximal spans in which the mask is True.

    >>> find_runs(np.array([False, True, True, False, True]))
    ((1, 3), (4, 5))
    """
    # Indices at which the mask changes; a run at either end of the mask has no change there.
    edges: list[int] = ((mask[1:] != mask[:-1]).nonzero()[0] + 1).tolist()
    if len(mask) and mask[0]:
        edges.insert(0, 0)
    if len(mask) and mask[-1]:
        edges.append(len(mask))
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def check_turns(turns: Spans, rewards: Sequence[float], numbers: Sequence[int], action_mask: Mask) -> None:
    """Raise UserError unless ordered turns cover exactly the sampled tokens, with one reward and number each."""
    end = 0
    for begin, after in turns:
        if not end <= begin < after <= len(action_mask):
            raise UserError(
                f"turns of a Sample must be spans [begin, end) in order, none empty, within its {len(action_mask)} "
                f"tokens; found {[*turns]!r:.80}"
            )
        if not action_mask[begin:after].all():
            raise UserError(
                f"the turn ({begin}, {after}) of a Sample contains a token that the policy did not choose; a turn "
                "must lie within action_mask"
            )
        end = after
    # The spans are disjoint here, so equal counts mean that the turns cover exactly the sampled tokens.
    covered = sum(after - begin for begin, after in turns)
    if turns and covered != (sampled := int(np.count_nonzero(action_mask))):
        raise UserError(
            f"the turns of a Sample cover {covered} of its {sampled} sampled tokens; add the span of every reply"
        )
    for name, values in (("turn_rewards", rewards), ("turn_numbers", numbers)):
        if values and len(values) != len(turns):
            raise UserError(
                f"{name} of a Sample must be empty or have one number per turn; found {len(values)} for {len(turns)} "
                "turns"
            )
    if not np.isfinite(rewards).all():
        raise UserError(f"turn_rewards of a Sample must be finite, found {[*rewards]}")
    # Through a set, so that equal numbers are refused too.
    if [*numbers] != sorted({*numbers}):
        raise UserError(f"turn_numbers of a Sample must rise from turn to turn, found {[*numbers]}")
