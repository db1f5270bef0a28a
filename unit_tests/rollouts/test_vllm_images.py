"""vLLM on a CPU with a model that sees: its tokens and log-probabilities are ours, with new vision weights too."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from core.errors import RunStopped, UserError
from core.types.allowed_tokens import AllowedTokens
from core.types.images import PlacedImage, list_written
from core.types.weights import Bucket
from data_feeds.chat.tokenizer import ChatTokenizer
from modeling.file_names import WeightExport, cut_buckets
from modeling.images.processor import ImageProcessor
from modeling.images.vision import VISION_FAMILIES
from modeling.text_use import leave_out, list_unused
from rollouts.engines.base import Completion, EngineConfig
from rollouts.engines.vllm import VllmEngine
from rollouts.engines.vllm_support.architectures import PACKAGES
from rollouts.transcript import find_places
from trainers.weight_sync.broadcast import WeightSender
from trainers.weight_sync.fingerprint import fingerprint, verify_sync
from unit_tests.helpers import seeing
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.image_models import say
from unit_tests.helpers.plain_vision import (
    PARTS,
    as_sample,
    draw,
    gap_of_sample,
    load_plain,
    make_seeing,
    plain_logp,
    write_ids,
)
from unit_tests.helpers.torchvision_beside import environment_with_torchvision

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]
BOUND = 1e-3
TEMPERATURE = 0.7
FOR_TEXT = ["gemma3", "gemma4"]
WITH_IMAGES = [family for family in seeing.FAMILIES if family != "gemma3"]
"""Families whose images vLLM computes as transformers does."""
CONVERSATIONS = [
    [say("user", "what is ", draw(1), "?")],
    [{"role": "user", "content": "how many?"}],
    [say("user", draw(2), "or", draw(3, 40, 80), "or", draw(2))],
]


def save_family(folder: Path, family: str) -> str:
    """Save a random model of the family; vLLM wants to be told what transformers' Qwen3-VL always does."""
    path = seeing.save_model(folder, family)
    if family == "qwen3_vl":
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["rope_parameters"]["mrope_interleaved"] = True
        (folder / "config.json").write_text(json.dumps(config))
    if family == "gemma4":
        seeing.make_small_gemma4().save_pretrained(folder)
    return path


class Seeing:
    """The model's folder, its prompts, and what plain transformers says of them."""

    def __init__(self, folder: Path, family: str = ""):
        self.length = 512 if family else 1024
        if family:
            self.path = save_family(folder, family)
            processor = ImageProcessor(self.path)
            self.prompts = [write_ids(processor, *parts) for parts in PARTS]
        else:
            self.path = make_seeing(folder, max_length=1024)
            tokenizer = ChatTokenizer(self.path, "chat")
            processor = tokenizer.images
            assert processor is not None
            self.prompts = [(ids := tokenizer.render(m), find_places(tokenizer, ids, m)) for m in CONVERSATIONS]
        self.banned = sorted(processor.placeholder_ids)
        # vLLM's recurrent layers have no kernel for CPUs in float32
        self.dtype, self.bound = ("bfloat16", 5e-2) if family == "qwen3_5" else ("float32", BOUND)
        self.old, self.new = (load_plain(self.path, getattr(torch, self.dtype)) for _ in range(2))
        parts = VISION_FAMILIES[self.new.config.model_type]
        with torch.no_grad():
            for parameter in self.new.get_submodule(parts.tower).parameters():
                parameter.mul_(1.5)

    def config(self) -> EngineConfig:
        only = {"stop_token_ids": [], "allowed_tokens": AllowedTokens(banned=tuple(self.banned))}
        return engine_config(self.path, temperature=TEMPERATURE, max_model_len=self.length, dtype=self.dtype, **only)

    def buckets(self, model: PreTrainedModel) -> list[Bucket]:
        groups = WeightExport(model).split("files", 100_000)
        buckets = (bucket for together in groups for bucket in cut_buckets(together, 100_000))
        return [*leave_out(buckets, list_unused(model))]

    def logp(self, model: PreTrainedModel, ids: Sequence[int], places: Sequence[PlacedImage]) -> list[float]:
        return plain_logp(model, self.path, ids, places)[[i - 1 for i in list_written(len(ids), places)]].tolist()

    async def sample(self, engine: VllmEngine, n: int = 12) -> list[Completion]:
        return await asyncio.gather(
            *(
                engine.generate(ids, max_new_tokens=n, seed=seed, **({"images": places} if places else {}))
                for seed, (ids, places) in enumerate(self.prompts)
            )
        )

    def worst(self, model: PreTrainedModel, completions: Sequence[Completion]) -> list[float]:
        return [
            gap_of_sample(model, self.path, as_sample(ids, places, done), TEMPERATURE, self.banned)
            for (ids, places), done in zip(self.prompts, completions, strict=True)
        ]

    async def load(self, engine: VllmEngine, version: int, model: PreTrainedModel) -> None:
        await engine.pause()
        await engine.load_weights(version, self.buckets(model))

    async def verify(self, engine: VllmEngine, model: PreTrainedModel) -> None:
        ids, places = self.prompts[0]
        verify_sync(
            fingerprint(pair for bucket in self.buckets(model) for pair in bucket),
            [await engine.read_fingerprint()],
            expected_logp=self.logp(model, ids, places),
            probe_logp=[await engine.probe(ids, images=places)],
            bound=self.bound,
        )


def test_vllm_sees_as_the_trainer_does_before_and_after_new_vision_weights(tmp_path: Path) -> None:
    """The engine itself compares its prompts with ours and refuses others; the probe sees a stale encoder cache."""
    lab = Seeing(tmp_path)
    engine = VllmEngine(lab.config())

    async def body() -> None:
        await lab.load(engine, 0, lab.old)
        await lab.verify(engine, lab.old)
        samples = await lab.sample(engine)
        assert max(lab.worst(lab.old, samples)) < BOUND
        of_new = lab.worst(lab.new, samples)
        assert min(of_new[0], of_new[2]) > 30 * BOUND > BOUND > of_new[1], "only those with images depend on it"
        assert not {t for done in samples for t in done.token_ids} & {*lab.banned}

        await lab.load(engine, 1, lab.new)
        await lab.verify(engine, lab.new)
        samples = await lab.sample(engine)
        assert max(lab.worst(lab.new, samples)) < BOUND and {v for d in samples for v in d.versions} == {1}

        ids, places = lab.prompts[0]
        [place] = places
        with pytest.raises(RunStopped, match=r"vLLM expanded a prompt with images to \d+ tokens, .*first diff"):
            only_pads = replace(place, begin=place.begin + 2, end=place.end - 1)
            await engine.generate(ids, max_new_tokens=1, seed=0, images=[only_pads])

        engine._sees = False  # as if the encoder cache were not cleared: prefix and processor caches are
        await lab.load(engine, 2, lab.old)
        with pytest.raises(RunStopped, match="log-probabilities of the probe prompt differ"):
            await lab.verify(engine, lab.old)
        engine._sees = True
        await lab.load(engine, 3, lab.old)
        await lab.verify(engine, lab.old)
        await engine.close()

    asyncio.run(body())


def test_running_requests_are_computed_again_with_new_vision_weights(tmp_path: Path) -> None:
    """vLLM keeps requests while weights come over gloo."""
    lab = Seeing(tmp_path)
    engine = VllmEngine(lab.config())
    sender = WeightSender(timeout_s=60.0)

    async def publish(version: int, model: PreTrainedModel) -> None:
        await engine.pause()
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            loop.run_in_executor(None, sender.send, lab.buckets(model)), engine.receive_weights(version)
        )
        await lab.verify(engine, model)

    async def body() -> None:
        port = sender.open("127.0.0.1")
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            loop.run_in_executor(None, lambda: sender.join(members=2)),
            engine.join_broadcast(address="127.0.0.1", port=port, first_rank=1, members=2),
        )
        await publish(0, lab.old)
        running = asyncio.create_task(lab.sample(engine, n=600))
        await lab.sample(engine, n=8)  # the others have begun by then
        await publish(1, lab.new)
        for (ids, places), done in zip(lab.prompts, await running, strict=True):
            for version, model in ((0, lab.old), (1, lab.new)):
                mine = [i for i, v in enumerate(done.versions) if v == version]
                want = plain_logp(model, lab.path, ids + done.token_ids, places, TEMPERATURE, lab.banned)
                gaps = (want[len(ids) - 1 :] - torch.tensor(done.logp)).abs()
                assert mine and float(gaps[mine].max()) < BOUND
        await engine.close()

    asyncio.run(body())


@pytest.mark.parametrize("family", ["", *(pytest.param(f, marks=pytest.mark.verify) for f in FOR_TEXT)])
def test_a_model_used_for_text_has_no_tower_in_vllm(family: str, tmp_path: Path) -> None:
    """Without the tower's tensors the proof is complete, and text has the trainer's log-probabilities."""
    skip_without_packages(family)
    lab = Seeing(tmp_path, family)
    engine = VllmEngine(replace(lab.config(), images="off"))
    sent = [*leave_out(lab.buckets(lab.old), list_unused(lab.old, "off"))]
    assert 0 < sum(map(len, sent)) < sum(map(len, lab.buckets(lab.old)))
    ids, places = lab.prompts[1]
    assert not places

    async def body() -> None:
        await engine.pause()
        await engine.load_weights(0, sent)
        verify_sync(
            fingerprint(pair for bucket in sent for pair in bucket),
            [await engine.read_fingerprint()],
            expected_logp=lab.logp(lab.old, ids, places),
            probe_logp=[await engine.probe(ids)],
            bound=BOUND,
        )
        done = await engine.generate(ids, max_new_tokens=12, seed=0)
        sample = as_sample(ids, places, done)
        assert gap_of_sample(lab.old, lab.path, sample, TEMPERATURE, lab.banned) < BOUND
        await engine.close()

    asyncio.run(body())


@pytest.mark.verify
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_every_family_that_vllm_loads_here(family: str, tmp_path: Path) -> None:
    skip_without_packages(family)
    lab = Seeing(tmp_path, family)
    VllmEngine.check_images(lab.old.config, path=lab.path)
    engine = VllmEngine(lab.config())

    async def body() -> None:
        for version, (model, other) in enumerate([(lab.old, lab.new), (lab.new, lab.old)]):
            await lab.load(engine, version, model)
            await lab.verify(engine, model)
            samples = await lab.sample(engine)
            assert max(lab.worst(model, samples)) < lab.bound
            of_other = lab.worst(other, samples)
            assert min(of_other[0], of_other[2]) > max(30 * BOUND, 3 * lab.bound)
        await engine.close()

    asyncio.run(body())


def skip_without_packages(family: str) -> None:
    try:
        VllmEngine.check_family(family, path="m", dtype="float32")
    except UserError as lacking:
        pytest.skip(str(lacking))


@pytest.mark.verify
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [
        *(f"test_every_family_that_vllm_loads_here[{f}]" for f in WITH_IMAGES if PACKAGES.get(f) == ("torchvision",)),
        *(f"test_a_model_used_for_text_has_no_tower_in_vllm[{f}]" for f in FOR_TEXT),
    ],
)
def test_families_that_need_torchvision_beside_a_torch_for_cpus(case: str) -> None:
    """The tests above, in a process that can import torchvision."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", f"{__file__}::{case}"]
    done = subprocess.run(command, env=environment_with_torchvision(), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-3000:]
