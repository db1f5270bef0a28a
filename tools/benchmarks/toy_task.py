"""A task small enough to enumerate, and the exact gradients of what algorithms estimate on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens

Source = Literal["pi", "engine", "stale"]
"""Who sampled. pi: the policy that learns. engine: mu, while the trainer's policy was pi when the step began. stale:
mu, and it was the trainer's policy too, as in a later update of a step."""


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A task with C completions and N unfinished prefixes over V tokens, and the policies that play it."""

    completions: list[tuple[int, ...]]
    following: Tensor
    """[N, V] int64, the prefix a token leads to; 0 where it leads to none."""
    takes: Tensor
    """[C, N, V], 1 where the completion takes this token after this prefix."""
    pi: Tensor
    """[N, V] logits of the policy that learns: the parameters. So are the next two, of others."""
    mu: Tensor
    ref: Tensor
    rewards: Tensor
    """[C]"""
    values: Tensor
    """[N] what the critic says; right for pi, unless replaced."""
    turns: tuple[tuple[int, ...], ...] = ()
    """Lengths of the turns of each completion; empty: each is one turn."""
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    """What each turn of a completion earned."""
    allowed_tokens: AllowedTokens = EVERY_TOKEN
    """Tokens that the policies may choose; completions hold no others."""

    @cached_property
    def choices(self) -> list[int]:
        """Tokens that may be chosen, one by one."""
        vocab = self.pi.shape[-1]
        return [v for v in range(vocab) if not self.allowed_tokens.find_outside([v])]

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] minus the logarithm of the sum over the tokens that may be chosen."""
        return logits - logits[..., self.choices].logsumexp(-1, keepdim=True)


def make_toy(
    *,
    vocab: int = 4,
    longest: int = 3,
    ends: bool = False,
    levels: int = 5,
    allowed_tokens: AllowedTokens = EVERY_TOKEN,
) -> Toy:
    """Random and fixed. With `ends`, token 0 ends a completion; rewards are one of `levels` from 0 to 1.

    Every policy would choose a token outside of `allowed_tokens` more often than all in it.
    """
    # a generator of its own: the claims of the tables are tested on these very numbers
    random = torch.Generator().manual_seed(0)
    outside = allowed_tokens.find_outside(range(vocab))
    choices = [v for v in range(vocab) if v not in outside]
    prefixes = [p for n in range(longest) for p in product(choices, repeat=n) if not (ends and 0 in p)]
    completions = [(*p, v) for p in prefixes for v in choices if (*p, v) not in prefixes]
    following, takes = list_moves(prefixes, completions, vocab)

    def near(logits: Tensor | float, far: float) -> Tensor:
        return logits + far * torch.randn(len(prefixes), vocab, generator=random, dtype=torch.float64)

    pi = near(0.0, 1.0)
    # so that an estimator that forgets the restriction is far off, and not nearly right
    pi[:, outside] += 5.0
    toy = Toy(
        completions=completions,
        following=following,
        takes=takes,
        pi=pi,
        mu=near(pi, 0.5),
        ref=near(pi, 0.5),
        rewards=torch.randint(levels, (len(completions),), generator=random).double() / (levels - 1),
        values=torch.zeros(len(prefixes), dtype=torch.float64),
        allowed_tokens=allowed_tokens,
    )
    # E[R | prefix] = E[R 1(prefix)] / P(prefix)
    return replace(toy, values=reach(toy, pi, toy.rewards) / reach(toy, pi))


def list_moves(
    prefixes: list[tuple[int, ...]], completions: list[tuple[int, ...]], vocab: int
) -> tuple[Tensor, Tensor]:
    """Return the fields `following` and `takes` of a Toy."""
    number = {p: n for n, p in enumerate(prefixes)}
    takes = torch.zeros(len(completions), len(prefixes), vocab, dtype=torch.float64)
    for c, completion in enumerate(completions):
        for t, v in enumerate(completion):
            takes[c, number[completion[:t]], v] = 1.0
    return torch.tensor([[number.get((*p, v), 0) for v in range(vocab)] for p in prefixes]), takes


def logp_of(toy: Toy, logits: Tensor) -> Tensor:
    """Compute the log-probability of every completion, [C]."""
    return torch.einsum("cnv,nv->c", toy.takes, toy.log_softmax(logits))


def reach(toy: Toy, logits: Tensor, worth: Tensor | float = 1.0) -> Tensor:
    """Compute the probability of each prefix, or its part of the expected `worth` [C] of a completion, [N]."""
    return torch.einsum("cnv,c->n", toy.takes, logp_of(toy, logits).exp() * worth)


def played(toy: Toy, source: Source) -> Tensor:
    """Return the logits of the policy that sampled, [N, V]."""
    return toy.pi if source == "pi" else toy.mu


Target = Callable[[Toy, Source], Tensor]
"""Which gradient is meant, [N, V]: the direction to go in."""


def slope(value: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    # a clone, because the toy's own tensors are shared by all measurements
    at = logits.clone().requires_grad_()
    return torch.autograd.grad(value(at), at)[0]


def reward_gradient(toy: Toy, source: Source) -> Tensor:
    """Compute the gradient of E_pi R, for any sampler."""
    return slope(lambda pi: (logp_of(toy, pi).exp() * toy.rewards).sum(), toy.pi)


def sequence_kl_gradient(toy: Toy, source: Source) -> Tensor:
    """Compute the gradient of -KL(pi || ref) between completions, for any sampler."""

    def kl(pi: Tensor) -> Tensor:
        logp = logp_of(toy, pi)
        return (logp.exp() * (logp - logp_of(toy, toy.ref))).sum()

    return -slope(kl, toy.pi)


def gradient_by_token(toy: Toy, source: Source, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Compute the gradient of `of`(log pi, log ref), [N, A] -> [N], per prefix, over the tokens that may be chosen.

    The distribution of prefixes is the sampler's, without gradient.
    """
    # no gradient through the prefixes: a loss per token takes those that were sampled as given
    through, ref = reach(toy, played(toy, source)), toy.log_softmax(toy.ref)[:, toy.choices]
    return slope(lambda pi: through @ of(toy.log_softmax(pi)[:, toy.choices], ref), toy.pi)


def token_kl_gradient(toy: Toy, source: Source) -> Tensor:
    """Compute the gradient of -KL(pi || ref), token by token."""
    return -gradient_by_token(toy, source, lambda logp, ref: (logp.exp() * (logp - ref)).sum(-1))


def forward_kl_gradient(toy: Toy, source: Source) -> Tensor:
    """Compute the gradient of -KL(ref || pi), token by token."""
    return -gradient_by_token(toy, source, lambda logp, ref: (ref.exp() * (ref - logp)).sum(-1))


def entropy_gradient(toy: Toy, source: Source) -> Tensor:
    return gradient_by_token(toy, source, lambda logp, _: -(logp.exp() * logp).sum(-1))


def truncated_likelihood_gradient(terms: int) -> Target:
    """Compute the gradient of -sum_k (1 - p)^k / k: the first terms of log p, p = E_pi R (MaxRL, arXiv 2602.02710)."""

    def target(toy: Toy, source: Source) -> Tensor:
        p = (logp_of(toy, toy.pi).exp() * toy.rewards).sum()
        return reward_gradient(toy, source) * sum((1 - p) ** k for k in range(terms))

    return target
