"""Teachers: models beside the policy, whose log-probabilities of its tokens an algorithm reads as columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.errors import UserError
from core.types.samples import Column, Group, Message, Sample

START, LIVE = "start", "live"

TeacherPrompt = Callable[[Sample, Group], Sequence[Message] | None]
"""Returns the messages that the teacher reads in place of the sample's prompt; None: this sample has no teacher."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """Model that scores the tokens of samples, at the sampling temperature and without gradient."""

    model: str
    """Path of a model with the policy's tokenizer. start: the policy's initial weights; with LoRA, the base model.
    live: the policy at the start of the step."""
    column: Column = ""
    """Column that it fills; "": that of its own name. Several teachers with disjoint `sources` may fill one column."""
    sources: Collection[str] = ()
    """Data sets whose samples it scores; (): all."""
    prompt: TeacherPrompt | None = None
    """Prompt of its own, in place of all tokens before the first sampled one. None: it reads what the policy read.

    Samples without a teacher are not trained on, nor counted: another source, None, or a row that is too long.
    """
    ema: float | None = None
    """Rate of an exponential moving average of the policy's weights, for model: start. After a step, in float32:
    teacher += ema x (policy - teacher). With LoRA, of the adapter's weights."""
    ema_every: int = 1
    """Number of steps between two moves of the average."""
    reset_every: int | None = None
    """Number of steps after which the teacher is the policy again, for model: start."""
    when: Callable[[Mapping[str, Any]], bool] | None = None
    """Condition on the algorithm's state after a step, under which the teacher is the policy again."""
    with_optimizer: bool = False
    """Whether a reset also clears the moments of the policy's optimizer, as ProRL does."""

    def __post_init__(self) -> None:
        resets = self.reset_every is not None or self.when is not None
        if not self.model:
            raise UserError('a teacher has no model: name a path, "start" or "live"')
        if self.moves and self.model != START:
            raise UserError(
                f"a teacher that moves begins at the policy's weights, and this one is {self.model}: "
                "set its model to start, or leave out ema, reset_every and when"
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise UserError(f"a teacher's ema={self.ema} must be above 0 and below 1: the rate of one step")
        if self.ema_every < 1 or (self.reset_every is not None and self.reset_every < 1):
            raise UserError("a teacher's ema_every and reset_every count steps: set them to 1 or more")
        if self.ema_every > 1 and self.ema is None:
            raise UserError("a teacher's ema_every has no effect without ema: set ema, or leave it out")
        if self.with_optimizer and not resets:
            raise UserError("a teacher's with_optimizer has no effect without a reset: set reset_every or when")
        if self.model == LIVE and self.prompt is None:
            raise UserError(
                "a live teacher that reads what the policy reads is the policy, and their KL is always 0: "
                "give it a prompt, or set its model to start"
            )

    @property
    def moves(self) -> bool:
        """True if the weights follow the policy's."""
        return self.ema is not None or self.reset_every is not None or self.when is not None

    @property
    def is_partial(self) -> bool:
        """True if some samples may have no teacher, or other tokens than the policy's: it is scored on its own."""
        return self.prompt is not None or bool(self.sources)

    @property
    def path(self) -> str | None:
        """Path of a model of its own; None for weights of the policy."""
        return None if self.model in (START, LIVE) else self.model

    def rate_after(self, steps_done: int, state: Mapping[str, Any]) -> float:
        """Return the share of the policy in the teacher after this many steps: 1 for a reset, 0 if it rests."""
        if self.reset_every is not None and steps_done % self.reset_every == 0:
            return 1.0
        if self.when is not None and self.when(state):
            return 1.0
        return self.ema if self.ema is not None and steps_done % self.ema_every == 0 else 0.0


def append_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages whose last one goes on with `text`, for a teacher that reads more than the policy."""
    *before, last = messages
    return [*before, {**last, "content": last["content"] + text}]


def grade_tokens(sample: Sample, column: Column) -> Sample:
    """Return the sample with log pi_teacher - log pi_rollout of each token as its advantage; 0 if it was not scored."""
    if not sample.n_trained:
        return sample.with_advantage(0.0)
    return sample.with_advantage(sample.columns[column].astype(np.float64) - sample.rollout_logp)


def find_column(name: str, teacher: Teacher) -> Column:
    """Return the column that a teacher fills."""
    return teacher.column or name


def list_paths(teachers: Mapping[str, Teacher]) -> list[str]:
    """Return the paths of the teachers' models, each once."""
    return list(dict.fromkeys(t.path for t in teachers.values() if t.path is not None))


def check_teachers(teachers: Mapping[str, Teacher], required: Collection[Column]) -> None:
    """Raise UserError if teachers fill a column that is not required, or several of them that of one sample."""
    by_column: dict[Column, list[Teacher]] = {}
    for name, teacher in teachers.items():
        if (column := find_column(name, teacher)) not in required:
            raise UserError(f"alg: the teacher {name} fills {column}, which required_columns does not name: add it")
        by_column.setdefault(column, []).append(teacher)
    for column, several in by_column.items():
        named = [source for teacher in several for source in teacher.sources]
        if len(several) > 1 and (not all(t.sources for t in several) or len({*named}) < len(named)):
            raise UserError(
                f"alg: {len(several)} teachers fill the column {column}, and some sample may have two of them: give "
                "each its own sources"
            )
