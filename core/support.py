"""Support set: the tokens that a policy may choose, for the sampler and for the trainer's softmax alike.

All other tokens have probability 0 in both, so log-probabilities agree. This is the one exact way to restrict sampling:
top-k, top-p and grammars change the distribution with the context, and the trainer would have to follow them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Set of token ids; the default allows every token."""

    allowed: tuple[int, ...] | None = None
    """Sorted ids that may be chosen, stop tokens included; None: all but those of `banned`."""
    banned: tuple[int, ...] = ()
    """Sorted ids that may not be chosen, where `allowed` is None: placeholders of pictures."""
