"""Bias and spread of the library's estimators against exact gradients: python -m tools.benchmarks.exact_gradient

The task is small enough to list: three tokens out of four, 64 completions, a fixed reward for each, and for each prefix
a row of logits, which are the parameters. Every group that can be drawn goes through the algorithm's own credit(),
token_weights(), pack() and objective() in float64, as an update of its own. It counts with its probability, so mean and
spread are sums and not samples. Where groups are too many to list, some are drawn, and the bias has an error.

    bias     |E g - g*| / |g*|        g: minus the gradient of the update's loss, g*: the gradient that is meant
    spread   sqrt(E |g - E g|^2) / |g*|
    cosine   of E g and g*; 1 where only the length of the step is another
    length   of E g along g*, over |g*|: what a learning rate could make good
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from algs.base import Algorithm
from algs.cispo import CISPO
from algs.dppo import DPPO
from algs.gmpo import GMPO
from algs.grpo import GRPO
from algs.gspo import GSPO
from algs.opd import OPD
from algs.p3o import P3O
from algs.p4o import P4O
from algs.ppo import PPO
from algs.reinforce_pp import ReinforcePP
from algs.rloo import RLOO
from algs.sapo import SAPO
from core.types.allowed_tokens import AllowedTokens
from tools.benchmarks.estimator_bias import EXACT, Measured, Setting, Verdict, measure
from tools.benchmarks.toy_task import (
    Toy,
    entropy_gradient,
    forward_kl_gradient,
    make_toy,
    sequence_kl_gradient,
    token_kl_gradient,
    truncated_likelihood_gradient,
)
from tools.benchmarks.two_turns import PerTurnIndex, compute_values, discounted_gradient, make_game


@dataclass(frozen=True, kw_only=True)
class Case:
    """Line of a table. The name says what sets the algorithm apart from its neighbours."""

    name: str
    alg: Algorithm
    claim: Verdict
    """Expected result of the measurement; tested."""


Settings = dict[str, object]
Estimator = tuple[type[Algorithm], Settings]


def use(kind: type[Algorithm], **settings: object) -> Estimator:
    return kind, settings


@dataclass(frozen=True)
class Table:
    """Estimators of a setting, by the property claimed of them."""

    title: str
    setting: Setting
    given: Settings = field(default_factory=dict)
    """Settings that all cases share."""
    unbiased: Sequence[Estimator] = ()
    in_length: Sequence[Estimator] = ()
    biased: Sequence[Estimator] = ()

    @property
    def headline(self) -> str:
        return "; ".join(filter(None, [self.title, f"G = {self.setting.group}", said(self.given)]))

    def cases(self) -> list[Case]:
        claims: dict[Verdict, Sequence[Estimator]] = {
            "unbiased": self.unbiased,
            "biased in length": self.in_length,
            "biased": self.biased,
        }
        return [
            Case(name=f"{kind.__name__} {said(own)}".strip(), alg=kind.model_validate(self.given | own), claim=claim)
            for claim, estimators in claims.items()
            for kind, own in estimators
        ]


def said(settings: Settings) -> str:
    return ", ".join(f"{key}: {recipe(value)}" for key, value in settings.items())


def recipe(value: object) -> str:
    """Write a value as in a recipe."""
    if isinstance(value, dict):
        return "{" + said(value) + "}"
    return value if isinstance(value, str) else json.dumps(value).replace("Infinity", ".inf")


# the only norm without a length in it, so what is left is the bias of the estimator itself
SUM: Settings = {"loss_norm": "sequence_sum"}
PLAIN = SUM | {"leave_one_out": True}
OFF, TOKEN, PRODUCT, MEAN = ({"level": level, "high": math.inf} for level in ("none", "token", "sequence", "geometric"))
MASKS = ({"level": "sequence", "mode": "mask"}, {"level": "geometric", "mode": "mask", "low": 0.8, "high": 1.2})
# bounds that never bind: the same loss without its clip
WIDE: Settings = {"clip_low": 0.999, "clip_high": math.inf}


def on_policy(toy: Toy) -> list[Table]:
    at = Setting(toy=toy)
    plain = (RLOO, GRPO, CISPO, GSPO, GMPO, SAPO, DPPO, P3O)
    divided = [use(GRPO, scale_rewards="group"), use(GRPO, scale_rewards="mean"), use(GRPO, whiten=True)]
    whitened = [use(ReinforcePP), use(ReinforcePP, baseline=True)]
    centred = [use(GRPO), use(GRPO, dynamic_sampling=True)]
    as_they_come = [use(GRPO), use(GRPO, loss_norm="constant"), *map(use, (CISPO, GSPO, GMPO, SAPO, DPPO))]
    published = use(GRPO, scale_rewards="group", loss_norm="sequence")
    return [
        Table("On-policy", at, PLAIN, unbiased=[use(kind) for kind in plain]),
        Table("On-policy", at, SUM, in_length=centred, biased=[*divided, *whitened]),
        Table("On-policy, as they come", at, in_length=as_they_come, biased=[published, use(ReinforcePP), use(PPO)]),
    ]


def critics(toy: Toy) -> list[Table]:
    at, given = Setting(toy=toy), SUM | {"whiten": False}
    # a critic may only change the spread: with lam 1 its error cancels, with less it does not
    untrained = replace(at, toy=replace(toy, values=torch.zeros_like(toy.values)))
    one, less, none = (use(PPO, lam=lam) for lam in (1.0, 0.95, 0.0))
    whitened = [use(PPO, whiten=True)]
    return [
        Table("On-policy, a critic that is right", at, given, unbiased=[one, less, none], biased=whitened),
        Table("On-policy, a critic that says 0", untrained, given, unbiased=[one], biased=[less, none]),
    ]


def off_policy(toy: Toy) -> list[Table]:
    engine, stale = (Setting(toy=toy, source=source) for source in ("engine", "stale"))
    whole = [use(kind, correction=PRODUCT) for kind in (RLOO, GRPO, GSPO, SAPO)]
    capped = [{"level": "token"}, {"level": "sequence"}]
    partly = [use(RLOO, correction=c) for c in (OFF, TOKEN, MEAN, *capped, *MASKS)]
    anchored = [use(CISPO, anchor="rollout", correction={"level": "none"}), use(DPPO), use(P3O)]
    clipped = [*map(use, (GRPO, CISPO, GSPO, GMPO, SAPO, P4O)), use(GRPO, **WIDE)]
    shared: Settings = {"loss_norm": "sequence", "leave_one_out": True, "ratio": "product"}
    tight = [use(GSPO, clip_low=0.2, clip_high=0.2)]
    return [
        Table("Samples of mu, the trainer at pi", engine, PLAIN, unbiased=whole, biased=[*partly, *anchored]),
        Table("Samples of mu, where the trainer was when the step began", stale, PLAIN, biased=clipped),
        Table("The same, ratios of whole sequences", stale, shared, unbiased=[use(GSPO, **WIDE)], biased=tight),
    ]


def lengths(toy: Toy) -> list[Table]:
    """Compare the loss norms. `prompt` is not here: with one prompt in an update it is `token`."""
    at, title = Setting(toy=toy), "On-policy, completions of 1 to 3 tokens"
    summed, constant, token, sequence = (
        use(GRPO, loss_norm=norm) for norm in ("sequence_sum", "constant", "token", "sequence")
    )
    luspo, gspo = (use(GSPO, loss_norm=norm) for norm in ("sequence_sum", "sequence"))
    uneven = [token, sequence, gspo]
    right = f"{title}, a critic that is right"
    return [
        Table(title, at, {"leave_one_out": True}, unbiased=[summed, luspo], in_length=[constant], biased=uneven),
        Table(right, at, SUM, unbiased=[use(PPO, whiten=False)], biased=[use(PPO)]),
    ]


def token_kls(idle: Toy) -> list[Table]:
    """Compare the KL estimators: with rewards of zero, an update consists of the KL term alone."""
    at = Setting(toy=idle, group=1, target=token_kl_gradient)
    forward, whole, entropy = (
        replace(at, target=target) for target in (forward_kl_gradient, sequence_kl_gradient, entropy_gradient)
    )
    live, k2, k3plus, k3 = (use(RLOO, kl={"coef": 1, "estimator": e}) for e in ("unbiased", "k2", "k3plus", "k3"))
    taught = use(OPD, teacher="ref", **SUM)
    on, off = "On-policy, no reward, against", "Samples of mu, no reward, against"
    reverse, engine = "KL(pi || ref) of each token", replace(at, source="engine")
    return [
        Table(f"{on} {reverse}", at, unbiased=[live, k2, k3plus, taught], biased=[k3]),
        Table(f"{off} {reverse}", engine, unbiased=[live], biased=[k2, k3plus, k3, taught]),
        Table(f"{on} KL(ref || pi) of each token", forward, unbiased=[k3], biased=[live]),
        Table(f"{on} KL(pi || ref) of completions", whole, biased=[live, k3]),
        Table(f"{on} the entropy of each token", entropy, unbiased=[use(RLOO, entropy_coef=1)]),
    ]


def sequence_kls(idle: Toy) -> list[Table]:
    given = SUM | {"kl": {"coef": 1, "place": "reward"}}
    at, against = Setting(toy=idle, target=sequence_kl_gradient), "no reward, against KL(pi || ref) of completions"
    engine = replace(at, source="engine")
    summed, product, token = [use(RLOO), use(PPO, whiten=False, lam=1)], use(RLOO, correction=PRODUCT), use(RLOO)
    return [
        Table(f"On-policy, {against}", at, given, unbiased=summed, biased=[use(ReinforcePP)]),
        Table(f"Samples of mu, {against}", engine, given, unbiased=[product], biased=[token]),
    ]


def larger_groups(toy: Toy, binary: Toy) -> list[Table]:
    at, title = Setting(toy=toy, group=4), "On-policy, completions of 2 tokens"
    divided, maxrl = use(GRPO, scale_rewards="group"), use(GRPO, scale_rewards="mean")
    uneven = [divided, maxrl, use(ReinforcePP, baseline=True)]
    # G - 1 terms, not G: a group without a success is skipped, its baseline too
    likelihood = replace(at, toy=binary, target=truncated_likelihood_gradient(at.group - 1))
    against = f"{title}, rewards 0 or 1, against the first 3 terms of log E R"
    return [
        Table(title, at, SUM, unbiased=[use(RLOO)], in_length=[use(GRPO)], biased=uneven),
        Table(against, likelihood, SUM, unbiased=[maxrl]),
    ]


def turns(game: Toy, smaller: Toy) -> list[Table]:
    """Compare what turns are credited with, in a game of one or two turns that the policy may stop."""
    pair, three, less = Setting(toy=game), Setting(toy=smaller, group=3), 0.5
    cut = replace(pair, branched=True)
    discounted = replace(pair, toy=replace(game, values=compute_values(game, less)), target=discounted_gradient(less))
    by_turn: Settings = {"credit": "turn"}
    exact = [use(RLOO), use(RLOO, **by_turn), use(GRPO, leave_one_out=True, **by_turn), use(PPO, whiten=False, lam=1.0)]
    critic = [use(PPO, whiten=False, lam=lam, **by_turn) for lam in (1.0, 0.95, 0.0)]
    index = [
        use(PerTurnIndex, over=over, leave_one_out=out) for over in ("returns", "rewards") for out in (True, False)
    ]
    centred = [use(GRPO, **by_turn)]
    divided = [use(GRPO, scale_rewards="group", **by_turn), use(ReinforcePP, **by_turn)]
    late = [use(kind, **settings, turn_discount=less) for kind, settings in (*exact[1:3], *critic)]
    title = "Two turns or one, on-policy"
    return [
        Table(title, pair, SUM, unbiased=[*exact, *critic, index[0]], in_length=centred, biased=[*index[1:], *divided]),
        Table(title, three, SUM, unbiased=[*exact[:2], index[0]], in_length=centred, biased=index[1:]),
        Table(f"{title}, every turn a sample", cut, SUM, unbiased=[*exact, *critic], in_length=centred, biased=divided),
        Table(f"{title}, each turn for its own return, turn_discount {less}", discounted, SUM, unbiased=late),
    ]


def support_sets(restricted: Toy) -> list[Table]:
    """Compare estimators of a policy that may choose some of the tokens only, as with `rollout.allowed_tokens`."""
    at, idle = Setting(toy=restricted), replace(restricted, rewards=torch.zeros_like(restricted.rewards))
    engine = replace(at, source="engine")
    token = Setting(toy=replace(idle, values=torch.zeros_like(idle.values)), group=1, target=token_kl_gradient)
    entropy = replace(token, target=entropy_gradient)
    title = "Three tokens of five may be chosen"
    return [
        Table(f"{title}, on-policy", at, PLAIN, unbiased=[use(RLOO), use(GRPO), use(CISPO)]),
        Table(f"{title}, samples of mu", engine, PLAIN, unbiased=[use(RLOO, correction=PRODUCT)]),
        Table(f"{title}, KL(pi || ref)", token, unbiased=[use(RLOO, kl={"coef": 1, "estimator": "unbiased"})]),
        Table(f"{title}, entropy", entropy, unbiased=[use(RLOO, entropy_coef=1)]),
    ]


def drawn(toy: Toy) -> list[Table]:
    one, many = Setting(toy=toy, group=8, draws=2000), Setting(toy=toy, draws=1000, groups=16)
    divided = [use(GRPO, scale_rewards="group")]
    by_step = [use(GRPO, scale_rewards="batch"), use(ReinforcePP)]
    return [
        Table("On-policy, drawn", one, SUM, unbiased=[use(RLOO)], in_length=[use(GRPO)], biased=divided),
        Table("On-policy, drawn, 16 groups in an update", many, SUM, in_length=by_step),
    ]


def listed(vocab: int = 4) -> list[Table]:
    """List all tables whose numbers are exact."""
    toy = make_toy(vocab=vocab)
    idle = replace(toy, rewards=torch.zeros_like(toy.rewards), values=torch.zeros_like(toy.values))
    short, binary = (make_toy(vocab=vocab, longest=2, levels=levels) for levels in (5, 2))
    rewarded = [*on_policy(toy), *critics(toy), *off_policy(toy), *lengths(make_toy(vocab=vocab, ends=True))]
    return [
        *rewarded,
        *token_kls(idle),
        *sequence_kls(idle),
        *larger_groups(short, binary),
        *turns(make_game(vocab - 1), make_game(2)),
        *support_sets(make_toy(vocab=5, longest=2, allowed_tokens=AllowedTokens(allowed=(1, 3, 4)))),
    ]


def line(name: str, m: Measured) -> str:
    bias = f"{m.bias:.3f} ± {m.error:.3f}" if m.error else f"{m.bias:.{'0e' if m.bias < EXACT else '3f'}} exact"
    return f"{bias:>15}{m.spread:>8.2f}{m.cosine:>9.4f}{m.length:>8.3f}   {m.verdict:<18}{name}"


def main() -> None:
    for table in [*listed(), *drawn(make_toy())]:
        print(f"\n{table.headline}\n{'bias':>15}{'spread':>8}{'cosine':>9}{'length':>8}")
        for case in table.cases():
            print(line(case.name, measure(case.alg, table.setting)), flush=True)


if __name__ == "__main__":
    main()
