"""What an engine is: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled after a prefix. The lists have one length."""

    token_ids: list[int]
    logp: list[float]
    """Log-probability of each sampled token, at the sampling temperature."""
    versions: list[int]
    """Policy version that sampled each token."""
    stop: Literal["eos", "length"]


class Engine(Protocol):
    """Knows nothing of chat, groups, rewards or algorithms.

    Life: built in its process, `start`ed once, then weights arrive (see rollouts/weight_sync.py) and
    completions are asked for, concurrently; `close` ends its processes.
    """

    async def generate(self, token_ids: list[int], *, max_new_tokens: int, seed: int) -> Completion:
        """Sample one continuation of `token_ids` at the run's temperature."""
        ...

    async def probe(self, token_ids: list[int]) -> list[float]:
        """Log-probability, at temperature 1, of token_ids[1:] given what is before each; float32."""
        ...

    async def fingerprint(self) -> list[Mapping[str, int]]:
        """One mapping per tensor-parallel rank: what that rank's last weight load consumed; see fingerprint.py."""
        ...

    async def close(self) -> None: ...
