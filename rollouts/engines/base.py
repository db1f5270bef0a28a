"""Interface of an engine: token ids in, token ids out. One file per engine, found by its name or its path.

An engine of your own is a file with one subclass of `Engine`, named by its path in `rollout.engine`. It is made as
`YourEngine(config)` in the process that runs it. Methods that it does not need raise EngineLacks, and a recipe that
would call them is refused before the start, because `capabilities` says what the engine can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from torch import nn

from configs.rollout_schema import PauseMode, SleepMode
from configs.trainer_schema import LoraConfig
from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.images import PlacedImage
from core.types.weights import Bucket
from rollouts.engines.sleeping import WakePart
from rollouts.stops import StopStrings
from trainers.weight_sync.base import Chunk, ReceivesWeights

CompletionStop = Literal["eos", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Tokens that an engine sampled after a prefix. The lists have one length."""

    token_ids: list[int]
    logp: list[float]
    """Log-probability of each sampled token, at the sampling temperature."""
    versions: list[int]
    """Policy version that sampled each token."""
    stop: CompletionStop


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. An engine reads those that it has a use for."""

    model_path: str
    temperature: float
    """Sampling temperature. 0, in an evaluation, is greedy: the most probable token, with its log-probability at 1."""
    max_model_len: int
    """Tokens of the longest prompt and completion together."""
    stop_token_ids: Sequence[int]
    """Tokens that end a completion. The model's own generation config is ignored."""
    stop_strings: StopStrings | None = None
    """Texts that end a completion with the token that completes one of them: `find_end` says where."""
    allowed_tokens: AllowedTokens = EVERY_TOKEN
    """Tokens that may be sampled."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    seed: int = 0
    tensor_parallel_size: int = 1
    cores: Sequence[int] | None = None
    """CPU cores of this engine, shared by its ranks; by default all that the process may use."""
    kv_cache_gib: float | None = None
    """Size of the KV cache per rank, in GiB; by default what `gpu_memory_utilization` leaves (4 on a CPU)."""
    gpu_memory_utilization: float = 0.85
    enforce_eager: bool = False
    prefix_cache: bool = True
    """False: the keys and values of a prompt are computed for every request. The doctor asks for that."""
    starts_empty: bool = False
    """True: the first weight sync sends all weights, so they need not be loaded."""
    lora: LoraConfig | None = None
    """LoRA settings if weight syncs send the adapter alone, with `targets` named one by one; else None."""
    over_nccl: bool = False
    """Weights come over NCCL, which takes GPUs at both ends."""
    timeout_s: float = 300.0
    """Deadline of one step of a weight sync."""
    pause_mode: PauseMode = "keep"
    """What happens to running requests when weights come: `weight_sync.pause_mode`."""
    sleep: SleepMode | None = None
    """What an engine that shares its device does with its weights while it sleeps; None is one that never sleeps."""
    over_ipc: bool = False
    """Weights come by handles of memory on the same GPU, which both processes see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Features of an engine beyond generation in one process. Recipes that need more are refused."""

    tensor_parallel: bool = False
    broadcast: bool = False
    """True if the engine can join a broadcast over gloo (`join_broadcast`); every engine on Ray needs this."""
    nccl: bool = False
    """True if the engine can join a broadcast over NCCL."""
    chunks: bool = False
    """True if the engine loads weights in chunks (`begin_chunks`, `load_chunk`): transports direct and disk."""
    adapter: bool = False
    """True if the engine can sample with a LoRA adapter beside the weights."""
    images: bool = False
    """True if prompts may hold images."""
    allowed_tokens: bool = False
    """True if the engine samples from `EngineConfig.allowed_tokens` only, with log-probabilities over that set."""
    stop_strings: bool = False
    """True if a completion ends where `EngineConfig.stop_strings` says."""
    sleep: bool = False
    """True if the engine can sleep and wake (`sleep`, `wake`), so that a trainer uses its device meanwhile."""
    ipc: bool = False
    """True if the engine can open handles of memory on its own GPU (`EngineConfig.over_ipc`)."""
    in_process: str = ""
    """Name of the engine that replaces this one with `backend: local`; "" is itself."""


class EngineLacks(NotImplementedError):
    """Error of a method that the engine's capabilities exclude."""


class Engine(ReceivesWeights, Protocol):
    """Sampler of completions. It knows nothing of chat, groups, rewards or algorithms.

    Requests are made concurrently. trainers/weight_sync/base.py says how weights arrive.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, config: EngineConfig) -> None:
        """Start the engine; return when requests can be made."""
        ...

    @classmethod
    def begin(cls, config: EngineConfig) -> Callable[[EngineConfig], Engine]:
        """Return what makes the engine. One that starts slowly begins here, before its tokenizer has been read.

        config: without stop tokens.
        """
        return cls

    @classmethod
    def check_user_code(cls, model: nn.Module, *, path: str) -> None:
        """Raise UserError where the engine cannot run a model whose class came with it; it is on the meta device."""
        return

    @classmethod
    def check_family(cls, family: str, *, path: str) -> None:
        """Raise UserError where the engine cannot run a model that sees images here; family: its `model_type`."""
        return

    async def generate(
        self, token_ids: list[int], *, max_new_tokens: int, seed: int, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        """Sample one continuation of `token_ids` at the run's temperature.

        images: what spans of `token_ids` stand for; given to engines with the capability `images` only.
        """
        ...

    async def close(self) -> None:
        """End the engine's processes."""
        ...

    async def load_weights(self, version: int, buckets: Iterable[Bucket]) -> None:
        raise EngineLacks("this engine does not run in the trainer's process")

    async def join_broadcast(self, *, address: str, port: int, first_rank: int, members: int) -> None:
        raise EngineLacks("this engine joins no broadcast")

    async def begin_chunks(self) -> None:
        raise EngineLacks("this engine takes no chunks")

    async def load_chunk(self, chunk: Chunk) -> None:
        raise EngineLacks("this engine takes no chunks")

    async def receive_weights(self, version: int) -> None:
        raise EngineLacks("this engine takes no weights from another process")

    async def sleep(self) -> None:
        """Free the memory of weights and cache, as `EngineConfig.sleep` says; no request is running.

        Until `wake` of both, a request raises RunStopped, and so do weights until `wake` of the weights. The weights
        that come between the two do not make the engine sample.
        """
        raise EngineLacks("this engine does not sleep")

    async def wake(self, part: WakePart) -> None:
        """Have the memory of this part again: the weights first, then the cache."""
        raise EngineLacks("this engine does not sleep")

    async def read_fingerprint(self) -> list[Mapping[str, int]]:
        """Return one mapping per tensor-parallel rank: checksums of what that rank's last update loaded."""
        ...
