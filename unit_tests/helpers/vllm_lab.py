"""A vLLM engine on the CPU beside the trainer's model, and the distance of their log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from configs.sync_schema import PauseMode
from configs.trainer_schema import LoraConfig
from core.types.weights import Bucket, split_into_buckets
from modeling.lora import name_lora_targets
from rollouts.engines.base import Completion, EngineConfig
from rollouts.engines.vllm import VllmEngine
from trainers.weight_sync.broadcast import WeightSender
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.examples import children_named

T = TypeVar("T")
BOUND = 1e-3
TEMPERATURE = 0.7
TIMEOUT_S = 60.0
VOCABULARY = 300  # no multiple of vLLM's padding
STOP = list(range(30))
PROMPT = [(13 * i) % VOCABULARY for i in range(160)]  # longer than a block of the KV cache
BUCKET_BYTES = 150_000  # a dozen buckets; no layer fits one
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
FAMILIES = {
    "qwen2-tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3-untied": Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "mistral-untied": MistralConfig(**SHAPE, head_dim=32, tie_word_embeddings=False),
}


def buckets_of(model: PreTrainedModel) -> Iterator[Bucket]:
    named = [(name, p.detach()) for name, p in model.named_parameters()]
    return split_into_buckets(named, lambda item: item[1].nbytes, BUCKET_BYTES)


def random_model(family: str, *, seed: int) -> PreTrainedModel:
    """All parameters random, biases and norms too, so that a lost one is seen."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def save(family: str, folder: Path, *, seed: int) -> PreTrainedModel:
    model = random_model(family, seed=seed)
    model.save_pretrained(folder)
    return model


def logp(model: PreTrainedModel, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Return those of token_ids[1:]."""
    with torch.no_grad():
        scores = model(torch.tensor([token_ids])).logits[0] / temperature
    return scores.log_softmax(-1)[:-1].gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


def gap(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def gap_of_samples(model: PreTrainedModel, completions: list[Completion]) -> float:
    ours = [x for c in completions for x in logp(model, PROMPT + c.token_ids, TEMPERATURE)[-len(c.token_ids) :]]
    return gap(ours, [x for c in completions for x in c.logp])


async def sample(engine: VllmEngine, seeds: range = range(6), max_new_tokens: int = 24) -> list[Completion]:
    return await asyncio.gather(*[engine.generate(PROMPT, max_new_tokens=max_new_tokens, seed=seed) for seed in seeds])


async def count_cached(engine: VllmEngine, token_ids: list[int]) -> int:
    """Return how many tokens of the prompt are served from the cache; a request, after which all of it is there."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    return (await engine._ask(token_ids, (), params)).num_cached_tokens


async def in_thread(call: Any, *args: Any, **kwargs: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, lambda: call(*args, **kwargs))


Tamper = Callable[[Bucket], Bucket]


class TamperingSender(WeightSender):
    """A sender that may send something else than what it took the fingerprint of."""

    tamper: Tamper

    def _send_bucket(self, bucket: Bucket) -> None:
        super()._send_bucket(self.tamper(bucket))


class Lab:
    """An engine with two ranks, its event loop, and trainers that reach it over gloo."""

    lora: LoraConfig | None = None

    def __init__(self, family: str, folder: Path, *, tensor_parallel_size: int, stop: list[int]) -> None:
        self.family = family
        self.ranks = tensor_parallel_size
        self.model = save(family, folder, seed=0)
        self._runner = asyncio.Runner()
        others = set(children_named("VLLM"))
        self.engine = self.run(self._start(folder, stop))
        self.processes = set(children_named("VLLM")) - others
        self.sender = TamperingSender(timeout_s=TIMEOUT_S)
        self.run(self._join())

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(body)

    @contextmanager
    def changed(self, **settings: Any) -> Generator[None]:
        """Run the body with other settings of requests. Another engine would take half a minute to start."""
        config = self.engine.config
        self.engine.prepare_requests(replace(config, **settings))
        try:
            yield
        finally:
            self.engine.prepare_requests(config)

    async def _start(self, folder: Path, stop: list[int]) -> VllmEngine:
        return VllmEngine(
            engine_config(
                folder,
                max_model_len=1024,
                stop_token_ids=stop,
                tensor_parallel_size=self.ranks,
                kv_cache_gib=0.25,
                timeout_s=TIMEOUT_S,
                lora=self.lora and name_lora_targets(self.lora, str(folder)),
            )
        )

    async def _join(self) -> None:
        port, members = self.sender.open(), self.ranks + 1
        joined = self.engine.join_broadcast(address="127.0.0.1", port=port, first_rank=1, members=members)
        await asyncio.gather(in_thread(self.sender.join, members=members), joined)

    async def publish(
        self, version: int, model: PreTrainedModel, tamper: Tamper = lambda bucket: bucket
    ) -> dict[str, int]:
        """Make one sync. `tamper` maps each bucket to what is sent in its place, after the sender's fingerprint."""
        await self.engine.pause()
        return await self.send(version, model, tamper)

    async def send(
        self, version: int, model: PreTrainedModel, tamper: Tamper = lambda bucket: bucket
    ) -> dict[str, int]:
        """To an engine that is held."""
        self.sender.tamper = tamper
        buckets = buckets_of(model)
        sent, _ = await asyncio.gather(in_thread(self.sender.send, buckets), self.engine.receive_weights(version))
        return sent

    def close(self) -> None:
        # one rank computes in this process, and more have a process each
        assert len(self.processes) == (self.ranks if self.ranks > 1 else 0)
        self.run(self.engine.close())
        self._runner.close()
        _, alive = psutil.wait_procs(self.processes, timeout=15)
        assert not alive, f"outlived the engine: {alive}"


SETTINGS: dict[str, Any] = {"temperature": 1.0, "max_model_len": 64, "stop_token_ids": STOP}


class Scripted(VllmEngine):
    """Without vLLM: each request gets the next of these answers. No tokens and no reason: aborted before the first."""

    def __init__(self, path: str, update: PauseMode, *answers: tuple[list[int], str | None]) -> None:
        self.answers, self.asked = list(answers), []
        super().__init__(EngineConfig(model_path=path, pause_mode=update, **SETTINGS))

    def _start(self, args: dict[str, Any], options: Any, *, transfer: str, cores: Any) -> None:
        pass

    async def _request(self, prompt: dict[str, Any], params: Any, ends: Any = None) -> Any:
        self.asked.append((prompt["prompt_token_ids"], params.max_tokens, params.seed))
        ids, reason = self.answers.pop(0)
        if not ids and reason is None:
            return None
        said = {
            "token_ids": ids,
            "finish_reason": reason,
            "logprobs": SimpleNamespace(logprobs=[-token / 10 for token in ids]),  # vLLM's FlatLogprobs
            "spec_decode_metrics": None,
            "weight_versions": [SimpleNamespace(version=str(len(self.asked)), start=0, end=len(ids))] if ids else [],
        }
        return SimpleNamespace(outputs=[SimpleNamespace(**said)])
