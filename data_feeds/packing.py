"""Samples -> Batches. The only place that shifts labels, and the only place that normalises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.arrays import Floats
from core.types import Batch, Group, LossNorm, Sample, ScoredColumn, Tokens
from data_feeds.bin_packing import pack_into_bins
from data_feeds.prefix_bins import count_shared, pack_families
from data_feeds.prefix_tree import lay_out_row

C = TypeVar("C", bound=str)


def token_weights(groups: list[Group], norm: LossNorm, *, horizon: int) -> list[float]:
    """Compute the weight of one trained token of each sample of an update, in the order of `groups`, flattened.

    Computed once on the whole update, before any split, in float64. Samples without a trained token
    have weight 0 and are counted in no denominator.

    Example: two prompts with one sample each, of 1 and 3 trained tokens, horizon 10.
        token         1/4,  1/4    every token of the update counts the same; long completions dominate
        sequence      1/2,  1/6    every completion counts the same; its tokens share
        sequence_sum  1/2,  1/2    every completion's sum counts the same (REINFORCE, RLOO)
        constant      1/20, 1/20   every token of every update counts the same (Dr. GRPO)
        prompt        1/2,  1/6    every prompt counts the same; its tokens share (ScaleRL)
    """
    counts = [[s.n_trained for s in group] for group in groups]  # [groups][samples]
    n_tokens = sum(map(sum, counts))
    n_sequences = sum(n > 0 for group in counts for n in group)
    n_prompts = sum(sum(group) > 0 for group in counts)

    def token_weight(n: int, in_group: int) -> float:
        match norm:
            case "token":
                return 1 / n_tokens
            case "sequence":
                return 1 / (n * n_sequences)
            case "sequence_sum":
                return 1 / n_sequences
            case "constant":
                return 1 / (n_sequences * horizon)
            case "prompt":
                return 1 / (in_group * n_prompts)

    return [token_weight(n, sum(group)) if n else 0.0 for group in counts for n in group]


def pack(
    samples: list[Sample],
    weights: list[float],
    *,
    groups: list[int] | None = None,
    families: list[int] | None = None,
    sources: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """Concatenate samples into a Batch; `weights[i]` is the weight of each trained token of `samples[i]`.

    groups: number of the group of each sample, where whole groups are in one batch. families: number of each sample's
    family, whose common beginnings are laid once (prefix_tree.py); None shares nothing. sources: data sets whose
    tokens get source_ids.

    A Sample is token-aligned (entry t is about token t), a Batch is input-aligned: position t predicts
    token t+1. The shift happens here and nowhere else, and so does the choice of the trained tokens:
    values of a column at other tokens never leave this function.
    """
    row = lay_out_row([s.token_ids[:-1] for s in samples], families)
    learnt = [s.loss_mask[1:] for s in samples]  # by input position: entry t is about token t + 1
    chosen = np.flatnonzero(np.concatenate(learnt))  # among the inputs of all samples, end to end
    counts = [np.count_nonzero(mask) for mask in learnt]

    def ints(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False))

    def select(per_sample: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([values[1:] for values in per_sample])[chosen]

    def floats(per_sample: list[Floats]) -> Tensor:
        return torch.from_numpy(select(per_sample)).to(dtype)

    columns: dict[str, Any] = {name: floats([s.columns[name] for s in samples]) for name in samples[0].columns}
    if all_credited(samples):
        columns["advantage"] = floats([s.advantage for s in samples if s.advantage is not None])

    def per_token(per_sample: Sequence[int]) -> Tensor:
        return ints(np.repeat(per_sample, counts))

    if groups is not None:
        numbers = {g: n for n, g in enumerate(dict.fromkeys(groups))}
        columns["group_ids"] = per_token([numbers[g] for g in groups])
    if sources:
        columns["source_ids"] = per_token([sources.index(s.prompt.source) for s in samples])
    return Batch(
        input_ids=torch.from_numpy(row.input_ids),
        position_ids=torch.from_numpy(row.position_ids),
        segment_ids=torch.from_numpy(row.segment_ids),
        parents=torch.from_numpy(row.parents),
        at=ints(np.concatenate(row.places)[chosen]),
        labels=ints(select([s.token_ids for s in samples])),
        tokens=Tokens(
            seq_ids=per_token(range(len(samples))),
            weight=torch.from_numpy(np.repeat(torch.tensor(weights, dtype=dtype).numpy(), counts)),
            rollout_logp=floats([s.rollout_logp for s in samples]),
            **columns,
        ),
    )


def all_credited(samples: list[Sample]) -> bool:
    """Return True if every sample has an advantage, False if none has; raise ValueError for a mix."""
    credited = {s.advantage is not None for s in samples}
    if len(credited) == 2:
        raise ValueError(
            "some samples of an update have an advantage and some have none: compute_advantages() must set all or none"
        )
    return credited.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Split of one update: the samples of every micro-batch of every rank."""

    samples: list[Sample]
    """Samples with at least one trained token."""
    weights: list[float]
    """Weight of each trained token, by sample."""
    bins: list[list[list[int]]]
    """[rank][micro-batch] -> indices into `samples`."""
    groups: list[int] | None
    """Number of each sample's group, where groups are kept whole."""
    families: list[int] | None
    """Number of each sample's group, where its samples share their common beginnings."""
    sources: Sequence[str]
    """Data sets whose losses are logged separately."""
    padded: bool
    """True if rows are padded to the longest of their micro-batch."""

    @property
    def padding(self) -> float:
        """Fraction of the positions of the forward passes that hold no token; 0 where nothing is padded."""
        if not self.padded:
            return 0.0
        sizes = [[len(self.samples[i].token_ids) - 1 for i in b] for rank in self.bins for b in rank if b]
        return 1 - sum(map(sum, sizes)) / sum(len(b) * max(b) for b in sizes)

    @property
    def shared(self) -> float:
        """Fraction of the samples' input tokens that a common beginning saves; 0 where nothing is shared."""
        if self.families is None:
            return 0.0
        return count_shared([s.token_ids[:-1] for s in self.samples], self.families, self.bins)

    def batches(self, dtype: torch.dtype = torch.float32) -> list[list[Batch]]:
        """Return the batches, [rank][micro-batch]."""
        return [[self._make_batch(b, dtype) for b in rank] for rank in self.bins]

    def _make_batch(self, chosen: list[int], dtype: torch.dtype) -> Batch:
        if not chosen:
            return self.make_idle_batch(dtype)
        return pack(
            [self.samples[i] for i in chosen],
            [self.weights[i] for i in chosen],
            groups=None if self.groups is None else [self.groups[i] for i in chosen],
            families=None if self.families is None else [self.families[i] for i in chosen],
            sources=self.sources,
            dtype=dtype,
        )

    def make_idle_batch(self, dtype: torch.dtype = torch.float32) -> Batch:
        """Return a batch without trained tokens: its rank still takes part in every collective of the step."""
        shortest = min(range(len(self.samples)), key=lambda i: len(self.samples[i].token_ids))
        batch = self._make_batch([shortest], dtype)
        columns: dict[str, Any] = {f.name: getattr(batch.tokens, f.name, None) for f in fields(Tokens)}
        batch.tokens = batch.tokens.replace(**{name: v[:0] for name, v in columns.items() if isinstance(v, Tensor)})
        batch.at, batch.labels = batch.at[:0], batch.labels[:0]
        return batch

    def with_columns(self, scored: list[list[dict[ScoredColumn, Floats]]]) -> dict[int, Sample]:
        """Return the samples with the columns of a trainer, by id() of the sample.

        scored: [rank][micro-batch][column], each [M].
        """
        laid = self.lay_out(scored, fill=0.0)
        return {id(s): replace(s, columns=s.columns | laid[id(s)]) for s in self.samples if id(s) in laid}

    def lay_out(self, columns: Sequence[Sequence[Mapping[C, Floats]]], *, fill: float) -> dict[int, dict[C, Floats]]:
        """Return columns of trained tokens over the whole of each sample, by id() of the sample.

        columns: [rank][micro-batch][column], each [M]. fill: value of a token that is not trained on.
        """
        done: dict[int, dict[C, Floats]] = {}
        for rank_bins, of_rank in zip(self.bins, columns, strict=True):
            for chosen, of_batch in zip(rank_bins, of_rank, strict=True):
                first = 0
                for s in (self.samples[i] for i in chosen):
                    mask, after = s.loss_mask, first + s.n_trained
                    own = {name: np.full(len(mask), fill, dtype=s.float_dtype) for name in of_batch}
                    for name, values in of_batch.items():
                        own[name][mask] = values[first:after]
                    done[id(s)], first = own, after
        return done


def plan_update(
    groups: list[Group],
    norm: LossNorm,
    max_tokens: int,
    *,
    ranks: int = 1,
    horizon: int = 1,
    padded: bool = True,
    share_prefixes: bool = False,
    whole_groups: bool = False,
    sources: Sequence[str] = (),
) -> Plan:
    """Split one update into micro-batches of at most `max_tokens` tokens, the same number for every rank.

    The split affects memory and speed only: weights are computed before it. share_prefixes: samples of a group share
    their common beginnings, and a micro-batch counts those once.
    """
    if padded and share_prefixes:
        raise ValueError("padded rows share no prefixes")
    weights = token_weights(groups, norm, horizon=horizon)
    numbered = [(g, s) for g, group in enumerate(groups) for s in group]
    rows = [(g, s, w) for (g, s), w in zip(numbered, weights, strict=True) if s.n_trained]
    families = [g for g, _, _ in rows]
    if share_prefixes:
        bins = pack_families([s for _, s, _ in rows], families, max_tokens, ranks=ranks, whole=whole_groups)
    else:
        units: dict[int, list[int]] = {}  # whole groups, or single samples
        for i, g in enumerate(families):
            units.setdefault(g if whole_groups else i, []).append(i)
        members = list(units.values())
        lengths = [[len(rows[i][1].token_ids) - 1 for i in unit] for unit in members]
        sizes = [len(u) * max(u) if padded else sum(u) for u in lengths]
        packed = pack_into_bins(sizes, max_tokens, ranks=ranks, padded=padded)
        bins = [[i for unit in b for i in members[unit]] for b in packed]
    return Plan(
        samples=[s for _, s, _ in rows],
        weights=[w for _, _, w in rows],
        bins=[bins[rank::ranks] for rank in range(ranks)],
        padded=padded,
        groups=families if whole_groups else None,
        families=families if share_prefixes else None,
        sources=sources,
    )


def micro_batches(groups: list[Group], norm: LossNorm, max_tokens: int, **how: Any) -> list[list[Batch]]:
    """Return the batches of `plan_update`, [rank][micro-batch]."""
    return plan_update(groups, norm, max_tokens, **how).batches()
