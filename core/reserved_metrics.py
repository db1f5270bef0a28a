"""Names of metrics that no part of a reward, no source and no metric of a loss may have in the log."""

from __future__ import annotations

from core import metrics as names

_REWARDS = (
    *(names.REWARD_MEAN, names.REWARD_STD, names.REWARD_LENGTH_CORR),
    *(names.REWARD_MEAN_DRAWN, names.REWARD_OTHERS),
)
_LOSSES = (
    *(names.TRAIN_LOSS, names.TRAIN_TOKENS, names.TRAIN_LR, names.TRAIN_GRAD_NORM),
    *(names.TRAIN_SKIPPED, names.TRAIN_PADDING, names.TRAIN_SHARED),
)
REWARD_NAMES = frozenset(name.removeprefix(names.REWARD_PART.format("")) for name in _REWARDS)
"""Names below reward/."""
LOSS_NAMES = frozenset(name.removeprefix(names.TRAIN) for name in _LOSSES)
"""Names below train/."""
