"""Keys of `reward` and `rollout`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from configs.agent_schema import AgentConfig
from configs.gateway_schema import GatewayConfig, check_gateway
from configs.judge_schema import JudgeBudgetConfig
from configs.opponent_checks import check_opponent, is_server
from core.strict_model import Seconds, StrictModel
from core.types.routes import RouterReplay
from core.types.truncation import EVERYTHING_KEPT, Truncation

Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
RewardWeights = float | dict[str, float]
"""Weight of a function's only part or of the part `correct`; or a weight per part."""


def _check_weights(given: Any) -> Any:
    """Validate a function's weight, or the weights of its parts."""
    numbers = list(given.values()) if isinstance(given, dict) else [given]
    # Not isinstance, for which `true` would be a number too.
    if not numbers or not all(type(n) in (int, float) and abs(n) <= 1e6 for n in numbers):
        raise ValueError(
            f"a weight is expected, or a weight for each part that counts ({{correct: 1.0}}), found {given!r:.100}"
        )
    return {str(part): float(n) for part, n in given.items()} if isinstance(given, dict) else float(given)


FunctionWeights = dict[str, Annotated[Any, AfterValidator(_check_weights)]]


def name_function(name_or_path: str) -> str:
    """Return a reward function's name in the log.

    >>> name_function("gsm8k"), name_function("mine/short.py")
    ('gsm8k', 'short')
    """
    return PurePath(name_or_path).stem


class RewardConfig(StrictModel):
    """Keys of `reward`."""

    function: str | None = None
    """Reward function: a module of rewards/, or the path of a Python file with a function `score(prompt, messages)`.
    Set either this or `functions`."""
    functions: FunctionWeights = Field({})
    """Several reward functions with weights: {gsm8k: 1.0, my_length.py: 0.2}. The weight applies to the part `correct`,
    or to the only part; {my_length.py: {short: 0.2, polite: 0.1}} weights each part. Parts are logged as
    <function>.<part>.
    """
    by_source: dict[str, FunctionWeights] = Field({})
    """Functions for the rows of a data source, by the source's name, instead of `function` or `functions`: {gsm8k:
    {math_verify: 1.0}}. Without function and functions, every source must be listed."""
    weights: dict[str, Weight] = Field({})
    """Weights of the parts returned by `function`, and of an environment's scores. The reward is the sum of weight x
    part. Every part is logged. Unset with `function`: {correct: 1.0}."""
    settings: dict[str, Any] = Field({})
    """Keyword arguments of `score`, such as the path of a reward model. With `functions` or `by_source`, per function:
    {my_length.py: {target: 4}}."""
    workers: int = Field(2, ge=1)
    """Number of processes per engine for plain reward functions. If a process hangs or dies, only the current sample
    fails."""
    max_concurrency: int = Field(32, ge=1)
    """Maximum number of calls of async reward functions in flight, of the whole run. Each engine gets an equal part, at
    least 1. A plain function has one call per process of `workers`."""
    timeout_s: Seconds = 20.0
    """Deadline of a call of a reward function in seconds: of one sample, or for `score_group` of one group. Plain
    functions of a row run one after another, and have it times their number. A sample without a reward has failed."""
    judge_budget: JudgeBudgetConfig = JudgeBudgetConfig()
    """Limits of the calls and tokens of judges. A run that has used one up ends after the step, as with `stop_when`,
    and an evaluation after the prompts in progress. Both can be resumed with a larger one."""
    max_failed_fraction: float = Field(0.1, ge=0, le=1)
    """Maximum fraction of failed samples in a step, or in a data set of an evaluation; above it the run stops."""

    @model_validator(mode="before")
    @classmethod
    def one_function_weighs_what_is_correct(cls, given: Any) -> Any:
        # Before validation, so that the printed configuration shows the weights in use.
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
        # Parts are logged as <function>.<part>: two files with the same name would share their metrics.
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
        """Unique names and paths in `functions` and `by_source`."""
        return list(
            dict.fromkeys([*self.functions, *(name for weights in self.by_source.values() for name in weights)])
        )

    def settings_of(self, name: str) -> dict[str, Any]:
        """Return the arguments of a function of `functions` or `by_source`, by log name."""
        # With `function`, the settings are its arguments themselves and not per function.
        if self.function is not None:
            return {}
        return next((s for n, s in self.settings.items() if name_function(n) == name), {})

    def check_sources(self, sources: Collection[str]) -> None:
        """Raise ValueError if `by_source` names an unknown source, or a source has no function."""
        if unknown := [source for source in self.by_source if source not in sources]:
            raise ValueError(
                f"reward.by_source names {unknown[0]}, which is no source of data; there are {', '.join(sources)}"
            )
        if self.function is None and not self.functions and (left := [s for s in sources if s not in self.by_source]):
            raise ValueError(
                f"reward.by_source has no functions for the source {left[0]}: add it, or set reward.functions"
            )


class EngineRange(StrictModel):
    """Keys of `rollout.num_engines` for a varying number of engines."""

    min: int = Field(1, ge=1)
    """Minimum number of engines, also the number at the start. A run with fewer engines continues for `timeout_s`, then
    stops."""
    max: int = Field(ge=2)
    """Maximum number of engines. Engines above `min` join at a weight sync, as soon as the cluster has room."""

    @field_validator("max")
    @classmethod
    def there_is_a_range(cls, given: int, info: ValidationInfo) -> int:
        # pydantic leaves `min` out of info.data if it is invalid itself; that error is reported anyway.
        if given <= info.data.get("min", 0):
            raise ValueError(
                f"{given} must be above min: write a plain number (num_engines: {given}) for one that stays"
            )
        return given


SleepMode = Literal["offload", "discard"]
Quantization = Literal["int8", "fp8"]


class RolloutConfig(StrictModel):
    """Keys of `rollout`."""

    engine: str = "vllm"
    """Inference engine: vllm, hf, http (of `servers`), or the path of a Python file with a subclass of
    rollouts.engines.base.Engine."""
    servers: list[Annotated[str, Field(pattern="^https?://")]] = Field([])
    """Addresses of servers that somebody else started, with engine: http; as many as `num_engines`."""
    env: str = "single_turn"
    """Environment: a module of rollouts/envs/, or the path of a Python file with a subclass of rollouts.envs.base.Env.
    """
    opponent: str | None = None
    """Frozen opponent in a game of several sides, such as an earlier version of the policy: folder of a model, or of an
    adapter of `model.path`. The policy plays one side, another from group to group. The opponent plays the others, by
    the engine hf in the process of each engine, and is not trained on. Or the address of an OpenAI-compatible server of
    one model, such as http://host:8000/v1: it gets messages of text with `temperature`, and a reply has up to
    `max_new_tokens`. Or policy: the policy itself, as it was up to `opponent_every` steps ago. Unset: the policy plays
    all sides."""
    opponent_every: int | None = Field(None, ge=1)
    """Steps between two snapshots of the policy in the run folder, with opponent: policy. The newest plays, before the
    first that of model.path; a resumed run plays the one of the checkpoint. They are taken at weight syncs. Without
    data.eval, because results against different opponents cannot be compared."""
    agent: AgentConfig | None = None
    """Agent instead of an environment: your program, with any harness, calls the policy at an OpenAI-compatible
    address."""
    gateway: GatewayConfig | None = None
    """Address of the policy for agents on other machines or in containers. Unset: loopback, and any free port."""
    max_concurrency: int | None = Field(None, ge=1)
    """Maximum number of episodes that run at a time, of the whole run, as a server of environments allows. Each
    engine gets an equal part, so it is no less than their number. `timeout_s` is then of an episode, from its start on:
    waiting does not count. Unset: unlimited."""
    num_engines: int | EngineRange = 1
    """Number of engines, each with a process and a copy of the weights. {min: 1, max: 8}: engines join and leave during
    the run, as machines of the cluster do."""
    sleep_mode: SleepMode = "offload"
    """Weights of sleeping engines, with placement: colocate. offload: keep them in the machine's memory. discard: free
    them, which is faster and needs less memory; each weight sync then sends all weights."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs (on a CPU: processes) per engine."""
    restarts: int = Field(3, ge=0)
    """Maximum number of restarts of dead engines, over all engines of a run. Unfinished groups are generated again, by
    other engines or by the restarted engine after a weight sync. 0: an engine's death ends the run. With a varying
    number of engines, an engine that died with its machine does not count."""
    # Log-probabilities are of logits divided by it, so it is not 0. vLLM raises a value below 0.01 to 0.01.
    temperature: float = Field(1.0, ge=0.01, le=100)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most probable tokens that together have this probability. It is computed after `min_p` and
    `top_k`, and includes the token that crosses it. The engine reports the kept set of every token, and the trainer's
    softmax is over it, so log-probabilities, ratios, entropies and KL terms are exactly those of the truncated policy.
    1: all tokens. With a large vocabulary set `top_k` too: it bounds the sets, of 4 bytes an id."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most probable tokens, and those as probable as the last of them; exact as `top_p` is. 0: all
    tokens."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample from tokens with at least this fraction of the largest probability; exact as `top_p` is. 0: all tokens."""
    allowed_tokens: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=1000)
    """Texts of the only tokens to sample, besides stop tokens: action tokens, or letters of choices. Each must be a
    single token. Sampling and the trainer's softmax use the same set, so log-probabilities, entropies and KL terms are
    those of the restricted policy. Unset: all tokens."""
    router_replay: RouterReplay = "off"
    """Experts of a mixture, for R3 (https://arxiv.org/abs/2510.11370). watch: the engine records the experts of every
    token, and metrics count where the trainer's routers choose others. replay: the trainer uses the recorded experts,
    in training and for prox_logp. A record takes k bytes per token and block of experts."""
    max_new_tokens: int = Field(256, ge=1)
    """Token budget of an episode, over all turns, including the environment's. Requests that an agent makes at the same
    time may each use what was left when they began."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field([])
    """Texts that end a reply, besides the model's stop tokens. The reply ends with the token that completes the first
    match, and includes it. Special tokens are not in that text, unless skip_special_tokens is false; list them in
    stop_token_ids."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field([])
    """Ids of tokens that end a reply, besides those of the model's tokenizer and generation config."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text of replies. false: rewards, environments, stop strings and samples see them,
    except for the model's stop token at the end of a reply."""
    tool_parser: str | None = Field(None, min_length=1)
    """Format of the model's tool calls and reasoning. hermes (also Qwen2.5, Qwen3, SmolLM3), llama3_json; harmony: the
    channels of gpt-oss; response_template: the tokenizer's template, of transformers; a .json file with such a
    template; vllm:NAME or vllm:NAME+REASONING: vLLM's parsers, such as vllm:hermes+qwen3. Rewards and environments
    receive the parsed reply. Unset: harmony if the template begins replies so, otherwise the tokenizer's template
    parses replies to prompts with tools."""
    max_turns: int = Field(1, ge=1)
    """Maximum number of replies of the policy in an episode."""
    timeout_s: Seconds = 900.0
    """Deadline in seconds of a group, or of an episode with `max_concurrency`. A late group is retried once, on another
    engine if possible; then the run stops."""
    enforce_eager: bool = False
    """Run vLLM without CUDA graphs; always the case on a CPU."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Size of vLLM's KV cache per rank, in GiB. Unset: 1 on a CPU; on a GPU, what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = Field(0.85, gt=0, lt=1)
    """Fraction of a GPU's memory for vLLM."""
    quantization: Quantization | None = None
    """Eight-bit linear layers in the engines, except the head: weights are rounded per output channel after every
    weight sync, inputs per token. The policy that samples is then another than the trainer's, so `alg.correction` must
    be on. vLLM computes int8 on GPUs and CPUs with VNNI, and fp8 on GPUs; hf rounds and computes in `model.dtype`. Not
    for mixtures of experts, but with fp8 in vLLM. Unset: `model.dtype`."""
    batch_invariant: bool = False
    """Draw tokens from log-probabilities that are the trainer's to the bit, for any batch, order, packing and number of
    threads. Each trained token is compared with the trainer's first pass, before the weights change; the first that
    differs stops the run. For dense models of text on a CPU, with engine: hf, backend: local and max_staleness: 0.
    docs/reference/batch_invariant.md has the cost."""
    vllm: dict[str, Any] = Field({})
    """Engine arguments of vLLM by name, such as {max_num_seqs: 512, kv_cache_dtype: fp8}. Names are checked against
    the installed vLLM before the start. Refused: those that FeynRL sets itself or that change the distribution.
    `feynrl doctor RECIPE --knob kv_cache_dtype=fp8` measures the effect on log-probabilities, speed and memory."""

    @field_validator("num_engines")
    @classmethod
    def there_is_an_engine(cls, given: int | EngineRange) -> int | EngineRange:
        if isinstance(given, int) and given < 1:
            raise ValueError(f"{given} is not valid: at least one engine must be there")
        return given

    @property
    def truncation(self) -> Truncation:
        """Rules of top-p, top-k and min-p; none with greedy decoding, which draws nothing."""
        if not self.temperature:
            return EVERYTHING_KEPT
        return Truncation(top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)

    @property
    def is_truncated(self) -> bool:
        """True if completions report kept sets."""
        return not self.truncation.is_off

    @property
    def is_opponent_served(self) -> bool:
        """True if the opponent is behind a server."""
        return is_server(self.opponent)

    @property
    def is_opponent_loaded(self) -> bool:
        """True if each engine loads an opponent beside the policy."""
        return self.opponent is not None and not self.is_opponent_served

    @property
    def opponent_folder(self) -> str | None:
        """Folder of an opponent of the recipe that each engine loads, or None."""
        return self.opponent if self.is_opponent_loaded and self.opponent_every is None else None

    @property
    def episodes_per_engine(self) -> int | None:
        """Maximum number of episodes that an engine runs at a time, or None."""
        return None if self.max_concurrency is None else self.max_concurrency // self.most_engines

    @property
    def least_engines(self) -> int:
        """Number of engines at the start."""
        return self.num_engines if isinstance(self.num_engines, int) else self.num_engines.min

    @property
    def most_engines(self) -> int:
        return self.num_engines if isinstance(self.num_engines, int) else self.num_engines.max

    @model_validator(mode="after")
    def there_is_a_server_for_each_engine(self) -> RolloutConfig:
        needed = self.num_engines if self.engine == "http" else 0
        if len(self.servers) != needed:
            raise ValueError(
                f"servers has {len(self.servers)} addresses, and engine={self.engine} with num_engines="
                f"{self.num_engines} needs {needed}"
            )
        return self

    @model_validator(mode="after")
    def an_opponent_plays_a_game(self) -> RolloutConfig:
        check_opponent(self.opponent, self.opponent_every, is_game=self.agent is None and self.env != "single_turn")
        return self

    @model_validator(mode="after")
    def an_agent_takes_the_place_of_an_environment(self) -> RolloutConfig:
        if self.agent is not None and self.env != "single_turn":
            raise ValueError(f"env={self.env} and agent exclude each other: leave one of them out")
        check_gateway(self.gateway, self.agent, engines=self.most_engines)
        if self.max_concurrency is not None and self.max_concurrency < self.most_engines:
            raise ValueError(
                f"max_concurrency={self.max_concurrency} is less than an episode for each of {self.most_engines} "
                "engines: raise it"
            )
        if self.agent is not None:
            self.agent.check_timeout(self.timeout_s)
        return self
