"""The configuration of an evaluation. Its sections are those of a training recipe, where they mean the same."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from configs.data_schema import COLUMNS, SourceConfig, TemplateConfig
from configs.rollout_schema import RewardConfig, RolloutConfig
from core.strict_model import Seconds, StrictModel

OF_PROMPTS = ("id", "messages", "tools", "answer", "image", "images")
"""Columns of a prompt that go by our names."""


class EvalModelConfig(StrictModel):
    """Keys of `model` in an evaluation."""

    path: str
    """Hugging Face folder, such as the `model` of a run folder, or name on the hub; or a checkpoint of a run
    (`checkpoints/step_00010`), whose weights are written as a model first."""
    adapter: str | None = None
    """Folder of a LoRA adapter in PEFT's format, to be merged into the model; unset evaluates the model as it is."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Read that code first."""


class EvalSetConfig(StrictModel):
    """Describe one data set of an evaluation: an entry of the list `data.sets`."""

    path: str
    """A Parquet or JSONL file, a folder written by datasets.save_to_disk, or hub:NAME (hub:NAME/CONFIG)."""
    name: str = Field("", pattern="^[^/]*$")
    """Name of the data set in the results, unique. Unset: the name of the file or data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    columns: dict[str, str] = Field({})
    """Mapping from our column names (id, messages, tools, answer, image, images) to those of the data set, where they
    differ."""
    rows: int | None = Field(None, ge=1)
    """Largest number of rows to use; unset uses all."""
    samples: int | None = Field(None, ge=1)
    """Samples per prompt of this data set; unset is `samples` of the recipe."""

    @field_validator("columns")
    @classmethod
    def maps_ours(cls, given: dict[str, str]) -> dict[str, str]:
        if unknown := [key for key in given if key not in OF_PROMPTS]:
            what = "is not read by an evaluation" if unknown[0] in COLUMNS else "is not one of our columns"
            raise ValueError(f"{unknown[0]} {what}: {', '.join(OF_PROMPTS)}")
        return given

    @property
    def source(self) -> SourceConfig:
        """The same rows as a source of training."""
        return SourceConfig(path=self.path, name=self.name, split=self.split, columns=self.columns)


class EvalDataConfig(TemplateConfig):
    """Keys of `data` in an evaluation."""

    sets: list[EvalSetConfig] = Field(min_length=1)
    """Data sets: a list of {path: ..., name: ...}. Rows have id, messages and answer; see data_prep/."""
    by: list[str] = Field([])
    """Columns of the rows, such as difficulty or subject, whose values get rows of their own in the results."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt, in tokens. Rows with a longer one are invalid."""
    max_invalid_fraction: float = Field(0.0, ge=0, le=1)
    """Largest fraction of invalid rows of a data set. They are not evaluated, so by default none may be."""

    @model_validator(mode="after")
    def sets_have_names(self) -> EvalDataConfig:
        names = [one.source.log_name for one in self.sets]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two of data.sets are called {twice[0]}: give them names of their own (name: ...)")
        return self


class EvalRolloutConfig(RolloutConfig):
    """Keys of `rollout` in an evaluation."""

    temperature: float = Field(1.0, ge=0, le=100)
    """Sampling temperature. 0 is greedy: the most probable token is taken, and one sample per prompt says all."""

    @field_validator("temperature")
    @classmethod
    def is_greedy_or_warm(cls, given: float) -> float:
        if 0 < given < 0.01:
            raise ValueError(f"temperature={given:g} is not valid: set 0 for greedy sampling, or 0.01 and more")
        return given


class EvalConfig(StrictModel):
    """Configuration of main_eval.py."""

    name: str = Field(pattern=r"^[^/\x00-\x1f.][^/\x00-\x1f]{0,99}$")
    """Name of the evaluation; the run folder is <run_dir>/<name>-<time>."""
    seed: int = Field(0, ge=0)
    """Seed of all sampling. With the seed of a training run, the samples of its held-out rows are those of its
    evaluation."""
    backend: Literal["ray", "local"] = "ray"
    """Where engines run. ray: in Ray actors. local: one engine, in this process."""
    device: Literal["auto", "cuda"] = "auto"
    """Device of the engines. auto: GPUs where there are some, else the CPU. cuda: refuse to run without enough GPUs."""
    ray_address: str | None = None
    """Address (host:port) of a running Ray cluster; unset starts a private one on this machine."""
    ship_code: bool = False
    """With `ray_address`: send this clone's code to every machine of the cluster, which then needs none. Files of your
    own that the recipe names must still be at the same path everywhere."""
    run_dir: str = "runs"
    """Folder in which run folders are made."""
    resume: str | None = None
    """Run folder of an evaluation that was ended early: its samples are kept, and what is missing is sampled, in a new
    run folder. Settings that change the samples must be the same."""
    timeout_s: Seconds = 1800.0
    """Deadline of the start of an engine, in seconds."""
    model: EvalModelConfig
    data: EvalDataConfig
    reward: RewardConfig
    rollout: EvalRolloutConfig = EvalRolloutConfig()
    samples: int = Field(1, ge=1)
    """Samples per prompt."""
    k: list[Annotated[int, Field(ge=1)]] = Field([])
    """Numbers of samples k of pass@k, pass^k and majority@k. Unset: the powers of two up to `samples`, and that."""
    pass_reward: float = 1.0
    """Smallest reward of a sample that passes."""
    resamples: int = Field(1000, ge=100, le=100_000)
    """Draws of the bootstrap that makes the 95 % confidence intervals."""
    prompts_per_engine: int = Field(64, ge=1)
    """Number of prompts that each engine works on at a time."""
    prompts_per_part: int = Field(32, ge=1)
    """Number of prompts that are written together: an evaluation that is killed loses fewer finished ones than this."""

    @property
    def n_steps(self) -> int:
        """Steps of the run, of which an evaluation has one."""
        return 1

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest possible sample."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    def count_samples(self, of: EvalSetConfig) -> int:
        """Return the samples per prompt of a data set."""
        return of.samples or self.samples

    @model_validator(mode="after")
    def sections_agree(self) -> EvalConfig:
        counts = [self.count_samples(one) for one in self.data.sets]
        if too_many := [k for k in self.k if k > max(counts)]:
            raise ValueError(
                f"k names {too_many[0]}, and no prompt has more than {max(counts)} samples: raise samples, or lower k"
            )
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
