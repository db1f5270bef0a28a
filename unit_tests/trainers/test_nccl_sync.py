"""The stream of weights over NCCL, between threads: vLLM's communicator is a stand-in, all else is the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from inspect import signature
from threading import Event, Timer
from threading import enumerate as enumerate_threads
from time import monotonic
from typing import Any

import pytest
import torch

from core.errors import TransportFailed
from core.gpu_contract import PARTS
from core.types.weights import Bucket, split_into_buckets
from trainers.weight_sync.fingerprint import fingerprint
from trainers.weight_sync.source import WeightSource
from unit_tests.helpers.nccl_stand_in import Communicator, Group, Network, members_of

WEIGHTS = {"a": torch.randn(48, 64).bfloat16(), "b": torch.randn(16, 8).t(), "c": torch.tensor(2.5)}
LONG_S, SHORT_S = 20.0, 0.3


def buckets() -> Iterator[Bucket]:
    yield from split_into_buckets(WEIGHTS.items(), lambda named: named[1].nbytes, 600)


class Members:
    """A sender and its receivers, in threads."""

    def __init__(self, receivers: int) -> None:
        self.network, self.members = Network(), receivers + 1
        sender_class, self.receiver_class = members_of(self.network)
        self.pool = ThreadPoolExecutor()
        self.sender = sender_class(timeout_s=LONG_S)
        self.port = self.sender.open()
        receivers_made = [self.pool.submit(self.join, rank + 1) for rank in range(receivers)]
        self.sender.join(members=self.members)
        self.receivers = [made.result() for made in receivers_made]

    def join(self, rank: int):
        where = {"address": "127.0.0.1", "port": self.port, "rank": rank}
        return self.receiver_class(**where, members=self.members, timeout_s=LONG_S)


def test_every_receiver_gets_every_tensor_in_every_sync():
    group = Members(receivers=2)
    for _ in range(2):
        received = [group.pool.submit(lambda r=r: list(r.receive())) for r in group.receivers]
        assert group.sender.send(buckets()) == fingerprint(WEIGHTS.items())
        for future in received:
            got = dict(pair for bucket in future.result() for pair in bucket)
            assert got.keys() == WEIGHTS.keys() and all(torch.equal(got[name], WEIGHTS[name]) for name in got)
    assert [made.destroyed for made in group.network.made] == [0, 0, 0]


@pytest.mark.timeout(60)
def test_a_member_that_dies_in_a_sync_ends_the_wait_of_all_others():
    group = Members(receivers=2)
    for member in (group.sender, *group.receivers):
        member._timeout = timedelta(seconds=SHORT_S)
    began = monotonic()
    got: list[Bucket] = []
    other = group.pool.submit(lambda: got.extend(group.receivers[0].receive()))  # and the second never receives
    with pytest.raises(TransportFailed, match=r"over nccl: the members did not finish within 0\.3 s"):
        group.sender.send(buckets())
    with pytest.raises(TransportFailed, match="over nccl"):
        other.result()
    assert monotonic() - began < LONG_S / 2 and got == [], "an aborted transfer is none"
    assert sorted(made.destroyed for made in group.network.made) == [0, 1, 1], "aborted once, and never twice"
    with pytest.raises(TransportFailed, match="this member is not in the group"):
        group.sender.send(buckets())


def test_a_transfer_that_is_given_up_has_freed_its_communicator(monkeypatch: pytest.MonkeyPatch):
    group, ended, early = Members(receivers=1), Event(), list[bool]()
    group.sender._timeout = timedelta(seconds=0.05)
    [made] = (made for made in group.network.made if made.rank == 0)
    abort = made.destroy

    def destroy() -> None:
        abort()  # the wait of `send` ends, while the memory is still being freed
        early.append(ended.wait(0.1))

    monkeypatch.setattr(made, "destroy", destroy)
    with pytest.raises(TransportFailed, match=r"the members did not finish within 0\.05 s"):
        group.sender.send(buckets())
    ended.set()
    assert early == [False]


def test_a_missing_member_is_an_error_in_time_and_what_comes_late_is_freed():
    network = Network()
    sender_class, receiver_class = members_of(network)
    sender = sender_class(timeout_s=SHORT_S)
    port = sender.open()
    with pytest.raises(TransportFailed, match=r"over nccl: not all 2 members joined within 0\.3 s"):
        sender.join(members=2)
    late = receiver_class(address="127.0.0.1", port=port, rank=1, members=2, timeout_s=LONG_S)
    with network.changed:
        assert network.changed.wait_for(lambda: any(made.destroyed for made in network.made if made.rank == 0), 5.0)
    late.leave()
    assert [made.destroyed for made in network.made] == [1, 1]


def test_a_group_that_is_formed_again_frees_the_communicator_of_the_last():
    group = Members(receivers=1)
    source = WeightSource(None, None, is_sender=True)  # type: ignore[arg-type]
    source.sender = group.sender
    source.open_broadcast("127.0.0.1", LONG_S, True)
    assert [made.destroyed for made in group.network.made if made.rank == 0] == [1]


def test_an_error_of_the_export_is_none_of_the_transport():
    group = Members(receivers=1)

    def export() -> Iterator[Bucket]:
        raise RuntimeError("out of memory")
        yield []

    with pytest.raises(RuntimeError, match="out of memory") as raised:
        group.sender.send(export())
    assert not isinstance(raised.value, TransportFailed)


def test_a_communicator_that_would_send_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(Communicator, "disabled", True)
    with pytest.raises(TransportFailed, match="vLLM finds no NCCL library"):
        Members(receivers=1)


def test_the_stand_in_has_what_is_used_of_vllms_communicator():
    made = Communicator(Network(), Group(torch.distributed.HashStore(), 0), 0, 0, 1)
    listed = {part.target.rpartition(":")[2]: part for part in PARTS}
    assert [*signature(Network().connect).parameters] == [*listed["stateless_init_process_group"].arguments]
    assert all(hasattr(made, name) for name in listed["PyNcclCommunicator"].attributes)
    arguments = listed["PyNcclCommunicator.broadcast"].arguments
    assert [*signature(made.broadcast).parameters] == [*arguments]
    assert [*signature(made.group.broadcast_obj).parameters] == [
        *listed["StatelessProcessGroup.broadcast_obj"].arguments
    ]


def test_members_wait_for_their_device_and_as_long_as_the_run_says(monkeypatch):
    module, notes, timers = torch.get_device_module(), list[str](), list[bool]()
    monkeypatch.setattr(module, "synchronize", lambda *_: notes.append("waits"))
    monkeypatch.setattr(module, "set_device", lambda device: notes.append(f"joins on {device}"))
    group = Members(receivers=1)
    assert isinstance(group.port, int) and notes == [f"joins on {module.current_device()}"] * 2
    assert [made.group.store.timeout for made in group.network.made] == [timedelta(seconds=LONG_S)] * 2
    notes.clear()

    def export() -> Iterator[Bucket]:
        timers.extend(thread.daemon for thread in enumerate_threads() if isinstance(thread, Timer))
        yield from buckets()

    received = group.pool.submit(lambda: list(group.receivers[0].receive()))
    group.sender.send(export())
    assert notes == ["waits"] * 2 * len(received.result()), "each member after each bucket"
    assert timers and all(timers), "none keeps a process alive"


def test_a_thread_that_waits_for_a_missing_member_keeps_no_process_alive():
    sender_class, receiver_class = members_of(network := Network())
    sender = sender_class(timeout_s=SHORT_S)
    port = sender.open()
    with pytest.raises(TransportFailed, match=r"over nccl: not all 2 members joined within 0\.3 s"):
        sender.join(members=2)
    waiting = [thread for thread in enumerate_threads() if thread.name == "join the NCCL group"]
    assert waiting and all(thread.daemon for thread in waiting)
    receiver_class(address="127.0.0.1", port=port, rank=1, members=2, timeout_s=LONG_S).leave()  # which ends it
    for thread in waiting:
        thread.join()
    assert len(network.made) == 2


def test_a_member_that_cannot_connect_says_why_at_once():
    sender_class, _ = members_of(Network())

    class Cut(sender_class):  # type: ignore[valid-type, misc]
        def load_connect(self) -> Callable[..., Any]:
            def connect(**where: Any) -> Any:
                raise OSError(f"no route to {where['master_address']}")

            return connect

    sender = Cut(timeout_s=LONG_S)
    sender.open()
    with pytest.raises(TransportFailed, match=r"^weights did not get through over nccl: no route to 127\.0\.0\.1$"):
        sender.join(members=2)
