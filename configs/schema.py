"""Typed configuration of a run. A recipe lists only the keys that differ from the defaults here.

Each class checks its own fields; only RLConfig and SLConfig compare sections. Unknown keys are errors.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

from pydantic import Field, model_validator

from configs.capture_schema import CaptureConfig, ShadowLoss
from configs.data_schema import DataConfig, PromptDataConfig, RowDataConfig
from configs.judge_schema import JudgeConfig
from configs.profile_schema import ProfileConfig
from configs.rollout_schema import RewardConfig, RolloutConfig
from configs.sync_schema import WeightSyncConfig, min_staleness
from configs.tracking_schema import TrackingConfig
from configs.trainer_schema import (
    CheckpointConfig,
    ModelConfig,
    StopWhenConfig,
    TrainerConfig,
    check_warmup,
    refuse_best,
)
from core.errors import UserError
from core.reserved_metrics import REWARD_NAMES
from core.strict_model import Seconds, StrictModel


class RunConfig(StrictModel):
    """Keys shared by RL and supervised runs."""

    name: str = Field(pattern=r"^[^/\x00-\x1f.][^/\x00-\x1f]{0,99}$")
    """Name of the run, up to 100 characters without "/". The run folder is <run_dir>/<name>-<time>."""
    seed: int = Field(0, ge=0)
    """Seed of the data order and of all sampling."""
    backend: Literal["ray", "local"] = "ray"
    """Processes of trainer ranks and engines. ray: Ray actors. local: a single process, so that breakpoint() works in a
    loss, an environment and an engine (rewards still have their own processes)."""
    device: Literal["auto", "cuda"] = "auto"
    """Device of trainer and engines. auto: GPUs if there are any, otherwise the CPU. cuda: refuse to run without enough
    GPUs."""
    ray_address: str | None = None
    """Address (host:port) of a running Ray cluster. Unset: start a private cluster on this machine."""
    ship_code: bool = False
    """With `ray_address`: send this clone's code to every machine of the cluster, which then needs no clone. Your own
    files named in the recipe must still exist on every machine, under the same path."""
    run_dir: str = "runs"
    """Parent folder of run folders."""
    save_to: str | None = None
    """Folder for a second copy of the final model, under a fixed name that other recipes can use."""
    push_to: str | None = Field(None, pattern=r"^[\w.-]{1,96}(/[\w.-]{1,96})?$")
    """Hugging Face Hub repository, NAME or OWNER/NAME, to push the saved final model to. A new repository is private.
    The run is refused at the start if the Hub does not respond or the token has no write access."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: str | None = None
    """Run folder (newest complete checkpoint) or checkpoint to resume exactly, in a new run folder. Settings that
    change the gradient must be equal; an error names the first that differs. Exceptions are listed in driver/resume.py,
    such as steps under a constant learning rate. Files that would execute code when loaded are refused."""
    on_failure: Literal["stop", "resume"] = "stop"
    """Reaction to the death of a trainer rank, or of more engines than `rollout.restarts` allows. stop: end the run.
    resume: resume from the newest checkpoint, in a new run folder."""
    max_resumes: int = Field(3, ge=1)
    """Maximum number of resumes by `on_failure: resume`."""
    timeout_s: Seconds = 1800.0
    """Deadline of every remote call in seconds, such as an engine's start, a training step or a checkpoint."""
    model: ModelConfig
    alg: dict[str, Any]
    """Algorithm and its hyper-parameters: `name` of a module in algs/, or `file`, the path of a Python file."""
    data: DataConfig
    eval_every: int = Field(0, ge=0)
    """Steps between two evaluations on data.eval: of the loss, or in RL the reward. 0: only at start and end."""
    stop_when: StopWhenConfig | None = None
    """Condition that ends the run early: {metric: reward/mean, above: 0.95, for_steps: 3}. Unset: run all `steps`."""
    trainer: TrainerConfig = TrainerConfig()
    trackers: list[str] = Field(["jsonl"])
    """Destinations of metrics: jsonl (metrics.jsonl in the run folder), mlflow, wandb, tensorboard, prometheus, or the
    path of your own tracker. A tracker that fails is reported once, and the run continues; only a full disk stops the
    run."""
    tracking: TrackingConfig = TrackingConfig()
    display: Literal["auto", "plain", "quiet", "json"] = "auto"
    """Terminal output. auto: a line per step, and in a terminal a status line. plain: lines without colours. quiet:
    warnings and the final result. json: a JSON object per line."""

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


class RLConfig(RunConfig):
    """Configuration of main_rl.py."""

    data: PromptDataConfig
    steps: int = Field(ge=1)
    """Number of training steps. Keys named "every" count steps."""
    groups_per_step: int = Field(ge=1)
    """Number of prompts per step."""
    group_size: int = Field(8, ge=1)
    """Number of samples per prompt."""
    updates_per_step: int = Field(1, ge=1)
    """Number of optimizer updates per step. The step's groups are divided among them."""
    max_staleness: int = Field(0, ge=0)
    """Maximum number of training steps between the policy that sampled a token and the policy trained on it. 0:
    generation waits for every weight sync. n: generation continues during training, and pauses before samples get
    older."""
    placement: Literal["separate", "colocate"] = "separate"
    """Devices of trainers and engines. separate: each has its own devices. colocate: they alternate on shared devices,
    and engine ranks must equal trainer ranks. While engines generate, trainers are offloaded to the machine's memory;
    while trainers train, engines sleep. max_staleness must be 0. On a CPU all share the memory anyway; the order is the
    same.
    """
    sample_reuse: int = Field(1, ge=1)
    """Number of steps that train on each group. A step adds groups_per_step / sample_reuse new groups."""
    eval_samples: int = Field(1, ge=1)
    """Number of samples per prompt of data.eval. Above 1, pass@k is logged for powers of two up to this number."""
    eval_pass_reward: float = 1.0
    """Minimum reward of a sample of data.eval that counts as solved in pass@k."""
    eval_reward: RewardConfig | None = None
    """Second reward of the samples of data.eval, such as another judge or an exact answer. It is logged beside theirs,
    as eval/second_reward/<part>, and not trained on. Unset: none."""
    show_samples: int = Field(0, ge=0)
    """Steps between two samples printed with their reward. 0: none."""
    record_tokens: bool = False
    """true: the sample files also hold token ids and log-probabilities, so that data.train of another run may name this
    run's folder, whose episodes join the groups of their prompts."""
    reward: RewardConfig
    judge: JudgeConfig | None = None
    """Judge that the run serves. Unset: rewards ask none, or the address in their settings."""
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    capture: CaptureConfig = CaptureConfig()
    profile: ProfileConfig = ProfileConfig()
    compare_losses: list[ShadowLoss] = Field([])
    """Losses to log beside the trained loss, on the same batches and forward pass, as compare_losses/<name>/... They do
    not affect training. Each is the name of a module in algs/, the path of a Python file, or a section like `alg` with
    a name for the log: {as: dr_grpo, name: grpo, loss_norm: constant}."""

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
        # all of these are logged as reward/<name>, sources of a mixture too: two of a name would overwrite each other
        names, held_out = ({s.log_name: 0 for s in self.data.list_sources(part)} for part in ("train", "eval"))
        if len(names) > 1 and (clash := (REWARD_NAMES | self.reward.weights.keys()) & names.keys()):
            said = f"a source of data.train is called {min(clash)}, as is another reward in the log: set its name"
            raise ValueError(said)
        self.reward.check_sources([*(names | held_out)])
        if self.backend == "local" and sync.transport != "auto":
            raise ValueError("backend: local hands weights over in one process: set weight_sync.transport to auto")
        if refused := self._refuse_colocation():
            raise ValueError(f"placement is colocate, {refused}, or placement to separate")
        if refused := self._refuse_adapter_sync():
            raise ValueError(f"weight_sync.lora is adapter, {refused}, or weight_sync.lora to merged")
        # A sample is never split over micro-batches. The longest possible one counts, or a run would fail when it
        # draws one, after hours.
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
        if self.model.quantization is not None:
            return "and the engine would add it to the weights of model.path: leave model.quantization out"
        if lora.dora:
            return "and vLLM has no DoRA: set model.lora.dora to false"
        if lora.r > 512:
            return f"and vLLM takes ranks up to 512: lower model.lora.r={lora.r}"
        if lora.vision:
            return "and vLLM adapts language parts only: set model.lora.vision to false"
        if lora.experts:
            # vLLM takes alternate rows of an adapter for gate and up, as gpt-oss has them; most families have halves
            return "and vLLM reads gate and up of an expert's adapter in another order: set model.lora.experts to false"
        return None

    @property
    def n_steps(self) -> int:
        return self.steps

    @property
    def longest_sample(self) -> int:
        """Maximum tokens of a sample."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def total_updates(self) -> int:
        return self.steps * self.updates_per_step


class SLConfig(RunConfig):
    """Configuration of main_sl.py."""

    data: RowDataConfig
    steps: int | None = Field(None, ge=1)
    """Number of training steps. Set either this or `epochs`. Keys named "every" count steps."""
    epochs: float | None = Field(None, gt=0)
    """Number of passes over data.train, instead of `steps`, rounded up to whole steps. The run folder's config.yaml
    contains the resulting `steps`."""
    rows_per_step: int = Field(ge=1)
    """Number of rows (conversations or pairs) per update."""
    precompute_ref_logp: bool = False
    """Time at which the reference model's log-probabilities are computed. true: for all rows before training, without a
    second model (no benefit if each row is used once). false: at each step, by a second model."""

    @model_validator(mode="after")
    def sections_agree(self) -> SLConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("set either steps or epochs" + ("" if self.steps is None else ", and not both"))
        if self.epochs is not None and len(self.data.list_sources("train")) > 1:
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
        """Return the configuration with `epochs` converted to `steps`, for a data set of `rows` rows."""
        if self.epochs is None:
            return self
        # exact, as the recipe has it: in floats, 2.2 x 100 rows are more than 220
        steps = -(-Fraction(str(self.epochs)) * rows // self.rows_per_step)
        try:
            # model_copy validates nothing, and only here are the steps known.
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
