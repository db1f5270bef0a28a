"""A game of one or two turns, small enough to enumerate: what a turn is credited with, against the exact gradient.

In its first turn the policy says two of three tokens. If the second of them is 0, the game is over, else there is a
second turn of two tokens. Each turn earns something at once, and the whole something at its end. Whether there is a
second turn is up to the policy: a baseline that counts turns can be biased here, and in a game of fixed length cannot.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from algs.base import with_advantages
from algs.rloo import RLOO
from algs.turns import number_turns
from core.types.arrays import Floats
from core.types.samples import Group
from tools.benchmarks.toy_task import Source, Target, Toy, list_moves, logp_of, slope

STOP, LEVELS = 0, 5


def make_game(vocab: int = 3) -> Toy:
    """Return the game: random and fixed. Its critic is right about what is still to come."""
    random = torch.Generator().manual_seed(0)
    first = list(product(range(vocab), repeat=2))
    completions = [(a, b) for a, b in first if b == STOP]
    completions += [(a, b, c, d) for a, b in first if b != STOP for c, d in first]
    prefixes = sorted({c[:t] for c in completions for t in range(len(c))}, key=lambda p: (len(p), p))
    # by length, so that the empty prefix is number 0: list_moves uses 0 where no prefix follows
    following, takes = list_moves(prefixes, completions, vocab)

    def draw_levels(of: list[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
        drawn = torch.randint(LEVELS, (len(of),), generator=random) / (LEVELS - 1)
        return dict(zip(of, drawn.tolist(), strict=True))

    at_first, at_second, at_the_end = draw_levels(first), draw_levels(completions), draw_levels(completions)
    earned = tuple((at_first[c[:2]], *([at_second[c]] if len(c) > 2 else [])) for c in completions)
    pi = torch.randn(len(prefixes), vocab, generator=random, dtype=torch.float64)
    game = Toy(
        completions=completions,
        following=following,
        takes=takes,
        pi=pi,
        mu=pi,
        ref=pi,
        rewards=torch.tensor([sum(r) + at_the_end[c] for c, r in zip(completions, earned, strict=True)]).double(),
        values=torch.zeros(len(prefixes), dtype=torch.float64),
        turns=tuple((2,) * (len(c) // 2) for c in completions),
        turn_rewards=earned,
    )
    return replace(game, values=compute_values(game))


def returns_of_tokens(game: Toy, discount: float) -> Tensor:
    """Compute the return from its turn on of every token that a completion takes, [C, N, V]; 0 elsewhere."""
    by_token = torch.zeros_like(game.takes)
    for c, (completion, total) in enumerate(zip(game.completions, game.rewards.tolist(), strict=True)):
        earned = list(game.turn_rewards[c])
        # the last turn earns what no turn has earned, as in algs/turns.py
        earned[-1] += total - sum(earned)
        prefix, t = 0, 0
        for k, length in enumerate(game.turns[c]):
            worth = sum(discount ** (later - k) * earned[later] for later in range(k, len(earned)))
            for v in completion[t : t + length]:
                by_token[c, prefix, v] = worth
                prefix = int(game.following[prefix, v])
            t += length
    return by_token


def compute_values(game: Toy, discount: float = 1.0) -> Tensor:
    """Compute the expected return of the turn that a prefix is in, [N]."""
    chance = logp_of(game, game.pi).exp()
    expected = torch.einsum("cnv,c->n", returns_of_tokens(game, discount), chance)
    return expected / torch.einsum("cnv,c->n", game.takes, chance)


def discounted_gradient(discount: float) -> Target:
    """Compute the gradient that discounted returns of turns mean: each turn goes for its own.

    With 1 it is that of the expected reward. With less it is the gradient of no expectation, as it never is where later
    states are not discounted themselves; but it is what every baseline must leave as it is.
    """

    def target(game: Toy, source: Source) -> Tensor:
        chance = logp_of(game, game.pi).exp()
        weights = torch.einsum("cnv,c->nv", returns_of_tokens(game, discount), chance)
        return slope(lambda pi: (weights * pi.log_softmax(-1)).sum(), game.pi)

    return target


class PerTurnIndex(RLOO):
    """RLOO with a baseline per turn index, as it is often done, and biased.

    Each is a mean over the episodes that have this turn, with or without the episode itself. rewards: what each turn
    earned is centred, and then summed from the turn on. returns: what is to come from the turn on is centred.
    """

    over: Literal["rewards", "returns"] = "rewards"

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        per_token: list[Floats] = []
        for group in groups:
            rows = [r for s in group if (r := self.turn_rewards(s)) is not None]
            if self.over == "returns":
                # reversed sums from the end: the return from each turn on
                rows = [np.cumsum(r[::-1])[::-1] for r in rows]
            for i, sample in enumerate(group):
                centred = np.array([r - self.baseline(rows, i, k) for k, r in enumerate(rows[i])])
                credit = centred if self.over == "returns" else np.cumsum(centred[::-1])[::-1]
                per_token.append(credit[number_turns(sample)])
        return with_advantages(groups, per_token)

    def baseline(self, rows: list[Floats], i: int, k: int) -> float:
        """Return the mean of turn k over the episodes that have it; 0 where no other one has."""
        there = [r[k] for j, r in enumerate(rows) if len(r) > k and not (self.leave_one_out and j == i)]
        return float(np.mean(there)) if there else 0.0
