"""AllowedTokens set: the tokens that a policy may choose, for the sampler and for the trainer's softmax alike.

All other tokens have probability 0 in both, so log-probabilities agree. This is the one exact way to restrict sampling:
top-k, top-p and grammars change the distribution with the context, and the trainer would have to follow them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import RunStopped

LOWEST = torch.finfo(torch.float32).min
"""Logit of a banned token. Its probability is 0 to the last bit; -inf would make NaN of the entropy's 0 x -inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedTokens:
    """Set of token ids; the default allows every token."""

    allowed: tuple[int, ...] | None = None
    """Sorted ids that may be chosen, stop tokens included; None: all but those of `banned`."""
    banned: tuple[int, ...] = ()
    """Sorted ids that may not be chosen, where `allowed` is None: placeholders of images."""

    @property
    def is_everything(self) -> bool:
        """Whether every token may be chosen."""
        return self.allowed is None and not self.banned

    def find_outside(self, ids: Sequence[int]) -> list[int]:
        """Return those of `ids` that may not be chosen.

        >>> AllowedTokens(allowed=(1, 3)).find_outside([3, 4]), AllowedTokens(banned=(3,)).find_outside([3, 4])
        ([4], [3])
        """
        if self.allowed is not None:
            return [i for i in ids if i not in self.allowed]
        return [i for i in ids if i in self.banned]

    def restrict(self, logits: Tensor, temperature: float) -> Tensor:
        """Return the logits [m, V] over the temperature, in float32 at least, as their softmax is to be taken.

        With `allowed` these are its columns alone, [m, A]: `to_columns` and `to_ids` tell which token has which.
        """
        if self.allowed is not None:
            logits = logits.index_select(-1, _to_tensor(self.allowed, logits))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        return logits.index_fill(-1, _to_tensor(self.banned, logits), LOWEST) if self.banned else logits

    def to_columns(self, ids: Tensor) -> Tensor:
        """Return the column of each token in what `restrict` returns; they must be in the set."""
        return ids if self.allowed is None else torch.searchsorted(_to_tensor(self.allowed, ids), ids)

    def to_ids(self, columns: Tensor) -> Tensor:
        """Return the token of each column of what `restrict` returns."""
        return columns if self.allowed is None else _to_tensor(self.allowed, columns)[columns]

    def check_labels(self, labels: Tensor) -> None:
        """Raise RunStopped where a token that is trained on, of labels [M], has probability 0."""
        if self.is_everything:
            return
        listed = torch.isin(labels, _to_tensor(self.banned if self.allowed is None else self.allowed, labels))
        if (wrong := labels[listed if self.allowed is None else ~listed]).numel():
            raise RunStopped(
                f"a sample holds the token {int(wrong[0])}, which the policy may not choose (rollout.allowed_tokens, "
                "and the placeholders of images): the engine samples what EngineConfig.allowed_tokens excludes: "
                "correct its generate()"
            )


EVERY_TOKEN = AllowedTokens()
"""AllowedTokens without any restriction."""


def _to_tensor(ids: Sequence[int], beside: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=beside.device)
