"""Test data of algs.check: a made-up step, variations of it, and a bandit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from algs.base import Algorithm, PolicyGradient
from algs.check.distributions import draw_distributions, draw_stored, measure_columns
from core.types.arrays import DOUBLE, Floats, Mask
from core.types.samples import TOKEN_REWARDS, Column, Group, Prompt, Rows, Sample, ScoredColumn, make_sample
from core.types.terms import find_term_tokens
from core.types.turns import find_runs

Tables = dict[str, Tensor]
"""logp, entropy and values of every token under the current models, [N] float64 each; and made-up logits, [N, SIZE]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUpStep:
    """Made-up step of N tokens. Token t has the id t, so the labels of a batch index the tables.

    Samples of a group start with the same tokens, so that prefixes can be shared.
    """

    groups: list[Group]
    now: Tables
    """Tables of the current policy and value model."""

    def locate_token(self, token: int) -> str:
        """Name the group, sample and position of a token."""
        for g, group in enumerate(self.groups):
            for i, s in enumerate(group):
                if token in s.token_ids:
                    return f"group {g}, sample {i}, token {int(np.argmax(s.token_ids == token))}"
        raise ValueError(f"there is no token {token}")


Kind = Literal["policy gradient"] | Rows

SAMPLED = [[1.0, 0.0, 0.3, 0.7], [0.0, 1.0, 0.5], [0.4] * 3, [1.0], [0.2, -0.5, 1.5, 1.0]]
"""Rewards by group: two ordinary, equal rewards, a single sample, and a group with a truncated sample."""
STEP: dict[Kind, list[list[float]]] = {
    "policy gradient": SAMPLED,
    "conversations": SAMPLED,
    "pairs": [[1.0, 0.0]] * 6,
    "unpaired": [[1.0], [0.0], [1.0], [0.0], [0.0], [1.0]],
    "scored": [[1.0, 0.0, 0.3], [0.0, 1.0], [0.4] * 3, [1.0, 0.2], [0.2, -0.5, 1.5]],
}
USUAL, EQUAL, SINGLE = 1, 2, 3
CORNERS: dict[Kind, dict[str, int]] = {
    "policy gradient": {"equal rewards in a group": EQUAL, "a group of one": SINGLE},
    "conversations": {"one conversation": SINGLE},
    "pairs": {"one pair": SINGLE},
    "unpaired": {"one desirable completion": EQUAL, "one undesirable completion": SINGLE},
    "scored": {"equal rewards in a row": EQUAL, "two completions": SINGLE},
}


def get_kind(alg: Algorithm) -> Kind:
    """Return the algorithm's kind, which selects the made-up step and the obligations."""
    return "policy gradient" if isinstance(alg, PolicyGradient) else alg.rows


def made_up_step(alg: Algorithm) -> MadeUpStep:
    """Return the step for the algorithm's kind, prepared by `prepare_groups`; always the same."""
    drawn, now, scored = _draw_step(get_kind(alg))
    scored = scored | measure_columns(alg, now)
    without = {name: table for name, table in scored.items() if name != TOKEN_REWARDS}
    # a group in two has token rewards
    groups = [
        [with_columns(s, without if i % 2 else scored) for s in group]
        for i, group in enumerate(alg.prepare_groups([[*g] for g in drawn]))
    ]
    if demonstrates(alg, groups[0][-1]):
        groups = [[*g[:-1], as_demonstration(g[-1])] if len(g) > 2 else g for g in groups]
    return MadeUpStep(groups=add_own_columns(alg, groups), now=now)


def add_own_columns(alg: Algorithm, groups: list[Group]) -> list[Group]:
    """Return the groups with the columns that the algorithm names itself, which are those of some teacher."""
    return [
        [replace(s, columns=dict.fromkeys(alg.required_columns, s.columns["teacher_logp"]) | s.columns) for s in g]
        for g in groups
    ]


def demonstrates(alg: Algorithm, sample: Sample) -> bool:
    """Tell whether a term of the algorithm is on demonstrated tokens."""
    made = as_demonstration(sample)
    return any(find_term_tokens(made, term.on, term.sources).any() for term in alg.terms)


def as_demonstration(s: Sample) -> Sample:
    """Return the same tokens as if they had been given as text."""
    versions = np.full_like(s.versions, -1)
    return replace(s, origin="demonstration", rollout_logp=np.zeros_like(s.rollout_logp), versions=versions)


@cache
def _draw_step(kind: Kind) -> tuple[list[Group], Tables, dict[ScoredColumn, Tensor]]:
    """Draw a step before `prepare_groups`: groups, tables of the current models, and columns of the earlier ones.

    Ratios are mostly near 1, with some far out on both sides.
    """
    # A fixed seed: a failure must occur again, at the same token.
    draw = torch.Generator().manual_seed(0)

    def draw_noise(n: int, scale: float, *, wild: int = 1, factor: float = 1.0) -> Tensor:
        """Draw n normal numbers, [n]; every `wild`-th is multiplied by `factor`."""
        steps = scale * torch.randn(n, generator=draw, dtype=torch.float64)
        steps[::wild] *= factor
        return steps

    groups: list[Group] = []
    rows: dict[str, list[Tensor]] = {"logp": [], "entropy": [], "values": []}
    scored: dict[ScoredColumn, list[Tensor]] = {"prox_logp": [], "ref_logp": [], "teacher_logp": [], "values": []}
    scored[TOKEN_REWARDS] = []
    first = 0
    for g, rewards in enumerate(STEP[kind]):
        groups.append([])
        for reward in rewards:
            n = int(torch.randint(6, 15, (1,), generator=draw))
            # Log-probabilities below -0.01: at exactly 0 a finite difference to the right would leave the domain.
            rollout = -0.3 - 4 * torch.rand(n, generator=draw, dtype=torch.float64)
            prox = (rollout + draw_noise(n, 0.1, wild=5, factor=8)).clamp(max=-0.01)
            now = (prox + draw_noise(n, 0.3, wild=6, factor=9)).clamp(max=-0.01)
            ref, teacher = (now + draw_noise(n, 0.4)).clamp(max=-0.01), (rollout + draw_noise(n, 0.8)).clamp(max=-0.01)
            values = draw_noise(n, 0.5)
            columns: dict[ScoredColumn, Tensor] = {"prox_logp": prox, "ref_logp": ref, "teacher_logp": teacher}
            columns["values"] = values
            # not drawn: they change no other number
            columns[TOKEN_REWARDS] = 0.05 * (torch.arange(n, dtype=torch.float64) % 3 - 1)
            for name, column in columns.items():
                scored[name].append(column)
            made = _make_sample(draw, rollout, group=g, first=first, reward=reward, turns=kind == "policy gradient")
            groups[-1].append(_with_prompt_of(groups[-1][0], made) if groups[-1] else made)
            rows["logp"].append(now)
            rows["entropy"].append(2 * torch.rand(n, generator=draw, dtype=torch.float64))
            rows["values"].append(values + draw_noise(n, 0.4))
            first += n
    # one truncated sample, for overlong.mode and bootstrap_truncated
    groups[-1][-1] = replace(groups[-1][-1], stop="length")
    now = {name: torch.cat(parts) for name, parts in rows.items()} | draw_distributions(first)
    return groups, now, {name: torch.cat(parts) for name, parts in scored.items()}


def with_columns(s: Sample, tables: dict[ScoredColumn, Tensor]) -> Sample:
    return replace(s, columns=s.columns | {name: table.numpy()[s.token_ids] for name, table in tables.items()})


def _make_sample(
    draw: torch.Generator, rollout: Tensor, *, group: int, first: int, reward: float, turns: bool
) -> Sample:
    n = len(rollout)
    prompt = int(torch.randint(1, 4, (1,), generator=draw))
    # holes in the mask, as tokens of tools and environments leave them; the last token is always trained
    chosen = (torch.rand(n, generator=draw) < 0.8).tolist()
    mask = [prompt <= t and (chosen[t] or t == n - 1) for t in range(n)]
    stored = draw_stored([first + t for t in range(1, n) if mask[t]])
    return make_sample(
        dtype=DOUBLE,
        prompt=Prompt(id=f"check/{group}", messages=[{"role": "user", "content": "?"}], answer="!", extra=stored),
        token_ids=list(range(first, first + n)),
        action_mask=mask,
        rollout_logp=[x if m else 0.0 for x, m in zip(rollout.tolist(), mask, strict=True)],
        versions=[0 if m else -1 for m in mask],
        reward=reward,
        completion=f"reply {first}",
        turn_rewards=[0.25 * (-1) ** k * (k + 1) for k in range(len(find_runs(np.array(mask)) if turns else ()))],
    )


def _with_prompt_of(first: Sample, s: Sample) -> Sample:
    """Replace a sample's prompt by the group's, up to the shorter length; trained tokens keep their ids."""
    # tokens are tables' indices: only untrained ones may have the same id in two samples
    n = min(int(first.action_mask.argmax()), int(s.action_mask.argmax()))
    return replace(s, token_ids=np.concatenate([first.token_ids[:n], s.token_ids[n:]]))


def keep_columns(groups: list[Group], names: frozenset[ScoredColumn]) -> list[Group]:
    """Return the groups with only these columns; a sample without trained tokens is never scored and has none.

    Token rewards stay: they come with a sample and not from a trainer.
    """

    def keep(sample: Sample, own: frozenset[ScoredColumn]) -> Sample:
        # columns of several numbers are the algorithm's own, from its rows
        several = {name for name, values in sample.columns.items() if values.ndim > 1}
        kept = sorted((own & sample.columns.keys()) | several) if sample.n_trained else []
        return replace(sample, columns={name: sample.columns[name] for name in kept})

    return [[keep(s, names | {TOKEN_REWARDS}) for s in g] for g in groups]


def shuffle_groups(groups: list[Group], seed: int) -> list[Group]:
    """Shuffle the groups, and the samples in each."""
    draw = torch.Generator().manual_seed(seed)

    def draw_order(n: int) -> list[int]:
        return cast(list[int], torch.randperm(n, generator=draw).tolist())

    return [[groups[g][i] for i in draw_order(len(groups[g]))] for g in draw_order(len(groups))]


PoisonableColumn = Column | Literal["rollout_logp", "advantage"]
POISONABLE_COLUMNS: list[PoisonableColumn] = [
    "rollout_logp", "prox_logp", "ref_logp", "teacher_logp", "values", "returns", "reference_point", "advantage",
    "token_rewards",
]  # fmt: skip


def list_poisonable(sample: Sample) -> list[PoisonableColumn]:
    """Return the columns that a sample has, those with names of the algorithm's own too."""
    names = [*POISONABLE_COLUMNS, *sorted(sample.columns.keys() - {*POISONABLE_COLUMNS})]
    return [name for name in names if has_column(sample, name)]


def has_column(sample: Sample, name: PoisonableColumn) -> bool:
    """Tell whether the sample has values for this column."""
    if name == "advantage":
        return sample.advantage is not None
    return name == "rollout_logp" or name in sample.columns


def poison_column(
    groups: list[Group], name: PoisonableColumn, bad: float, *, keep: Callable[[Sample], Mask] | None = None
) -> list[Group]:
    """Write `bad` into a column, if present, at every untrained token, or at every token that `keep` leaves out."""

    def poison_sample(s: Sample) -> Sample:
        def replace_untrained(values: Floats) -> Floats:
            kept = s.loss_mask if keep is None else keep(s)
            return np.where(kept if values.ndim == 1 else kept[:, None], values, bad)

        # no policy sampled a demonstration, so it has no rollout_logp at all
        if not has_column(s, name) or (name == "rollout_logp" and s.origin == "demonstration"):
            return s
        if name == "rollout_logp":
            return replace(s, rollout_logp=replace_untrained(s.rollout_logp))
        if name == "advantage":
            assert s.advantage is not None
            return replace(s, advantage=replace_untrained(s.advantage))
        return replace(s, columns=s.columns | {name: replace_untrained(s.columns[name])})

    return [[poison_sample(s) for s in g] for g in groups]


def make_on_policy(step: MadeUpStep, *, engine_gap: float = 0.0) -> list[Group]:
    """Return the step's groups with engine, proximal policy and reference equal to the current policy.

    engine_gap: log(pi_prox / pi_rollout) of every token, 0 if the engine is equal too.
    """

    def copy_logp(s: Sample) -> Sample:
        # token t has the id t, so the ids index the tables
        now = step.now["logp"].numpy()[s.token_ids]
        logps: dict[Column, Floats] = {"prox_logp": now, "ref_logp": now}
        rollout_logp = s.rollout_logp if s.origin == "demonstration" else now - engine_gap
        return replace(s, rollout_logp=rollout_logp, columns=s.columns | logps)

    return [[copy_logp(s) for s in g] for g in step.groups]


LIKELY = -1.0
"""Log-probability of the likelier of two policies: a bound on probabilities, as of DPPO, can bind on both sides."""


def ratio_arms(
    log_ratios: Tensor, advantages: Sequence[float], *, engine_gap: float = 0.0
) -> tuple[list[Group], Tensor]:
    """Return samples of a single token, one for each ratio to the proximal policy and advantage; and logp now, [N].

    A sequence has a single token here, so the sequence's ratio is the same. engine_gap: log(pi_prox / pi_rollout).
    """
    prox = LIKELY - log_ratios.clamp(min=0.0)
    groups: list[Group] = []
    for old in prox.tolist():
        for advantage in advantages:
            n, same, zero = len(groups), [0.0, old], [0.0, 0.0]
            columns: dict[Column, list[float]] = {"prox_logp": same, "ref_logp": same, "teacher_logp": same}
            columns |= {"values": zero, "returns": zero}
            arm = _make_arm(str(n), [0, n], old - engine_gap, reward=1.0, columns=columns)
            groups.append([arm.with_advantage(np.array([0.0, advantage]))])
    return groups, (prox + log_ratios).repeat_interleave(len(advantages))


ARM_REWARDS = [0.1, 0.2, 0.3, 1.0]
"""Reward of each arm of the bandit."""
BEST = ARM_REWARDS.index(max(ARM_REWARDS))
TEACHER = torch.tensor([0.05, 0.05, 0.05, 0.85], dtype=torch.float64).log()


def sample_bandit(logits: Tensor, columns: dict[ScoredColumn, Tensor], draw: torch.Generator) -> list[Group]:
    """Sample two groups of eight one-token completions from softmax(logits); columns: a value per arm, [arms]."""
    groups, size = 2, 8
    logp: list[float] = logits.log_softmax(-1).tolist()
    drawn = torch.multinomial(logits.softmax(-1).expand(groups, -1), size, replacement=True, generator=draw)
    scored: list[dict[Column, list[float]]] = [
        {name: [0.0, float(values[arm])] for name, values in columns.items()} for arm in range(len(ARM_REWARDS))
    ]

    def make_arms(g: int) -> Group:
        return [
            _make_arm(f"bandit/{g}", [0, arm], logp[arm], reward=reward, columns=scored[arm])
            for arm, reward in enumerate(ARM_REWARDS)
        ]

    arms = map(make_arms, range(groups))
    return [[own[arm] for arm in row] for own, row in zip(arms, drawn.tolist(), strict=True)]


def _make_arm(prompt: str, ids: list[int], logp: float, *, reward: float, columns: dict[Column, list[float]]) -> Sample:
    return make_sample(
        dtype=DOUBLE,
        prompt=Prompt(id=prompt, messages=[{"role": "user", "content": "?"}], answer="!"),
        token_ids=ids,
        action_mask=[False, True],
        rollout_logp=[0.0, logp],
        versions=[-1, 0],
        reward=reward,
        completion=f"reply {ids[-1]}",
        columns=columns,
    )
