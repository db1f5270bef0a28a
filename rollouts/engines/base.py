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

    Life: built in its process, with the keywords model_path, dtype, temperature, stop_token_ids, timeout_s (of one step
    of a weight update) and update (`rollout.update`: what becomes of requests that are being answered); then weights
    arrive and completions are asked for, concurrently; `close` ends its processes.

    An update is a `hold`, and then `load(version, buckets)` by a trainer in the same process, or `receive(version)` of
    what trainers send (weight_sync/broadcast.py). At its end the engine samples again, with the new weights alone.
    """

    async def generate(self, token_ids: list[int], *, max_new_tokens: int, seed: int) -> Completion:
        """Sample one continuation of `token_ids` at the run's temperature."""
        ...

    async def probe(self, token_ids: list[int]) -> list[float]:
        """Log-probability, at temperature 1, of token_ids[1:] given what is before each; float32."""
        ...

    async def hold(self) -> None:
        """Return when the weights may be replaced; with update=drain that is after the last token of what runs."""
        ...

    async def fingerprint(self) -> list[Mapping[str, int]]:
        """One mapping per tensor-parallel rank: what that rank's last weight load consumed; see fingerprint.py."""
        ...

    async def close(self) -> None: ...
