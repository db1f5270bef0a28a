"""Publishing of weights: which workers are called, in which order, who is charged, and what is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from core.cluster.actor import IDLE
from core.errors import CallFailed, ProcessDied, ProofFailed, RunStopped, TransportFailed
from core.timing.clock import ActivityTimer
from core.timing.phases import Activity
from trainers.weight_sync.base import Delivery, Probe, Sent
from trainers.weight_sync.broadcast import WeightReceiver, WeightSender
from trainers.weight_sync.delta import Changes
from trainers.weight_sync.fingerprint import fingerprint
from trainers.weight_sync.publisher import LocalWeightSync, prove
from unit_tests.helpers.syncs import sync_of

SENT = {"a": 10, "b": 20}


def test_the_metrics_of_a_proof_are_its_gap_its_bytes_and_what_changed():
    probe = Probe(token_ids=[1, 2, 3], bound=0.5)
    changes = Changes(values=8, changed=2, tensors=4, by_xor=1)

    def delivery(changes: Changes) -> Delivery:
        sent = Sent(checksums=SENT, nbytes=12, changes=changes)
        return Delivery(version=3, engines=[2], sent=sent, loaded=[[SENT]], expected_logp=[-1.0, -2.0])

    assert prove(delivery(Changes()), [[-1.25, -2.0]], probe) == {"sync/probe_gap": 0.125, "sync/bytes": 12.0}
    assert prove(delivery(changes), [[-1.0, -2.0]], probe) == {
        **{"sync/probe_gap": 0.0, "sync/bytes": 12.0},
        **{"sync/changed": 2 / 8, "sync/by_xor": 1 / 4},
    }
    with pytest.raises(ProofFailed, match=r"^engine 2 was sent .* by 0.75 on average, where at most 0.5 is expected$"):
        prove(delivery(changes), [[-1.0, -3.5]], probe)


class Fleet:
    """Workers that note their calls with their ranks, and one of which may die in a call."""

    def __init__(self, name: str, notes: list[str], dies_in: str = "", gone: tuple[str, int] | None = None) -> None:
        self.name, self.notes, self.dies_in, self.gone = name, notes, dies_in, gone
        self.ranks: Sequence[int] = range(3)
        self.actors = ["x", "y", "z"]

    def __len__(self) -> int:
        return 3

    def only(self, ranks: Sequence[int]) -> Fleet:
        found = Fleet(self.name, self.notes, self.dies_in, self.gone)
        found.ranks = ranks
        return found

    async def call_all(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        told = " ".join([*map(str, args), *map(str, kwargs)])
        self.notes.append(f"{self.name} {[*self.ranks]} {method.__name__} {told}".strip())
        if method.__name__ == self.dies_in:
            raise ProcessDied(f"{self.name} 2 died", worker=self.gone)
        if method.__name__ == "read_fingerprint":
            return [[SENT] for _ in self.ranks]
        return [[-1.0, float(-rank)] for rank in self.ranks]


class Carrier:
    name = "gloo"

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    async def transfer(self, version: int, ends: Any) -> Sent:
        self.notes.append(f"version {version} to {ends.list_members()}")
        return Sent(checksums=SENT, nbytes=9)


def publish_to(notes: list[str], **engine: Any):
    engines, trainers = cast(Any, Fleet("engine", notes, **engine)), cast(Any, Fleet("trainer", notes))
    return sync_of(trainers, engines, [cast(Any, Carrier(notes))], may_fall_back=True, say=notes.append)


DELIVERED = [
    "engine [1, 2] begin_activity sync",
    "engine [1, 2] pause",
    "version 5 to ['y', 'z']",
    "engine [1, 2] read_fingerprint",
    "trainer [0, 1, 2] probe [1, 2]",
]
PROVED = ["engine [1, 2] probe [1, 2]", "engine [1, 2] end_activity sync"]


def test_a_sync_calls_the_named_engines_in_order_and_charges_them():
    notes: list[str] = []
    sync = publish_to(notes)
    # the engines' probes are -1 and minus their rank, and the trainer's rank 0 says -1 and 0
    sync.probe = Probe(token_ids=[1, 2], bound=1.0)
    assert asyncio.run(sync.publish_weights(5, engines=[1, 2])) == {"sync/probe_gap": 1.0, "sync/bytes": 9.0}
    assert notes == [*DELIVERED, *PROVED] and sync.facts == {"transport": "gloo"} and sync.kept_by == ["y", "z"]
    notes.clear()
    delivery = asyncio.run(sync.deliver_weights(5))
    every = [note.replace("[1, 2]", "[0, 1, 2]", note.startswith("engine")) for note in DELIVERED]
    every[2] = "version 5 to ['x', 'y', 'z']"
    ends = ["engine [0, 1, 2] end_activity sync"]
    assert notes == every + ends
    assert delivery.version == 5 and [*delivery.engines] == [0, 1, 2] and delivery.expected_logp == [-1.0, 0.0]
    assert delivery.sent == Sent(checksums=SENT, nbytes=9) and delivery.loaded == [[SENT]] * 3
    notes.clear()
    assert asyncio.run(sync.prove_weights(delivery)) == {"sync/probe_gap": 1.0, "sync/bytes": 9.0}
    assert notes == ["engine [0, 1, 2] begin_activity sync", "engine [0, 1, 2] probe [1, 2]", *ends]


@pytest.mark.parametrize(
    ("gone", "others"), [(("engine", 2), "[0, 1]"), (("engine", 0), "[1, 2]"), (None, "[0, 1, 2]")]
)
@pytest.mark.parametrize("dies_in", ["begin_activity", "pause", "probe"])
def test_engines_beside_a_dead_one_are_not_charged_on(gone, others, dies_in):
    notes: list[str] = []
    with pytest.raises(ProcessDied) as raised:
        asyncio.run(publish_to(notes, dies_in=dies_in, gone=gone).publish_weights(5))
    assert str(raised.value) == "in the sync of version 5, engine 2 died" and raised.value.worker == gone
    assert notes[-1] == f"engine {others} end_activity sync"
    assert [note for note in notes if "end_activity" in note] == notes[-1:]


def test_a_call_that_fails_in_a_sync_keeps_its_kind_and_gets_the_version():
    sync = publish_to([])

    class Cut(Carrier):
        async def transfer(self, version: int, ends: Any) -> Sent:
            raise CallFailed("engine 1 did not answer")

    sync.transports = [cast(Any, Cut([]))]
    for call in (sync.publish_weights(6), sync.deliver_weights(6)):
        with pytest.raises(CallFailed, match=r"^in the sync of version 6, engine 1 did not answer$") as raised:
            asyncio.run(call)
        assert type(raised.value) is CallFailed


class Trainer:
    def export_weights(self, max_bytes: int, scope: str) -> Any:
        assert (max_bytes, scope) == (100, "files")
        yield [("a", torch.ones(3)), ("b", torch.ones(2, 2))]
        yield [("c", torch.ones(5).bfloat16())]

    def probe(self, token_ids: list[int]) -> list[float]:
        return [-1.0] * len(token_ids)


class Engine:
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def pause(self) -> None:
        self.calls.append("pause")

    async def load_weights(self, version: int, buckets: Any) -> None:
        self.loaded = fingerprint(pair for bucket in buckets for pair in bucket)
        self.calls.append(f"load {version}")

    async def read_fingerprint(self) -> list[Any]:
        return [self.loaded]

    async def probe(self, token_ids: list[int]) -> list[float]:
        return [-1.25] * len(token_ids)


def test_a_sync_in_one_process_counts_and_proves_what_it_hands_over():
    engine, timers = Engine(), (ActivityTimer(Activity.SYNC), ActivityTimer(Activity.SYNC))
    probe = Probe(token_ids=[1, 2], bound=0.5)
    sync = LocalWeightSync(cast(Any, Trainer()), cast(Any, engine), timers, probe, 100, "files")
    assert asyncio.run(sync.publish_weights(4)) == {"sync/probe_gap": 0.25, "sync/bytes": 12.0 + 16 + 10}
    assert engine.calls == ["pause", "load 4"] and all(timer.read_seconds()["sync"] > 0 for timer in timers)
    delivery = asyncio.run(sync.deliver_weights(5))
    assert (delivery.version, delivery.engines, delivery.expected_logp) == (5, [0], [-1.0, -1.0])
    assert delivery.loaded == [[delivery.sent.checksums]] and [*delivery.sent.checksums] == ["a", "b", "c"]


def test_the_first_error_waits_for_one_that_names_the_cause():
    """A rank whose connection breaks says so before the rank that broke it."""

    async def breaks() -> None:
        raise TransportFailed("the connection is closed")

    async def names() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        raise RunStopped("out of memory")

    ends = sync_of(cast(Any, Quiet()), cast(Any, Quiet()), [], may_fall_back=True, say=print).ends
    for timeout_s in (0.0, 1.0):
        with pytest.raises(RunStopped, match=r"^out of memory$"):
            asyncio.run(replace(ends, timeout_s=timeout_s).gather_collective([breaks(), names()]))


class Quiet:
    """Workers that are alive and idle."""

    name, ranks, restarting = "engine", (0,), frozenset[int]()

    async def check_health(self, rank: int) -> tuple[bool, str]:
        return True, f"engine {rank}{IDLE}"


def test_a_member_that_has_left_neither_sends_nor_receives():
    sender = WeightSender(timeout_s=20.0)
    port = sender.open()
    with ThreadPoolExecutor() as pool:
        where = {"address": "127.0.0.1", "port": port, "rank": 1, "members": 2, "timeout_s": 20.0}
        joins = pool.submit(lambda: WeightReceiver(**where))
        sender.join(members=2)
        receiver = joins.result()
    sender.leave()
    receiver.leave()
    for call in (lambda: sender.send([[("w", torch.ones(2))]]), lambda: [*receiver.receive()]):
        with pytest.raises(TransportFailed, match=r"^weights did not get through over gloo: this member is not in the"):
            call()
