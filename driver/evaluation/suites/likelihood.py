"""Log-likelihoods of given tokens, by the trainer's scoring: the numbers that training works with, at temperature 1.

Continuations of one context are scored as a group, so the context is computed once where the model allows it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from algs.base import Algorithm
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.types.samples import Group, Prompt, Sample, make_sample
from data_feeds.packing.batches import Plan, plan_update
from trainers.learner import Learner
from trainers.local import LocalTrainer

TOKENS_AT_ONCE = 8192
"""Tokens of one forward pass; a longer text has one of its own."""
CONTEXTS_AT_ONCE = 256
"""Contexts that are packed together."""

Pair = tuple[list[int], list[int]]
"""Tokens of a context, one at least, and of what follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """Log-likelihood of a continuation after its context."""

    logp: float
    """Sum over its tokens."""
    is_greedy: bool
    """True if each of its tokens is the most probable one."""


class LikelihoodScorer:
    """Model that scores continuations of contexts."""

    def __init__(self, model: ModelConfig):
        # all logits at once: the largest is asked for
        settings: dict[str, Any] = {"micro_batch_tokens": TOKENS_AT_ONCE, "logits_mib": 0}
        cfg = TrainerConfig(**settings)
        self.trainer = _ScoringTrainer(model, cfg, Algorithm(), temperature=1.0, total_updates=1)
        self.layout = self.trainer.describe_layout()

    def score(self, pairs: Sequence[Pair]) -> Generator[tuple[int, Likelihood]]:
        """Yield the likelihoods with the numbers of their pairs, in the order in which they are computed."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        for i, (context, _) in enumerate(pairs):
            by_context.setdefault(tuple(context), []).append(i)
        groups = [*by_context.values()]
        for start in range(0, len(groups), CONTEXTS_AT_ONCE):
            yield from self._score_groups(pairs, groups[start : start + CONTEXTS_AT_ONCE])

    def _score_groups(self, pairs: Sequence[Pair], groups: list[list[int]]) -> Generator[tuple[int, Likelihood]]:
        samples: list[Group] = [[_make_sample(*pairs[i]) for i in group] for group in groups]
        numbers = {
            id(sample): i
            for group, made in zip(groups, samples, strict=True)
            for i, sample in zip(group, made, strict=True)
        }
        plan = plan_update(
            samples,
            "token",
            TOKENS_AT_ONCE,
            padded=self.layout.padded,
            share_prefixes=self.layout.shares_prefixes,
        )
        for chosen, found in self._score_plan(plan):
            yield from ((numbers[id(plan.samples[i])], one) for i, one in zip(chosen, found, strict=True))

    def _score_plan(self, plan: Plan) -> Generator[tuple[list[int], list[Likelihood]]]:
        """Yield the samples of each micro-batch, by number, and their likelihoods."""
        [bins], [batches] = plan.bins, plan.batches()
        for chosen, batch in zip(bins, batches, strict=True):
            with _watch_choices(self.trainer.model) as choices:
                [columns] = self.trainer.compute_columns([batch], frozenset({"prox_logp"}))
            of_sample = batch.tokens.seq_ids.numpy()
            missed = torch.cat(choices).numpy() != batch.labels.numpy()
            logp = np.bincount(of_sample, columns["prox_logp"].astype(np.float64), minlength=len(chosen))
            misses = np.bincount(of_sample, missed, minlength=len(chosen))
            yield (
                chosen,
                [Likelihood(logp=float(x), is_greedy=not n) for x, n in zip(logp, misses, strict=True)],
            )


class _ScoringTrainer(LocalTrainer):
    """Local trainer without an optimizer and its copies of the weights."""

    def make_learner(self, model: nn.Module) -> Learner:
        return cast(Learner, _Frozen(model.requires_grad_(False).to(self.device)))  # nothing more is asked of it


class _Frozen:
    """Model that is not trained."""

    def __init__(self, model: nn.Module):
        self.model = self.module = model


@contextmanager
def _watch_choices(model: nn.Module) -> Generator[list[Tensor]]:
    """Collect the most probable token at every position that the head sees: those of scored tokens only.

    What models do to logits after their head keeps the order.
    """
    hf: Any = model
    choices: list[Tensor] = []
    head = hf.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, args, logits: choices.append(logits[0].argmax(-1).cpu()))
    try:
        yield choices
    finally:
        hook.remove()


def _make_sample(context: list[int], continuation: list[int]) -> Sample:
    n, m = len(context), len(continuation)
    return make_sample(
        prompt=Prompt(id="", messages=[]),
        token_ids=context + continuation,
        action_mask=[False] * n + [True] * m,
        rollout_logp=[0.0] * (n + m),
        versions=[-1] * (n + m),
    )
