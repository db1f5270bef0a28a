"""Row of a GPU day for weights between two processes on one GPU, by handles of CUDA IPC.

On a CPU the same two processes pass the bytes themselves: this rehearses all but the handles.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import torch

from core.types.weights import Bucket
from tools.gpu_day.bench import Bench, TrainerOn
from tools.gpu_day.rows import CheckFailed, Numbers
from trainers.weight_sync.base import Chunk
from trainers.weight_sync.chunks import ChunkWriter, read_chunk
from trainers.weight_sync.fingerprint import fingerprint
from trainers.weight_sync.ipc import HandleWriter, join_chunks, open_handles

BUCKET_BYTES = 2**28
START_S = 60.0
"""Deadline of the other process for its start and for every chunk."""


def check_ipc(bench: Bench) -> Numbers:
    """Send all weights of a large model to another process, which takes their checksums."""
    trainer = TrainerOn(bench.device, bench.make_large_model(), "bfloat16")
    stream, on_gpu = trainer.export_weights(BUCKET_BYTES, "whole"), bench.device == "cuda"
    writer = (HandleWriter if on_gpu else ChunkWriter)(stream, writes=True, folder=None)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    reader = spawn.Process(target=read_chunks, args=(theirs, on_gpu), daemon=True)
    reader.start()
    theirs.close()  # else the end of the other process would not end the pipe
    receive(ours)  # it is ready
    began, loaded = time.perf_counter(), dict[str, int]()
    while writer.write_chunk():
        ours.send(writer.chunk)
        loaded |= receive(ours)
    seconds = time.perf_counter() - began
    ours.send(None)
    reader.join(START_S)
    sent = writer.summarize()
    if loaded != sent.checksums:
        raise CheckFailed(f"the other process read other values of {len(sent.checksums)} tensors than were sent")
    gib = sent.nbytes / 2**30
    return {"tensors": len(loaded), "GiB": gib, "with checksums at both ends, s per GiB": seconds / gib}


def receive(pipe: Connection) -> dict[str, int]:
    """Return the next answer of the other process. Raises CheckFailed if it has ended, or says nothing."""
    if not pipe.poll(START_S):
        raise CheckFailed(f"the other process gave no answer within {START_S:g} s")
    try:
        return pipe.recv()
    except EOFError as error:
        raise CheckFailed("the other process has ended: its error is above") from error


def read_chunks(pipe: Connection, on_gpu: bool) -> None:
    """Be the other process: answer every chunk with the checksums of its tensors, until None comes."""
    if on_gpu:
        torch.cuda.init()
    pipe.send({})
    while (chunk := pipe.recv()) is not None:
        pipe.send(fingerprint(open_chunk(chunk, on_gpu)))


def open_chunk(chunk: Chunk, on_gpu: bool) -> Bucket:
    if not on_gpu:
        return read_chunk(chunk)
    assert isinstance(chunk, bytes)
    return open_handles(join_chunks([chunk]), torch.cuda.current_device())
