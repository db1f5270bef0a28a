"""The engine hf on the pretend CUDA device: it samples what it samples on the CPU, and takes a trainer's weights."""

import asyncio

import pytest
import torch

from algs.sft import SFT
from core.types.allowed_tokens import AllowedTokens
from data_feeds.packing.batches import micro_batches
from modeling.images.processor import ImageProcessor
from trainers.weight_sync.fingerprint import fingerprint
from unit_tests.helpers import seeing
from unit_tests.helpers.engines import PROMPTS, engine_of, several
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.local_trainers import trainer_of
from unit_tests.helpers.pretend_cuda import needs_pretend_cuda, pretend_cuda

pytestmark = [needs_pretend_cuda, pytest.mark.usefixtures("one_thread")]
TOKENS = 12
SETTINGS = {
    "sampled": {},
    "greedy": {"temperature": 0.0},
    "allowed tokens": {"allowed_tokens": AllowedTokens(allowed=tuple(range(0, 100, 3)))},
    "banned tokens": {"allowed_tokens": AllowedTokens(banned=(5, 6, 7))},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_it_samples_what_it_samples_on_a_cpu(tiny_path, name):
    def sample() -> list:
        return asyncio.run(several(engine_of(tiny_path, **SETTINGS[name]), PROMPTS * 2, range(8), TOKENS))

    want = sample()
    with pretend_cuda() as device:
        assert sample() == want
    waits, uploads = (
        {line: n for line, n in counted.items() if line.startswith("rollouts/") and "self.model(" not in line}
        for counted in (device.syncs, device.uploads)
    )
    assert 0 < sum(waits.values()) <= 2 * TOKENS, "of every token its id and its log-probability"
    # an index that stays on the CPU would be copied by each use
    assert all("device" in line for line in uploads), uploads


@pytest.mark.parametrize("family", seeing.FAST)
def test_it_sees_images(tmp_path, family):
    path = seeing.save_model(tmp_path, family)
    [sample, *_] = seeing.seeing_groups(ImageProcessor(path))[0]

    def look() -> tuple:
        engine = engine_of(path)

        async def ask():
            done = await engine.generate(sample.token_ids.tolist(), max_new_tokens=4, seed=0, images=sample.images)
            return done, await engine.probe(sample.token_ids.tolist(), sample.images)

        return asyncio.run(ask())

    want = look()
    with pretend_cuda():
        assert look() == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_takes_the_weights_of_a_trainer(tiny_path, dtype):
    def sync() -> tuple:
        trainer = trainer_of(tiny_path, SFT(), dtype=dtype)
        trainer.step([micro_batches(some_groups(2), "token", 10_000)[0]])
        engine = engine_of(tiny_path, dtype=dtype, starts_empty=True)
        ids = [5, 6, 7, 8, 9]

        async def load():
            await engine.load_weights(1, trainer.export_weights(2**16, "whole"))
            return await engine.read_fingerprint(), await engine.probe(ids), trainer.probe(ids)

        [loaded], theirs, ours = asyncio.run(load())
        sent = {k: v for bucket in trainer.export_weights(2**16, "whole") for k, v in fingerprint(bucket).items()}
        assert loaded == sent
        return loaded, theirs, ours

    want = sync()
    with pretend_cuda():
        got = sync()
    assert got == want
    assert torch.tensor(got[1]).sub(torch.tensor(got[2])).abs().max() < (1e-5 if dtype == "float32" else 0.1)
