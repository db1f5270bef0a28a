"""Broadcast of weights from GPU to GPU, over NCCL in a group of vLLM's. Never run yet.

The stream is that of broadcast.py, but headers go through the group's store. NCCL has no deadline of its own: a member
that waits too long leaves the group, which aborts NCCL's calls on its GPU (ncclCommAbort).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Lock, Thread, Timer
from typing import Any

import torch

from core.cluster.addresses import listen_at
from core.errors import TransportFailed
from core.gpu_contract import load_part
from core.types.weights import Bucket
from trainers.weight_sync.base import transfer_errors
from trainers.weight_sync.broadcast import Member, WeightSender


class NcclMember(Member):
    """Member of an NCCL group, on this process's current device."""

    transport = "nccl"
    _timeout: timedelta

    def __init__(self) -> None:
        self._nccl: Any = None
        """vLLM's PyNcclCommunicator, or None outside of a group."""
        self._lock = Lock()

    def load_connect(self) -> Callable[..., Any]:
        """Return vLLM's function that makes a communicator. It waits for all members, without a deadline."""
        return load_part("stateless_init_process_group")

    def leave(self) -> None:
        """Free the communicator. Calls that wait for another member end."""
        with self._lock:  # the deadline's thread may leave too, and a communicator is freed once
            nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.destroy()

    def _join(self, *, address: str, port: int, rank: int, members: int) -> None:
        """Join the group. Raises TransportFailed after the deadline."""
        connect, module = self.load_connect(), torch.get_device_module()
        device = module.current_device()
        made: Future[Any] = Future()

        def make() -> None:
            try:
                module.set_device(device)  # a thread begins on the first device
                where = {"master_address": address, "master_port": port}
                communicator = connect(**where, rank=rank, world_size=members, device=device)
            except Exception as error:
                with suppress(InvalidStateError):
                    made.set_exception(error)
                return
            try:
                made.set_result(communicator)
            except InvalidStateError:  # the deadline was missed
                communicator.destroy()

        # NCCL cannot be interrupted while it connects, so a thread waits for it, and is abandoned after the deadline
        Thread(target=make, daemon=True, name="join the NCCL group").start()
        with transfer_errors(self.transport):
            wait([made], self._timeout.total_seconds())
            if made.cancel():  # False if it is done
                raise TimeoutError(f"not all {members} members joined within {self._timeout.total_seconds():g} s")
            self._nccl = made.result()
            if self._nccl.disabled:  # vLLM would send nothing, and say nothing
                raise ConnectionError("vLLM finds no NCCL library")
            self._nccl.group.store.set_timeout(self._timeout)

    @contextmanager
    def _deadline(self) -> Generator[None]:
        """Leave the group if the body takes too long. Raises TransportFailed then."""
        expired = Event()

        def expire() -> None:
            expired.set()
            self.leave()

        timer = Timer(self._timeout.total_seconds(), expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        except TransportFailed:
            if not expired.is_set():
                raise
        finally:
            timer.cancel()
            timer.join()
        if expired.is_set():
            raise TransportFailed(
                f"weights did not get through over nccl: the members did not finish within "
                f"{self._timeout.total_seconds():g} s, as when one has died"
            )

    def _share(self, header: list[Any] | None) -> Any:
        """Return the sender's header, or None at the end of the stream."""
        with self.leaving_on_failure():
            return self._get_communicator().group.broadcast_obj(header, src=0)

    def _broadcast(self, bucket: Bucket) -> None:
        """Broadcast the sender's tensors into the receivers', and wait: the sender frees its tensors afterwards."""
        module = torch.get_device_module()
        with self.leaving_on_failure():
            nccl = self._get_communicator()
            for _, tensor in bucket:
                nccl.broadcast(tensor, src=0, stream=module.current_stream())
            module.synchronize()
            self._get_communicator()  # an aborted call returns as if it had received

    def _get_communicator(self) -> Any:
        if self._nccl is None:
            raise ConnectionError("this member is not in the group")
        return self._nccl


class NcclSender(NcclMember, WeightSender):
    """Sender over NCCL. Never run yet."""

    def __init__(self, *, timeout_s: float) -> None:
        NcclMember.__init__(self)
        WeightSender.__init__(self, timeout_s=timeout_s)

    def open(self, address: str = "127.0.0.1") -> int:
        with listen_at(address) as listener:  # vLLM's store will listen there
            self._address, self._port = address, listener.getsockname()[1]
        return self._port

    def join(self, *, members: int) -> None:
        self._join(address=self._address, port=self._port, rank=0, members=members)

    def send(
        self, buckets: Iterable[Bucket], encode: Callable[[Bucket], Bucket] = lambda bucket: bucket
    ) -> dict[str, int]:
        with self._deadline():
            return super().send(buckets, encode)

    def _send_bucket(self, bucket: Bucket) -> None:
        self._share([(name, t.dtype, t.shape) for name, t in bucket])
        device = torch.get_device_module().current_device()
        self._broadcast([(name, t.detach().to(device).contiguous()) for name, t in bucket])

    def _send_end(self) -> None:
        self._share(None)


class NcclReceiver(NcclMember):
    """Receiver of a tensor-parallel rank of an engine, over NCCL. Never run yet."""

    def __init__(self, *, address: str, port: int, rank: int, members: int, timeout_s: float) -> None:
        """Join the group as `rank` of 1..members-1; returns when all have joined."""
        super().__init__()
        self._timeout = timedelta(seconds=timeout_s)
        self._join(address=address, port=port, rank=rank, members=members)

    def receive(self) -> Iterator[Bucket]:
        """Yield the buckets of a `send`, each in memory of its own."""
        with self._deadline():
            while (header := self._share(None)) is not None:
                device = torch.get_device_module().current_device()
                bucket = [(name, torch.empty(shape, dtype=dtype, device=device)) for name, dtype, shape in header]
                self._broadcast(bucket)
                yield bucket
