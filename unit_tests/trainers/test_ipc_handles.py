"""Weights by handles of memory between two processes on one GPU, with a stand-in for the GPU: a list of tensors."""

from __future__ import annotations

from collections.abc import Generator
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from core.errors import TransportFailed
from core.timing.clock import ActivityTimer
from core.timing.phases import TRAINER_ACTIVITIES
from core.types.weights import Bucket
from trainers.weight_sync import ipc
from trainers.weight_sync.base import Sent
from trainers.weight_sync.fingerprint import fingerprint
from trainers.weight_sync.ipc import join_chunks, open_handles
from trainers.weight_sync.source import WeightSource

ARGUMENTS = [*signature(reductions.rebuild_cuda_tensor).parameters]
NAMES = {0: "first", 1: "second", 2: "third", 3: "first"}
"""Names of the GPUs by their number: the trainer's process counts the first as 3, the engine's as 0."""


class Gpu:
    """Memory, with handles in the form of torch's."""

    def __init__(self) -> None:
        self.memory: list[Tensor] = []
        self.notes: list[str] = []
        self.current = 3

    def share(self, tensor: Tensor) -> tuple[str, tuple[Any, ...]]:
        assert tensor.is_contiguous() and not tensor.requires_grad
        self.notes.append("share")
        self.memory.append(tensor)
        told = {"storage_device": self.current, "storage_handle": len(self.memory) - 1}
        return "how to rebuild it", tuple(told.get(name, name) for name in ARGUMENTS)

    def rebuild(self, *args: Any) -> Tensor:
        given = dict(zip(ARGUMENTS, args, strict=True))
        self.notes.append(f"open on {given.pop('storage_device')}")
        own = self.memory[given.pop("storage_handle")]
        assert all(name == value for name, value in given.items())
        return own


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    made = Gpu()
    parts = {"reduce_tensor": made.share, "rebuild_cuda_tensor": made.rebuild}
    monkeypatch.setattr(ipc, "load_part", parts.__getitem__)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.notes.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=NAMES[device]))
    return made


class Trainer:
    def __init__(self, scale: float) -> None:
        self.buckets: list[Bucket] = [
            [("a", (scale * torch.arange(6.0).reshape(2, 3)).t().requires_grad_()), ("b", torch.ones(4))],
            [("c", torch.full((2,), scale))],
        ]

    def export_weights(self, max_bytes: int, scope: str) -> Generator[Bucket]:
        assert (max_bytes, scope) == (600, "files")
        yield from self.buckets


def source_of(scale: float) -> Any:
    trainer: Any = Trainer(scale)
    source = WeightSource(trainer, ActivityTimer(*TRAINER_ACTIVITIES), is_sender=False)
    source.begin_handles(600, "files")
    return source


def test_an_engine_gets_copies_of_the_tensors_on_its_own_gpu(gpu):
    sources = [source_of(1.0), source_of(2.0)]
    for n in range(2):
        chunks: list[Any] = []
        for source, number in zip(sources, (3, 1), strict=True):
            gpu.current = number
            gpu.notes.clear()
            assert source.write_chunk()
            chunks.append(source.get_chunk())
            assert gpu.notes == ["wait", *["share"] * len(source.trainer.buckets[n])]
        for engine, source in enumerate(sources):
            gpu.notes.clear()
            found = open_handles(join_chunks(chunks), engine)
            want = source.trainer.buckets[n]
            assert gpu.notes == [f"open on {engine}"] * len(want)
            for (name, got), (own, tensor) in zip(found, want, strict=True):
                assert name == own and torch.equal(got, tensor)
                assert all(got.data_ptr() != held.data_ptr() for held in gpu.memory)
        with pytest.raises(TransportFailed) as raised:
            open_handles(join_chunks(chunks), 2)
        assert str(raised.value) == (
            "weights did not get through over ipc: no trainer rank is on the GPU third of this engine"
        )
    assert [source.write_chunk() for source in sources] == [False, False]
    every = [pair for bucket in Trainer(2.0).buckets for pair in bucket]
    assert sources[1].summarize_chunks() == Sent(checksums=fingerprint(every), nbytes=4 * (6 + 4 + 2))


def test_a_handle_that_cannot_be_opened_is_an_error_of_the_transport(gpu, monkeypatch):
    source = source_of(1.0)
    source.write_chunk()
    chunk: Any = source.get_chunk()
    gpu.memory.clear()

    def fail(name: str) -> Any:
        raise RuntimeError("invalid device context")

    monkeypatch.setattr(ipc, "load_part", fail)
    with pytest.raises(TransportFailed, match=r"^weights did not get through over ipc: invalid device context$"):
        open_handles(join_chunks([chunk]), 0)
