"""Keys of `model`, `trainer` and `checkpoint`."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from core.metrics import EVAL_LOSS, METRICS, TRAIN, find_metric
from core.strict_model import LearningRate, StrictModel


class LoraConfig(StrictModel):
    """PEFT's LoRA (https://arxiv.org/abs/2106.09685)."""

    r: int = Field(16, ge=1, le=65_536)
    """Rank of the adapter."""
    alpha: float = Field(32.0, gt=0)
    """Scaling numerator: the update is scaled by alpha / r, with rslora by alpha / sqrt(r)."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Names of the linear layers that get an adapter; all-linear: all except the head."""
    rslora: bool = False
    """Rank-stabilised scaling (https://arxiv.org/abs/2312.03732)."""
    dora: bool = False
    """Train the length of each column separately from its direction (DoRA, https://arxiv.org/abs/2402.09353)."""
    vision: bool = False
    """Adapt the vision tower and its connector too, in a model that reads images; else the language part alone."""
    merge_on_save: bool = False
    """Save the whole model with the adapter merged in, and the adapter in `adapter/` below it. Otherwise only the
    adapter is saved, in PEFT's format."""


class ModelConfig(StrictModel):
    """Keys of `model`."""

    path: str
    """Hugging Face folder, or name on the hub. Trainer, reference model and engines all start from it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights in use; master weights, gradients and log-softmax are float32 in either case."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernel of the trainer. auto: the default of transformers; sdpa then runs sequence by sequence for model
    families tested with that (modeling/attention.py)."""
    lora: LoraConfig | None = None
    """Low-rank adapters to train instead of the weights; unset trains the weights."""
    trust_remote_code: bool = False
    """Run code that comes with a model, in its folder or on the hub, in driver, trainers and engines: for `path` and
    for the models that `alg` names. Read that code first. A model with code of its own is trained on padded rows, and
    sampled by vLLM if vLLM has its architecture, else by the engine hf; a saved model holds its code. A reward's model
    has a setting of its own (rewards/reward_model.py)."""


OURS_OF_DEEPSPEED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("managed_gradient_accumulation", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
    *("bf16", "fp16", "data_types", "optimizer", "scheduler", "data_parallel_size", "sequence_parallel_size"),
)
"""DeepSpeed keys that follow from other keys of the recipe, and change the gradient."""


class TrainerConfig(StrictModel):
    """Keys of `trainer`."""

    ranks: int = Field(1, ge=1)
    """Number of trainer processes; each computes a share of every update."""
    strategy: Literal["deepspeed", "fsdp2"] = "deepspeed"
    """Library that shares a model among the ranks. fsdp2: torch's own; weights, gradients and optimizer states are
    sharded, and a checkpoint can be resumed with another number of ranks."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed's ZeRO stage, with strategy: deepspeed. 1 shards the optimizer's state over the ranks, 2 the gradients
    too, 3 the weights too."""
    offload: bool = False
    """Whether weights, gradients and optimizer states are held in the machine's memory, with strategy: fsdp2. The GPU
    then has the weights of one block at a time and the activations, and the CPU makes the update: for models that do
    not fit, and slower."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of neighbouring ranks that compute a micro-batch together, each a slice of its positions: for sequences
    whose activations do not fit into one (DeepSpeed-Ulysses, with both libraries). It must divide `ranks` and the
    model's heads of queries, and divide or be a multiple of those of keys. For packed rows of the text models of
    modeling/attention.py with attention: auto."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer of torch; sgd is without momentum."""
    lr: LearningRate = 1e-6
    """Learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Schedule of the learning rate after the warm-up. linear and cosine fall from there on, wsd (warm-up, stable,
    decay) stays at lr and falls linearly in its last updates. An update after the last one would have
    lr_min_fraction * lr."""
    lr_min_fraction: float = Field(0.0, ge=0, le=1)
    """Fraction of lr at which linear, cosine and wsd end."""
    decay_fraction: float | None = Field(None, gt=0, le=1)
    """Fraction of all updates in which wsd falls, rounded to whole updates, at least one. Set it with wsd."""
    warmup_updates: int = Field(0, ge=0)
    """Number of updates in which the learning rate rises to lr."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's running mean of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """Term that AdamW adds to the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay: decoupled from the gradient in AdamW, added to the gradient in sgd."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Largest norm of an update's gradient; 0 does not clip. The logged norm is the one before clipping."""
    micro_batch_tokens: int = Field(16_384, ge=1)
    """Largest number of tokens in one forward pass, those of images included; shared ones count once. It affects
    memory only: the gradient does not depend on it. With sequence_parallel each rank holds its slice of them."""
    logits_mib: int = Field(1024, ge=0)
    """Memory for logits and their gradient, in MiB. Where those of a micro-batch take more, they are computed in chunks
    that fit, and a second time in the backward pass. It affects memory and speed only. The gradient of the head's
    weight comes on top, in float32. 0: always all at once."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""
    vision: Literal["train", "frozen"] = "train"
    """What a model that reads images learns. frozen: its vision tower keeps its weights; the connector, which turns
    the tower's features into embeddings of tokens, and the language part are trained. With model.lora neither is, and
    this key is about a value model."""
    layout: Literal["auto", "padded", "packed"] = "auto"
    """Layout of a micro-batch in the forward pass. packed: all sequences in one row. padded: each in its own row. auto:
    packed where the kernel gets the sequence boundaries (flash attention, and attention: auto for the model families of
    modeling/attention.py), else padded."""
    share_prefixes: Literal["auto", "off"] = "auto"
    """Sharing of what the samples of a group have in common: a common beginning of token ids, such as the prompt, is
    computed once, forward and backward. Groups of one sample, as in SFT, share a system prompt or tools that way. It
    changes speed and memory, not the gradient. auto: with packed rows, for the model families of modeling/attention.py
    with attention: auto."""
    max_skipped_updates: int = Field(3, ge=1)
    """Number of consecutive skipped updates that ends the run. An update is skipped on all ranks if its gradient is not
    finite."""
    deepspeed: dict[str, Any] = Field({})
    """Keys merged last into the generated DeepSpeed configuration, with strategy: deepspeed; those with a key of their
    own here are refused."""

    @model_validator(mode="after")
    def a_fall_has_its_keys(self) -> TrainerConfig:
        if self.lr_schedule == "constant" and self.lr_min_fraction:
            raise ValueError("lr_min_fraction is where a falling learning rate ends, and lr_schedule is constant")
        if self.lr_schedule == "wsd" and self.decay_fraction is None:
            raise ValueError("lr_schedule is wsd: set decay_fraction, the part of the updates in which it falls")
        if self.lr_schedule != "wsd" and self.decay_fraction is not None:
            raise ValueError(f"decay_fraction belongs to lr_schedule: wsd, and lr_schedule is {self.lr_schedule}")
        return self

    @model_validator(mode="after")
    def ranks_form_whole_groups(self) -> TrainerConfig:
        size = self.sequence_parallel
        if self.ranks % size:
            raise ValueError(
                f"sequence_parallel={size} ranks compute a micro-batch together, and ranks={self.ranks} is no multiple "
                "of that: change one of the two"
            )
        if size > 1 and self.layout == "padded":
            raise ValueError(
                f"sequence_parallel={size} slices packed rows, and layout is padded: leave one of them out"
            )
        return self

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of ranks that train on different rows."""
        return self.ranks // self.sequence_parallel

    def count_decay_updates(self, total_updates: int) -> int:
        """Return the number of updates in which wsd falls; 0 for another schedule."""
        return 0 if self.decay_fraction is None else max(1, round(self.decay_fraction * total_updates))

    @field_validator("deepspeed")
    @classmethod
    def leaves_ours_alone(cls, given: dict[str, Any]) -> dict[str, Any]:
        zero = given.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ValueError(f"zero_optimization must hold keys of DeepSpeed's ZeRO, found {zero!r:.60}")
        nested = ["zero_optimization.stage"] if "stage" in zero else []
        if taken := [key for key in given if key in OURS_OF_DEEPSPEED] + nested:
            raise ValueError(f"{taken[0]} follows from other keys of the recipe: leave it out here")
        return given


class StopWhenConfig(StrictModel):
    """Keys of `stop_when`: the end of a run before its last step, with its model saved."""

    metric: str = Field(min_length=1)
    """Name of a metric of metrics.jsonl, such as reward/mean or eval/reward/mean."""
    above: float | None = None
    """The run ends when the metric is above this. Set this or `below`."""
    below: float | None = None
    """The run ends when the metric is below this."""
    for_steps: int = Field(1, ge=1)
    """Number of logged values in a row that must be so. A step that does not log the metric, such as one without an
    evaluation, changes nothing."""

    @model_validator(mode="after")
    def one_bound(self) -> StopWhenConfig:
        if (self.above is None) == (self.below is None):
            raise ValueError("set above or below" + ("" if self.above is None else ", and not both"))
        return self


class CheckpointConfig(StrictModel):
    """Keys of `checkpoint`."""

    every: int = Field(0, ge=0)
    """Steps between two checkpoints; 0 writes none. One is written at the end as well. They are in the run folder's
    checkpoints/. Every rank writes its share there, so on several machines run_dir must be a shared folder."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep, in addition to the best one. `last` and `best` point at them."""
    best: str | None = None
    """Metric of the log by which the best checkpoint is kept, such as eval/reward/mean; its model is also in the run
    folder's best_model/. Unset: the lowest eval/loss (supervised runs with eval_every), without a model of its own. A
    resumed run compares its own checkpoints."""
    best_mode: Literal["auto", "highest", "lowest"] = "auto"
    """Which value of `best` is the best. auto: the lowest of a name that ends in loss, nll or kl, else the highest."""

    @property
    def best_metric(self) -> str:
        """Metric by which checkpoints are compared."""
        return self.best or EVAL_LOSS

    @property
    def lower_is_better(self) -> bool:
        """Direction of that metric."""
        if self.best_mode == "auto":
            return self.best_metric.endswith(("loss", "nll", "kl"))
        return self.best_mode == "lowest"


def refuse_best(checkpoint: CheckpointConfig, *, eval_every: int) -> str | None:
    """Return why `checkpoint.best` cannot be compared in a run; None if it can."""
    name, every = checkpoint.best, checkpoint.every
    if name is None:
        return None
    if not every:
        return "the run makes no checkpoint: set checkpoint.every"
    if find_metric(name) is None and not name.startswith(TRAIN):  # a loss of the user's may log any name there
        close = difflib.get_close_matches(name, [metric.name for metric in METRICS], n=1)
        return "there is no such metric" + (
            f" (did you mean {close[0]!r}?)" if close else "; see docs/reference/metrics.md"
        )
    if name.startswith("eval/") and not eval_every:
        return "it is measured with eval_every: set that"
    if name.startswith("eval/") and every % eval_every:
        return (
            f"it is measured every eval_every={eval_every} steps, and checkpoints are made every {every}: make "
            "checkpoint.every a multiple of eval_every"
        )
    return None
