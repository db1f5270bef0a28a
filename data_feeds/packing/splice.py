"""Rows of a teacher with a prompt of its own: another prompt, and then the ids of the sample.

Only tokens before the first sampled one differ. All others are copied by id, those of tools and environments too, and
never encoded again: encode(decode(ids)) may differ from ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from core.types.arrays import BOOLS, INTS, Floats, Mask, to_column
from core.types.kept_sets import KeptSets
from core.types.samples import Column, Sample


def find_first_sampled(sample: Sample) -> int:
    """Return the position of the first token that the policy chose."""
    return int(sample.action_mask.argmax())


def splice(sample: Sample, prompt_ids: Sequence[int]) -> Sample:
    """Return the row of a sample under another prompt, with the same trained tokens, without columns.

    Raises ValueError for an empty prompt, after which nothing predicts the first reply's first token.
    """
    if not prompt_ids:
        raise ValueError("a teacher's prompt has no tokens")
    first, before = find_first_sampled(sample), np.zeros(len(prompt_ids))
    trained = np.concatenate([before.astype(BOOLS), sample.loss_mask[first:]])
    return replace(
        sample,
        token_ids=np.concatenate([to_column(prompt_ids, INTS), sample.token_ids[first:]]),
        action_mask=trained,
        rollout_logp=np.concatenate([before.astype(sample.float_dtype), sample.rollout_logp[first:]]),
        versions=np.concatenate([before.astype(INTS) - 1, sample.versions[first:]]),
        kept=None if sample.kept is None else _splice_kept(sample.kept, trained, first),
        routes=None,  # the engine's, under another prompt
        columns={},
        advantage=None,
        excluded=None,
        turns=(),
        turn_rewards=(),
        turn_numbers=(),
    )


def _splice_kept(kept: KeptSets, trained: Mask, first: int) -> KeptSets:
    """Return the sets of a row's trained tokens: the teacher's softmax is over the set that the policy chose from."""
    own = kept.take(np.arange(first, len(kept)))
    is_trained = trained[len(trained) - len(own) :]
    sizes = np.where(is_trained, own.sizes, 0)
    before = KeptSets.none(len(trained) - len(own))
    return KeptSets.join([before, KeptSets.of_sizes(own.ids[np.repeat(is_trained, own.sizes)], sizes)])


def align(sample: Sample, row: Sample, column: Column) -> Floats:
    """Return a column of a sample's row, [L of the row], at the tokens of the sample, [L]; 0 before the reply."""
    first = find_first_sampled(sample)
    own = np.zeros(len(sample.token_ids), dtype=sample.float_dtype)
    # counted from the end, for the prompts differ in length
    own[first:] = row.columns[column][len(row.token_ids) - (len(own) - first) :]
    return own
