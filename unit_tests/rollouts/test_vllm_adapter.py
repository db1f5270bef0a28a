"""vLLM samples with an adapter that came alone, beside the weights it read itself; what it says is the trainer's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from configs.trainer_schema import LoraConfig
from core.errors import RunStopped
from core.types.weights import Bucket
from modeling.export import exported_tensors
from modeling.load import load_model
from modeling.lora import name_lora_targets, with_adapter
from rollouts.engines.vllm import VllmEngine
from trainers.weight_sync.fingerprint import fingerprint, verify_sync
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.runs import check_engines_follow
from unit_tests.helpers.vllm_lab import (
    BOUND,
    PROMPT,
    TEMPERATURE,
    Lab,
    count_cached,
    gap,
    gap_of_samples,
    in_thread,
    logp,
    sample,
    save,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]
ALPHA = 16.0


def adapted(folder: Path, lora: LoraConfig, *, seed: int) -> nn.Module:
    """The folder's model with a random adapter, both of its matrices far from zero."""
    torch.manual_seed(seed)
    model = with_adapter(load_model(str(folder), dtype="float32", attention="sdpa"), lora, path=str(folder)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def buckets(model: nn.Module) -> list[Bucket]:
    named = [(piece.name, piece.compute()) for piece in exported_tensors(model)["adapter"]]
    return [named[:5], named[5:]]


def engine_of(folder: Path, lora: LoraConfig) -> VllmEngine:
    return VllmEngine(
        engine_config(folder, temperature=TEMPERATURE, stop_token_ids=[], lora=name_lora_targets(lora, str(folder)))
    )


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen2-tied", LoraConfig(r=5, alpha=ALPHA, rslora=True)),
        pytest.param(
            "llama-tied",
            LoraConfig(r=8, alpha=ALPHA, targets=["v_proj", "mlp.gate_proj", "down_proj"]),
            marks=pytest.mark.verify,
        ),
        *(pytest.param(f, LoraConfig(r=12), marks=pytest.mark.verify) for f in ("qwen3-untied", "mistral-untied")),
    ],
)
def test_an_adapter_alone_brings_the_trainers_policy(family: str, lora: LoraConfig, tmp_path: Path) -> None:
    base = save(family, tmp_path, seed=0)
    first, second = (adapted(tmp_path, lora, seed=seed) for seed in (1, 2))
    engine = engine_of(tmp_path, lora)

    async def follows(version: int, model: nn.Module, others: list[nn.Module]) -> None:
        held = [p.detach().clone() for p in model.parameters()]
        await engine.pause()
        await engine.load_weights(version, buckets(model))
        assert all(torch.equal(p, h) for p, h in zip(model.parameters(), held, strict=True)), "left as it was"
        assert await count_cached(engine, PROMPT) == 0, "keys and values of the old policy are not used again"
        assert await count_cached(engine, PROMPT) == 128, "the control: those of the same policy are"
        samples = await sample(engine)
        assert gap_of_samples(model, samples) < BOUND
        assert all(gap_of_samples(other, samples) > 100 * BOUND for other in others)
        assert {v for c in samples for v in c.versions} == {version}
        probing, *_ = await asyncio.gather(engine.probe(PROMPT), sample(engine))
        verify_sync(
            fingerprint(pair for bucket in buckets(model) for pair in bucket),
            [await engine.read_fingerprint()],
            expected_logp=logp(model, PROMPT),
            probe_logp=[probing],
            bound=BOUND,
        )

    async def body() -> None:
        await follows(1, first, [base, second])
        await follows(2, second, [base, first])
        tampered = [(name, tensor + 1e-6) for name, tensor in buckets(first)[0]]
        await engine.pause()
        await engine.load_weights(3, [tampered, buckets(first)[1]])
        with pytest.raises(RunStopped, match="rank 0 loaded other values of base_model"):
            sent = fingerprint(pair for bucket in buckets(first) for pair in bucket)
            verify_sync(sent, [await engine.read_fingerprint()], expected_logp=[], probe_logp=[], bound=BOUND)
        stranger = [(name.replace("layers.1", "layers.7"), tensor) for name, tensor in buckets(first)[1]]
        with pytest.raises(RunStopped, match=r"layers that vLLM's model does not have .*layers\.7"):
            await engine.pause()
            await engine.load_weights(4, [buckets(first)[0], stranger])
        await engine.close()

    asyncio.run(body())


class AdapterLab(Lab):
    """Its models differ in their adapters, and those alone are sent."""

    lora = LoraConfig(r=8)

    async def publish_adapter(self, version: int, model: nn.Module) -> None:
        self.sender.tamper = lambda bucket: bucket
        await self.engine.pause()
        sent, _ = await asyncio.gather(
            in_thread(self.sender.send, buckets(model)), self.engine.receive_weights(version)
        )
        loaded, probe = [await self.engine.read_fingerprint()], [await self.engine.probe(PROMPT)]
        verify_sync(sent, loaded, expected_logp=logp(model, PROMPT), probe_logp=probe, bound=BOUND)


@pytest.mark.verify
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_an_adapter_is_exchanged_under_tokens_keep(tmp_path: Path, tensor_parallel: int) -> None:
    lab = AdapterLab("qwen2-tied", tmp_path, tensor_parallel_size=tensor_parallel, stop=[])
    first, second = (adapted(tmp_path, lab.lora, seed=seed) for seed in (1, 2))

    async def body() -> None:
        await lab.publish_adapter(7, first)
        running = asyncio.create_task(lab.engine.generate(PROMPT, max_new_tokens=700, seed=0))
        await asyncio.sleep(1.0)
        await lab.publish_adapter(8, second)
        c = await running
        assert set(c.versions) == {7, 8}
        for version, model in ((7, first), (8, second)):
            expected = logp(model, PROMPT + c.token_ids, TEMPERATURE)[-700:]
            at = [i for i, v in enumerate(c.versions) if v == version]
            assert gap([expected[i] for i in at], [c.logp[i] for i in at]) < BOUND

    lab.run(body())
    lab.close()


@pytest.mark.verify
@pytest.mark.parametrize(
    ("transport", "zero", "ranks", "tp"),
    [("direct", 1, 1, 1), *((transport, 3, 2, 2) for transport in ("gloo", "direct", "disk"))],
)
def test_a_run_sends_the_adapter_alone(recipe, tmp_path, tiny_path, transport, zero, ranks, tp):
    changes = {
        **{"model.lora": {"r": 1, "alpha": 8.0}, "weight_sync.lora": "adapter", "weight_sync.transport": transport},
        **{"trainer.lr": 3e-2, "trainer.zero_stage": zero, "trainer.ranks": ranks, "rollout.tensor_parallel_size": tp},
    }
    folder, metrics = check_engines_follow(recipe, tmp_path, **changes)
    whole = (Path(tiny_path) / "model.safetensors").stat().st_size
    assert all(0 < m["sync/bytes"] < 0.05 * whole for m in metrics)
    assert metrics[2]["reward/mean"] != metrics[0]["reward/mean"]
    assert json.loads((folder / "summary.json").read_text())["transport"] == transport
    assert (folder / "model" / "adapter_model.safetensors").is_file()
