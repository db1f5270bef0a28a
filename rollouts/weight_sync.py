"""How new weights reach the engines, and the proof that they did.

The trainer's rank 0 is rank 0 of a process group of its own, over gloo and TCP; every tensor-parallel
rank of every engine is a member. A sync is one stream over it:

    [bytes of header][header: (name, dtype, shape) ...][tensors, end to end]   once per bucket
    [0]                                                                        the end

Nobody needs to know the names beforehand, no process holds more than a bucket besides its own weights,
and all engines hear the same broadcast. vLLM's workers listen in rollouts/vllm_worker.py, the hf engine
by itself. Afterwards `verify` compares what was sent with what every engine loaded. Where there are GPUs,
vLLM's workers hear an `NcclSender` instead, and all else is the same. A member that fails leaves the group,
so that the others notice at once. rollouts/parcels.py does without a group.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from threading import Thread

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from core.errors import RunStopped, TransportFailed, first_line
from rollouts.fingerprint import difference, fingerprint

Bucket = list[tuple[str, Tensor]]
"""Named full tensors that travel together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a trainer says of one sync."""

    checksums: dict[str, int]
    nbytes: int
    """Of the tensors; what goes to each engine."""


_ALIGNMENT = 64
_PARENT_POLL_S = 1.0
_Header = list[tuple[str, str, list[int]]]


@contextmanager
def carrying(transport: str) -> Generator[None]:
    """Around what moves bytes: its failures become TransportFailed."""
    try:
        yield
    except (RuntimeError, OSError, SafetensorError) as error:  # gloo, NCCL and the store raise RuntimeErrors
        said = first_line(error).rpartition("] ")[2]  # gloo begins with the place in its own source
        raise TransportFailed(f"weights did not get through over {transport}: {said}") from error


def register() -> None:
    """vLLM calls this in each of its processes (entry point group vllm.general_plugins), maybe more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    _end_with_parent()
    transports = {"feynrl_gloo": "GlooTransfer", "feynrl_local": "LocalTransfer", "feynrl_nccl": "NcclTransfer"}
    for name, cls in transports.items():
        if name not in Factory._registry:  # it refuses a second registration
            Factory.register_engine(name, "rollouts.vllm_worker", cls)


def _end_with_parent() -> None:
    """In a process that vLLM started: end when its parent is gone. After a kill of the parent vLLM would stay."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    Thread(target=watch, daemon=True, name="end with parent").start()


class WeightSender:
    """The trainer's end. Life: `open`, tell the engines the port, `join` while they join, `send` once per step."""

    transport = "gloo"
    sent_bytes: int
    """Of the tensors of the last `send`."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def open(self, address: str = "127.0.0.1") -> int:
        """Listen for members at `address`, which they must be able to reach; returns the port."""
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return self._store.port

    def join(self, *, members: int) -> None:
        """Wait until the `members` - 1 receivers have joined."""
        if self._store is None:
            raise RuntimeError("open() comes before join()")
        with carrying(self.transport):
            self._group = _join(self._store, rank=0, members=members, timeout=self._timeout)

    def leave(self) -> None:
        """Close the connections: no member waits any longer."""
        self._group = None

    def send(self, buckets: Iterable[Bucket]) -> dict[str, int]:
        """Broadcast every bucket; returns the fingerprint of what was sent.

        The tensors are full ones, of the dtype that the engines hold. Buckets are drawn one at a time.
        """
        sent: dict[str, int] = {}
        self.sent_bytes = 0
        for bucket in buckets:
            sent.update(fingerprint(bucket))
            self.sent_bytes += sum(tensor.nbytes for _, tensor in bucket)
            self._carry(self._ship, bucket)
        self._carry(self._end)
        return sent

    def _carry(self, act: Callable[..., None], *args: Bucket) -> None:
        try:
            with carrying(self.transport):
                act(*args)
        except TransportFailed:
            self.leave()
            raise

    def _ship(self, bucket: Bucket) -> None:
        header: _Header = [(name, _dtype_name(t.dtype), list(t.shape)) for name, t in bucket]
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        places, size = _layout(header)
        flat = torch.empty(size, dtype=torch.uint8)
        for at, (_, tensor) in zip(places, bucket, strict=True):
            flat[at : at + tensor.nbytes].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        self._broadcast(torch.tensor([len(text)]))
        self._broadcast(text)
        self._broadcast(flat)

    def _end(self) -> None:
        self._broadcast(torch.zeros(1, dtype=torch.int64))

    def _broadcast(self, tensor: Tensor) -> None:
        if self._group is None:
            raise RuntimeError("join() comes before send()")
        _broadcast(self._group, tensor)


class NcclSender(WeightSender):
    """From GPU to GPU, by vLLM's own NCCL group; headers go through the store where its members met. Never run yet.

    NCCL knows no deadline: the engine's, and that of the call which came here, end a wait for a lost member.
    """

    transport = "nccl"

    def open(self, address: str = "127.0.0.1") -> int:
        from vllm.utils.network_utils import get_open_port

        self._where = {"master_address": address, "master_port": get_open_port()}
        return self._where["master_port"]

    def join(self, *, members: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        # Else vLLM would put this thread on a new stream, which would not wait for the trainer's.
        torch.cuda.set_stream(torch.cuda.current_stream())
        with carrying(self.transport):
            self._nccl = trainer_init({**self._where, "world_size": members})
        self._nccl.group.store.set_timeout(self._timeout)

    def leave(self) -> None:
        del self._nccl

    def _ship(self, bucket: Bucket) -> None:
        self._nccl.group.broadcast_obj([(name, t.dtype, t.shape) for name, t in bucket], src=0)
        stream = torch.cuda.current_stream()
        for _, tensor in bucket:
            self._nccl.broadcast(tensor.to(self._nccl.device).contiguous(), src=0, stream=stream)
        stream.synchronize()  # the bucket is let go of after this

    def _end(self) -> None:
        self._nccl.group.broadcast_obj(None, src=0)


class WeightReceiver:
    """An engine's end: one per tensor-parallel rank."""

    def __init__(self, *, address: str, port: int, rank: int, members: int, timeout_s: float) -> None:
        """Join the group as `rank` of 1..members-1; returns when all have joined."""
        timeout = timedelta(seconds=timeout_s)
        with carrying("gloo"):
            store = TCPStore(address, port, is_master=False, timeout=timeout)
            self._group: ProcessGroupGloo | None = _join(store, rank=rank, members=members, timeout=timeout)

    def receive(self) -> Iterator[Bucket]:
        """The buckets of one `send`. Each has storage of its own, which a consumer may keep."""
        while length := int(self._hear(torch.zeros(1, dtype=torch.int64))):
            text = self._hear(torch.empty(length, dtype=torch.uint8))
            header: _Header = json.loads(bytes(text.tolist()))
            places, size = _layout(header)
            flat = self._hear(torch.empty(size, dtype=torch.uint8))
            yield [
                (name, flat[at : at + _nbytes(dtype, shape)].view(getattr(torch, dtype)).view(shape))
                for at, (name, dtype, shape) in zip(places, header, strict=True)
            ]

    def _hear(self, tensor: Tensor) -> Tensor:
        try:
            with carrying("gloo"):
                if self._group is None:
                    raise ConnectionError("this member has left the group")
                return _broadcast(self._group, tensor)
        except TransportFailed:
            self._group = None
            raise


def verify(
    sent: Mapping[str, int],
    loaded: Sequence[Sequence[Mapping[str, int]]],
    *,
    expected_logp: Sequence[float],
    probe_logp: Sequence[Sequence[float]],
    bound: float,
) -> float:
    """Raise RunStopped unless every engine holds what was sent; returns the largest mean difference of the probe.

    loaded: per engine, per tensor-parallel rank, `Engine.fingerprint()`.
    expected_logp: the trainer's log-probabilities of the probe prompt; probe_logp: per engine, `Engine.probe()`.
    bound: what the mean absolute difference of the two may be.
    """
    for engine, ranks in enumerate(loaded):
        if found := difference(sent, ranks):
            raise RunStopped(f"the weights of engine {engine} are not the trainer's after the sync: {found}")
    worst = 0.0
    for engine, logp in enumerate(probe_logp):
        gaps = [abs(a - b) for a, b in zip(logp, expected_logp, strict=True)]
        mean = sum(gaps) / len(gaps)
        if not mean <= bound:  # a nan is no agreement either
            raise RunStopped(
                f"engine {engine} was sent the trainer's weights, but its log-probabilities of the probe prompt "
                f"differ from the trainer's by {mean:.2g} on average, where at most {bound:.2g} is expected"
            )
        worst = max(worst, mean)
    return worst


def _join(store: TCPStore, *, rank: int, members: int, timeout: timedelta) -> ProcessGroupGloo:
    # A group object of its own, not torch's default group: trainers and vLLM's workers have theirs already.
    return ProcessGroupGloo(PrefixStore("feynrl_weights", store), rank, members, timeout)


def _broadcast(group: ProcessGroupGloo, tensor: Tensor) -> Tensor:
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
    return tensor


def _layout(header: _Header) -> tuple[list[int], int]:
    """Where each tensor begins in the flat buffer, and how long that is, in bytes."""
    places, end = [], 0
    for _, dtype, shape in header:
        places.append(end)
        end += -(-_nbytes(dtype, shape) // _ALIGNMENT) * _ALIGNMENT
    return places, end


def _nbytes(dtype: str, shape: list[int]) -> int:
    return getattr(torch, dtype).itemsize * prod(shape)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
