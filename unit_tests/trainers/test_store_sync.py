"""Weights in folders and object stores: only what was written whole is read, and nothing stays."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from algs.sft import SFT
from configs.sync_schema import WeightSyncConfig
from core.errors import TransportFailed, UserError
from core.timing.clock import ActivityTimer
from core.timing.phases import TRAINER_ACTIVITIES
from data_feeds.packing.batches import micro_batches
from driver.checks import weight_store
from driver.start.weight_sync import choose_store
from trainers.weight_sync import store
from trainers.weight_sync.chunks import ChunkWriter
from trainers.weight_sync.fingerprint import fingerprint
from trainers.weight_sync.source import WeightSource
from trainers.weight_sync.store import read_chunk_bytes, read_manifest, remove_folder, write_chunk, write_manifest
from trainers.weight_sync.transports import StoreTransport
from unit_tests.helpers.engines import engine_of
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.local_trainers import trainer_of
from unit_tests.helpers.other_packages import ROOT, install_beside
from unit_tests.helpers.processes import find_free_port
from unit_tests.helpers.runs import LUCK, file_of, folder_of, metrics_of, program


class Failing(MemoryFileSystem):
    """A store in memory whose calls fail as they are told, in turn."""

    protocol = "failing"
    store: ClassVar[dict[str, Any]] = {}
    failures: ClassVar[list[Exception]] = []
    calls = 0

    def _fail(self) -> None:
        type(self).calls += 1
        if self.failures:
            raise self.failures.pop(0)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._fail()
        super().pipe_file(path, value, mode, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._fail()
        return super().cat_file(path, start, end, **kwargs)


fsspec.register_implementation("failing", Failing)


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch):
    monkeypatch.setattr(store, "WAITS_S", (0.0, 0.0))
    Failing.failures, Failing.calls = [], 0


@pytest.mark.parametrize("kind", ["path", "memory://", "failing://"])
def test_an_engine_follows_a_trainer_by_objects(kind, tiny_path, tmp_path):
    """Whole weights, then changes; the checksums of what the engine loaded are those of the trainer's weights."""
    base = str(tmp_path / "weights") if kind == "path" else f"{kind}bucket{tmp_path}"
    trainer = trainer_of(tiny_path, SFT(), dtype="bfloat16", lr=1e-4)
    engine = engine_of(tiny_path, dtype="bfloat16")
    source = WeightSource(trainer, ActivityTimer(*TRAINER_ACTIVITIES), is_sender=True)

    async def sync(version: int, coding: Any) -> None:
        folder = f"{base}/{version}"
        await engine.pause()
        await engine.begin_chunks()
        source.begin_chunks(100_000, "whole", folder, coding)
        Failing.failures = [ConnectionResetError("reset"), TimeoutError("slow")]  # which pass
        while source.write_chunk():
            with pytest.raises(TransportFailed, match=r"cannot read .*/manifest.json"):
                read_manifest(folder)
        for chunk in read_manifest(folder):
            await engine.load_chunk(chunk)
        await engine.receive_weights(version)
        [loaded] = await engine.read_fingerprint()
        assert loaded == source.summarize_chunks().checksums == fingerprint(trainer.model.named_parameters())

    asyncio.run(sync(1, "whole"))
    trainer.step([micro_batches(some_groups(2, 2), "token", 10_000)[0]])
    asyncio.run(sync(2, "changes"))
    whole, changes = (sum(len(read_chunk_bytes(chunk)) for chunk in read_manifest(f"{base}/{n}")) for n in (1, 2))
    assert changes < 0.5 * whole
    remove_folder(base)
    remove_folder(base)  # nothing is there
    with pytest.raises(TransportFailed):
        read_manifest(f"{base}/2")


def test_an_object_that_is_not_what_was_written_is_not_read(tmp_path):
    folder = str(tmp_path)
    chunk = write_chunk(folder, "0.safetensors", b"weights")
    write_manifest(folder, [chunk])
    assert [read_chunk_bytes(one) for one in read_manifest(folder)] == [b"weights"]
    for found, why in ((b"weight", "6 of 7 bytes"), (b"weighty", "its hash is another")):
        Path(folder, "0.safetensors").write_bytes(found)
        with pytest.raises(TransportFailed, match=rf"over disk: cannot read .*0.safetensors: .*{why}"):
            read_chunk_bytes(chunk)
    Path(folder, "manifest.json").write_text('{"chunks": ["0.saf')
    with pytest.raises(TransportFailed, match=r"cannot read .*/manifest.json"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("failure", "why", "calls"),
    [
        (ConnectionResetError("reset by peer"), "ConnectionResetError: reset by peer", 3),
        (PermissionError("Access Denied"), r"access is denied \(Access Denied\)", 1),
        (OSError(errno.ENOSPC, "No space left on device"), "there is no room left", 1),
        (FileNotFoundError("The specified bucket does not exist"), "there is no such bucket", 1),
        (NotImplementedError(), "this kind of store takes no objects", 1),
    ],
)
def test_failures_that_may_pass_are_tried_again_and_others_told_at_once(failure, why, calls):
    Failing.failures = [failure] * 3
    with pytest.raises(TransportFailed, match=rf"cannot write 0 to failing://b: {why}"):
        write_chunk("failing://b", "0", b"weights")
    assert Failing.calls == calls


def test_a_stream_that_breaks_off_has_no_list(tmp_path):
    def stream():
        yield [("w", torch.ones(3))]
        raise RuntimeError("broken")

    writer = ChunkWriter(stream(), writes=True, folder=str(tmp_path))
    assert writer.write_chunk()
    with pytest.raises(RuntimeError, match="broken"):
        writer.write_chunk()
    assert [file.name for file in tmp_path.iterdir()] == ["0.safetensors"]


def test_a_folder_that_cannot_hold_weights_is_refused_before_the_start(refused, tmp_path, monkeypatch):
    by_disk = {"backend": "ray", "weight_sync.transport": "disk"}
    (tmp_path / "file").write_text("")
    wrong = [
        ("s3://bucket/run", "s3:// needs a package that is not installed: pip install s3fs"),
        ("memory://run", "is in the memory of one process"),
        ("s3://me:mine@host/run", "the address holds a user, a password or a token"),
        ("nope://run", "fsspec knows no protocol nope://"),
        ("http://127.0.0.1:9/run", "weight_sync.folder=http://127.0.0.1:9/run: cannot write object"),
        (str(tmp_path / "file" / "below"), "name a folder that may be written to, read and cleared"),
    ]
    for folder, why in wrong:
        refused(by_disk | {"weight_sync.folder": folder}, "weight_sync.folder", why)
    refused({"backend": "ray", "weight_sync.folder": str(tmp_path)}, "weight_sync", "set weight_sync.transport to disk")


def test_the_folder_that_a_sync_removes_is_never_the_run_folder(tmp_path):
    run_folder = tmp_path / "runs" / "run-1"
    (tmp_path / "link").symlink_to(run_folder)
    store_of = {folder: choose_store(disk_to(tmp_path / folder), run_folder) for folder in ("runs", "else")}
    assert store_of == {name: f"{tmp_path}/{name}/feynrl-weights-run-1" for name in store_of}
    assert choose_store(WeightSyncConfig(), run_folder) == f"{run_folder}/weights"
    for folder in (run_folder, run_folder / "samples", tmp_path / "link" / "below"):
        with pytest.raises(UserError, match=r"weight_sync.folder=.* lies in the run folder"):
            choose_store(disk_to(folder), run_folder)


def disk_to(folder: Path) -> WeightSyncConfig:
    return WeightSyncConfig(transport="disk", folder=str(folder))


def test_the_object_of_a_check_is_removed_if_it_cannot_be_read(refused, tmp_path, monkeypatch):
    def unreadable(chunk: str) -> bytes:
        raise TransportFailed("weights did not get through over disk: cannot read it")

    monkeypatch.setattr(weight_store, "read_chunk_bytes", unreadable)
    (tmp_path / "store").mkdir()
    disk = {"backend": "ray", "weight_sync.transport": "disk", "weight_sync.folder": str(tmp_path / "store")}
    refused(disk, "weight_sync.folder", "cannot read it")
    assert not [*(tmp_path / "store").iterdir()]


class Opening(MemoryFileSystem):
    """A store that fails to open as it is told, in turn."""

    protocol = "opening"
    cachable = False
    failures: ClassVar[list[Exception]] = []

    def __init__(self, **kwargs):
        if self.failures:
            raise self.failures.pop(0)
        super().__init__(**kwargs)


fsspec.register_implementation("opening", Opening)


def test_a_store_that_does_not_open_is_tried_again():
    for call in (lambda: write_chunk("opening://b", "0", b"weights"), lambda: remove_folder("opening://b")):
        Opening.failures = [OSError("no credentials")] * 2
        call()
        Opening.failures = [OSError("no credentials")] * 3
        with pytest.raises(TransportFailed, match=r"cannot .* opening://b: OSError: no credentials"):
            call()


@dataclass
class Ends:
    """Endpoints of a sync with one chunk, whose engines load it or fail."""

    failure: BaseException | None = None
    called: list[str] = field(default_factory=list)
    ranks: Sequence[int] = (0, 1)
    max_bytes, scope, coding, folder = 1, "whole", "plain", ""

    def start_one(self, rank: int, method: Callable[..., Any], *args: Any) -> Any:
        return self._call(method.__name__, *args)

    def start_all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [self.start_one(0, method, *args)]

    async def call_all(self, method: Callable[..., Any]) -> None:
        self.called.append(method.__name__)

    async def call_one(self, rank: int, method: Callable[..., Any]) -> None: ...

    async def gather_collective(self, calls: list[Any]) -> list[Any]:
        return await asyncio.gather(*calls)

    @property
    def sources(self) -> Ends:
        return self

    engines = sources

    async def _call(self, name: str, *args: Any) -> bool:
        self.called.append(name)
        if name == "begin_chunks" and args:
            self.folder = args[2]
        if name == "write_chunk":
            n = self.called.count(name)
            if n == 3 and self.failure is not None:
                raise self.failure
            if n < 4:
                write_chunk(self.folder, str(n), b"weights")
            else:
                write_manifest(self.folder, [f"{self.folder}/{n}#7-0" for n in range(3)])
            return n < 4
        return True


@pytest.mark.parametrize("failure", [TransportFailed("no"), UserError("no"), asyncio.CancelledError()], ids=repr)
def test_a_sync_that_fails_or_is_cancelled_leaves_no_object(failure, tmp_path):
    ends: Any = Ends(failure=failure)
    with pytest.raises(type(failure)):
        asyncio.run(StoreTransport(f"{tmp_path}/weights").transfer(1, ends))
    assert ends.called.count("write_chunk") == 3 and ends.called[-1] == "abort_chunks"
    assert not [*tmp_path.iterdir()]


def test_every_stored_chunk_is_a_call_with_a_deadline_of_its_own(tmp_path):
    ends: Any = Ends()
    asyncio.run(StoreTransport(f"{tmp_path}/weights").transfer(1, ends))
    assert ends.called.count("load_chunk") == 3 * 2 and not [*tmp_path.iterdir()]


@pytest.fixture
def s3(tmp_path, monkeypatch) -> Iterator[Callable[..., str]]:
    """Run a program of Python against an S3 server of this machine, with a bucket `weights`."""
    moto, s3fs = install_beside("moto[server]"), install_beside("s3fs")
    port = find_free_port()
    keys = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in (keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}).items():
        monkeypatch.setenv(name, value)
    log = (tmp_path / "moto.txt").open("w")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(moto)}, stdout=log, stderr=log)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{s3fs}")

    def run(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < until, (tmp_path / "moto.txt").read_text()
            time.sleep(0.2)
        run("import s3fs; s3fs.S3FileSystem().mkdir('weights')")
        yield run
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_weights_travel_through_an_s3_server_and_none_stay_there(s3, recipe, tmp_path):
    changes = {
        **{"backend": "ray", "steps": 3, "model.dtype": "bfloat16", "trainer.lr": 1e-5, "rollout.num_engines": 2},
        **{"weight_sync.transport": "disk", "weight_sync.folder": "s3://weights/runs", "weight_sync.delta": True},
        "reward.function": file_of(tmp_path / "luck.py", LUCK),
    }
    refused = program(recipe(changes | {"weight_sync.folder": "s3://nowhere/runs"}))
    assert refused.returncode == 2 and "there is no such bucket" in refused.stderr, refused.stderr
    s3("import s3fs; s3fs.S3FileSystem().pipe('weights/runs/mine', b'kept')")
    done = program(recipe(changes))
    assert done.returncode == 0, done.stderr
    found = metrics_of(folder_of(tmp_path))
    assert len(found) == 3 and all(row["sync/probe_gap"] < 0.1 and 0 < row["sync/changed"] < 0.3 for row in found)
    assert s3("import s3fs; print(s3fs.S3FileSystem().find('weights'))") == "['weights/runs/mine']\n"
