"""Bias and spread of the library's estimators against a gradient known exactly: python -m benchmarks.exact_gradient

The task is small enough to list: three tokens out of four, 64 completions, a fixed reward for each, and for each
prefix a row of logits, which are the parameters. Every group that can be drawn goes through the algorithm's own
credit(), token_weights(), pack() and objective() in float64, as an update of its own, and counts with its probability:
mean and spread are sums and not samples. Where groups are too many to list, some are drawn, and the bias has an error.

    bias     |E g - g*| / |g*|        g: minus the gradient of the update's loss, g*: the gradient that is meant
    spread   sqrt(E |g - E g|^2) / |g*|
    cosine   of E g and g*; 1 where only the length of the step is another
    length   of E g along g*, over |g*|: what a learning rate could make good
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement, product
from typing import Literal

import torch
from torch import Tensor

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
from core.types import Batch, Column, Group, Policy, Prompt, Sample
from data_feeds.packing import pack, token_weights

Source = Literal["pi", "engine", "stale"]
"""Who sampled. pi: the policy that learns. engine: mu, while the trainer's policy was pi when the step began. stale:
mu, and it was the trainer's policy too, as in a later update of a step."""
Verdict = Literal["unbiased", "biased in length", "biased"]
Step = Sequence[Sequence[int]]
"""The completions of one update: [groups][samples]."""

EXACT = 1e-9
"""Relative; what is left of an unbiased estimator's bias in float64 is some 1e-15."""
STEPS_AT_ONCE = 128


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


def make_toy(*, vocab: int = 4, longest: int = 3, ends: bool = False, levels: int = 5) -> Toy:
    """Random and fixed. With `ends`, token 0 ends a completion; rewards are one of `levels` from 0 to 1."""
    random = torch.Generator().manual_seed(0)
    prefixes = [p for n in range(longest) for p in product(range(vocab), repeat=n) if not (ends and 0 in p)]
    number = {p: n for n, p in enumerate(prefixes)}
    completions = [(*p, v) for p in prefixes for v in range(vocab) if (*p, v) not in number]
    takes = torch.zeros(len(completions), len(prefixes), vocab, dtype=torch.float64)
    for c, completion in enumerate(completions):
        for t, v in enumerate(completion):
            takes[c, number[completion[:t]], v] = 1.0

    def near(logits: Tensor | float, far: float) -> Tensor:
        return logits + far * torch.randn(len(prefixes), vocab, generator=random, dtype=torch.float64)

    pi = near(0.0, 1.0)
    toy = Toy(
        completions=completions,
        following=torch.tensor([[number.get((*p, v), 0) for v in range(vocab)] for p in prefixes]),
        takes=takes,
        pi=pi,
        mu=near(pi, 0.5),
        ref=near(pi, 0.5),
        rewards=torch.randint(levels, (len(completions),), generator=random).double() / (levels - 1),
        values=torch.zeros(len(prefixes), dtype=torch.float64),
    )
    return replace(toy, values=reach(toy, pi, toy.rewards) / reach(toy, pi))


def logp_of(toy: Toy, logits: Tensor) -> Tensor:
    """Of every completion, [C]."""
    return torch.einsum("cnv,nv->c", toy.takes, logits.log_softmax(-1))


def reach(toy: Toy, logits: Tensor, worth: Tensor | float = 1.0) -> Tensor:
    """Chance to come through each prefix, or what it adds to the expected `worth` [C] of a completion, [N]."""
    return torch.einsum("cnv,c->n", toy.takes, logp_of(toy, logits).exp() * worth)


def played(toy: Toy, source: Source) -> Tensor:
    """[N, V] logits of who sampled."""
    return toy.pi if source == "pi" else toy.mu


Target = Callable[[Toy, Source], Tensor]
"""Which gradient is meant, [N, V]: the direction to go in."""


def slope(value: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    at = logits.clone().requires_grad_()
    return torch.autograd.grad(value(at), at)[0]


def reward_gradient(toy: Toy, source: Source) -> Tensor:
    """Of E_pi R, whoever sampled."""
    return slope(lambda pi: (logp_of(toy, pi).exp() * toy.rewards).sum(), toy.pi)


def sequence_kl_gradient(toy: Toy, source: Source) -> Tensor:
    """Of -KL(pi || ref) between completions, whoever sampled."""

    def kl(pi: Tensor) -> Tensor:
        logp = logp_of(toy, pi)
        return (logp.exp() * (logp - logp_of(toy, toy.ref))).sum()

    return -slope(kl, toy.pi)


def gradient_by_token(toy: Toy, source: Source, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Of `of`(log pi, log ref), [N, V] -> [N], after each prefix; the prefixes are the sampler's, and stay what they
    are."""
    through, ref = reach(toy, played(toy, source)), toy.ref.log_softmax(-1)
    return slope(lambda pi: through @ of(pi.log_softmax(-1), ref), toy.pi)


def token_kl_gradient(toy: Toy, source: Source) -> Tensor:
    """Of -KL(pi || ref), token by token."""
    return -gradient_by_token(toy, source, lambda logp, ref: (logp.exp() * (logp - ref)).sum(-1))


def forward_kl_gradient(toy: Toy, source: Source) -> Tensor:
    """Of -KL(ref || pi), token by token."""
    return -gradient_by_token(toy, source, lambda logp, ref: (ref.exp() * (ref - logp)).sum(-1))


def entropy_gradient(toy: Toy, source: Source) -> Tensor:
    return gradient_by_token(toy, source, lambda logp, _: -(logp.exp() * logp).sum(-1))


def truncated_likelihood_gradient(terms: int) -> Target:
    """Of -sum_k (1 - p)^k / k, the first terms of log p, p = E_pi R (MaxRL, https://arxiv.org/abs/2602.02710)."""

    def target(toy: Toy, source: Source) -> Tensor:
        p = (logp_of(toy, toy.pi).exp() * toy.rewards).sum()
        return reward_gradient(toy, source) * sum((1 - p) ** k for k in range(terms))

    return target


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Who draws what, and which gradient is meant."""

    toy: Toy
    source: Source = "pi"
    group: int = 2
    target: Target = reward_gradient
    draws: int = 0
    """Updates to draw; 0 lists all those of one group."""
    groups: int = 1
    """Groups in an update that is drawn."""


def samples_of(alg: Algorithm, setting: Setting) -> list[Sample]:
    """Every completion as its source would have sent it, with the columns that the trainer would have scored."""
    toy, source = setting.toy, setting.source
    pi, mu, ref = (logits.log_softmax(-1) for logits in (toy.pi, toy.mu, toy.ref))
    rollout = pi if source == "pi" else mu
    scored: dict[Column, Tensor] = {
        "prox_logp": mu if source == "stale" else pi,
        "ref_logp": ref,
        "teacher_logp": ref,
        "values": toy.values[:, None].expand_as(pi),
    }
    wanted = alg.needs | ({"prox_logp"} if source == "stale" else set())
    columns: dict[Column, list[list[float]]] = {
        name: table.tolist() for name, table in scored.items() if name in wanted
    }
    says = rollout.tolist()

    def sample(completion: tuple[int, ...], reward: float) -> Sample:
        path = [0]
        for v in completion[:-1]:
            path.append(int(toy.following[path[-1], v]))

        def laid(table: list[list[float]]) -> list[float]:
            return [0.0, *(table[n][v] for n, v in zip(path, completion, strict=True))]

        return Sample(
            prompt=Prompt(id="toy", messages=[]),
            token_ids=[0, *completion],
            mask=[False, *[True] * len(completion)],
            rollout_logp=laid(says),
            versions=[-1, *[0] * len(completion)],
            reward=reward,
            columns={name: laid(table) for name, table in columns.items()},
        )

    return [sample(c, r) for c, r in zip(toy.completions, toy.rewards.tolist(), strict=True)]


def all_groups(chance: Tensor, size: int) -> tuple[list[Step], Tensor]:
    """Every group as a step of its own, and its probability; one that differs in order only is counted into it."""
    p = chance.tolist()
    groups = list(combinations_with_replacement(range(len(p)), size))

    def orders(group: tuple[int, ...]) -> int:
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
    kept = [i for i, step in enumerate(steps) if all(map(alg.keep, step))]
    probability = probability[kept]
    return step_gradients(toy, alg, [steps[i] for i in kept]), probability / probability.sum()


def step_gradients(toy: Toy, alg: Algorithm, steps: list[list[Group]]) -> Tensor:
    """Minus the gradient of the loss of each update, [steps, N, V].

    Credit and weights are those of the update alone. The losses of many are then taken in one call, as no token has a
    part in the loss of another sequence; unless the algorithm sums over what it believes to be the whole update.
    """
    at_once = 1 if type(alg).totals is not Algorithm.totals else STEPS_AT_ONCE
    horizon = max(map(len, toy.completions))
    parts: list[Tensor] = []
    for first in range(0, len(steps), at_once):
        credited = [alg.credit(step) for step in steps[first : first + at_once]]
        weights = [w for step in credited for w in token_weights(step, alg.loss_norm, horizon=horizon)]
        rows = [(i, s) for i, step in enumerate(credited) for group in step for s in group]
        batch = pack([s for _, s in rows], weights, dtype=torch.float64)
        step_of = torch.tensor([i for i, _ in rows])[batch.tokens.seq_ids]  # [M]
        prefix = prefixes_of(toy, batch)[batch.at]  # [M]
        by_step = toy.pi.new_zeros(len(credited), *toy.pi.shape)
        parts.append(by_step.index_put((step_of, prefix), -logit_gradient(toy.pi[prefix], alg, batch), accumulate=True))
    return torch.cat(parts)


def prefixes_of(toy: Toy, batch: Batch) -> Tensor:
    """The prefix that every input position has behind it, [T]: what a model reads off its context."""
    prefix = torch.zeros_like(batch.input_ids)
    for t in range(1, int(batch.position_ids.max()) + 1):
        here = (batch.position_ids == t).nonzero()[:, 0]
        prefix[here] = toy.following[prefix[here - 1], batch.input_ids[here]]
    return prefix


def logit_gradient(logits: Tensor, alg: Algorithm, batch: Batch) -> Tensor:
    """Of the batch's loss, with respect to the logits of each learnt token, [M, V]."""
    logits = logits.requires_grad_()
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1) if alg.needs_entropy else None
    policy = Policy(logp=logp.gather(-1, batch.labels[:, None])[:, 0], entropy=entropy)
    with torch.no_grad():
        tokens = replace(batch.tokens, totals=alg.totals(policy, batch.tokens))
    loss, _ = alg.objective(policy, tokens)
    return torch.autograd.grad((loss * tokens.weight).sum(), logits)[0]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All relative to the length of the gradient that is meant."""

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
        error=(variance / setting.draws) ** 0.5 / size if setting.draws else 0.0,
        spread=variance**0.5 / size,
        cosine=length * size / mean.norm().item(),
        length=length,
        aside=(mean - length * target).norm().item() / size,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of a table. The name says what sets the algorithm apart from its neighbours."""

    name: str
    alg: Algorithm
    claim: Verdict
    """What the measurement should say; tested."""


Settings = dict[str, object]
Estimator = tuple[type[Algorithm], Settings]


def use(kind: type[Algorithm], **settings: object) -> Estimator:
    return kind, settings


@dataclass(frozen=True)
class Table:
    """Estimators in one setting, by what is claimed of them."""

    title: str
    setting: Setting
    given: Settings = field(default_factory=dict)
    """What all of them have set."""
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
    """As a recipe has it."""
    if isinstance(value, dict):
        return "{" + said(value) + "}"
    return value if isinstance(value, str) else json.dumps(value).replace("Infinity", ".inf")


SUM: Settings = {"loss_norm": "sequence_sum"}
PLAIN = SUM | {"leave_one_out": True}
OFF, TOKEN, PRODUCT, MEAN = ({"level": level, "high": math.inf} for level in ("none", "token", "sequence", "geometric"))
MASKS = ({"level": "sequence", "mode": "mask"}, {"level": "geometric", "mode": "mask", "low": 0.8, "high": 1.2})
WIDE: Settings = {"clip_low": 0.999, "clip_high": math.inf}


def on_policy(toy: Toy) -> list[Table]:
    at = Setting(toy=toy)
    plain = (RLOO, GRPO, CISPO, GSPO, GMPO, SAPO, DPPO, P3O)
    divided = [use(GRPO, scale="group"), use(GRPO, scale="mean"), use(GRPO, whiten=True)]
    whitened = [use(ReinforcePP), use(ReinforcePP, baseline=True)]
    centred = [use(GRPO), use(GRPO, drop_dead_groups=True)]
    as_they_come = [use(GRPO), use(GRPO, loss_norm="constant"), *map(use, (CISPO, GSPO, GMPO, SAPO, DPPO))]
    published = use(GRPO, scale="group", loss_norm="sequence")
    return [
        Table("On-policy", at, PLAIN, unbiased=[use(kind) for kind in plain]),
        Table("On-policy", at, SUM, in_length=centred, biased=[*divided, *whitened]),
        Table("On-policy, as they come", at, in_length=as_they_come, biased=[published, use(ReinforcePP), use(PPO)]),
    ]


def critics(toy: Toy) -> list[Table]:
    at, given = Setting(toy=toy), SUM | {"whiten": False}
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
    """loss_norm: prompt is not here: with one prompt in an update it is token."""
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
    """With nothing to earn, all that is left of an update is the KL's part."""
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
    divided, maxrl = use(GRPO, scale="group"), use(GRPO, scale="mean")
    uneven = [divided, maxrl, use(ReinforcePP, baseline=True)]
    # G - 1 terms, not G: a group without a success is skipped, its baseline too
    likelihood = replace(at, toy=binary, target=truncated_likelihood_gradient(at.group - 1))
    against = f"{title}, rewards 0 or 1, against the first 3 terms of log E R"
    return [
        Table(title, at, SUM, unbiased=[use(RLOO)], in_length=[use(GRPO)], biased=uneven),
        Table(against, likelihood, SUM, unbiased=[maxrl]),
    ]


def drawn(toy: Toy) -> list[Table]:
    one, many = Setting(toy=toy, group=8, draws=2000), Setting(toy=toy, draws=1000, groups=16)
    divided = [use(GRPO, scale="group")]
    by_step = [use(GRPO, scale="batch"), use(ReinforcePP)]
    return [
        Table("On-policy, drawn", one, SUM, unbiased=[use(RLOO)], in_length=[use(GRPO)], biased=divided),
        Table("On-policy, drawn, 16 groups in an update", many, SUM, in_length=by_step),
    ]


def listed(vocab: int = 4) -> list[Table]:
    """All tables whose numbers are exact."""
    toy = make_toy(vocab=vocab)
    idle = replace(toy, rewards=torch.zeros_like(toy.rewards), values=torch.zeros_like(toy.values))
    short, binary = (make_toy(vocab=vocab, longest=2, levels=levels) for levels in (5, 2))
    rewarded = [*on_policy(toy), *critics(toy), *off_policy(toy), *lengths(make_toy(vocab=vocab, ends=True))]
    return [*rewarded, *token_kls(idle), *sequence_kls(idle), *larger_groups(short, binary)]


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
