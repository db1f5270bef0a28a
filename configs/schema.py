"""The whole configuration, typed. A recipe states only what differs from the defaults here.

A field is checked by the class that owns it; only RLConfig and SLConfig compare sections; an unknown
key is an error; nothing is filled in later, so the printed configuration is the one that ran.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from core.section import Section


class LoraConfig(Section):
    """PEFT's LoRA (https://arxiv.org/abs/2106.09685)."""

    r: int = Field(16, ge=1)
    """Rank."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / r, with rslora by alpha / sqrt(r)."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Names of the linear layers that get an adapter; all-linear: all but the head."""
    rslora: bool = False
    """Rank-stabilised scaling (https://arxiv.org/abs/2312.03732)."""
    dora: bool = False
    """Learn each column's length apart from its direction (DoRA, https://arxiv.org/abs/2402.09353)."""
    merge_on_save: bool = False
    """Save the whole model, the adapter merged into it, where the next recipe's model.path looks, and the adapter in
    `adapter/` below it. Else the adapter alone is saved, in PEFT's format."""


class ModelConfig(Section):
    path: str
    """A Hugging Face folder, or a name on the hub. Trainer, reference model and engines all start from it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights in use; master weights, gradients and log-softmax are float32 either way."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernel of the trainer; auto leaves the choice to transformers, and runs torch's (sdpa) sequence by
    sequence where the model's family was tested with that (trainers/attention.py)."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights; unset trains the weights."""


COLUMNS = ("id", "messages", "answer", "chosen", "rejected", "label")


class SourceConfig(Section):
    path: str
    """A Parquet or JSONL file, a folder written by datasets.save_to_disk, or hub:NAME (hub:NAME/CONFIG)."""
    name: str = Field("", pattern="^[^/]*$")
    """In the log; unset, the file's or data set's own name. Names are unique within a mixture, and have no /."""
    ratio: float = Field(1.0, gt=0)
    """Rows drawn from it, relative to the other sources. Exact: counts of any prefix are within one row of it."""
    split: str = "train"
    """Of a Hugging Face data set."""
    columns: dict[str, str] = Field({})
    """Our column -> theirs, where the names differ: id, messages, answer, chosen, rejected, label. A column of plain
    text under `messages` is one user turn."""
    replacement: bool = False
    """Draw each row anew from all; else every row comes once per pass."""

    @field_validator("columns")
    @classmethod
    def maps_ours(cls, given: dict[str, str]) -> dict[str, str]:
        if unknown := [key for key in given if key not in COLUMNS]:
            raise ValueError(f"{unknown[0]} is not one of our columns: {', '.join(COLUMNS)}")
        return given

    @property
    def called(self) -> str:
        """Its name in the log."""
        if self.name:
            return self.name
        if self.path.startswith("hub:"):
            return self.path.removeprefix("hub:").split("/")[:2][-1]
        return PurePath(self.path).stem


class DataConfig(Section):
    train: str | list[SourceConfig]
    """Where the rows are, as `path` of a source (data_prep/ makes such files); or a mixture: a list of sources, each
    with a path and a ratio. Rows have id, messages and answer; pairs also chosen and rejected, labelled ones label."""
    eval: str | SourceConfig | None = None
    """The same columns, held out: accuracy (or loss) on it is measured before and after."""
    eval_rows: int = Field(200, ge=1)
    """At most so many rows of `eval` are used."""
    learn: Literal["everything", "last_reply"] | list[str] = Field(["assistant"])
    """Supervised: the roles whose turns are learnt, their end-of-turn tokens included; last_reply: the last assistant
    turn only (completion-only); everything: every token. Preferences always compare the last reply."""
    max_unfit_share: float = Field(0.1, ge=0, le=1)
    """Rows that do not fit (a missing or empty column, too long, no reply) are counted and shown; a larger share of
    them stops the run before it starts."""
    template: Literal["chat", "plain"] = "chat"
    """chat: the tokenizer's chat template. plain: the contents as they stand, one after another."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts (in supervised learning: longer rows) are rows that do not fit."""

    def sources(self, which: Literal["train", "eval"]) -> list[SourceConfig]:
        """What `train` or `eval` names, a plain path as a source; none where it is unset."""
        given = self.train if which == "train" else self.eval
        listed = given if isinstance(given, list) else [] if given is None else [given]
        return [SourceConfig(path=source) if isinstance(source, str) else source for source in listed]

    @model_validator(mode="after")
    def a_mixture_has_names(self) -> DataConfig:
        if not self.learn:
            raise ValueError("learn names no role: give some, such as [assistant]")
        if not self.train:
            raise ValueError("train names no source: give a path, or a list of sources")
        names = [source.called for source in self.sources("train")]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two sources of train are called {twice[0]}: give them names of their own (name: ...)")
        return self


class RewardConfig(Section):
    fn: str
    """A module of rewards/, or the path of a Python file with a function `score(prompt, messages)`."""
    weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field({"correct": 1.0}, min_length=1)
    """Reward = sum of weight x part, over the parts that `fn` returns. Every part is logged, weighted or not."""
    settings: dict[str, Any] = Field({})
    """Passed to `score` by name, such as the path of a reward model."""
    workers: int = Field(2, ge=1)
    """Processes per rollout worker that score; one that hangs or dies costs its sample only."""
    timeout_s: float = Field(20.0, gt=0)
    """Seconds that the reward of one sample may take; a sample without one is failed."""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """The run stops when more of a step's samples than this have no reward because it failed."""


UpdateMode = Literal["in_flight", "drain", "abort"]


class RolloutConfig(Section):
    engine: str = "vllm"
    """vllm, hf, or the path of a Python file with a class `Engine`."""
    env: str = "single_turn"
    """A name in rollouts/envs.py, or the path of a Python file with a class `Environment`."""
    engines: int = Field(1, ge=1)
    """Each has a process and a copy of the weights."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs (on a CPU: processes) per engine."""
    temperature: float = Field(1.0, gt=0)
    """top-p, top-k and min-p are not offered: they renormalise the sampling distribution on a subset of the
    vocabulary, and the trainer's log-probabilities would silently be those of another policy."""
    max_new_tokens: int = Field(256, ge=1)
    """Budget of one episode, over all its turns, the environment's included."""
    max_turns: int = Field(1, ge=1)
    """Replies of the policy in one episode, at most."""
    timeout_s: float = Field(900.0, gt=0)
    """Deadline of one group. One that has not come is asked of another engine, and the run stops where that brings
    none either."""
    update: UpdateMode = "in_flight"
    """What new weights do to requests that are being answered. in_flight: they are held, and go on under the new
    weights, their cache computed anew. drain: they are finished first (within timeout_s), while new ones wait. abort:
    they are cut off, and asked again from the tokens already there. Every token carries the version that sampled it."""
    enforce_eager: bool = False
    """vLLM without compiled graphs; always so on a CPU."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """vLLM's key-value cache on a CPU."""
    gpu_memory_utilization: float = Field(0.85, gt=0, lt=1)
    """vLLM's share of a GPU's memory."""


class WeightSyncConfig(Section):
    transport: Literal["auto", "nccl", "gloo", "direct", "disk"] = "auto"
    """nccl, gloo: trainer rank 0 broadcasts, from GPU to GPU or over TCP. direct: in buckets through Ray's object
    store. disk: in files below the run folder, which on several machines all must share. auto: nccl for vLLM on GPUs,
    else gloo; in synchronous runs one that raises is replaced by direct, and that by disk, for the rest of the run."""
    bucket_mib: int = Field(256, ge=1)
    """Weights are gathered and sent in buckets of this size; a single larger tensor makes its own."""
    timeout_s: float = Field(300.0, gt=0)
    """Deadline of each step of a sync: forming the group, sending, probing."""
    lora: Literal["merged", "adapter"] = "merged"
    """What is sent of a LoRA model: its weights with the adapter merged in, or the adapter alone."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean absolute difference allowed between the trainer's and an engine's log-probabilities of a probe
    prompt after a sync. Unset: 0.002 in float32, 0.1 in bfloat16."""


OURS_OF_DEEPSPEED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("managed_gradient_accumulation", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
    *("bf16", "fp16", "data_types", "optimizer", "scheduler"),
)
"""What the gradient depends on, and the recipe says elsewhere."""


class TrainerConfig(Section):
    ranks: int = Field(1, ge=1)
    """Trainer processes, each with a share of every update."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """Of DeepSpeed. 1 deals out the optimizer's state over the ranks, 2 the gradients too, 3 the weights too."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """torch's; sgd is without momentum."""
    lr: float = Field(1e-6, gt=0)
    """The learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; linear and cosine end at zero with the last update."""
    warmup_updates: int = Field(0, ge=0)
    """Updates in which the learning rate rises to lr."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Of AdamW: the decays of the gradient's running mean and of its square's."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's is decoupled from the gradient; sgd adds it to the gradient."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the gradient of an update to this norm; 0 does not clip. The norm that is logged is the one before."""
    micro_batch_tokens: int = Field(16_384, ge=1)
    """Tokens in one forward pass. A matter of memory only: the gradient does not depend on it."""
    gradient_checkpointing: bool = False
    """Compute activations anew in the backward pass instead of keeping them: less memory, more time."""
    layout: Literal["auto", "padded", "packed"] = "auto"
    """How a micro-batch lies before the attention kernel: packed, all sequences in one row; padded, each in a row of
    its own. auto is packed where the kernel is told the borders: flash attention, and attention: auto in the model
    families of trainers/attention.py; padded elsewhere."""
    max_skipped_updates: int = Field(3, ge=1)
    """An update whose gradient is not finite is skipped on all ranks; so many in a row end the run."""
    deepspeed: dict[str, Any] = Field({})
    """Merged last into the generated DeepSpeed configuration, for what has no key here; what has one is refused."""

    @field_validator("deepspeed")
    @classmethod
    def leaves_ours_alone(cls, given: dict[str, Any]) -> dict[str, Any]:
        nested = [f"zero_optimization.{k}" for k in given.get("zero_optimization", {}) if k == "stage"]
        if taken := [key for key in given if key in OURS_OF_DEEPSPEED] + nested:
            raise ValueError(f"{taken[0]} follows from other keys of the recipe: leave it out here")
        return given


class CheckpointConfig(Section):
    every: int = Field(0, ge=0)
    """Steps between two checkpoints; 0 makes none. One is made at the end as well. They lie in the run folder's
    checkpoints/; every rank writes its share there, so on several machines run_dir must be a folder that all share."""
    keep: int = Field(2, ge=1)
    """So many of the newest stay, and the one with the lowest eval/loss of those made at a step that measured it (see
    eval_every; RL measures none). `last` and `best` point at them."""


class RunConfig(Section):
    """What RL and supervised runs have in common."""

    name: str
    """The run folder is <run_dir>/<name>-<time>."""
    seed: int = 0
    """Of the order of the data and of all sampling."""
    steps: int = Field(ge=1)
    """Training steps. There are no epochs, and every key that says "every" counts steps."""
    backend: Literal["ray", "local"] = "ray"
    """ray: trainer ranks and engines are Ray actors. local: one process for trainer and engine, so that
    breakpoint() works in a loss, an environment and an engine (rewards keep processes of their own)."""
    device: Literal["auto", "cuda"] = "auto"
    """auto: GPUs where there are some, else the CPU. cuda: refuse to run without enough GPUs."""
    ray_address: str | None = None
    """host:port of a running cluster; unset starts a private one on this machine."""
    run_dir: str = "runs"
    """Where run folders are made."""
    save_to: str | None = None
    """Folder for a second copy of the final model, under a name that the next recipe can know."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: str | None = None
    """A run folder, or one of its checkpoints: go on from it (its newest complete one), exactly, in a new run folder.
    What the gradient depends on must be as it was, or one sentence names the first key that is not; core/recipe.py
    lists what may differ, such as steps under a constant learning rate. Name only what you trust: it is unpickled."""
    timeout_s: float = Field(1800.0, gt=0)
    """Deadline of every remote call: start of an engine, collecting, a training step."""
    model: ModelConfig
    alg: dict[str, Any]
    """`name` of a module in algs/, or `file`, the path of one elsewhere; with its hyper-parameters."""
    data: DataConfig
    eval_every: int = Field(0, ge=0)
    """Steps between two measurements on data.eval: of the loss, or in RL of the reward, by the weights that the engines
    hold then. 0 measures at the start and the end only."""
    trainer: TrainerConfig = TrainerConfig()

    @model_validator(mode="after")
    def what_is_measured_is_there(self) -> RunConfig:
        if self.eval_every and self.data.eval is None:
            raise ValueError("eval_every wants held-out rows: set data.eval")
        return self

    @model_validator(mode="after")
    def one_process_has_one_rank(self) -> RunConfig:
        if self.backend == "ray" and self.trainer.zero_stage == 0 and self.model.dtype == "bfloat16":
            raise ValueError(
                "DeepSpeed has no ZeRO-0 for bfloat16 with float32 gradients: set trainer.zero_stage to 1, or "
                "model.dtype to float32"
            )
        if self.backend == "local" and self.trainer.ranks != 1:
            raise ValueError("backend: local is one process: set trainer.ranks to 1, or backend to ray")
        return self


def least_lag(*, publish_every: int, reuse: int) -> int:
    """The lag that samples reach whatever the timing: the smallest `max_lag` that can be kept."""
    return publish_every + reuse - 2


class RLConfig(RunConfig):
    groups_per_step: int = Field(ge=1)
    """Prompts drawn per step."""
    group_size: int = Field(8, ge=1)
    """Samples of each prompt."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer updates that the groups of a step are dealt over."""
    max_lag: int = Field(0, ge=0)
    """How many steps of training the policy may be ahead of the one that sampled a token it learns from. 0:
    generation waits for every publish; n: it runs on while the trainer works, and stops where it would go too far."""
    publish_every: int = Field(1, ge=1)
    """Steps between two publishes of the weights, at most."""
    publish_drift: float | None = Field(None, gt=0)
    """Publish earlier, as soon as train/mismatch/kl of a step is above this."""
    reuse: int = Field(1, ge=1)
    """Steps that train on each group: a step takes groups_per_step / reuse new groups beside those it has."""
    reward: RewardConfig
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()

    @model_validator(mode="after")
    def sections_agree(self) -> RLConfig:
        if self.groups_per_step % self.updates_per_step:
            raise ValueError(
                f"groups_per_step={self.groups_per_step} must be a multiple of updates_per_step={self.updates_per_step}"
            )
        if self.groups_per_step % self.reuse:
            raise ValueError(f"groups_per_step={self.groups_per_step} must be a multiple of reuse={self.reuse}")
        if self.max_lag < (least := least_lag(publish_every=self.publish_every, reuse=self.reuse)):
            raise ValueError(
                f"max_lag={self.max_lag}, and with publish_every={self.publish_every} and reuse={self.reuse} a sample "
                f"gets {least} steps old: raise max_lag to {least} or more, or lower the others"
            )
        if self.publish_drift is not None and self.publish_every == 1:
            raise ValueError(
                "publish_drift publishes earlier than publish_every=1 does, which is every step: raise publish_every"
            )
        if self.backend == "local" and (self.rollout.engines, self.rollout.tensor_parallel) != (1, 1):
            raise ValueError("backend: local is one process: set rollout.engines and rollout.tensor_parallel to 1")
        if self.rollout.engine != "vllm" and self.rollout.tensor_parallel != 1:
            raise ValueError("only rollout.engine=vllm has tensor parallelism: set rollout.tensor_parallel to 1")
        taken = {"mean", "std", "mean_drawn", *self.reward.weights}
        if isinstance(self.data.train, list) and (clash := taken & {s.called for s in self.data.train}):
            raise ValueError(
                f"a source of data.train is called {min(clash)}, as is another reward in the log: set its name"
            )
        if self.backend == "local" and self.weight_sync.transport != "auto":
            raise ValueError("backend: local hands weights over in one process: set weight_sync.transport to auto")
        if self.weight_sync.transport == "nccl" and self.rollout.engine != "vllm":
            raise ValueError("only rollout.engine=vllm takes weights over NCCL: set weight_sync.transport to auto")
        if refused := self._why_no_adapter_alone():
            raise ValueError(f"weight_sync.lora is adapter, {refused}, or weight_sync.lora to merged")
        if self.longest > self.trainer.micro_batch_tokens:
            raise ValueError(
                f"one sample may reach {self.longest} tokens (data.max_prompt_tokens + rollout.max_new_tokens), more "
                f"than trainer.micro_batch_tokens={self.trainer.micro_batch_tokens}: raise that, or lower those"
            )
        return self

    def _why_no_adapter_alone(self) -> str | None:
        lora = self.model.lora
        if self.weight_sync.lora == "merged":
            return None
        if lora is None:
            return "and the model has none: set model.lora"
        if self.rollout.engine != "vllm":
            return "and only vLLM samples with an adapter beside the weights: set rollout.engine to vllm"
        if lora.dora:
            return "and vLLM has no DoRA: set model.lora.dora to false"
        if lora.r > 512:
            return f"and vLLM takes ranks up to 512: lower model.lora.r={lora.r}"
        return None

    @property
    def longest(self) -> int:
        """Tokens the longest sample may have."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def total_updates(self) -> int:
        return self.steps * self.updates_per_step


class SLConfig(RunConfig):
    rows_per_step: int = Field(ge=1)
    """Rows (conversations) in one update."""
    reference: Literal["each_step", "ahead"] = "each_step"
    """Where the algorithm compares with a reference: score it anew at each step by a second model, or once for all
    rows before training, with the model itself, and keep the numbers (of no use where rows are seen once)."""

    @model_validator(mode="after")
    def sections_agree(self) -> SLConfig:
        if self.data.max_prompt_tokens > self.trainer.micro_batch_tokens:
            raise ValueError(
                f"one row may have {self.data.max_prompt_tokens} tokens (data.max_prompt_tokens), more than "
                f"trainer.micro_batch_tokens={self.trainer.micro_batch_tokens}: raise that, or lower this"
            )
        return self

    @property
    def total_updates(self) -> int:
        return self.steps
