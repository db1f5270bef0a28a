"""Keys of `judge`, a judge that the run serves, and of `reward.judge_budget`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from core.strict_model import StrictModel

POLICY = "policy"
"""Value of `judge.model` for the policy's own engines."""


class JudgeBudgetConfig(StrictModel):
    """Keys of `reward.judge_budget`: limits of what judges may cost, over training and evaluation."""

    calls: int | None = Field(None, ge=1)
    """Maximum number of requests that judges answer. Unset: unlimited."""
    tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens of these requests and answers, as the server counts them. Unset: unlimited."""


class JudgeConfig(StrictModel):
    """Keys of `judge`, for rewards whose settings have no base_url. Memory and precision are as in `rollout` and
    `model`: gpu_memory_utilization, kv_cache_gib, enforce_eager and dtype."""

    model: str = Field(min_length=1)
    """Path or name of the judge's model, which is not trained. policy: the policy, with the current weights, on its own
    engines."""
    engine: str = "vllm"
    """Inference engine of the judge, as in rollout.engine."""
    num_engines: int = Field(1, ge=1)
    """Number of engines of the judge. A dead one is restarted, up to `rollout.restarts` times; one that takes turns
    with others, in its turn only."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs (on a CPU: processes) per engine of the judge."""
    placement: Literal["separate", "colocate"] | None = None
    """Devices of the judge's engines. separate: their own. colocate: those of trainers and engines, in turns, which
    needs `placement: colocate`; rewards are asked for when all episodes have ended. Unset: as `placement`."""
    temperature: float = Field(0.7, ge=0, le=2)
    """Sampling temperature of verdicts. Equal requests have equal seeds."""
    max_model_len: int | None = Field(None, ge=2)
    """Maximum number of tokens of a request and its verdict. A longer request fails the sample. Unset: 4096, or the
    positions of the judge's model if they are fewer."""
    allowed_tokens: list[Annotated[str, Field(min_length=1)]] = Field([])
    """Texts of the only two tokens of a verdict, for `verdict: probability`: that of 1 and that of 0, [yes, no]. Needs
    temperature 0, with which log-probabilities are those at temperature 1."""
    template_args: dict[str, Any] = Field({})
    """Arguments of the judge's chat template, such as {enable_thinking: false}."""

    @property
    def is_policy(self) -> bool:
        """True if the policy's engines judge."""
        return self.model == POLICY

    @model_validator(mode="after")
    def keys_fit_each_other(self) -> JudgeConfig:
        if self.is_policy and (given := sorted(self.model_fields_set - {"model", "max_model_len"})):
            raise ValueError(
                f"{given[0]} is set and would not be read, because model is {POLICY}, which samples as in rollout: "
                "leave it out"
            )
        if self.allowed_tokens and len(self.allowed_tokens) != 2:
            raise ValueError(f"allowed_tokens must name two tokens, found {len(self.allowed_tokens)}: set [yes, no]")
        if self.allowed_tokens and self.temperature:
            raise ValueError(
                f"allowed_tokens is set, and temperature={self.temperature:g} would change the probabilities: set "
                "temperature to 0"
            )
        return self
