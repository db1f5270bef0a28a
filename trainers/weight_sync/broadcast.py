"""Broadcast of weights to the engines.

The trainer's rank 0 is rank 0 of a separate process group, over gloo and TCP; every tensor-parallel rank of every
engine is a member. A sync is one stream of uint8 tensors over it:

    [bytes of header][header: (name, dtype, shape) ...][tensors, end to end]   for each bucket
    [0]                                                                        the end

Example: one bucket with w = bfloat16 [2, 3] and b = float32 [4]. Tensors begin at multiples of 64 bytes.

    int64 [1]      50                                                          bytes of the header
    uint8 [50]     [["w", "bfloat16", [2, 3]], ["b", "float32", [4]]]          JSON
    uint8 [128]    w in bytes 0 to 11, b in bytes 64 to 79
    int64 [1]      0

Receivers need not know the names beforehand, no process stores more than two buckets besides the model, and all
engines receive the same broadcast. vLLM's workers receive in rollouts/engines/vllm_support/worker.py. Afterwards
`verify_sync` compares the checksums of sent and loaded tensors. With NCCL, vLLM's workers receive from an `NcclSender`.
A member that fails leaves the group, so that the others fail at once. trainers/weight_sync/chunks.py needs no group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import prod

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from core.cluster.addresses import host_store
from core.errors import TransportFailed
from core.types.weights import Bucket
from trainers.weight_sync.base import transfer_errors
from trainers.weight_sync.fingerprint import fingerprint

_ALIGNMENT = 64
_Header = list[tuple[str, str, list[int]]]


class Member:
    """Member of the process group."""

    transport = "gloo"
    _group: ProcessGroupGloo | None = None

    def leave(self) -> None:
        """Close the connections: no member waits any longer."""
        self._group = None

    @contextmanager
    def leaving_on_failure(self) -> Generator[None]:
        """Run the body; a member whose transfer fails leaves the group, and TransportFailed is raised."""
        try:
            with transfer_errors(self.transport):
                yield
        except TransportFailed:
            self.leave()
            raise

    def _form_group(self, store: TCPStore, *, rank: int, members: int, timeout: timedelta) -> None:
        # A separate group object, not torch's default group: trainers and vLLM's workers have one already.
        with transfer_errors(self.transport):
            self._group = ProcessGroupGloo(PrefixStore("feynrl_weights", store), rank, members, timeout)

    def _start(self, tensor: Tensor) -> Work:
        """Start to broadcast the sender's tensor to all members. Raises ConnectionError without a group."""
        if self._group is None:
            raise ConnectionError("this member is not in the group")
        options = BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([tensor], options)


class WeightSender(Member):
    """Sender in the trainer. Order of calls: `open`; `join`, while the engines join at this port; `send` per sync."""

    sent_bytes: int
    """Bytes of the tensors of the last `send`."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._store: TCPStore | None = None
        self._on_its_way: Work | None = None
        self._flats = [torch.empty(0, dtype=torch.uint8)] * 2  # kept: new memory is slower than the network

    def open(self, address: str = "127.0.0.1") -> int:
        """Listen for members at `address`, which they must be able to reach; return the port."""
        self._store = host_store(address, timeout=self._timeout)
        return self._store.port

    def join(self, *, members: int) -> None:
        """Wait until the `members` - 1 receivers have joined."""
        if self._store is None:
            raise RuntimeError("open() comes before join()")
        self._form_group(self._store, rank=0, members=members, timeout=self._timeout)

    def leave(self) -> None:
        super().leave()
        self._on_its_way = None

    def send(
        self, buckets: Iterable[Bucket], encode: Callable[[Bucket], Bucket] = lambda bucket: bucket
    ) -> dict[str, int]:
        """Broadcast every bucket; return the checksums of the tensors by name. Raises TransportFailed.

        Tensors are whole, in the dtype of the engines. encode: the form in which a bucket is sent; see delta.py.
        Sending overlaps with copying: while a bucket is sent, the next is read and copied.
        """
        sent: dict[str, int] = {}
        self.sent_bytes = 0
        self._on_its_way = None
        for bucket in buckets:
            sent.update(fingerprint(bucket))
            coded = encode(bucket)
            self.sent_bytes += sum(tensor.nbytes for _, tensor in coded)
            with self.leaving_on_failure():
                self._send_bucket(coded)
        with self.leaving_on_failure():
            self._send_end()
        return sent

    def _send_bucket(self, bucket: Bucket) -> None:
        header: _Header = [(name, _dtype_name(t.dtype), list(t.shape)) for name, t in bucket]
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        places, size = _plan_layout(header)
        self._flats.reverse()  # the other one is on its way
        if len(self._flats[0]) < size:
            self._flats[0] = torch.empty(size, dtype=torch.uint8)
        flat = self._flats[0][:size]
        for at, (_, tensor) in zip(places, bucket, strict=True):
            source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            # by numpy, in one thread: torch's threads would wait for cores that the receivers keep busy
            flat[at : at + tensor.nbytes].numpy()[:] = source.cpu().numpy()
        self._wait_for_last()
        self._start(torch.tensor([len(text)])).wait()
        self._start(text).wait()
        self._on_its_way = self._start(flat)

    def _send_end(self) -> None:
        self._wait_for_last()
        self._start(torch.zeros(1, dtype=torch.int64)).wait()

    def _wait_for_last(self) -> None:
        if self._on_its_way is not None:
            self._on_its_way.wait()
            self._on_its_way = None


class WeightReceiver(Member):
    """Weight receiver of a tensor-parallel rank of an engine."""

    def __init__(self, *, address: str, port: int, rank: int, members: int, timeout_s: float) -> None:
        """Join the group as `rank` of 1..members-1; returns when all have joined."""
        timeout = timedelta(seconds=timeout_s)
        with transfer_errors(self.transport):
            store = TCPStore(address, port, is_master=False, timeout=timeout)
        self._form_group(store, rank=rank, members=members, timeout=timeout)

    def receive(self) -> Iterator[Bucket]:
        """Yield the buckets of a `send`. Each has a separate storage, so a consumer may keep it.

        The next bucket is received while the consumer uses the current bucket.
        """
        bucket: Bucket | None = None
        while length := int(self._receive_tensor(torch.zeros(1, dtype=torch.int64))):
            text = self._receive_tensor(torch.empty(length, dtype=torch.uint8))
            header: _Header = json.loads(bytes(text.tolist()))
            places, size = _plan_layout(header)
            flat = torch.empty(size, dtype=torch.uint8)
            with self.leaving_on_failure():
                arrives = self._start(flat)
            if bucket is not None:
                yield bucket
            with self.leaving_on_failure():
                arrives.wait()
            bucket = [
                (name, flat[at : at + _count_bytes(dtype, shape)].view(getattr(torch, dtype)).view(shape))
                for at, (name, dtype, shape) in zip(places, header, strict=True)
            ]
        if bucket is not None:
            yield bucket

    def _receive_tensor(self, tensor: Tensor) -> Tensor:
        with self.leaving_on_failure():
            self._start(tensor).wait()
        return tensor


def _plan_layout(header: _Header) -> tuple[list[int], int]:
    """Return the offset of each tensor in the flat buffer, and the buffer's length, in bytes."""
    places, end = [], 0
    for _, dtype, shape in header:
        places.append(end)
        end += -(-_count_bytes(dtype, shape) // _ALIGNMENT) * _ALIGNMENT
    return places, end


def _count_bytes(dtype: str, shape: list[int]) -> int:
    return getattr(torch, dtype).itemsize * prod(shape)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
