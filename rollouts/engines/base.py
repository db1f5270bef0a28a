"""Interface of an inference engine: token ids in, token ids out. One file per engine.

`rollout.engine` names an engine, or the path of a file with one subclass of `Engine`. It is created as
`YourEngine(config)` in the process that runs it. Methods without an implementation raise EngineLacks. `capabilities`
lists the features of the engine, and a recipe that needs others is refused before the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from torch import nn

from configs.rollout_schema import Quantization, RolloutConfig, SleepMode
from configs.sync_schema import PauseMode
from configs.trainer_schema import LoraConfig
from core.errors import UserError
from core.tasks import gather_fail_fast
from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.arrays import Ids
from core.types.drafts import NO_DRAFTS, Drafts
from core.types.images import PlacedImage, as_argument
from core.types.kept_sets import KeptSets
from core.types.routes import Routes
from core.types.truncation import EVERYTHING_KEPT, Truncation
from core.types.weights import Bucket
from rollouts.engines.sleeping import WakePart
from rollouts.stops import StopStrings
from trainers.weight_sync.base import Chunk, ReceivesWeights

CompletionStop = Literal["eos", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Tokens sampled after a prefix. All lists, and `kept`, have the same length."""

    token_ids: list[int]
    logp: list[float]
    """Log-probability of each sampled token, at the sampling temperature."""
    versions: list[int]
    """Policy version that sampled each token."""
    stop: CompletionStop
    kept: KeptSets | None = None
    """Set that each token was drawn from, with EngineConfig.truncation; `logp` is then that of the distribution over
    the set. None: no truncation, or greedy decoding."""
    routes: Routes | None = None
    """[prefix + completion, layers, k] experts of every token as an input, with EngineConfig.routes; the last token's
    are unknown."""
    drafts: Drafts = NO_DRAFTS
    """Counts of speculative decoding."""

    def cut(self, n: int) -> Completion:
        """Return the first n tokens, ended by a stop."""
        kept = None if self.kept is None else self.kept.take(np.arange(n))
        routes = None if self.routes is None else self.routes[: len(self.routes) - len(self.token_ids) + n]
        columns = {"token_ids": self.token_ids[:n], "logp": self.logp[:n]}
        return replace(self, **columns, versions=self.versions[:n], stop="eos", kept=kept, routes=routes)


def make_completion(
    token_ids: list[int],
    logp: list[float],
    versions: list[int],
    kept: Sequence[Ids],
    *,
    stop: CompletionStop,
    routes: Routes | None = None,
    drafts: Drafts = NO_DRAFTS,
) -> Completion:
    """Return a completion. kept: ids of each token's set; empty without truncation."""
    sets = KeptSets.of_sizes(np.concatenate(kept), [len(ids) for ids in kept]) if kept else None
    columns = {"token_ids": token_ids, "logp": logp, "versions": versions}
    return Completion(**columns, stop=stop, kept=sets, routes=routes, drafts=drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. An engine may ignore settings that do not concern it."""

    model_path: str
    temperature: float
    """Sampling temperature. 0 is greedy decoding in an evaluation, with log-probabilities at temperature 1."""
    max_model_len: int
    """Maximum length of prompt and completion together, in tokens."""
    stop_token_ids: Sequence[int]
    """Tokens that end a completion. The model's own generation config is ignored."""
    stop_strings: StopStrings | None = None
    """Texts that end a completion, with the token that completes the text. See `find_end`."""
    allowed_tokens: AllowedTokens = EVERY_TOKEN
    """Tokens that may be sampled."""
    truncation: Truncation = EVERYTHING_KEPT
    """Truncation of the distribution over these tokens, at the temperature. Ignored by greedy decoding."""
    routes: bool = False
    """Whether completions report the experts of every token (`Completion.routes`)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    images: Literal["auto", "off"] = "auto"
    """Whether prompts may have images, if the model reads any (model.images)."""
    trust_remote_code: bool = False
    """Whether code in the model's folder may run."""
    seed: int = 0
    tensor_parallel_size: int = 1
    cores: Sequence[int] | None = None
    """CPU cores of this engine, shared by all ranks. None: all cores of the process."""
    kv_cache_gib: float | None = None
    """Size of the KV cache per rank, in GiB. None: from `gpu_memory_utilization` on a GPU, 4 on a CPU."""
    gpu_memory_utilization: float = 0.85
    enforce_eager: bool = False
    prefix_cache: bool = True
    """False: recompute keys and values of the prompt for every request, as the doctor needs."""
    starts_empty: bool = False
    """True: skip loading weights, since the first weight sync sends all of them."""
    lora: LoraConfig | None = None
    """LoRA settings with `targets` by full name, if weight syncs send only the adapter. Else None."""
    adapter: str | None = None
    """Folder of an adapter to merge into the weights when they are loaded: of `rollout.opponent`, by the engine hf."""
    over_nccl: bool = False
    """Receive weights over NCCL, which requires GPUs at both ends."""
    timeout_s: float = 300.0
    """Deadline of each step of a weight sync, in seconds."""
    pause_mode: PauseMode = "keep"
    """Treatment of running requests during a weight update: `weight_sync.pause_mode`."""
    sleep: SleepMode | None = None
    """Treatment of the weights during sleep of a colocated engine. None: the engine never sleeps."""
    over_ipc: bool = False
    """Receive weights through CUDA IPC handles, from another process on the same GPU."""
    quantization: Quantization | None = None
    """Rounding of the linear layers: `rollout.quantization`."""
    batch_invariant: bool = False
    """Whether log-probabilities are the trainer's to the bit: `rollout.batch_invariant`."""
    server: str | None = None
    """Address of this engine's server, of `rollout.servers`. None: the engine starts itself."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of this engine alone, such as `rollout.vllm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Optional features of an engine. Recipes that need a missing feature are refused."""

    tensor_parallel: bool = False
    broadcast: bool = False
    """True if the engine can join a broadcast over gloo (`join_broadcast`). Required on Ray."""
    nccl: bool = False
    """True if the engine can join a broadcast over NCCL."""
    chunks: bool = False
    """True if the engine loads weights in chunks (`begin_chunks`, `load_chunk`), for the transports direct and disk."""
    deltas: bool = False
    """True if the engine decodes what it receives by a DeltaDecoder, for weight_sync.delta."""
    adapter: bool = False
    """True if the engine can sample with a LoRA adapter beside the base weights."""
    images: bool = False
    """True if prompts may contain images."""
    allowed_tokens: bool = False
    """True if `EngineConfig.allowed_tokens` is respected, with log-probabilities over that set."""
    kept_sets: bool = False
    """True if `EngineConfig.truncation` is applied, and the kept sets are reported (`Completion.kept`)."""
    routes: bool = False
    """True if `EngineConfig.routes` is respected."""
    batch_invariant: bool = False
    """True if `EngineConfig.batch_invariant` is respected."""
    stop_strings: bool = False
    """True if `EngineConfig.stop_strings` ends completions."""
    sleep: bool = False
    """True if the engine can sleep and wake (`sleep`, `wake`), so that a trainer can use the device."""
    file_names: bool = False
    """True if weights arrive under the names of model files. False: under those of transformers' model."""
    ipc: bool = False
    """True if the engine can open CUDA IPC handles of its GPU (`EngineConfig.over_ipc`)."""


class EngineLacks(NotImplementedError):
    """Error of a method outside the engine's capabilities."""


class Engine(ReceivesWeights, Protocol):
    """Sampler of completions, independent of chat, groups, rewards and algorithms.

    Requests are concurrent. trainers/weight_sync/base.py defines the protocol of weight updates.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, config: EngineConfig) -> None:
        """Start the engine, and return when it accepts requests."""
        ...

    @classmethod
    def check_user_code(cls, model: nn.Module, *, path: str) -> None:
        """Raise UserError if the engine cannot run a model with custom code. The model is on the meta device."""
        return

    @classmethod
    def check_family(cls, family: str, *, path: str, dtype: str) -> None:
        """Raise UserError if the engine cannot run this family of models in this dtype (model.dtype).

        family: the config's `model_type`.
        """
        return

    @classmethod
    def check_images(cls, config: Any, *, path: str) -> None:
        """Raise UserError if the engine cannot run a vision model with images. config: that of transformers."""
        return

    @classmethod
    def check_truncation(cls, rollout: RolloutConfig, *, on_gpu: bool, aborts: bool) -> None:
        """Raise UserError if the engine cannot report the kept sets of a recipe that truncates.

        on_gpu: whether it runs on GPUs. aborts: whether weight updates abort requests.
        """
        if not cls.capabilities.kept_sets:
            raise UserError(
                f"rollout.top_p, top_k or min_p is set, and rollout.engine={rollout.engine} does not report kept sets: "
                "apply EngineConfig.truncation and return Completion.kept, as in rollouts/engines/hf.py, and say so in "
                "its capabilities"
            )

    @classmethod
    def check_routes(cls, rollout: RolloutConfig, *, on_gpu: bool, aborts: bool) -> None:
        """Raise UserError if the engine cannot report the routes of a recipe. on_gpu, aborts: as above."""
        if not cls.capabilities.routes:
            raise UserError(
                f"rollout.router_replay is {rollout.router_replay}, and rollout.engine={rollout.engine} does not "
                "report routes: return Completion.routes where EngineConfig.routes is set, as in "
                "rollouts/engines/hf.py, and say so in its capabilities"
            )

    @classmethod
    def check_options(cls, options: Mapping[str, Any], rollout: RolloutConfig) -> None:
        """Raise UserError for an option that the engine does not take, alone or with other keys of the recipe."""
        if options:
            raise UserError(
                f"rollout.vllm has options of vLLM, and rollout.engine is {rollout.engine}: leave rollout.vllm out"
            )

    @classmethod
    def check_quantization(cls, rollout: RolloutConfig, *, dtype: str, on_gpu: bool) -> None:
        """Raise UserError if the engine cannot compute in rollout.quantization, which is set. dtype: of the model."""
        raise UserError(
            f"rollout.quantization is {rollout.quantization}, and rollout.engine={rollout.engine} does not round its "
            "linear layers: set rollout.engine to vllm or hf, or leave rollout.quantization out"
        )

    @classmethod
    def check_adapter(cls, *, engine: str, dtype: str, on_gpu: bool) -> None:
        """Raise UserError if the engine cannot sample with an adapter. engine: its name. dtype: of the model."""
        if not cls.capabilities.adapter:
            raise UserError(
                f"weight_sync.lora is adapter, and rollout.engine={engine} does not sample with an adapter beside the "
                "weights: set rollout.engine to vllm, or weight_sync.lora to merged"
            )

    @classmethod
    def check_rounded(cls, rollout: RolloutConfig, model: nn.Module) -> None:
        """Raise UserError if the engine cannot round a model's layers. model: on the meta device, without weights."""
        return

    async def generate(
        self, token_ids: list[int], *, max_new_tokens: int, seed: int, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        """Sample a continuation of `token_ids` at the run's temperature.

        images: images of spans of `token_ids`, passed only to engines with the capability `images`.
        """
        ...

    async def generate_group(
        self, token_ids: list[int], *, size: int, max_new_tokens: int, seed: int, images: Sequence[PlacedImage] = ()
    ) -> list[Completion]:
        """Sample `size` continuations. Continuation i is the one that `generate` returns for the seed `seed` + i."""
        seen = as_argument(images)
        each = (self.generate(token_ids, max_new_tokens=max_new_tokens, seed=seed + i, **seen) for i in range(size))
        return [await one for one in each] if size == 1 else await gather_fail_fast(each, grace_s=0)

    async def close(self) -> None:
        """End the engine's processes."""
        ...

    async def load_weights(self, version: int, buckets: Iterable[Bucket]) -> None:
        raise EngineLacks("this engine does not run in the trainer's process")

    async def join_broadcast(self, *, address: str, port: int, first_rank: int, members: int) -> None:
        raise EngineLacks("this engine cannot join a broadcast")

    async def begin_chunks(self) -> None:
        raise EngineLacks("this engine cannot load chunks")

    async def load_chunk(self, chunk: Chunk) -> None:
        raise EngineLacks("this engine cannot load chunks")

    async def receive_weights(self, version: int) -> None:
        raise EngineLacks("this engine cannot receive weights from another process")

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache, as `EngineConfig.sleep` says. No request may be running.

        Requests raise RunStopped until both parts are awake. Weight updates raise RunStopped until the weights are
        awake. An update between the two does not resume sampling.
        """
        raise EngineLacks("this engine does not sleep")

    async def wake(self, part: WakePart) -> None:
        """Allocate the memory of a part again: first the weights, then the cache."""
        raise EngineLacks("this engine does not sleep")

    async def start_trace(self, *, trace: bool, memory: bool) -> None:
        """Start to profile the engine's processes; see core/timing/trace.py."""
        raise EngineLacks("this engine has no profiler: leave profile out")

    async def stop_trace(self, stem: Path) -> list[str]:
        """Write the profiles to files whose names begin with `stem`; return their names."""
        raise EngineLacks("this engine has no profiler: leave profile out")

    async def read_fingerprint(self) -> list[Mapping[str, int]]:
        """Return checksums of the last update's tensors, one mapping per tensor-parallel rank."""
        ...
