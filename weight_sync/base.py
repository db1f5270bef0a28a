"""Types that every part of weight sync shares."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from safetensors import SafetensorError
from torch import Tensor

from core.errors import TransportFailed, first_line

Bucket = list[tuple[str, Tensor]]
"""Named full tensors that travel together."""

Part = Literal["whole", "adapter"]
"""Of a model: all its weights, with the adapter (if it has one) merged in; or the adapter alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a trainer says of one sync."""

    checksums: dict[str, int]
    nbytes: int
    """Of the tensors; what goes to each engine."""


@contextmanager
def carrying(transport: str) -> Generator[None]:
    """Around what moves bytes: its failures become TransportFailed."""
    try:
        yield
    except (RuntimeError, OSError, SafetensorError) as error:  # gloo, NCCL and the store raise RuntimeErrors
        said = first_line(error).rpartition("] ")[2]  # gloo begins with the place in its own source
        raise TransportFailed(f"weights did not get through over {transport}: {said}") from error


class WeightSync(Protocol):
    async def publish(self, version: int) -> dict[str, float]:
        """Return when every engine samples from version `version` and has shown it; raise RunStopped otherwise."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A prompt whose log-probabilities trainer and engines must agree on after every sync."""

    token_ids: list[int]
    bound: float
    """Largest mean absolute difference, in nats."""
