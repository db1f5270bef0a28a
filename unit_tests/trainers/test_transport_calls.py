"""Every transport brings every tensor to every rank of every engine, call by call, with all workers in this process."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from core.cluster.actor import IDLE
from core.errors import RunStopped, TransportFailed
from core.timing.clock import ActivityTimer
from core.timing.phases import TRAINER_ACTIVITIES
from core.types.weights import Bucket, split_into_buckets
from trainers.weight_sync import store
from trainers.weight_sync.base import Sent
from trainers.weight_sync.broadcast import WeightReceiver, WeightSender
from trainers.weight_sync.chunks import ChunkWriter, read_chunk
from trainers.weight_sync.fingerprint import fingerprint
from trainers.weight_sync.source import WeightSource
from trainers.weight_sync.transports import BroadcastTransport, ChunkedTransport, StoreTransport, SyncEndpoints

WEIGHTS = {"a": torch.randn(48, 64).bfloat16(), "b": torch.randn(16, 8), "c": torch.tensor(2.5)}
NBYTES = 48 * 64 * 2 + 16 * 8 * 4 + 4
BUCKETS = [["a"], ["b", "c"]]
"""Of at most 600 bytes: the first tensor is larger, and the others fit together."""
LONG_S = 20.0


class Trainer:
    """Exports three tensors, and counts the buckets that were read."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.read = self.closed = 0

    def export_weights(self, max_bytes: int, scope: str) -> Generator[Bucket]:
        self.asked.append((max_bytes, scope))
        try:
            for bucket in split_into_buckets(WEIGHTS.items(), lambda named: named[1].nbytes, max_bytes):
                self.read += 1
                yield bucket
        finally:
            self.closed += 1


class Engine:
    """Engine of two ranks, which keep the tensors that they get."""

    def __init__(self) -> None:
        self.receivers: list[WeightReceiver] = []
        self.got: list[dict[str, Any]] = []
        self.failure: Exception | None = None

    def join_broadcast(self, *, address: str, port: int, first_rank: int, members: int) -> None:
        def join(rank: int) -> WeightReceiver:
            return WeightReceiver(address=address, port=port, rank=rank, members=members, timeout_s=LONG_S)

        with ThreadPoolExecutor() as pool:
            self.receivers = [*pool.map(join, (first_rank, first_rank + 1))]

    def begin_chunks(self) -> None:
        self.receivers, self.chunks = [], dict[str, Any]()

    def load_chunk(self, chunk: bytes | str) -> None:
        if self.failure is not None:
            raise self.failure
        self.chunks |= dict(read_chunk(chunk))

    def receive_weights(self, version: int) -> None:
        if self.failure is not None:
            for receiver in self.receivers:
                receiver.leave()
            raise self.failure
        with ThreadPoolExecutor() as pool:
            received = [pool.submit(lambda r=r: list(r.receive())) for r in self.receivers]
            buckets = [future.result() for future in received]
        self.got = [dict(pair for bucket in one for pair in bucket) for one in buckets] or [self.chunks]


class Workers:
    """Twin of `Remote` over objects of this process: notes every call as NAME RANK METHOD."""

    def __init__(self, name: str, workers: Sequence[Any], notes: list[str]) -> None:
        self.name, self.workers, self.notes = name, workers, notes
        self.ranks: Sequence[int] = range(len(workers))
        self.actors: list[Any] = [*workers]
        self.restarting = set[int]()

    async def check_health(self, rank: int) -> tuple[bool, str]:
        return True, f"{self.name} {rank}{IDLE}"

    async def find_free_address(self, rank: int) -> tuple[str, int]:
        self.notes.append(f"{self.name} {rank} find_free_address")
        return "127.0.0.1", 1

    def only(self, ranks: Sequence[int]) -> Workers:
        found = Workers(self.name, self.workers, self.notes)
        found.ranks, found.actors = ranks, [*self.actors]
        return found

    async def start_one(self, rank: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.notes.append(f"{self.name} {rank} {method.__name__}")
        args = tuple([await arg if inspect.isawaitable(arg) else arg for arg in args])  # as Ray does
        return await asyncio.to_thread(getattr(self.workers[rank], method.__name__), *args, **kwargs)

    def start_all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [self.start_one(rank, method, *args) for rank in self.ranks]

    async def call_one(self, rank: int, method: Callable[..., Any], *args: Any) -> Any:
        return await self.start_one(rank, method, *args)

    async def call_all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return list(await asyncio.gather(*self.start_all(method, *args)))

    def submit(self, rank: int, method: Callable[..., Any]) -> Any:
        self.notes.append(f"{self.name} {rank} {method.__name__} submitted")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_result(getattr(self.workers[rank], method.__name__)())
        return answer


class World:
    """Two trainer ranks, of which the first sends, and two engines of two ranks."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.trainers = [Trainer(), Trainer()]
        self.timers = [ActivityTimer(*TRAINER_ACTIVITIES) for _ in self.trainers]
        made = zip(self.trainers, self.timers, strict=True)
        self.sources = [WeightSource(cast(Any, one), timer, is_sender=not n) for n, (one, timer) in enumerate(made)]
        self.engines = [Engine(), Engine()]
        workers: Any = Workers("trainer", self.sources, self.notes)
        engines: Any = Workers("engine", self.engines, self.notes)
        handles = {"trainers": workers, "sources": workers, "engines": engines, "engine_timers": engines}
        self.ends = SyncEndpoints(**handles, ranks_per_engine=2, max_bytes=600, scope="files", timeout_s=LONG_S)

    def sync(self, transport: Any, version: int = 7) -> list[str]:
        """Run a sync; return the calls, in order, where those of a gather are sorted."""
        self.notes.clear()
        for engine in self.engines:
            engine.got = []
        self.sent: Sent = asyncio.run(transport.transfer(version, self.ends))
        assert self.sent.checksums == fingerprint(WEIGHTS.items()) and self.sent.nbytes == NBYTES
        for engine in self.engines:
            assert engine.got and all(got.keys() == WEIGHTS.keys() for got in engine.got)
            assert all(torch.equal(got[name], WEIGHTS[name]) for got in engine.got for name in got)
        return [*self.notes]


def both(name: str, method: str) -> list[str]:
    return [f"{name} 0 {method}", f"{name} 1 {method}"]


SENDS = [*both("trainer", "broadcast_weights"), *both("engine", "receive_weights")]
FORMS = [
    *("trainer 0 find_free_address", "trainer 0 open_broadcast", "trainer 0 wait_for_members"),
    *both("engine", "join_broadcast"),
]


def test_a_broadcast_forms_its_group_once_and_again_for_other_engines() -> None:
    world, transport = World(), BroadcastTransport("gloo")
    assert world.sync(transport) == [*FORMS, *SENDS]
    assert [len(engine.got) for engine in world.engines] == [2, 2], "every rank of an engine"
    assert world.sync(transport) == SENDS, "the same members"
    assert [one.asked for one in world.trainers] == [2 * [(600, "files")]] * 2 and world.trainers[1].read == 2 * 2
    assert transport.members == world.engines
    cast(Any, world.ends.engines).actors[1] = "restarted"
    assert world.sync(transport) == [*FORMS, *SENDS]
    alone = replace(world.ends, engines=world.ends.engines.only([1]))
    world.notes.clear()
    asyncio.run(transport.transfer(9, alone))
    assert world.notes == [note for note in [*FORMS, *SENDS] if not note.startswith("engine 0")]


def test_a_group_whose_member_failed_is_formed_again() -> None:
    world, transport = World(), BroadcastTransport("gloo")
    world.sync(transport)
    read = [one.read for one in world.trainers]
    world.engines[1].failure = RunStopped("the engine lacks a name")
    with pytest.raises(RunStopped, match=r"^the engine lacks a name$"):
        asyncio.run(transport.transfer(8, world.ends))
    assert transport.members == []
    assert [one.read - before for one, before in zip(world.trainers, read, strict=True)] == [2, 2], "all gather all"
    world.engines[1].failure = None
    assert world.sync(transport) == [*FORMS, *SENDS]


def test_a_group_that_could_not_be_formed_leaves_none_behind() -> None:
    """The members of before have left theirs to join it."""
    world, transport = World(), BroadcastTransport("gloo")
    world.sync(transport)
    find, actors = world.ends.sources.find_free_address, cast(Any, world.ends.engines).actors
    before, actors[1] = actors[1], "restarted"

    async def fail(rank: int) -> Any:
        raise RunStopped("trainer 0 died")

    cast(Any, world.ends.sources).find_free_address = fail
    with pytest.raises(RunStopped, match=r"^trainer 0 died$"):
        asyncio.run(transport.transfer(8, world.ends))
    cast(Any, world.ends.sources).find_free_address, actors[1] = find, before
    assert world.sync(transport) == [*FORMS, *SENDS]


def test_chunks_go_through_the_object_store_one_by_one() -> None:
    world = World()
    write = both("trainer", "write_chunk")
    loads = ["trainer 0 get_chunk submitted", *both("engine", "load_chunk")]
    assert world.sync(ChunkedTransport("direct")) == [
        *both("engine", "begin_chunks"),
        *both("trainer", "begin_chunks"),
        *(write + loads) * len(BUCKETS),
        *write,
        *both("engine", "receive_weights"),
        "trainer 0 summarize_chunks",
    ]
    assert [one.asked for one in world.trainers] == [[(600, "files")]] * 2
    assert [(one.read, one.closed) for one in world.trainers] == [(2, 1)] * 2


def test_objects_go_to_a_folder_and_are_removed(tmp_path: Path) -> None:
    world, folder = World(), tmp_path / "weights"
    folder.mkdir()
    (folder / "of an earlier run").write_text("")
    seen: list[str] = []
    notes = world.sync(StoreTransport(str(folder)))
    before = [*both("engine", "begin_chunks"), *both("trainer", "begin_chunks")]
    before += both("trainer", "write_chunk") * (len(BUCKETS) + 1)
    assert notes[: len(before)] == before
    # an engine does not wait for the other
    assert sorted(notes[len(before) : -3]) == sorted(both("engine", "load_chunk") * len(BUCKETS))
    assert notes[-3:] == [*both("engine", "receive_weights"), "trainer 0 summarize_chunks"]
    assert not folder.exists()
    load_one, left = world.engines[0].load_chunk, list[Path]()
    folder.mkdir()
    (folder / "of a killed run").write_text("")

    def noted(chunk: Any) -> None:
        seen.append(str(chunk))
        left.extend(folder.glob("of a*"))
        load_one(chunk)

    world.engines[0].load_chunk = noted  # type: ignore[method-assign]
    world.sync(StoreTransport(str(folder)), version=12)
    hashed = [re.sub(r"-[0-9a-f]{8}/", "-HEX/", one.partition("#")[0]) for one in seen]
    assert hashed == [f"{folder}/12-HEX/{n}.safetensors" for n in range(len(BUCKETS))]
    assert left == [], "room for new weights"


@pytest.mark.parametrize("failure", [RunStopped("out of memory"), ValueError("odd")], ids=repr)
@pytest.mark.parametrize("name", ["direct", "disk"])
def test_a_load_that_fails_ends_the_stream_on_every_rank(name: str, failure: Exception, tmp_path: Path) -> None:
    world = World()
    transport: Any = StoreTransport(f"{tmp_path}/weights") if name == "disk" else ChunkedTransport("direct")
    world.engines[1].failure = failure
    if name == "disk":  # all chunks are written before the first is loaded
        fails = world.sources[0].write_chunk

        def once() -> bool:
            if world.trainers[0].read:
                raise failure
            return fails()

        world.sources[0].write_chunk = once  # type: ignore[method-assign]
    with pytest.raises(type(failure), match=rf"^{failure}$"):
        asyncio.run(transport.transfer(1, world.ends))
    assert sorted(world.notes[-2:]) == both("trainer", "abort_chunks")
    assert [one.closed for one in world.trainers] == [1, 1] and not [*tmp_path.iterdir()]


def test_an_abort_that_fails_does_not_hide_the_first_error() -> None:
    world = World()

    def abort() -> None:
        raise RunStopped("trainer 1 died")

    world.sources[1].abort_chunks = abort  # type: ignore[method-assign]
    world.engines[0].failure = ValueError("odd")
    with pytest.raises(ValueError, match=r"^odd$"):
        asyncio.run(ChunkedTransport("direct").transfer(1, world.ends))
    world.engines[0].failure = RunStopped("out of memory")
    with pytest.raises(RunStopped, match=r"^trainer 1 died$"):
        asyncio.run(ChunkedTransport("direct").transfer(2, world.ends))


def test_a_sync_has_only_the_engines_that_it_names() -> None:
    ends = World().ends.only([1])
    assert [*ends.engines.ranks] == [*ends.engine_timers.ranks] == [1] and [*ends.sources.ranks] == [0, 1]
    assert ends.list_members() == [cast(Any, ends.engines).actors[1]]


def test_the_stream_of_a_broadcast_is_as_the_module_says() -> None:
    """The example at the top of trainers/weight_sync/broadcast.py, read by a plain member of the group."""
    w, b = torch.arange(6).reshape(2, 3).bfloat16(), torch.arange(4.0)
    sender = WeightSender(timeout_s=LONG_S)
    port = sender.open("127.0.0.1")

    def read() -> list[bytes]:
        names = PrefixStore("feynrl_weights", TCPStore("127.0.0.1", port, is_master=False))
        group = ProcessGroupGloo(names, 1, 2, timedelta(seconds=LONG_S))
        found: list[bytes] = []
        for size in (8, 50, 128, 8):
            flat, options = torch.empty(size, dtype=torch.uint8), BroadcastOptions()
            group.broadcast([flat.view(torch.int64) if size == 8 else flat], options).wait()
            found.append(bytes(flat.tolist()))
        return found

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(read)
        sender.join(members=2)
        sent = sender.send([[("w", w), ("b", b)]])
        head, text, flat, end = answer.result()
    assert sent == fingerprint([("w", w), ("b", b)]) and sender.sent_bytes == 12 + 16
    assert head == (50).to_bytes(8, "little") and end == bytes(8)
    assert text == b'[["w", "bfloat16", [2, 3]], ["b", "float32", [4]]]'
    assert flat[:12] == w.view(torch.uint8).numpy().tobytes() and flat[64:80] == b.numpy().tobytes()


def test_a_sender_that_listens_to_nobody_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"^open\(\) comes before join\(\)$"):
        WeightSender(timeout_s=1.0).join(members=2)
    with pytest.raises(
        TransportFailed, match=r"^weights did not get through over gloo: this member is not in the grou"
    ):
        WeightSender(timeout_s=1.0).send([[("w", torch.ones(2))]])


@pytest.mark.parametrize(("folder", "over"), [(True, "disk"), (False, "direct")])
def test_a_chunk_that_cannot_be_made_names_its_transport(folder: bool, over: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(store, "WAITS_S", ())

    def stream() -> Generator[Bucket]:
        yield [("w", WEIGHTS["b"]), ("same", WEIGHTS["b"])]

    writer = ChunkWriter(stream(), writes=True, folder=str(tmp_path) if folder else None)
    with pytest.raises(TransportFailed, match=rf"^weights did not get through over {over}: .*share memory"):
        writer.write_chunk()
    with pytest.raises(TransportFailed, match=r"^weights did not get through over disk: "):
        read_chunk(f"{tmp_path}/0.safetensors#1-0")
    with pytest.raises(TransportFailed, match=r"^weights did not get through over direct: "):
        read_chunk(b"nothing")


def test_a_chunk_holds_what_the_encoder_returns_and_counts_its_bytes() -> None:
    def stream() -> Generator[Bucket]:
        yield [("w", WEIGHTS["b"])]
        yield [("v", WEIGHTS["b"].t())]

    writer = ChunkWriter(
        stream(), writes=True, folder=None, encode=lambda bucket: [(f"half {n}", t[: len(t) // 2]) for n, t in bucket]
    )
    found: dict[str, Any] = {}
    while writer.write_chunk():
        found |= load(cast(bytes, writer.chunk))
    assert {name: t.shape for name, t in found.items()} == {"half w": (8, 8), "half v": (4, 16)}
    assert writer.summarize() == Sent(
        checksums=fingerprint([("w", WEIGHTS["b"]), ("v", WEIGHTS["b"].t())]), nbytes=8 * 8 * 4 + 4 * 16 * 4
    )
