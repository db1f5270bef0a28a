"""The whole configuration, typed. A recipe states only what differs from the defaults here.

A field is checked by the class that owns it. Only RLConfig and SLConfig compare sections. An unknown key is an error.
Nothing is filled in later, so the printed configuration is the one that ran.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from configs.capture_schema import CaptureConfig, ShadowLoss
from configs.data_schema import DataConfig, PromptDataConfig, RowDataConfig
from configs.rollout_schema import RewardConfig, RolloutConfig, WeightSyncConfig
from configs.tracking_schema import TrackingConfig
from configs.trainer_schema import CheckpointConfig, ModelConfig, StopWhenConfig, TrainerConfig, refuse_best
from core.errors import UserError
from core.strict_model import Seconds, StrictModel


class RunConfig(StrictModel):
    """Keys that RL and supervised runs have in common."""

    name: str = Field(pattern=r"^[^/\x00-\x1f.][^/\x00-\x1f]{0,99}$")
    """Name of the run, up to 100 characters without "/"; the run folder is <run_dir>/<name>-<time>."""
    seed: int = Field(0, ge=0)
    """Seed of the order of the data and of all sampling."""
    backend: Literal["ray", "local"] = "ray"
    """Where trainer ranks and engines run. ray: in Ray actors. local: all in one process, so that breakpoint() works in
    a loss, an environment and an engine (rewards keep processes of their own)."""
    device: Literal["auto", "cuda"] = "auto"
    """Device of trainer and engines. auto: GPUs where there are some, else the CPU. cuda: refuse to run without enough
    GPUs."""
    ray_address: str | None = None
    """Address (host:port) of a running Ray cluster; unset starts a private one on this machine."""
    ship_code: bool = False
    """With `ray_address`: send this clone's code to every machine of the cluster, which then needs none. Files of your
    own that the recipe names must still be at the same path everywhere."""
    run_dir: str = "runs"
    """Folder in which run folders are made."""
    save_to: str | None = None
    """Folder for a second copy of the final model, under a fixed name that another recipe can refer to."""
    push_to: str | None = Field(None, pattern=r"^[\w.-]{1,96}(/[\w.-]{1,96})?$")
    """Repository on the Hugging Face hub, NAME or OWNER/NAME, to which the final model is pushed after it is saved. A
    new one is private. Refused before the start without a token that may write, or without an answer of the hub."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: str | None = None
    """Run folder (its newest complete checkpoint) or checkpoint to resume from, exactly, in a new run folder. Settings
    that change the gradient must be the same; otherwise an error names the first one that differs. driver/resume.py
    lists what may differ, such as steps under a constant learning rate. A file that would run code when it is read is
    refused."""
    on_failure: Literal["stop", "resume"] = "stop"
    """What happens when a trainer rank dies, or an engine more often than `rollout.restarts` allows. stop: the run
    ends. resume: it resumes by itself from its newest checkpoint, in a new run folder."""
    max_resumes: int = Field(3, ge=1)
    """Largest number of times that `on_failure: resume` resumes."""
    timeout_s: Seconds = 1800.0
    """Deadline of every remote call, in seconds: start of an engine, a training step, a checkpoint."""
    model: ModelConfig
    alg: dict[str, Any]
    """Algorithm: `name` of a module in algs/ or `file`, the path of one elsewhere; with its hyper-parameters."""
    data: DataConfig
    eval_every: int = Field(0, ge=0)
    """Steps between two evaluations on data.eval: of the loss, or in RL of the reward under the engines' current
    weights. 0 evaluates at the start and the end only."""
    stop_when: StopWhenConfig | None = None
    """End of the run before its last step: {metric: reward/mean, above: 0.95, for_steps: 3}. Unset: `steps` decides."""
    trainer: TrainerConfig = TrainerConfig()
    trackers: list[str] = Field(["jsonl"])
    """Where the metrics go: jsonl (metrics.jsonl in the run folder), mlflow, wandb, tensorboard, or the path of a
    tracker of your own. One that fails is told once and costs nothing else; only a full disk stops the run."""
    tracking: TrackingConfig = TrackingConfig()
    display: Literal["auto", "plain", "quiet", "json"] = "auto"
    """What the run prints. auto: a line per step, and in a terminal what is going on below them. plain: the lines only,
    without colours. quiet: warnings and the outcome. json: one JSON object per line."""

    @property
    def n_steps(self) -> int:
        """Training steps of the run."""
        raise NotImplementedError

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the run."""
        raise NotImplementedError

    @model_validator(mode="after")
    def what_is_measured_is_there(self) -> RunConfig:
        if self.eval_every and self.data.eval is None:
            raise ValueError("eval_every needs held-out rows: set data.eval")
        if self.stop_when is not None and self.stop_when.metric.startswith("eval/") and not self.eval_every:
            raise ValueError(f"stop_when.metric={self.stop_when.metric} is measured by evaluations: set eval_every")
        return self

    @model_validator(mode="after")
    def what_trackers_are_told_is_used(self) -> RunConfig:
        if unused := self.tracking.find_unused(self.trackers):
            raise ValueError(unused)
        return self

    @model_validator(mode="after")
    def what_resumes_has_checkpoints(self) -> RunConfig:
        if self.on_failure == "resume" and not self.checkpoint.every:
            raise ValueError("on_failure is resume, and the run makes no checkpoint: set checkpoint.every")
        return self

    @model_validator(mode="after")
    def best_is_measured(self) -> RunConfig:
        if refused := refuse_best(self.checkpoint, eval_every=self.eval_every):
            raise ValueError(f"checkpoint.best={self.checkpoint.best}: {refused}")
        return self

    @model_validator(mode="after")
    def one_process_has_one_rank(self) -> RunConfig:
        uses_zero_0 = self.trainer.strategy == "deepspeed" and self.trainer.zero_stage == 0
        if self.backend == "ray" and uses_zero_0 and self.model.dtype == "bfloat16":
            raise ValueError(
                "DeepSpeed has no ZeRO-0 for bfloat16 with float32 gradients: set trainer.zero_stage to 1, or "
                "model.dtype to float32"
            )
        if self.backend == "local" and self.trainer.ranks != 1:
            raise ValueError("backend: local is one process: set trainer.ranks to 1, or backend to ray")
        return self

    @model_validator(mode="after")
    def shared_rows_have_our_attention(self) -> RunConfig:
        if self.trainer.sequence_parallel > 1 and self.model.attention != "auto":
            raise ValueError(
                f"trainer.sequence_parallel={self.trainer.sequence_parallel} needs the attention of "
                f"modeling/attention.py, and model.attention is {self.model.attention}: set it to auto"
            )
        return self


def check_warmup(trainer: TrainerConfig, total_updates: int) -> None:
    """Raise ValueError for a warm-up that outlasts the run, whose learning rate would never reach `lr`."""
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


def min_staleness(*, sync_every: int, sample_reuse: int) -> int:
    """Return the smallest `max_staleness` that a run can keep: samples get this stale whatever the timing.

    >>> min_staleness(sync_every=1, sample_reuse=1)
    0
    """
    return sync_every + sample_reuse - 2


class RLConfig(RunConfig):
    """Configuration of main_rl.py."""

    data: PromptDataConfig
    steps: int = Field(ge=1)
    """Number of training steps. Keys named "every" count steps."""
    groups_per_step: int = Field(ge=1)
    """Number of prompts per step."""
    group_size: int = Field(8, ge=1)
    """Number of samples of each prompt."""
    updates_per_step: int = Field(1, ge=1)
    """Number of optimizer updates per step. The groups of the step are distributed over them."""
    max_staleness: int = Field(0, ge=0)
    """Largest number of training steps between the policy that sampled a token and the one that is trained on it. 0:
    generation waits for every weight sync. n: it continues while the trainer works, and stops before it gets too
    old."""
    placement: Literal["separate", "colocate"] = "separate"
    """Devices of trainers and engines. separate: each has its own. colocate: they take turns on the same ones,
    for as many engine ranks as trainer ranks: while the engines generate the trainers are in the machine's memory, and
    while the
    trainers train the engines sleep. max_staleness is 0 then. On a CPU, where all share the memory anyway, the turns
    are the same."""
    sample_reuse: int = Field(1, ge=1)
    """Number of steps that train on each group: a step adds groups_per_step / sample_reuse new groups to the window."""
    eval_samples: int = Field(1, ge=1)
    """Number of samples of each prompt of data.eval. With more than one, pass@k is measured too, for the powers of two
    up to this number."""
    eval_pass_reward: float = 1.0
    """Smallest reward of a sample of data.eval that counts as solved in pass@k."""
    show_samples: int = Field(0, ge=0)
    """Steps between two samples that are printed with their reward. 0: none."""
    reward: RewardConfig
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    capture: CaptureConfig = CaptureConfig()
    compare_losses: list[ShadowLoss] = Field([])
    """Losses to measure beside the one that trains, on the same batches and the same forward pass: their metrics are
    logged as compare_losses/<name>/..., and nothing is trained by them. Each is the name of a module in algs/, the
    path of a
    Python file, or a section like `alg` with a name for the log: {as: dr_grpo, name: grpo, loss_norm: constant}."""

    @model_validator(mode="after")
    def sections_agree(self) -> RLConfig:
        if self.groups_per_step % self.updates_per_step:
            raise ValueError(
                f"groups_per_step={self.groups_per_step} must be a multiple of updates_per_step={self.updates_per_step}"
            )
        if self.groups_per_step % self.sample_reuse:
            raise ValueError(
                f"groups_per_step={self.groups_per_step} must be a multiple of sample_reuse={self.sample_reuse}"
            )
        check_warmup(self.trainer, self.total_updates)
        sync = self.weight_sync
        least = min_staleness(sync_every=sync.every, sample_reuse=self.sample_reuse)
        if self.max_staleness < least:
            raise ValueError(
                f"max_staleness={self.max_staleness}, and with weight_sync.every={sync.every} and sample_reuse="
                f"{self.sample_reuse} a sample gets {least} steps old: raise max_staleness to {least} or more, or "
                "lower the others"
            )
        if sync.max_kl is not None and sync.every == 1:
            raise ValueError(
                "weight_sync.max_kl syncs earlier than weight_sync.every=1 does, which is every step: raise "
                "weight_sync.every"
            )
        if self.backend == "local" and (self.rollout.num_engines, self.rollout.tensor_parallel_size) != (1, 1):
            raise ValueError(
                "backend: local is one process: set rollout.num_engines and rollout.tensor_parallel_size to 1"
            )
        taken = {"mean", "std", "mean_drawn", *self.reward.weights}
        if isinstance(self.data.train, list) and (clash := taken & {s.log_name for s in self.data.train}):
            raise ValueError(
                f"a source of data.train is called {min(clash)}, as is another reward in the log: set its name"
            )
        sources = [*self.data.list_sources("train"), *self.data.list_sources("eval")]
        self.reward.check_sources(list(dict.fromkeys(source.log_name for source in sources)))
        if self.backend == "local" and sync.transport != "auto":
            raise ValueError("backend: local hands weights over in one process: set weight_sync.transport to auto")
        if refused := self._refuse_colocation():
            raise ValueError(f"placement is colocate, {refused}, or placement to separate")
        if refused := self._refuse_adapter_sync():
            raise ValueError(f"weight_sync.lora is adapter, {refused}, or weight_sync.lora to merged")
        if self.longest_sample > self.trainer.micro_batch_tokens:
            raise ValueError(
                f"one sample may reach {self.longest_sample} tokens (data.max_prompt_tokens + rollout.max_new_tokens), "
                f"more than trainer.micro_batch_tokens={self.trainer.micro_batch_tokens}: raise that, or lower those"
            )
        return self

    def _refuse_colocation(self) -> str | None:
        if self.placement == "separate":
            return None
        if self.rollout.least_engines != self.rollout.most_engines:
            return "and engines that come and go need devices of their own: set rollout.num_engines to a number"
        ranks, engines = self.trainer.ranks, self.rollout.least_engines * self.rollout.tensor_parallel_size
        if self.max_staleness:
            return f"so nothing can generate while the trainer trains: set max_staleness={self.max_staleness} to 0"
        if engines != ranks:
            return (
                f"and {engines} engine ranks (rollout.num_engines x rollout.tensor_parallel_size) cannot share the "
                f"devices of {ranks} trainer ranks: set trainer.ranks to {engines}"
            )
        if self.ray_address is not None:
            return "which is written for the GPUs of one machine: leave ray_address out"
        if self.trainer.offload:
            return "which moves the trainer's state itself: set trainer.offload to false"
        if self.weight_sync.transport == "nccl":
            return "and NCCL refuses two processes on one GPU: set weight_sync.transport to auto"
        if self.rollout.sleep_mode == "discard" and self.weight_sync.lora == "adapter":
            only_adapter = "weight_sync.lora=adapter would never send the other weights again"
            return f"rollout.sleep_mode is discard, and {only_adapter}: set rollout.sleep_mode to offload"
        return None

    def _refuse_adapter_sync(self) -> str | None:
        lora = self.model.lora
        if self.weight_sync.lora == "merged":
            return None
        if lora is None:
            return "and the model has none: set model.lora"
        if lora.dora:
            return "and vLLM has no DoRA: set model.lora.dora to false"
        if lora.r > 512:
            return f"and vLLM takes ranks up to 512: lower model.lora.r={lora.r}"
        if lora.vision:
            return "and vLLM adapts language parts only: set model.lora.vision to false"
        return None

    @property
    def n_steps(self) -> int:
        return self.steps

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest possible sample."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def total_updates(self) -> int:
        return self.steps * self.updates_per_step


class SLConfig(RunConfig):
    """Configuration of main_sl.py."""

    data: RowDataConfig
    steps: int | None = Field(None, ge=1)
    """Number of training steps. Set this or `epochs`. Keys named "every" count steps."""
    epochs: float | None = Field(None, gt=0)
    """Number of passes over the rows of data.train, instead of `steps`: rounded up to whole steps. The run folder's
    config.yaml holds the resulting `steps`."""
    rows_per_step: int = Field(ge=1)
    """Number of rows (conversations or pairs) in one update."""
    precompute_ref_logp: bool = False
    """When to compute the log-probabilities of the reference model. true: once for all rows before training, with the
    model itself (of no use if each row is seen once). false: at each step, with a second model."""

    @model_validator(mode="after")
    def sections_agree(self) -> SLConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("set either steps or epochs" + ("" if self.steps is None else ", and not both"))
        if self.epochs is not None and isinstance(self.data.train, list):
            raise ValueError("epochs counts passes over one data set, and data.train is a mixture: set steps instead")
        if self.steps is not None:
            check_warmup(self.trainer, self.steps)
        if self.data.max_tokens > self.trainer.micro_batch_tokens:
            raise ValueError(
                f"one row may have {self.data.max_tokens} tokens (data.max_tokens), more than "
                f"trainer.micro_batch_tokens={self.trainer.micro_batch_tokens}: raise that, or lower this"
            )
        return self

    def with_steps(self, rows: int) -> SLConfig:
        """Return the configuration with `epochs` converted to `steps`, for a data set with this number of rows."""
        if self.epochs is None:
            return self
        steps = math.ceil(self.epochs * rows / self.rows_per_step)
        try:
            check_warmup(self.trainer, steps)
        except ValueError as error:
            raise UserError(str(error)) from error
        return self.model_copy(update={"steps": steps, "epochs": None})

    @property
    def n_steps(self) -> int:
        assert self.steps is not None, "with_steps() comes first"
        return self.steps

    @property
    def total_updates(self) -> int:
        return self.n_steps
