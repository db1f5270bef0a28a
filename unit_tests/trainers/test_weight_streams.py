"""Ends of a weight sync, one by one: what is in flight, who leaves, what an engine may keep, what a store forgets."""

from __future__ import annotations

import json
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor

from core.errors import TransportFailed, UserError
from core.timing.clock import ActivityTimer
from core.timing.phases import TRAINER_ACTIVITIES
from core.types.weights import Bucket
from trainers.weight_sync import store
from trainers.weight_sync.base import Sent
from trainers.weight_sync.broadcast import WeightReceiver, WeightSender
from trainers.weight_sync.delta import Changes, DeltaDecoder, DeltaEncoder
from trainers.weight_sync.fingerprint import fingerprint
from trainers.weight_sync.source import WeightSource
from trainers.weight_sync.store import remove_folder, write_chunk
from unit_tests.helpers.processes import find_free_port

LONG_S = 20.0


class Late(WeightSender):
    """Sender whose tensors go out when they are waited for, as over a slow network."""

    def __init__(self) -> None:
        super().__init__(timeout_s=LONG_S)
        self.out: list[Tensor] = []

    def _start(self, tensor: Tensor) -> Any:
        return SimpleNamespace(wait=lambda: self.out.append(tensor.clone()))


def test_a_bucket_stays_as_it_was_until_it_has_gone_out():
    a, b, c, d = torch.arange(40.0), torch.arange(9.0) + 50, torch.ones(3, dtype=torch.uint8), torch.arange(30.0) - 7
    buckets: list[Bucket] = [[("a", a)], [("b", b), ("c", c)], [("d", d)]]
    sender = Late()
    for _ in range(2):
        sender.out.clear()
        assert sender.send(iter(buckets)) == fingerprint(pair for bucket in buckets for pair in bucket)
        assert sender.sent_bytes == 4 * (40 + 9 + 30) + 3
        lengths, texts, flats, [end] = sender.out[0:9:3], sender.out[1:9:3], sender.out[2:9:3], sender.out[9:]
        assert [int(length) for length in lengths] == [len(text) for text in texts] and end.tolist() == [0]
        assert {length.dtype for length in (*lengths, end)} == {torch.int64}, "what the receivers wait for"
        headers = [[name for name, _, _ in json.loads(bytes(text.tolist()))] for text in texts]
        assert headers == [["a"], ["b", "c"], ["d"]]
        assert [len(flat) for flat in flats] == [192, 128, 128], "multiples of 64 bytes"
        assert torch.equal(flats[0][:160].view(torch.float32), a)
        assert torch.equal(flats[1][:36].view(torch.float32), b) and flats[1][64:67].tolist() == [1] * 3
        assert torch.equal(flats[2][:120].view(torch.float32), d)


def test_a_member_whose_transfer_fails_leaves_the_group():
    sender = WeightSender(timeout_s=LONG_S)
    port = sender.open()
    where = {"address": "127.0.0.1", "port": port, "rank": 1, "members": 2, "timeout_s": LONG_S}
    with ThreadPoolExecutor() as pool:
        joins = pool.submit(lambda: WeightReceiver(**where))
        sender.join(members=2)
        receiver = joins.result()
    bucket: Bucket = [("w", torch.ones(2))]
    with pytest.raises(TransportFailed, match=r"^weights did not get through over gloo: Cannot copy out of meta"):
        sender.send([bucket], lambda _: [("w", torch.empty(2, device="meta"))])
    with pytest.raises(TransportFailed, match=r": this member is not in the group$"):
        sender.send([bucket])
    receiver.leave()


def test_an_engine_whose_trainer_does_not_listen_is_told_in_time():
    with pytest.raises(TransportFailed, match=r"^weights did not get through over gloo: "):
        WeightReceiver(address="127.0.0.1", port=find_free_port(), rank=1, members=2, timeout_s=0.2)


def test_what_was_delivered_is_the_engines_own():
    encoder, decoder, weight = DeltaEncoder(), DeltaDecoder(), torch.zeros(999)
    delivered: list[Tensor] = []
    for coding in ("whole", "changes", "changes"):
        weight = weight.clone()
        weight[len(delivered)] += 1
        encoder.begin(coding)
        arrived = [(name, coded.clone()) for name, coded in encoder.encode([("w", weight)])]
        [(_, got)] = decoder.decode(arrived)
        assert torch.equal(got, weight)
        delivered.append(got.fill_(7))  # the engine may change it
    assert all((got == 7).all() for got in delivered)


class Trainer:
    """Exports the same two tensors in every sync, and counts the buckets that were read."""

    def __init__(self) -> None:
        self.read = 0

    def export_weights(self, max_bytes: int, scope: str) -> Generator[Bucket]:
        assert (max_bytes, scope) == (600, "files")
        for name in ("a", "b"):
            self.read += 1
            yield [(name, torch.ones(999))]


class Wire:
    """Sender that notes the names in code, or is cut after a bucket."""

    sent_bytes, is_cut = 5, False

    def send(self, stream: Any, encode: Any) -> dict[str, int]:
        if self.is_cut:
            next(stream)
            raise TransportFailed("the cable is cut")
        self.names = [name for bucket in stream for name, _ in encode(bucket)]
        return {"a": 1}


def test_a_broadcast_is_in_the_code_of_its_sync_and_read_to_the_end():
    trainer: Any = Trainer()
    source: Any = WeightSource(trainer, ActivityTimer(*TRAINER_ACTIVITIES), is_sender=True)
    source.sender = wire = Wire()
    unchanged = Changes(values=2 * 999, tensors=2)
    for coding, names, changes in (
        ("whole", ["=a", "=b"], Changes()),
        ("changes", ["+a", "+b"], unchanged),
        ("changes", ["+a", "+b"], unchanged),
        ("plain", ["a", "b"], Changes()),
    ):
        assert source.broadcast_weights(600, "files", coding) == Sent(checksums={"a": 1}, nbytes=5, changes=changes)
        assert wire.names == names
    wire.is_cut, trainer.read = True, 0
    with pytest.raises(TransportFailed, match=r"^the cable is cut$"):
        source.broadcast_weights(600, "files", "plain")
    assert trainer.read == 2, "the other ranks gather to the end"


class Caching(MemoryFileSystem):
    """Store that remembers what it has listed."""

    protocol = "caching"
    store: ClassVar[dict[str, Any]] = {}
    notes: ClassVar[list[str]] = []

    def invalidate_cache(self, path: str | None = None) -> None:
        self.notes.append("forget")

    def exists(self, path: str, **more: Any) -> bool:
        self.notes.append("look")
        return super().exists(path, **more)


fsspec.register_implementation("caching", Caching)


def test_a_folder_is_looked_for_anew_before_it_is_removed():
    """Another process has written there since the last look."""
    write_chunk("caching://b", "0", b"weights")
    Caching.notes.clear()
    remove_folder("caching://b")
    assert Caching.notes[:2] == ["forget", "look"]


def test_an_address_of_no_store_is_the_users_mistake_and_said_at_once(monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(store.time, "sleep", waited.append)
    for call in (lambda: write_chunk("nope://b", "0", b"weights"), lambda: remove_folder("nope://b")):
        with pytest.raises(UserError, match=r"^weight_sync.folder=nope://b.*: fsspec knows no protocol nope://"):
            call()
    assert waited == []
