"""Types that every part of weight sync shares, and its interfaces to trainers and engines."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from safetensors import SafetensorError

from core.errors import TransportFailed, first_line
from core.types.images import PlacedImage, as_argument
from core.types.weights import Bucket, ExportScope
from trainers.weight_sync.delta import Changes

Chunk = bytes | str
"""A bucket in safetensors format, or the address of such an object with size and hash (store.py)."""
TransportName = Literal["nccl", "ipc", "gloo", "direct", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Trainer-side record of a sync."""

    checksums: dict[str, int]
    """Checksums by tensor name; see fingerprint.py."""
    nbytes: int
    """Bytes sent to each engine."""
    changes: Changes = field(default_factory=Changes)
    """What a sync of deltas sent; nothing for another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Weights that engines have loaded and not yet verified."""

    version: int
    engines: Sequence[int]
    """Ranks of the engines."""
    sent: Sent
    loaded: list[list[Mapping[str, int]]]
    """Checksums that each engine's ranks loaded."""
    expected_logp: list[float]
    """The trainer's log-probabilities of the probe prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A prompt whose log-probabilities trainer and engines must agree on after every sync."""

    token_ids: list[int]
    bound: float
    """Largest mean absolute difference, in nats."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the prompt, so that a vision part with old weights, or old features of it, is seen."""
    explain: Callable[[], str] = field(default=str, compare=False)
    """Returns parts of the model that may make trainer and engine disagree, for the error; "" if none is known."""

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the methods `probe` besides the tokens."""
        return as_argument(self.images)


class WeightSync(Protocol):
    """Transfer of the trainer's weights to every engine."""

    async def publish_weights(self, version: int, engines: Sequence[int] | None = None) -> dict[str, float]:
        """Send and verify weights. Return the metrics when every engine samples from `version`; else raise RunStopped.

        engines: ranks of the engines that receive the weights; None is all of them. If an engine dies (ProcessDied),
        the others are ready for another sync.
        """
        ...

    async def deliver_weights(self, version: int) -> Delivery:
        """Transfer the weights to all engines. The first half of a sync whose engines cannot sample yet."""
        ...

    async def prove_weights(self, delivery: Delivery) -> dict[str, float]:
        """Verify the weights that the engines loaded. The second half of a sync; trainers take no part in it."""
        ...


class ExportsWeights(Protocol):
    """Interface of a trainer to weight sync. Every rank is called."""

    def export_weights(self, max_bytes: int, scope: ExportScope) -> Generator[Bucket]:
        """Yield every tensor once, whole, in buckets of at most `max_bytes` (one tensor at least)."""
        ...

    def probe(self, token_ids: list[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        """Return the log-probability, at temperature 1, of each token of text after the first, given what is before."""
        ...


class ReceivesWeights(Protocol):
    """Interface of an engine to weight sync.

    In the trainer's process an update is `pause`, then `load_weights`. From another process it is `pause`, then
    `receive_weights` for a broadcast that the engine has joined (`join_broadcast`); or `pause`, `begin_chunks`,
    `load_chunk` for every chunk, `receive_weights`. After it the engine samples again, with the new
    weights alone.
    """

    async def pause(self) -> None:
        """Pause generation, until the weights are replaced. `weight_sync.pause_mode` governs running requests."""
        ...

    async def load_weights(self, version: int, buckets: Iterable[Bucket]) -> None:
        """Load the weights of a trainer in the same process."""
        ...

    async def join_broadcast(self, *, address: str, port: int, first_rank: int, members: int) -> None:
        """Join the sender's group as ranks `first_rank`, `first_rank` + 1, ...; later weights come from this group."""
        ...

    async def begin_chunks(self) -> None:
        """Prepare for weights in chunks, by `load_chunk`."""
        ...

    async def load_chunk(self, chunk: Chunk) -> None:
        """Load a bucket of the update."""
        ...

    async def receive_weights(self, version: int) -> None:
        """Receive a broadcast, or complete an update received in chunks; then sample from `version`."""
        ...

    async def read_fingerprint(self) -> list[Mapping[str, int]]:
        """Return the checksums of the last loaded update by tensor name, a mapping per tensor-parallel rank."""
        ...

    async def probe(self, token_ids: list[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        """Return the log-probability, at temperature 1, of each token of text after the first, given what is before.

        images: images of the prompt, placed in `token_ids`; passed only if there are any. float32.
        """
        ...


@contextmanager
def transfer_errors(transport: str) -> Generator[None]:
    """Convert errors of a transport into TransportFailed."""
    try:
        yield
    except (RuntimeError, OSError, SafetensorError) as error:  # gloo, NCCL and the store raise RuntimeErrors
        reason = first_line(error).rpartition("] ")[2]  # gloo begins with a line of its own source
        raise TransportFailed(f"weights did not get through over {transport}: {reason}") from error
