"""Keys of `model`, `trainer` and `checkpoint`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from core.errors import suggest_name
from core.metrics import EVAL_LOSS
from core.strict_model import LearningRate, StrictModel


class LoraConfig(StrictModel):
    """Keys of `model.lora`: PEFT's LoRA (https://arxiv.org/abs/2106.09685)."""

    r: int = Field(16, ge=1, le=65_536)
    """Rank of the adapter."""
    alpha: float = Field(32.0, gt=0)
    """Scaling numerator: the update is scaled by alpha / r, or alpha / sqrt(r) with rslora."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Names of the linear layers with an adapter; all-linear: all except the head, routers of experts and gates of a
    single output."""
    experts: bool = False
    """Also adapt the experts of a mixture, each with rank r, if those of a layer are a single tensor in memory. Engines
    then receive merged weights."""
    rslora: bool = False
    """Rank-stabilised scaling (https://arxiv.org/abs/2312.03732)."""
    dora: bool = False
    """Train each column's magnitude separately from the direction (DoRA, https://arxiv.org/abs/2402.09353)."""
    vision: bool = False
    """Also adapt the vision tower and connector of a vision-language model. false: only the language part."""
    merge_on_save: bool = False
    """Save the full model with the adapter merged in, and the adapter in the subfolder `adapter/`. false: save only the
    adapter, in PEFT's format."""

    @model_validator(mode="after")
    def experts_have_no_magnitudes(self) -> LoraConfig:
        if self.experts and self.dora:
            raise ValueError("experts and dora are set, and PEFT has no DoRA for experts: leave one of them out")
        return self


class ModelConfig(StrictModel):
    """Keys of `model`."""

    path: str
    """Hugging Face folder or Hub model id. Trainer, reference model and engines all start from it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights in forward passes. Master weights, gradients and log-softmax are always float32."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernel of the trainer. auto: that of modeling/attention.py, per sequence; if it is not exact, sdpa or
    eager."""
    images: Literal["auto", "off"] = "auto"
    """Images of a vision-language model. auto: rows may have images if the family is known here and the engine reads
    them as the trainer does (for Gemma 3 and large models of Gemma 4 only hf); else the model is used for text. off:
    text only. Parts that text never reaches are then frozen; engines leave them out, and they are saved."""
    lora: LoraConfig | None = None
    """Low-rank adapters to train instead of the weights. Unset: train the weights."""
    quantization: Literal["nf4"] | None = None
    """Storage of an adapter's frozen linear layers. nf4: four bits (QLoRA, https://arxiv.org/abs/2305.14314), by
    bitsandbytes. The policy is then the dequantised model with the adapter: that is sent to engines, and saved without
    the folder `adapter/`. A value model is not quantised. Unset: `dtype`."""
    trust_remote_code: bool = False
    """Run code shipped with a model, from a folder or the Hub, in driver, trainers and engines: for `path` and the
    models in `alg`. Read that code first. Such a model is sampled by vLLM if vLLM supports the architecture, otherwise
    by the engine hf. A saved model includes the code. Reward models have a separate setting
    (rewards/reward_model.py)."""

    @model_validator(mode="after")
    def what_is_quantized_is_frozen_and_saved_whole(self) -> ModelConfig:
        if self.quantization is None:
            return self
        if self.lora is None:
            raise ValueError(
                f"quantization={self.quantization} is of the frozen weights below an adapter, and lora is unset: set "
                "lora, or leave quantization out"
            )
        if not self.lora.merge_on_save:
            raise ValueError(
                f"quantization={self.quantization}, and an adapter saved alone would be used with the weights of path, "
                "which are not those it was trained with: set lora.merge_on_save to true"
            )
        return self


OURS_OF_DEEPSPEED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("managed_gradient_accumulation", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
    *("bf16", "fp16", "data_types", "optimizer", "scheduler", "data_parallel_size", "sequence_parallel_size"),
)
"""DeepSpeed keys that are derived from other keys of the recipe, and change the gradient."""
OF_DEEPSPEED = (
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio", "checkpoint"),
    *("communication_data_type", "seq_parallel_communication_data_type", "disable_allgather", "disable_python_gc"),
    *("comms_logger", "flops_profiler", "wall_clock_breakdown", "memory_breakdown", "timers", "steps_per_print"),
    *("dump_state", "log_level", "tensorboard", "wandb", "comet", "csv_monitor"),
)
"""DeepSpeed keys that a recipe may set. DeepSpeed itself reads past a misspelt one."""


class TrainerConfig(StrictModel):
    """Keys of `trainer`."""

    ranks: int = Field(1, ge=1)
    """Number of trainer processes, each computing a share of every update."""
    strategy: Literal["deepspeed", "fsdp2"] = "deepspeed"
    """Library that distributes a model over the ranks. fsdp2: PyTorch's FSDP2; weights, gradients and optimizer states
    are sharded, and a checkpoint can be resumed with another number of ranks."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed's ZeRO stage, with strategy: deepspeed. 1 shards optimizer states over the ranks, 2 also gradients, 3
    also weights."""
    offload: bool = False
    """Keep weights, gradients and optimizer states in the machine's memory, with strategy: fsdp2. The GPU then stores
    activations and the weights of a block at a time, and the CPU computes the update. For models that do not fit;
    slower."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of neighbouring ranks that compute a micro-batch together, each on a slice of the positions, for sequences
    whose activations exceed a rank's memory (DeepSpeed-Ulysses, with both strategies). It must divide `ranks` and the
    model's query heads, and divide or be a multiple of the key heads. Requires a text model without recurrent layers,
    packed rows and attention: auto."""
    optimizer: str = "adamw"
    """adamw, sgd (without momentum), muon, or the path of a class, such as torch.optim.NAdam. muon orthogonalises the
    momentum of each matrix of a layer, and updates all other parameters by AdamW with the same lr (arXiv:2502.16982);
    on Ray it requires strategy: fsdp2. On Ray a class must update each number by that number's gradients alone, since
    ranks hold parts of tensors; that is measured before the start. Any class runs with strategy: fsdp2 and
    ranks: 1, since that rank has whole tensors."""
    optimizer_settings: dict[str, Any] = Field({})
    """Keyword arguments of an optimizer that is named by a path; lr comes from the schedule. muon has momentum (0.95).
    """
    lr: LearningRate = 1e-6
    """Learning rate after the warm-up."""
    lr_scales: dict[Annotated[str, Field(min_length=1)], Annotated[float, Field(gt=0)]] = Field({})
    """Factors of the learning rate by names of parameters or modules, as in `freeze`: {"*.layers.[01]": 0.1}. A
    parameter may match one of them. Names that a value model lacks are ignored there."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate schedule after the warm-up. linear and cosine decay from there on. wsd (warm-up, stable, decay)
    stays at lr and decays linearly in the last updates. An update after the last would have lr_min_fraction * lr."""
    lr_min_fraction: float = Field(0.0, ge=0, le=1)
    """Fraction of lr at the end of linear, cosine and wsd."""
    decay_fraction: float | None = Field(None, gt=0, le=1)
    """Fraction of all updates in which wsd decays, rounded to whole updates, at least 1. Required with wsd."""
    warmup_updates: int = Field(0, ge=0)
    """Number of updates in which the learning rate rises to lr."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the running means of gradient and squared gradient."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's term in the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay: decoupled in AdamW, added to the gradient in sgd."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak of a trainer device in teraflops per second, for the metric mfu. null: measured at the start, by a product
    of two matrices in model.dtype."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average of the policy's weights, which is saved beside the model, as model_ema:
    after each update, in float32, average = ema * average + (1 - ema) * weights. null: none."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Maximum gradient norm of an update; 0: no clipping. The logged norm is the norm before clipping."""
    micro_batch_tokens: int = Field(16_384, ge=1)
    """Maximum number of tokens per forward pass, including image tokens; shared tokens count once. It affects only
    memory, not the gradient. With sequence_parallel each rank computes a slice."""
    logits_mib: int = Field(1024, ge=0)
    """Memory for logits and their gradient in MiB. Larger micro-batches compute logits in chunks, and again in the
    backward pass. It affects only memory and speed. The float32 gradient of the head's weight comes on top. 0: never in
    chunks.
    """
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""
    compile: bool = False
    """Compile the blocks of the language part (decoder layers) with torch.compile, for all lengths at once; attention
    over packed rows runs as it is. Updates are equal within rounding; whether a resumed run is equal to the bit has not
    been measured. The first passes take seconds to minutes, and the metrics train/compile/* count compilations. It
    requires a C++ compiler on every machine of a trainer. With zero_stage: 3 a rank then gathers the weights of a block
    at a time, as with fsdp2. Refused with model.quantization, rollout.router_replay and recurrent layers; with backend:
    ray also with gradient_checkpointing, sequence_parallel, offload, and an adapter with zero_stage: 3."""
    freeze: list[Annotated[str, Field(min_length=1)]] = Field([])
    """Parameters that are not trained: names of parameters or modules, with * for any characters (`model.embed_tokens`,
    `*.layers.[01]`), or the words router (of all experts) and vision (the vision tower; the connector to the language
    part is trained). They are saved and sent as the others. It applies to a value model, too; with model.lora only to
    that, for an adapter's base is frozen anyway."""
    layout: Literal["auto", "padded", "packed"] = "auto"
    """Layout of a micro-batch in the forward pass. packed: all sequences in a single row. padded: a row per sequence.
    auto: packed if every sequence then has the log-probabilities it has alone, which is measured when the model is
    loaded, otherwise padded."""
    share_prefixes: Literal["auto", "off"] = "auto"
    """Compute common prefixes of a group's samples once, forward and backward: equal token ids at the beginning, such
    as the prompt. Groups of size 1, as in SFT, share a system prompt or tools. It affects speed and memory, not the
    gradient. auto: with packed rows and attention: auto, if that is exact, as for layout."""
    max_skipped_updates: int = Field(3, ge=1)
    """Number of consecutive skipped updates that stops the run. An update is skipped on all ranks if the gradient is
    not finite."""
    deepspeed: dict[str, Any] = Field({})
    """Keys merged last into the generated DeepSpeed configuration, with strategy: deepspeed. Keys that the recipe sets
    elsewhere are refused."""

    @model_validator(mode="after")
    def a_fall_has_its_keys(self) -> TrainerConfig:
        # A key that nothing reads would be a mistake that shows nowhere.
        if self.lr_schedule == "constant" and self.lr_min_fraction:
            raise ValueError("lr_min_fraction is where a falling learning rate ends, and lr_schedule is constant")
        if self.lr_schedule == "wsd" and self.decay_fraction is None:
            raise ValueError("lr_schedule is wsd: set decay_fraction, the part of the updates in which it falls")
        if self.lr_schedule != "wsd" and self.decay_fraction is not None:
            raise ValueError(f"decay_fraction belongs to lr_schedule: wsd, and lr_schedule is {self.lr_schedule}")
        return self

    @model_validator(mode="after")
    def optimizer_is_known(self) -> TrainerConfig:
        if self.optimizer not in ("adamw", "sgd", "muon") and not self.is_optimizer_named:
            raise ValueError(
                f"optimizer={self.optimizer} is not known: choose adamw, sgd, muon, or a path, such as "
                "torch.optim.NAdam"
            )
        if ours := {"lr", "params"} & self.optimizer_settings.keys():
            raise ValueError(f"optimizer_settings has {min(ours)}, which the trainer sets: use trainer.lr")
        return self

    @property
    def is_optimizer_named(self) -> bool:
        """True if the optimizer is named by a path."""
        return "." in self.optimizer

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
        """Number of groups of ranks with different rows."""
        return self.ranks // self.sequence_parallel

    def count_decay_updates(self, total_updates: int) -> int:
        """Return the number of updates in which wsd decays; 0 for other schedules."""
        # At least one: a short run with wsd must not end without its decay.
        return 0 if self.decay_fraction is None else max(1, round(self.decay_fraction * total_updates))

    @field_validator("deepspeed")
    @classmethod
    def leaves_ours_alone(cls, given: dict[str, Any]) -> dict[str, Any]:
        zero = given.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ValueError(f"zero_optimization must hold keys of DeepSpeed's ZeRO, found {zero!r:.60}")
        # Of this section only the stage is ours: its other keys are what `deepspeed` is for.
        nested = ["zero_optimization.stage"] if "stage" in zero else []
        # These keys are merged last, so they would silently override the recipe's own.
        if taken := [key for key in given if key in OURS_OF_DEEPSPEED] + nested:
            raise ValueError(f"{taken[0]} follows from other keys of the recipe: leave it out here")
        if unknown := [key for key in given if key not in OF_DEEPSPEED]:
            raise ValueError(
                f"{unknown[0]} is no key of DeepSpeed that a recipe may set{suggest_name(unknown[0], OF_DEEPSPEED)}"
            )
        return given


def check_warmup(trainer: TrainerConfig, total_updates: int) -> None:
    """Raise ValueError if warm-up and decay do not fit into the run's updates."""
    if trainer.warmup_updates > total_updates:
        raise ValueError(
            f"trainer.warmup_updates={trainer.warmup_updates}, and the run makes {total_updates} updates, so the "
            "learning rate never reaches trainer.lr: lower it, or train longer"
        )
    decay = trainer.count_decay_updates(total_updates)
    if trainer.warmup_updates + decay > total_updates:
        raise ValueError(
            f"trainer.warmup_updates={trainer.warmup_updates} and the {decay} updates of trainer.decay_fraction="
            f"{trainer.decay_fraction} are more than the {total_updates} updates of the run: lower one of them"
        )


class StopWhenConfig(StrictModel):
    """Keys of `stop_when`: early end of a run. The model is saved."""

    metric: str = Field(min_length=1)
    """Name of a metric in metrics.jsonl, such as reward/mean or eval/reward/mean."""
    above: float | None = None
    """The run ends when the metric is above this value. Set either this or `below`."""
    below: float | None = None
    """The run ends when the metric is below this value."""
    for_steps: int = Field(1, ge=1)
    """Number of consecutive logged values that must satisfy the condition. Steps that do not log the metric are
    ignored."""

    @model_validator(mode="after")
    def one_bound(self) -> StopWhenConfig:
        if (self.above is None) == (self.below is None):
            raise ValueError("set above or below" + ("" if self.above is None else ", and not both"))
        return self


class CheckpointConfig(StrictModel):
    """Keys of `checkpoint`."""

    every: int = Field(0, ge=0)
    """Steps between two checkpoints; 0: none. The last step also writes a checkpoint. They are in the run folder's
    checkpoints/. Every rank writes a share, so a run on several machines needs a shared run_dir."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep, besides the best. `last` and `best` link to them."""
    best: str | None = None
    """Metric that selects the best checkpoint, such as eval/reward/mean. Its model is also saved in the run folder's
    best_model/. Unset: the lowest eval/loss (supervised runs with eval_every), without best_model/. A resumed run
    compares only new checkpoints. eval/ metrics are of the saved weights, which engines receive before the evaluation;
    others, such as reward/mean, are of the weights before the step."""
    best_mode: Literal["auto", "highest", "lowest"] = "auto"
    """Order of the values of `best`. auto: lowest for names that end in loss, nll or kl, otherwise highest."""

    @property
    def best_metric(self) -> str:
        """Metric that selects the best checkpoint."""
        return self.best or EVAL_LOSS

    @property
    def lower_is_better(self) -> bool:
        """True if lower values of the metric in `best` are better."""
        if self.best_mode == "auto":
            # Losses and divergences are better if lower; rewards and accuracies if higher.
            return self.best_metric.endswith(("loss", "nll", "kl"))
        return self.best_mode == "lowest"


def refuse_best(checkpoint: CheckpointConfig, *, eval_every: int) -> str | None:
    """Return why `checkpoint.best` cannot be compared; None if it can."""
    name, every = checkpoint.best, checkpoint.every
    if name is None:
        return None
    if not every:
        return "the run makes no checkpoint: set checkpoint.every"
    if name.startswith("eval/") and not eval_every:
        return "it is measured with eval_every: set that"
    # A checkpoint without a value of the metric could never be the best, however good its weights are.
    if name.startswith("eval/") and every % eval_every:
        return (
            f"it is measured every eval_every={eval_every} steps, and checkpoints are made every {every}: make "
            "checkpoint.every a multiple of eval_every"
        )
    return None
