"""AllowedTokens: the token set shared by the sampler and the trainer's softmax.

All other tokens have probability 0 in both, so log-probabilities agree. This set is fixed. The sets of top-p, top-k and
min-p change with the context, and are recorded with each token (core/types/kept_sets.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import RunStopped

LOWEST = -(2.0**96)
"""Logit of a banned token. The probability is exactly 0; with -inf, entropy would compute 0 x -inf = NaN, and so would
the gradient with the lowest float, which a weight above 1 makes -inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedTokens:
    """Set of token ids; all tokens by default."""

    allowed: tuple[int, ...] | None = None
    """Sorted ids of the allowed tokens, stop tokens included; None: all except `banned`."""
    banned: tuple[int, ...] = ()
    """Sorted ids of excluded tokens (placeholders of images), used if `allowed` is None."""

    @property
    def is_everything(self) -> bool:
        """True if all tokens are allowed."""
        return self.allowed is None and not self.banned

    def find_outside(self, ids: Sequence[int]) -> list[int]:
        """Return the ids outside the set.

        >>> AllowedTokens(allowed=(1, 3)).find_outside([3, 4]), AllowedTokens(banned=(3,)).find_outside([3, 4])
        ([4], [3])
        """
        if self.allowed is not None:
            return [i for i in ids if i not in self.allowed]
        return [i for i in ids if i in self.banned]

    def restrict(self, logits: Tensor, temperature: float) -> Tensor:
        """Return logits [m, V] divided by the temperature, in float32 or wider, ready for softmax; perhaps themselves.

        With `allowed`, only those columns remain: [m, A]. `to_columns` and `to_ids` map between tokens and columns.
        """
        if self.allowed is not None:
            # Select before the conversion, so that only A of the V columns exist in float32.
            logits = logits.index_select(-1, _to_tensor(self.allowed, logits))
        logits = divide(logits, temperature)
        return logits.index_fill(-1, _to_tensor(self.banned, logits), LOWEST) if self.banned else logits

    def to_columns(self, ids: Tensor) -> Tensor:
        """Map token ids to columns of the restricted logits. Every id must be in the set."""
        # `allowed` is sorted, so the column of an id is its rank in it.
        return ids if self.allowed is None else torch.searchsorted(_to_tensor(self.allowed, ids), ids)

    def to_ids(self, columns: Tensor) -> Tensor:
        """Map columns of the restricted logits to token ids."""
        return columns if self.allowed is None else _to_tensor(self.allowed, columns)[columns]

    def check_labels(self, labels: Tensor) -> None:
        """Raise RunStopped if a trained token, of labels [M], has probability 0."""
        if self.is_everything:
            return
        # Its log-probability would be about -8e28: a single token would decide the loss.
        listed = torch.isin(labels, _to_tensor(self.banned if self.allowed is None else self.allowed, labels))
        if (wrong := labels[listed if self.allowed is None else ~listed]).numel():
            raise RunStopped(
                f"a sample contains token {int(wrong[0])}, which the policy may not choose (rollout.allowed_tokens, "
                "and the placeholders of images); the engine's generate() must keep to EngineConfig.allowed_tokens"
            )


EVERY_TOKEN = AllowedTokens()
"""Unrestricted set."""


def _to_tensor(ids: Sequence[int], beside: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=beside.device)


def divide(logits: Tensor, temperature: float) -> Tensor:
    """Return logits divided by the temperature, in float32 or wider; perhaps themselves."""
    # bfloat16 has 8 significant bits, too few for log-probabilities; a float64 model keeps its own dtype.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits / temperature  # a division by 1 would copy them
