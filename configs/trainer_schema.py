"""Keys of `model`, `trainer` and `checkpoint`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from core.strict_model import StrictModel


class LoraConfig(StrictModel):
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


class ModelConfig(StrictModel):
    path: str
    """A Hugging Face folder, or a name on the hub. Trainer, reference model and engines all start from it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights in use; master weights, gradients and log-softmax are float32 in either case."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernel of the trainer; auto leaves the choice to transformers, and runs torch's (sdpa) sequence by
    sequence where the model's family was tested with that (modeling/attention.py)."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights; unset trains the weights."""


OURS_OF_DEEPSPEED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("managed_gradient_accumulation", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
    *("bf16", "fp16", "data_types", "optimizer", "scheduler"),
)
"""What the gradient depends on, and the recipe says elsewhere."""


class TrainerConfig(StrictModel):
    ranks: int = Field(1, ge=1)
    """Trainer processes, each with a share of every update."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed's ZeRO stage. 1 shards the optimizer's state over the ranks, 2 the gradients too, 3 the weights too."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer of torch; sgd is without momentum."""
    lr: float = Field(1e-6, gt=0)
    """The learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine end at zero with the last update."""
    warmup_updates: int = Field(0, ge=0)
    """Updates in which the learning rate rises to lr."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's running mean of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's term in the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's is decoupled from the gradient; sgd adds it to the gradient."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the gradient of an update to this norm; 0 does not clip. The norm that is logged is the one before."""
    micro_batch_tokens: int = Field(16_384, ge=1)
    """Tokens in one forward pass. This decides memory only: the gradient does not depend on it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""
    layout: Literal["auto", "padded", "packed"] = "auto"
    """How a micro-batch lies before the attention kernel: packed, all sequences in one row; padded, each in a row of
    its own. auto is packed where the kernel is told the borders: flash attention, and attention: auto in the model
    families of modeling/attention.py; padded elsewhere."""
    max_skipped_updates: int = Field(3, ge=1)
    """An update whose gradient is not finite is skipped on all ranks; this many in a row end the run."""
    deepspeed: dict[str, Any] = Field({})
    """Merged last into the generated DeepSpeed configuration, for what has no key here; what has one is refused."""

    @field_validator("deepspeed")
    @classmethod
    def leaves_ours_alone(cls, given: dict[str, Any]) -> dict[str, Any]:
        nested = [f"zero_optimization.{k}" for k in given.get("zero_optimization", {}) if k == "stage"]
        if taken := [key for key in given if key in OURS_OF_DEEPSPEED] + nested:
            raise ValueError(f"{taken[0]} follows from other keys of the recipe: leave it out here")
        return given


class CheckpointConfig(StrictModel):
    every: int = Field(0, ge=0)
    """Steps between two checkpoints; 0 makes none. One is made at the end as well. They lie in the run folder's
    checkpoints/; every rank writes its share there, so on several machines run_dir must be a folder that all share."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints that stay, beside the one with the lowest eval/loss of those made at a step that
    measured it (see eval_every; RL measures none). `last` and `best` point at them."""
