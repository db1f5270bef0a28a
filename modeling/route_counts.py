"""Counts of the choices of routers, and forced passes of a model in training."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from core.types.routes import PADDING
from modeling.routes import ExpertChoice, RoutedPass, RouterHook


class RouteCounts:
    """Sums over the tokens of forward passes."""

    def __init__(self, hook: RouterHook, device: torch.device | str):
        self.sums = torch.zeros(6, dtype=torch.float64, device=device)
        """Positions, tokens with a missing route, choices with a known route and those that differ from it, tokens with
        all routes known and those that differ in a layer."""
        self.entropy = torch.zeros(2, dtype=torch.float64, device=device)
        """Sum of the entropies of the routers, as fractions of the largest, and their number."""
        self.load = torch.zeros(len(hook.blocks), hook.experts, dtype=torch.float64, device=device)
        """[layers, experts] tokens that an expert computed."""

    def flatten(self) -> Tensor:
        return torch.cat([self.sums, self.entropy, self.load.flatten()])

    def read(self, total: Tensor) -> dict[str, float]:
        """Return the metrics of `flatten`, summed over the ranks; {} without a token."""
        sums, (entropy, choices), load = total[:6].tolist(), total[6:8].tolist(), total[8:].view_as(self.load)
        positions, missing, known, changed, whole, changed_tokens = sums
        if not positions:
            return {}
        found = {
            "moe/load_max": float((load.max(-1).values / load.mean(-1)).max()),
            "moe/unused_experts": float((load == 0).double().mean()),
            "moe/router_entropy": entropy / choices,
            "moe/missing_routes": missing / positions,
        }
        if known:
            found["moe/changed_choices"] = changed / known
        if whole:
            found["moe/changed_tokens"] = changed_tokens / whole
        return found


class PassCounts:
    """Counts of one forward pass."""

    def __init__(self, counts: RouteCounts, given: Tensor):
        """given: [P, layers, k] recorded routes; UNKNOWN, or PADDING at positions without a token."""
        self.counts, self.given = counts, given
        self.is_token = given[:, 0, 0] != PADDING
        self.is_changed = torch.zeros_like(self.is_token)

    @torch.no_grad()
    def see(self, number: int, choice: ExpertChoice) -> None:
        counts, given = self.counts, self.given[:, number].long()
        weight = self.is_token.double()
        counts.load[number].scatter_add_(0, choice.chosen.flatten(), weight.repeat_interleave(given.shape[-1]))
        entropy = compute_entropy(choice).double()
        counts.entropy += torch.stack([(entropy * weight).sum(), weight.sum()])
        is_known = given[:, 0] >= 0
        differs = is_known & (choice.own.sort(-1).values != given.sort(-1).values).any(-1)
        counts.sums[2:4] += torch.stack([is_known.sum(), differs.sum()])
        self.is_changed |= differs

    def finish(self) -> None:
        """Add the counts of whole tokens, after the pass."""
        is_known = (self.given[:, :, 0] >= 0).all(-1)
        is_missing = self.is_token & ~is_known
        changed = self.is_changed & is_known
        self.counts.sums[:2] += torch.stack([self.is_token.sum(), is_missing.sum()])
        self.counts.sums[4:] += torch.stack([is_known.sum(), changed.sum()])


class RouteReplay:
    """Recorded routes in the forward passes of a model in training: counted, and forced if `forces`."""

    def __init__(self, module: nn.Module, model: nn.Module, *, forces: bool, device: torch.device | str):
        """Install the hooks; see RouterHook. forces: whether routers take the recorded choices."""
        self.hook = RouterHook(module, model, device=device, key="rollout.router_replay is set")
        self.forces, self.device = forces, device
        self.clear()

    def clear(self) -> None:
        """Set all counts to 0."""
        self.counts = RouteCounts(self.hook, self.device)

    @contextmanager
    def over(self, routes: Tensor, *, counted: bool) -> Generator[None]:
        """Apply routes [P, layers, k] to the forward pass in the body. Raises ValueError for those of other blocks."""
        if routes.shape[1] != len(self.hook.blocks):
            raise ValueError(f"routes of {routes.shape[1]} blocks, and the model has {len(self.hook.blocks)}")
        reader = PassCounts(self.counts, routes) if counted else None
        with self.hook.over(RoutedPass(forced=routes if self.forces else None, reader=reader)):
            yield
        if reader is not None:
            reader.finish()


def compute_entropy(choice: ExpertChoice) -> Tensor:
    """Return the entropy of the router's distribution at each position, [P], as a fraction of log(experts)."""
    if choice.normalised is None:  # the choice is made between logits
        p = choice.scores.float().softmax(-1)
    else:
        p = choice.normalised.flatten(0, -2).float()
        p = p / p.sum(-1, keepdim=True)  # sigmoids do not sum to 1
    return torch.special.entr(p).sum(-1) / math.log(choice.experts)
