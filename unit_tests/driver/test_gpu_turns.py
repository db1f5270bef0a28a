"""Trainer and engine on one GPU, in turns. These need torch, transformers, numpy, pydantic and pytest, and a GPU."""

import asyncio
import gc
import multiprocessing

import pytest
import torch

from algs.grpo import GRPO
from data_feeds.packing.batches import micro_batches
from rollouts.engines.base import EngineConfig
from rollouts.engines.hf import HfEngine
from trainers.offload.offloaded_trainer import OffloadedTrainer
from trainers.weight_sync.fingerprint import fingerprint
from trainers.weight_sync.ipc import HandleWriter, join_chunks, open_handles
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.local_trainers import trainer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_a_trainer_that_leaves_frees_the_gpu_and_returns_to_the_bit(tiny_path):
    update = [micro_batches(some_groups(), "token", 40)[0]]
    # cuBLAS takes its workspace, larger than this model, at the first product, and keeps it
    trainer_of(tiny_path, GRPO(), dtype="bfloat16", optimizer="adamw", lr=1e-2).step(update)
    gc.collect()
    before = torch.cuda.memory_allocated()
    trainers = [trainer_of(tiny_path, GRPO(), dtype="bfloat16", optimizer="adamw", lr=1e-2) for _ in range(2)]
    stays, leaves = trainers
    for trainer in trainers:
        trainer.step(update)
    held = torch.cuda.memory_allocated() - before
    away = OffloadedTrainer(leaves)
    freed = away.offload_states() + away.offload_weights()
    assert freed > 0.45 * held and held - (torch.cuda.memory_allocated() - before) >= freed
    away.reload_states()
    for trainer in trainers:
        trainer.step(update)
    assert torch.equal(stays.flatten_weights(), leaves.flatten_weights())


def test_an_engine_that_sleeps_frees_the_gpu(tiny_path):
    before = torch.cuda.memory_allocated()
    engine = HfEngine(EngineConfig(model_path=tiny_path, temperature=1.0, max_model_len=64, stop_token_ids=[1]))
    held = torch.cuda.memory_allocated() - before
    expected = asyncio.run(engine.probe([5, 6, 7]))
    asyncio.run(engine.sleep())
    assert torch.cuda.memory_allocated() - before < 0.05 * held
    asyncio.run(engine.wake("weights"))
    asyncio.run(engine.wake("kv_cache"))
    assert asyncio.run(engine.probe([5, 6, 7])) == expected


def checksums_of(pipe) -> None:
    """In another process on the same GPU: take the checksums of every chunk of handles."""
    while (chunk := pipe.recv()) is not None:
        pipe.send(fingerprint(open_handles(join_chunks([chunk]), torch.cuda.current_device())))


def test_weights_go_to_another_process_by_handles(tiny_path):
    trainer = trainer_of(tiny_path, GRPO())
    writer = HandleWriter(trainer.export_weights(2**18), writes=True, folder=None)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    reader = spawn.Process(target=checksums_of, args=(theirs,), daemon=True)
    reader.start()
    loaded: dict[str, int] = {}
    while writer.write_chunk():
        ours.send(writer.chunk)
        loaded |= ours.recv()
    ours.send(None)
    reader.join()
    assert loaded == writer.summarize().checksums and len(loaded) > 10
