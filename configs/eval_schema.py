"""Configuration of an evaluation; shared sections have the same meaning as in training recipes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from configs.data_schema import COLUMNS, SourceConfig, TemplateConfig
from configs.rollout_schema import RewardConfig, RolloutConfig
from core.strict_model import Seconds, StrictModel

OF_PROMPTS = ("id", "messages", "tools", "answer", "image", "images")
"""Prompt columns, under our names."""


class EvalModelConfig(StrictModel):
    """Keys of `model` in an evaluation."""

    path: str
    """Hugging Face folder (such as `model` of a run folder), Hub model id, or checkpoint of a run
    (`checkpoints/step_00010`). A checkpoint's weights are first written as a model."""
    adapter: str | None = None
    """Folder of a LoRA adapter in PEFT's format, merged into the model. Unset: no adapter."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights."""
    images: Literal["auto", "off"] = "auto"
    """Images of a vision-language model, as in training. off: text only; then the policy may also sample tokens that
    stand for images, and vLLM starts without the model's other parts."""
    trust_remote_code: bool = False
    """Run code shipped with the model. Read that code first."""


class EvalSetConfig(StrictModel):
    """Data set of an evaluation: an entry of `data.sets`."""

    path: str
    """Parquet, JSONL, JSON, CSV or Arrow file, folder written by datasets.save_to_disk, or hub:NAME
    (hub:NAME/CONFIG)."""
    name: str = Field("", pattern="^[^/]*$")
    """Unique name of the data set in the results. Unset: name of the file or data set."""
    split: str = "train"
    """Split of a Hugging Face data set, or key of a JSON file."""
    form: str = "auto"
    """Form of the rows, as in training. auto: the only form that fits the columns and the first 200 rows."""
    columns: dict[str, str] = Field({})
    """Mapping from our column names (id, messages, tools, answer, image, images) to those of the data set, if they
    differ."""
    rows: int | None = Field(None, ge=1)
    """Maximum number of rows to use. Unset: all."""
    samples: int | None = Field(None, ge=1)
    """Samples per prompt of this data set. Unset: `samples` of the recipe."""

    @field_validator("columns")
    @classmethod
    def maps_ours(cls, given: dict[str, str]) -> dict[str, str]:
        if unknown := [key for key in given if key not in OF_PROMPTS]:
            what = "is not read by an evaluation" if unknown[0] in COLUMNS else "is not one of our columns"
            raise ValueError(f"{unknown[0]} {what}: {', '.join(OF_PROMPTS)}")
        return given

    @property
    def source(self) -> SourceConfig:
        """The data set as a training source."""
        return SourceConfig(path=self.path, name=self.name, split=self.split, form=self.form, columns=self.columns)


class EvalDataConfig(TemplateConfig):
    """Keys of `data` in an evaluation."""

    sets: list[EvalSetConfig] = Field(min_length=1)
    """Data sets: a list of {path: ..., name: ...}. Columns: id, messages and answer; see data_prep/."""
    by: list[str] = Field([])
    """Columns, such as difficulty or subject, by whose values results are broken down."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Maximum tokens of a prompt. Rows with a longer prompt are invalid."""
    continue_final_message: bool = False
    """true: a row may end with an assistant turn, which the policy continues; its text is part of the prompt. false:
    such a row is invalid."""
    max_invalid_fraction: float = Field(0.0, ge=0, le=1)
    """Maximum fraction of invalid rows of a data set. Invalid rows are not evaluated, so none are allowed by default.
    """

    @model_validator(mode="after")
    def sets_have_names(self) -> EvalDataConfig:
        names = [one.source.log_name for one in self.sets]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two of data.sets are called {twice[0]}: give them names of their own (name: ...)")
        return self


class EvalRolloutConfig(RolloutConfig):
    """Keys of `rollout` in an evaluation."""

    temperature: float = Field(1.0, ge=0, le=100)
    """Sampling temperature. 0: greedy decoding, for which a single sample per prompt suffices."""

    @field_validator("temperature")
    @classmethod
    def is_greedy_or_warm(cls, given: float) -> float:
        # vLLM itself would raise such a temperature to 0.01.
        if 0 < given < 0.01:
            raise ValueError(f"temperature={given:g} is not valid: set 0 for greedy sampling, or 0.01 and more")
        return given


class EvalConfig(StrictModel):
    """Configuration of main_eval.py."""

    # The name begins that of a folder: no slash, no control character, not hidden.
    name: str = Field(pattern=r"^[^/\x00-\x1f.][^/\x00-\x1f]{0,99}$")
    """Name of the evaluation; the run folder is <run_dir>/<name>-<time>."""
    seed: int = Field(0, ge=0)
    """Seed of all sampling. With a training run's seed, held-out rows get the same samples as in that run's evaluation.
    """
    backend: Literal["ray", "local"] = "ray"
    """Processes of engines. ray: Ray actors. local: a single engine, in this process."""
    device: Literal["auto", "cuda"] = "auto"
    """Device of the engines. auto: GPUs if there are any, otherwise the CPU. cuda: refuse to run without enough GPUs.
    """
    ray_address: str | None = None
    """Address (host:port) of a running Ray cluster. Unset: start a private cluster on this machine."""
    ship_code: bool = False
    """With `ray_address`: send this clone's code to every machine of the cluster, which then needs no clone. Your own
    files named in the recipe must still exist on every machine, under the same path."""
    run_dir: str = "runs"
    """Parent folder of run folders."""
    resume: str | None = None
    """Run folder of an interrupted evaluation. Its samples are reused, and missing samples are generated, in a new run
    folder. Settings that change the samples must be equal."""
    timeout_s: Seconds = 1800.0
    """Deadline of an engine's start in seconds."""
    model: EvalModelConfig
    data: EvalDataConfig
    reward: RewardConfig
    rollout: EvalRolloutConfig = EvalRolloutConfig()
    samples: int = Field(1, ge=1)
    """Samples per prompt."""
    k: list[Annotated[int, Field(ge=1)]] = Field([])
    """Values of k for pass@k, pass^k and majority@k. Unset: the powers of two up to `samples`, and `samples`."""
    pass_reward: float = 1.0
    """Minimum reward of a sample that passes."""
    resamples: int = Field(1000, ge=100, le=100_000)
    """Bootstrap draws for the 95 % confidence intervals."""
    prompts_per_engine: int = Field(64, ge=1)
    """Number of prompts in progress per engine."""
    prompts_per_part: int = Field(32, ge=1)
    """Number of prompts written together. A killed evaluation loses fewer finished prompts than this."""

    @property
    def n_steps(self) -> int:
        """Number of steps, 1 for an evaluation."""
        return 1

    @property
    def longest_sample(self) -> int:
        """Maximum tokens of a sample."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    def count_samples(self, of: EvalSetConfig) -> int:
        """Return the number of samples per prompt of a data set."""
        return of.samples or self.samples

    @model_validator(mode="after")
    def sections_agree(self) -> EvalConfig:
        counts = [self.count_samples(one) for one in self.data.sets]
        if too_many := [k for k in self.k if k > max(counts)]:
            raise ValueError(
                f"k names {too_many[0]}, and no prompt has more than {max(counts)} samples: raise samples, or lower k"
            )
        # Equal samples would make pass@k, pass^k and majority@k look like estimates, and all be pass@1.
        if self.rollout.temperature == 0 and max(counts) > 1:
            raise ValueError(
                f"rollout.temperature=0 makes the {max(counts)} samples of a prompt equal: set samples to 1, or raise "
                "the temperature"
            )
        if not isinstance(self.rollout.num_engines, int):
            raise ValueError("rollout.num_engines: in an evaluation no engine joins or leaves: write a plain number")
        if self.backend == "local" and (self.rollout.num_engines, self.rollout.tensor_parallel_size) != (1, 1):
            raise ValueError(
                "backend: local is one process: set rollout.num_engines and rollout.tensor_parallel_size to 1"
            )
        return self
