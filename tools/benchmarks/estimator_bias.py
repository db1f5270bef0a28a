"""Bias and spread of an algorithm's gradient estimate on a toy task."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement, pairwise
from typing import Literal

import torch
from torch import Tensor

from algs.base import Algorithm, accepts_group, assign_advantages
from algs.check.cuts import cut_after_every_turn
from algs.totals import prepare_update, total_alone
from core.types.allowed_tokens import AllowedTokens
from core.types.arrays import DOUBLE
from core.types.episodes import number_episodes
from core.types.samples import Batch, Column, Group, Policy, Prompt, Sample, make_sample
from data_feeds.packing.batches import pack, token_weights
from data_feeds.packing.numbering import renumber
from tools.benchmarks.toy_task import Source, Target, Toy, logp_of, played, reward_gradient

Verdict = Literal["unbiased", "biased in length", "biased"]
Step = Sequence[Sequence[int]]
"""The completions of one update: [groups][samples]."""

EXACT = 1e-9
"""Relative; what is left of an unbiased estimator's bias in float64 is some 1e-15."""
STEPS_AT_ONCE = 128


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A toy problem, the policy that samples, and the gradient that is measured."""

    toy: Toy
    source: Source = "pi"
    group: int = 2
    target: Target = reward_gradient
    draws: int = 0
    """Updates to draw; 0 lists all those of one group."""
    groups: int = 1
    """Groups in an update that is drawn."""
    branched: bool = False
    """True: each turn of a completion is a sample of its own."""


def samples_of(alg: Algorithm, setting: Setting) -> list[Sample]:
    """Return every completion as its source would send it, with the columns that the trainer would compute."""
    toy, source = setting.toy, setting.source
    pi, mu, ref = (toy.log_softmax(logits) for logits in (toy.pi, toy.mu, toy.ref))
    rollout = pi if source == "pi" else mu
    scored: dict[Column, Tensor] = {
        "prox_logp": mu if source == "stale" else pi,
        "ref_logp": ref,
        "teacher_logp": ref,
        "values": toy.values[:, None].expand_as(pi),
    }
    wanted = alg.required_columns | ({"prox_logp"} if source == "stale" else set())
    columns: dict[Column, list[list[float]]] = {
        name: table.tolist() for name, table in scored.items() if name in wanted
    }
    says = rollout.tolist()

    def sample(c: int, completion: tuple[int, ...], reward: float) -> Sample:
        # prefix 0 is the empty one, with which every completion begins
        path = [0]
        for v in completion[:-1]:
            path.append(int(toy.following[path[-1], v]))

        def laid(table: list[list[float]]) -> list[float]:
            return [0.0, *(table[n][v] for n, v in zip(path, completion, strict=True))]

        return make_sample(
            dtype=DOUBLE,
            prompt=Prompt(id="toy", messages=[]),
            token_ids=[0, *completion],
            action_mask=[False, *[True] * len(completion)],
            rollout_logp=laid(says),
            versions=[-1, *[0] * len(completion)],
            reward=reward,
            columns={name: laid(table) for name, table in columns.items()},
            turns=pairwise(accumulate((1, *toy.turns[c]))) if toy.turns else (),
            turn_rewards=toy.turn_rewards[c] if toy.turn_rewards else (),
        )

    return [sample(i, c, r) for i, (c, r) in enumerate(zip(toy.completions, toy.rewards.tolist(), strict=True))]


def all_groups(chance: Tensor, size: int) -> tuple[list[Step], Tensor]:
    """Return every group as a step of its own, and its probability; groups that differ in order only are merged."""
    p = chance.tolist()
    groups = list(combinations_with_replacement(range(len(p)), size))

    def orders(group: tuple[int, ...]) -> int:
        # the multinomial coefficient: how many ordered draws give this group
        return math.factorial(size) // math.prod(math.factorial(n) for n in Counter(group).values())

    probability = [orders(g) * math.prod(p[c] for c in g) for g in groups]
    return [[g] for g in groups], torch.tensor(probability, dtype=torch.float64)


def drawn_steps(chance: Tensor, size: int, *, groups: int, draws: int) -> tuple[list[Step], Tensor]:
    random = torch.Generator().manual_seed(1)
    picks = torch.multinomial(chance, draws * groups * size, replacement=True, generator=random)
    return picks.view(draws, groups, size).tolist(), torch.full((draws,), 1 / draws, dtype=torch.float64)


def estimates(alg: Algorithm, setting: Setting) -> tuple[Tensor, Tensor]:
    """Gradient and probability of every update, [steps, N, V] and [steps]."""
    samples, toy = samples_of(alg, setting), setting.toy
    chance = logp_of(toy, played(toy, setting.source)).exp()
    if setting.draws:
        listed, probability = drawn_steps(chance, setting.group, groups=setting.groups, draws=setting.draws)
    else:
        listed, probability = all_groups(chance, setting.group)
    steps = [[[samples[c] for c in group] for group in step] for step in listed]
    if setting.branched:
        steps = [[cut_after_every_turn(group) for group in step] for step in steps]
    kept = [i for i, step in enumerate(steps) if all(accepts_group(alg, group) for group in step)]
    probability = probability[kept]
    # conditional on acceptance: a rejected group is drawn anew, and never trained on
    return step_gradients(toy, alg, [steps[i] for i in kept]), probability / probability.sum()


def step_gradients(toy: Toy, alg: Algorithm, steps: list[list[Group]]) -> Tensor:
    """Compute minus the gradient of the loss of each update, [steps, N, V].

    Credit and weights are those of the update alone. The losses of many are then taken in one call, as no token has a
    part in the loss of another sequence; unless the algorithm sums over what it believes to be the whole update.
    """
    # totals are over an update, so updates must not be joined
    at_once = 1 if type(alg).totals is not Algorithm.totals else STEPS_AT_ONCE
    horizon = max(map(len, toy.completions))
    parts: list[Tensor] = []
    for first in range(0, len(steps), at_once):
        credited = [prepare_update(alg, assign_advantages(alg, step)) for step in steps[first : first + at_once]]
        weights = [w for step in credited for w in token_weights(step, alg.loss_norm, horizon=horizon)]
        rows = [(i, s) for i, step in enumerate(credited) for group in step for s in group]
        groups = [group for step in credited for group in step]
        episodes = renumber([(g, n) for g, group in enumerate(groups) for n in number_episodes(group)])
        batch = pack([s for _, s in rows], weights, episodes=episodes, dtype=torch.float64).to("cpu")
        step_of = torch.tensor([i for i, s in rows for _ in range(s.n_trained)])  # [M]
        prefix = prefixes_of(toy, batch)[batch.at]  # [M]
        by_token = -logit_gradient(toy.pi[prefix], alg, batch, toy.allowed_tokens)
        # many tokens share a prefix: their gradients are added up, as in a table of logits
        by_step = toy.pi.new_zeros(len(credited), *toy.pi.shape)
        parts.append(by_step.index_put((step_of, prefix), by_token, accumulate=True))
    return torch.cat(parts)


def prefixes_of(toy: Toy, batch: Batch) -> Tensor:
    """Return the prefix before every input position, [T]: the context that a model reads."""
    prefix = torch.zeros_like(batch.input_ids)
    for t in range(1, int(batch.position_ids.max()) + 1):
        here = (batch.position_ids == t).nonzero()[:, 0]
        prefix[here] = toy.following[prefix[here - 1], batch.input_ids[here]]
    return prefix


def logit_gradient(logits: Tensor, alg: Algorithm, batch: Batch, allowed_tokens: AllowedTokens) -> Tensor:
    """Compute the gradient of the batch's loss with respect to the logits of each trained token, [M, V]."""
    logits = logits.requires_grad_()
    logp = allowed_tokens.restrict(logits, 1.0).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1) if alg.needs_entropy else None
    policy = Policy(logp=logp.gather(-1, allowed_tokens.to_columns(batch.labels)[:, None])[:, 0], entropy=entropy)
    with torch.no_grad():
        tokens = total_alone(alg, policy, batch.tokens)
    loss, _ = alg.objective(policy, tokens)
    return torch.autograd.grad((loss * tokens.weight).sum(), logits)[0]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements, all relative to the length of the gradient that is meant."""

    bias: float
    error: float
    """Standard error of the mean gradient; 0 where nothing was drawn."""
    spread: float
    cosine: float
    length: float
    aside: float
    """The part of the mean gradient that no learning rate makes good."""

    @property
    def verdict(self) -> Verdict:
        # The error has many directions, so its length hardly varies: twice that is no accident.
        bound = 2 * self.error or EXACT
        if self.bias < bound:
            return "unbiased"
        return "biased in length" if self.aside < bound else "biased"


def measure(alg: Algorithm, setting: Setting) -> Measured:
    gradients, probability = estimates(alg, setting)
    mean = torch.einsum("s,snv->nv", probability, gradients)
    target = setting.target(setting.toy, setting.source)
    size, length = target.norm().item(), ((mean * target).sum() / target.square().sum()).item()
    variance = (probability @ (gradients - mean).square().sum((1, 2))).item()
    return Measured(
        bias=(mean - target).norm().item() / size,
        # the standard error of a mean of independent draws
        error=(variance / setting.draws) ** 0.5 / size if setting.draws else 0.0,
        spread=variance**0.5 / size,
        cosine=length * size / mean.norm().item(),
        length=length,
        aside=(mean - length * target).norm().item() / size,
    )
