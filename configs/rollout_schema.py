"""Keys of `reward`, `rollout` and `weight_sync`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from core.strict_model import Seconds, StrictModel

Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
RewardWeights = float | dict[str, float]
"""Weight of a function's only part, or of its part `correct`; or a weight for each part that counts."""


def _check_weights(given: Any) -> Any:
    """Return the weight, or the weights of the parts, of one function."""
    numbers = list(given.values()) if isinstance(given, dict) else [given]
    if not numbers or not all(type(n) in (int, float) and abs(n) <= 1e6 for n in numbers):
        raise ValueError(
            f"a weight is expected, or a weight for each part that counts ({{correct: 1.0}}), found {given!r:.100}"
        )
    return {str(part): float(n) for part, n in given.items()} if isinstance(given, dict) else float(given)


FunctionWeights = dict[str, Annotated[Any, AfterValidator(_check_weights)]]


def name_function(name_or_path: str) -> str:
    """Return the name of a reward function in the log.

    >>> name_function("gsm8k"), name_function("mine/short.py")
    ('gsm8k', 'short')
    """
    return PurePath(name_or_path).stem


class RewardConfig(StrictModel):
    """Keys of `reward`."""

    function: str | None = None
    """Reward function: a module of rewards/, or the path of a Python file with a function `score(prompt, messages)`.
    Set this or `functions`."""
    functions: FunctionWeights = Field({})
    """Several reward functions, each with its weight: {gsm8k: 1.0, my_length.py: 0.2}. The weight is that of the part
    `correct`, or of the only part; {my_length.py: {short: 0.2, polite: 0.1}} weighs parts one by one. Parts are logged
    as <function>.<part>."""
    by_source: dict[str, FunctionWeights] = Field({})
    """Functions for the rows of one data source, by its name, instead of `function` or `functions`:
    {gsm8k: {math_verify: 1.0}}. Where neither function nor functions is set, every source is listed."""
    weights: dict[str, Weight] = Field({})
    """Weights of the parts that `function` returns, and of an environment's scores. The reward is the sum of
    weight x part. Every part is logged. Unset with `function`: {correct: 1.0}."""
    settings: dict[str, Any] = Field({})
    """Arguments passed to `score` by name, such as the path of a reward model. With `functions` or `by_source`
    by function: {my_length.py: {target: 4}}."""
    workers: int = Field(2, ge=1)
    """Number of reward processes per engine. If one hangs or dies, only its own sample fails."""
    timeout_s: Seconds = 20.0
    """Deadline of the reward of one sample, in seconds. A sample without a reward has failed."""
    max_failed_fraction: float = Field(0.1, ge=0, le=1)
    """Largest fraction of a step's samples that may fail; above it the run stops."""

    @model_validator(mode="before")
    @classmethod
    def one_function_weighs_what_is_correct(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("function") is not None and "weights" not in given:
            return given | {"weights": {"correct": 1.0}}
        return given

    @model_validator(mode="after")
    def functions_are_named_once(self) -> RewardConfig:
        if self.function is None and not self.functions and not self.by_source:
            raise ValueError(
                "function is missing: set it in the recipe or as reward.function=VALUE on the command line, or set "
                "functions"
            )
        if self.function is not None and self.functions:
            raise ValueError("set function or functions, and not both")
        if self.function is not None and not self.weights:
            raise ValueError("weights names no part of function: give one, such as {correct: 1.0}")
        names = [name_function(given) for given in self.function_names]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two functions are called {twice[0]} in the log: give their files different names")
        if not_found := [name for name in self.settings if self.function is None and name not in self.function_names]:
            raise ValueError(f"settings names {not_found[0]}, which is no function of functions or by_source")
        if self.function is None and any(not isinstance(of_one, dict) for of_one in self.settings.values()):
            raise ValueError(
                "settings holds the arguments of each function under its name: {my_length.py: {target: 4}}"
            )
        if self.function is not None and self.by_source and self.settings:
            raise ValueError(
                "settings are for function alone, or for several functions: write functions instead of function"
            )
        return self

    @property
    def function_names(self) -> list[str]:
        """Names and paths in `functions` and `by_source`, each once."""
        return list(
            dict.fromkeys([*self.functions, *(name for weights in self.by_source.values() for name in weights)])
        )

    def settings_of(self, name: str) -> dict[str, Any]:
        """Return the arguments of one of several functions, by its name in the log."""
        return (
            {}
            if self.function is not None
            else next((s for n, s in self.settings.items() if name_function(n) == name), {})
        )

    def check_sources(self, sources: Collection[str]) -> None:
        """Raise ValueError where `by_source` names a source that is not there, or a source has no function."""
        if unknown := [source for source in self.by_source if source not in sources]:
            raise ValueError(
                f"reward.by_source names {unknown[0]}, which is no source of data; there are {', '.join(sources)}"
            )
        if self.function is None and not self.functions and (left := [s for s in sources if s not in self.by_source]):
            raise ValueError(
                f"reward.by_source has no functions for the source {left[0]}: add it, or set reward.functions"
            )


class AgentConfig(StrictModel):
    """Keys of `rollout.agent`."""

    file: str | None = None
    """Python file with a function `run(task)`, plain or async, that plays one episode and returns named numbers. Set
    this or `command`."""
    command: list[Annotated[str, Field(min_length=1)]] = Field([])
    """Program with its arguments that plays one episode, in any language: the task is JSON on its standard input, the
    numbers are one line of JSON on file descriptor 3."""

    @model_validator(mode="after")
    def is_a_file_or_a_command(self) -> AgentConfig:
        if (self.file is None) == (not self.command):
            raise ValueError("set file or command, and not both")
        if self.file is not None and not self.file.endswith(".py"):
            raise ValueError(f"file must be the path of a Python file (my_agent.py), found {self.file!r:.100}")
        return self


class EngineRange(StrictModel):
    """Keys of `rollout.num_engines`, where engines come and go."""

    min: int = Field(1, ge=1)
    """Smallest number of engines: those that are there at the start. A run with fewer goes on for `timeout_s`, then it
    stops."""
    max: int = Field(ge=2)
    """Largest number of engines. Those above `min` join as soon as the cluster has a place for them, at a weight sync.
    """

    @field_validator("max")
    @classmethod
    def there_is_a_range(cls, given: int, info: ValidationInfo) -> int:
        if given <= info.data.get("min", 0):
            raise ValueError(
                f"{given} must be above min: write a plain number (num_engines: {given}) for one that stays"
            )
        return given


SleepMode = Literal["offload", "discard"]


class RolloutConfig(StrictModel):
    """Keys of `rollout`."""

    engine: str = "vllm"
    """Engine: vllm, hf, or the path of a Python file with one subclass of rollouts.engines.base.Engine."""
    env: str = "single_turn"
    """Environment: a module of rollouts/envs/, or the path of a Python file with one subclass of
    rollouts.envs.base.Env."""
    agent: AgentConfig | None = None
    """Agent instead of an environment: a program of yours that talks to the policy at an OpenAI-compatible address,
    with any harness. One process per episode, killed after nine tenths of `timeout_s`."""
    num_engines: int | EngineRange = 1
    """Number of engines. Each has a process and a copy of the weights. {min: 1, max: 8}: engines come and go while the
    run goes on, as machines of the cluster do."""
    sleep_mode: SleepMode = "offload"
    """What the engines do with their weights while they sleep, with placement: colocate. offload: keep them in the
    machine's memory. discard: drop them, which is faster and takes less; each weight sync brings all of them."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs (on a CPU: processes) per engine."""
    restarts: int = Field(3, ge=0)
    """Largest number of times that an engine which died is restarted, over all engines of a run. Its unfinished groups
    are generated again, by the others or by the engine itself when it has the current weights. 0: its death ends the
    run. Where engines come and go, one that died with its machine does not count."""
    temperature: float = Field(1.0, ge=0.01, le=100)
    """Sampling temperature. top-p, top-k and min-p are not offered: they renormalise the sampling distribution on a
    subset of the vocabulary that changes from token to token, and the trainer's log-probabilities would silently be
    those of another policy. `allowed_tokens` restricts sampling exactly."""
    allowed_tokens: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=1000)
    """Texts of the only tokens that may be sampled, besides those that end a reply: action tokens, the letters of
    choices. Each must be one token. Sampling and the trainer's softmax are restricted to the same set, so
    log-probabilities, entropies and KL terms are those of the restricted policy. Unset: all tokens."""
    max_new_tokens: int = Field(256, ge=1)
    """Token budget of one episode, over all its turns, the environment's turns included."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field([])
    """Texts that end a reply, besides the model's own stop tokens: it ends with the token that completes the first of
    them, and keeps it. A reward sees the whole text. Special tokens are not in that text: name them in
    stop_token_ids."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field([])
    """Tokens that end a reply, besides the model's own (its tokenizer's and its generation config's)."""
    tool_parser: str | None = Field(None, min_length=1)
    """Form in which the model writes tool calls and reasoning. hermes (also Qwen2.5, Qwen3, SmolLM3), llama3_json;
    response_template: the tokenizer's own, of transformers; a .json file that holds such a template; vllm:NAME or
    vllm:NAME+REASONING: parsers of vLLM, such as vllm:hermes+qwen3. Rewards and environments get the reply as this
    parser reads it. Unset: replies to prompts with tools are read by the tokenizer's own template."""
    max_turns: int = Field(1, ge=1)
    """Largest number of replies of the policy in one episode."""
    timeout_s: Seconds = 900.0
    """Deadline of one group, in seconds. A late group is retried once, on another engine if there is one, then the run
    stops."""
    enforce_eager: bool = False
    """Run vLLM without CUDA graphs; always so on a CPU."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """Size of vLLM's KV cache on a CPU, in GiB."""
    gpu_memory_utilization: float = Field(0.85, gt=0, lt=1)
    """Fraction of a GPU's memory that vLLM may use."""

    @field_validator("num_engines")
    @classmethod
    def there_is_an_engine(cls, given: int | EngineRange) -> int | EngineRange:
        if isinstance(given, int) and given < 1:
            raise ValueError(f"{given} is not valid: at least one engine must be there")
        return given

    @property
    def least_engines(self) -> int:
        """Engines that are there at the start."""
        return self.num_engines if isinstance(self.num_engines, int) else self.num_engines.min

    @property
    def most_engines(self) -> int:
        return self.num_engines if isinstance(self.num_engines, int) else self.num_engines.max

    @model_validator(mode="after")
    def an_agent_takes_the_place_of_an_environment(self) -> RolloutConfig:
        if self.agent is not None and self.env != "single_turn":
            raise ValueError(f"env={self.env} and agent exclude each other: leave one of them out")
        return self


PauseMode = Literal["keep", "wait", "abort"]


class WeightSyncConfig(StrictModel):
    """Keys of `weight_sync`."""

    every: int = Field(1, ge=1)
    """Largest number of steps between two weight syncs."""
    max_kl: float | None = Field(None, gt=0)
    """Bound of train/mismatch/kl: a step above it syncs weights at once, before `every` steps are over."""
    pause_mode: PauseMode = "keep"
    """What happens to running requests during a weight sync. keep: they are paused, and continue under the new
    weights with their KV cache recomputed. wait: they finish first (within timeout_s), while new ones wait. abort: they
    are aborted, and continued from the tokens already sampled. Every token carries the version that sampled it."""
    transport: Literal["auto", "nccl", "gloo", "direct", "disk"] = "auto"
    """Transport of the weights. nccl, gloo: trainer rank 0 broadcasts, from GPU to GPU or over TCP. direct: buckets
    through Ray's object store. disk: files below the run folder, which all machines must share. auto: nccl for vLLM on
    GPUs (with placement: colocate handles of memory on the same GPU), else gloo; in synchronous runs a transport that
    fails is replaced by direct, and that by disk, for the rest of the run."""
    bucket_mib: int = Field(64, ge=1)
    """Size of a bucket, in MiB. Weights are gathered and sent in buckets; a larger single tensor is its own bucket."""
    timeout_s: Seconds = 300.0
    """Deadline of each step of a sync, in seconds: forming the group, sending, probing."""
    lora: Literal["merged", "adapter"] = "merged"
    """Weights that are sent of a LoRA model: all weights with the adapter merged in, or the adapter alone."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean absolute difference allowed between the trainer's and an engine's log-probabilities of a probe
    prompt after a sync. Unset: 0.002 in float32, 0.1 in bfloat16."""
