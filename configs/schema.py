"""The whole configuration, typed. A recipe states only what differs from the defaults here.

A field is checked by the class that owns it; only RLConfig and SLConfig compare sections; an unknown
key is an error; nothing is filled in later, so the printed configuration is the one that ran.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from configs.data_schema import DataConfig
from configs.rollout_schema import RewardConfig, RolloutConfig, WeightSyncConfig
from configs.trainer_schema import CheckpointConfig, ModelConfig, TrainerConfig
from core.section import Section


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
    What the gradient depends on must be as it was, or one sentence names the first key that is not; driver/resume.py
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
