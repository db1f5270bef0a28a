"""What differs on a GPU. These need torch, transformers and pydantic only; without a GPU they are skipped."""

import asyncio
import multiprocessing
import os

import pytest
import torch

from algs.grpo import GRPO
from configs.trainer_schema import ModelConfig, TrainerConfig
from data_feeds.packing import micro_batches
from modeling.attention import attend_by_sequence
from modeling.attention_varlen import fits_varlen
from modeling.forward import forward
from modeling.load import load_model
from modeling.segments import Segments
from rollouts.engines.base import EngineConfig
from rollouts.engines.hf import HfEngine
from trainers.away import Away
from trainers.local import LocalTrainer
from unit_tests.examples import families, some_groups
from weight_sync.fingerprint import fingerprint
from weight_sync.ipc import HandleWriter, join_chunks, open_handles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def trainer_of(path: str, **changes) -> LocalTrainer:
    model = ModelConfig(path=path, dtype=changes.pop("dtype", "float32"), attention=changes.pop("attention", "sdpa"))
    cfg = TrainerConfig(**{"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 0.0} | changes)
    return LocalTrainer(model, cfg, GRPO(), temperature=0.9, total_updates=10)


def update_of(trainer: LocalTrainer, max_tokens: int) -> torch.Tensor:
    before = trainer.flatten_weights()
    trainer.step([micro_batches(some_groups(), "token", max_tokens)[0]])
    return before - trainer.flatten_weights()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_gradient_does_not_depend_on_the_cut(tiny_path, layout):
    whole = update_of(trainer_of(tiny_path), 10_000)
    pieces = update_of(trainer_of(tiny_path, layout=layout), 40)
    assert (pieces - whole).norm() < 1e-4 * whole.norm()


@pytest.mark.skipif(os.environ.get("FLASH") != "1", reason="set FLASH=1 where flash-attn is installed")
@torch.no_grad()
def test_flash_attention_takes_the_borders(tiny_path):
    [[batch]] = micro_batches(some_groups(), "token", 10_000)
    models = [load_model(tiny_path, dtype="bfloat16", attention=a).cuda() for a in ("sdpa", "flash_attention_2")]
    padded, packed = (
        forward(m, m, batch.to("cuda"), layout=layout, temperature=1.0).logp
        for m, layout in zip(models, ("padded", "packed"), strict=True)
    )
    assert (padded - packed).abs().mean() < 0.02


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("parents", [[-1, -1, -1, -1], [-1, 0, 0, 1]])
def test_one_call_for_the_row_is_the_attention_of_each_segment(parents, window):
    """Flash attention of torch in bfloat16 beside the kernel of a CPU in float32: outputs and gradients."""
    segments = Segments([11, 6, 6, 17], parents)
    torch.manual_seed(0)
    shapes = [(1, heads, sum(segments.lengths), 64) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    assert fits_varlen(inputs[0]) and not fits_varlen(inputs[0].float())
    slope = torch.randn(1, sum(segments.lengths), 4, 64, device="cuda")

    def attend(tensors) -> tuple[torch.Tensor, ...]:
        done, _ = attend_by_sequence(torch.nn.Identity(), *tensors, None, sliding_window=window, segments=segments)
        return done.float(), *torch.autograd.grad((done.float() * slope).sum(), inputs)

    for got, want in zip(attend(inputs), attend([x.float() for x in inputs]), strict=True):
        assert (got - want).float().norm() < 0.02 * want.float().norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_prefixes_give_the_same_update(tiny_path, dtype):
    def update(**cut) -> torch.Tensor:
        trainer = trainer_of(tiny_path, dtype=dtype, attention="auto")
        assert trainer.describe_layout().shares_prefixes
        before = trainer.flatten_weights()
        trainer.step([micro_batches(families(), "token", 10_000, padded=False, **cut)[0]])
        return before - trainer.flatten_weights()

    apart = update()
    assert (update(share_prefixes=True) - apart).norm() < (1e-4 if dtype == "float32" else 0.05) * apart.norm()


def test_engine_and_trainer_agree_after_a_sync(tiny_path):
    trainer = trainer_of(tiny_path)
    settings = {"dtype": "float32", "temperature": 0.9, "max_model_len": 64, "stop_token_ids": [1]}
    engine = HfEngine(EngineConfig(model_path=tiny_path, **settings))
    update_of(trainer, 10_000)

    async def sync_and_compare():
        await engine.load_weights(1, trainer.export_weights(2**20))
        done = await engine.generate([5, 6, 7], max_new_tokens=12, seed=0)
        return await engine.probe([5, 6, 7, *done.token_ids]), trainer.probe([5, 6, 7, *done.token_ids])

    theirs, ours = asyncio.run(sync_and_compare())
    assert theirs == pytest.approx(ours, abs=1e-3)
    sent = {name: value for bucket in trainer.export_weights(2**20) for name, value in fingerprint(bucket).items()}
    assert asyncio.run(engine.read_fingerprint()) == [sent]


def test_a_fingerprint_is_the_same_on_every_device():
    x = torch.randn(1000, 96, dtype=torch.bfloat16)
    assert fingerprint([("x", x)]) == fingerprint([("x", x.cuda())])


def test_a_trainer_that_leaves_frees_the_gpu_and_returns_to_the_bit(tiny_path):
    update = [micro_batches(some_groups(), "token", 40)[0]]
    before = torch.cuda.memory_allocated()
    trainers = [trainer_of(tiny_path, dtype="bfloat16", optimizer="adamw", lr=1e-2) for _ in range(2)]
    stays, leaves = trainers
    for trainer in trainers:
        trainer.step(update)
    held = torch.cuda.memory_allocated() - before
    away = Away(leaves)
    freed = away.leave_states().freed + away.leave_weights().freed
    assert freed > 0.45 * held and held - (torch.cuda.memory_allocated() - before) >= freed
    away.return_to_device()
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
    trainer = trainer_of(tiny_path)
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
