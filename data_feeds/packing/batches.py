"""Convert samples to Batches. The only place that shifts labels, and the only place that normalises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from core.errors import RunStopped
from core.types.arrays import Mask
from core.types.batch import TermTokens
from core.types.episodes import number_episodes
from core.types.images import PlacedImage, list_written
from core.types.kept_sets import KeptSets, KeptTokens
from core.types.samples import Batch, Group, LossNorm, Prompt, Sample, make_sample
from core.types.terms import Term
from data_feeds.packing.bin_packing import SAMPLE_TOO_LARGE, TooLarge, pack_units
from data_feeds.packing.inputs import check_untrained, count_inputs, fill_row, find_inputs, make_keys
from data_feeds.packing.kept_sets import select_kept
from data_feeds.packing.numbering import number_samples, renumber
from data_feeds.packing.prefix_bins import find_families, pack_families
from data_feeds.packing.prefix_tree import lay_out_row
from data_feeds.packing.routes import select_routes
from data_feeds.packing.terms import TermShare, find_places, find_tokens, unite
from data_feeds.packing.tokens import drop_all, select_tokens


def token_weights(
    groups: list[Group], norm: LossNorm, *, horizon: int, counts: list[list[int]] | None = None
) -> list[float]:
    """Compute the token weight of each sample of an update, in the order of `groups`, flattened.

    counts: tokens of each sample, [groups][samples], for a term of the objective; None: its trained tokens.
    Weights are computed in float64 on the whole update, before any split. A sequence is an episode, of one or several
    samples. Sequences without a trained token have weight 0 and count in no denominator.

    Example: two prompts with one episode each, of 1 and 3 trained tokens, horizon 10.
        token         1/4,  1/4    all tokens of the update count the same; long episodes dominate
        sequence      1/2,  1/6    all episodes count the same, divided among their tokens
        sequence_sum  1/2,  1/2    the sums of all episodes count the same (REINFORCE, RLOO)
        constant      1/20, 1/20   all tokens of all updates count the same (Dr. GRPO)
        prompt        1/2,  1/6    all prompts count the same, divided among their tokens (ScaleRL)
    """
    if counts is None:
        counts = [[s.n_trained for s in group] for group in groups]
    episodes = [add_up_episodes(group, own) for group, own in zip(groups, counts, strict=True)]
    n_tokens = sum(map(sum, counts))
    n_sequences = sum(n > 0 for totals, _ in episodes for n in totals)
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

    return [
        token_weight(totals[number], sum(own)) if n else 0.0
        for own, (totals, numbers) in zip(counts, episodes, strict=True)
        for n, number in zip(own, numbers, strict=True)
    ]


def add_up_episodes(group: Group, counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Sum `counts` per episode. Return the sums, and each sample's episode number."""
    numbers = number_episodes(group)
    totals = [0] * (1 + max(numbers, default=-1))
    for number, n in zip(numbers, counts, strict=True):
        totals[number] += n
    return totals, numbers


def pack(
    samples: list[Sample],
    weights: list[float],
    *,
    groups: list[int] | None = None,
    families: list[int] | None = None,
    episodes: Sequence[int] | None = None,
    has_seq_ids: bool = True,
    sources: Sequence[str] = (),
    terms: Sequence[TermShare] = (),
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """Concatenate samples into a Batch. `weights[i]` is the weight of each trained token of `samples[i]`.

    groups: group numbers, if whole groups are in one batch. families: samples of a family share common prefixes
    (prefix_tree.py). episodes: episode numbers; None: one per sample. has_seq_ids: False if the rest of an episode may
    be in other batches. sources: data sets with source_ids. terms: those of the objective; then their tokens are the
    trained ones, and `weights` are not read.

    A Sample is token-aligned: entry t is about token t. A Batch is input-aligned: position t predicts token t+1. The
    shift and the selection of trained tokens happen only here. Values of other tokens stay behind.
    """
    row = lay_out_row(make_keys(samples), families)
    union = unite(terms) if terms else [s.loss_mask for s in samples]
    inputs = find_inputs(samples, union)
    numbering = partial(number_samples, samples, groups, episodes, has_seq_ids=has_seq_ids, sources=sources)
    input_ids, rope_ids, images = fill_row(samples, row)
    batch = Batch(
        input_ids=input_ids,
        position_ids=torch.from_numpy(row.position_ids),
        segment_ids=torch.from_numpy(row.segment_ids),
        parents=torch.from_numpy(row.parents),
        lengths=torch.from_numpy(row.sizes),
        at=torch.from_numpy(
            np.concatenate([place[chosen] for place, chosen in zip(row.places, inputs.chosen, strict=True)])
        ),
        labels=torch.from_numpy(inputs.select([s.token_ids for s in samples])),
        tokens=select_tokens(samples, weights, inputs, numbering, has="none" if terms else "all", dtype=dtype),
        images=images,
        rope_ids=rope_ids,
        kept=select_kept(samples, inputs.chosen),
        routes=select_routes(samples, row.places, len(row.input_ids)),
    )
    # in reverse, so that the first term which has a token gives it its weight
    for term in reversed(terms):
        inputs = find_inputs(samples, term.masks)
        own = select_tokens(samples, term.weights, inputs, numbering, has=term.has, dtype=dtype)
        batch.terms[term.name] = TermTokens(at=torch.from_numpy(find_places(term, union)), tokens=own)
        batch.tokens.weight[batch.terms[term.name].at] = own.weight
    return batch


def make_probe_batch(token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> Batch:
    """Return a batch of one sequence in which every token of text after the first is scored."""
    n = len(token_ids)
    written = set(list_written(n, images))
    sample = make_sample(
        prompt=Prompt(id="probe", messages=[]),
        token_ids=token_ids,
        action_mask=[i in written for i in range(n)],
        rollout_logp=[0.0] * n,
        versions=[-1] * n,
        images=tuple(images),
    )
    return pack([sample], [0.0])


def share_out(terms: Sequence[Term], groups: list[Group], norm: LossNorm, *, horizon: int) -> list[TermShare]:
    """Return the share of every term in the samples of an update, in the order of `groups`, flattened.

    norm: that of the algorithm, for terms without one of their own. Each term has a denominator of its own; one without
    tokens in the whole update is 0.
    """
    shares: list[TermShare] = []
    for term in terms:
        masks, counts, has = find_tokens(term, groups)
        weights = token_weights(groups, term.norm or norm, horizon=horizon, counts=counts)
        # a sample may have tokens in the denominator alone
        own = [w if mask.any() else 0.0 for mask, w in zip(masks, weights, strict=True)]
        shares.append(TermShare(name=term.name, masks=masks, weights=own, has=has))
    return shares


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
    """Group number of each sample, if groups are kept whole."""
    families: list[int] | None
    """Family number of each sample, if families share prefixes. Usually the group."""
    episodes: list[int]
    """Episode number of each sample."""
    has_seq_ids: bool
    """False if an episode may be split between micro-batches."""
    sources: Sequence[str]
    """Data sets with separately logged losses."""
    padded: bool
    """True if rows are padded to the longest row of the micro-batch."""
    terms: Sequence[TermShare] = ()
    """Shares of the objective's terms in `samples`; empty for an algorithm without terms."""

    def list_masks(self) -> list[Mask]:
        """Return the trained tokens of each sample, [L]: those of all terms."""
        return unite(self.terms) if self.terms else [s.loss_mask for s in self.samples]

    @property
    def padding(self) -> float:
        """Fraction of padding among the positions of all forward passes; 0 without padding."""
        if not self.padded:
            return 0.0
        # minus one: the last token of a sequence is no input
        sizes = [[len(self.samples[i].token_ids) - 1 for i in b] for rank in self.bins for b in rank if b]
        return 1 - sum(map(sum, sizes)) / sum(len(b) * max(b) for b in sizes)

    def batches(self, dtype: torch.dtype = torch.float32) -> list[list[Batch]]:
        """Return the batches, [rank][micro-batch]."""
        return [[self._make_batch(b, dtype) for b in rank] for rank in self.bins]

    def measure_shared(self, batches: list[list[Batch]]) -> float:
        """Return the fraction of input tokens saved by sharing prefixes in these batches."""
        both = [pair for rank in zip(self.bins, batches, strict=True) for pair in zip(*rank, strict=True)]
        laid = sum(batch.input_ids.numel() for chosen, batch in both if chosen)  # the others are idle
        return 1 - laid / sum(map(count_inputs, self.samples))

    def _make_batch(self, chosen: list[int], dtype: torch.dtype) -> Batch:
        if not chosen:
            return self.make_idle_batch(dtype)
        return pack(
            [self.samples[i] for i in chosen],
            [self.weights[i] for i in chosen],
            groups=None if self.groups is None else [self.groups[i] for i in chosen],
            families=None if self.families is None else [self.families[i] for i in chosen],
            episodes=[self.episodes[i] for i in chosen],
            has_seq_ids=self.has_seq_ids,
            sources=self.sources,
            terms=[term.take(chosen) for term in self.terms],
            dtype=dtype,
        )

    def make_idle_batch(self, dtype: torch.dtype = torch.float32) -> Batch:
        """Return a batch without trained tokens, so that an idle rank still joins every collective of the step."""
        # a real sample, the shortest: every parameter needs a gradient, or the collectives would hang
        shortest = min(range(len(self.samples)), key=lambda i: len(self.samples[i].token_ids))
        batch = self._make_batch([shortest], dtype)
        batch.tokens = drop_all(batch.tokens)
        batch.terms = {n: TermTokens(at=t.at[:0], tokens=drop_all(t.tokens)) for n, t in batch.terms.items()}
        batch.at, batch.labels = batch.at[:0], batch.labels[:0]
        batch.kept = None if batch.kept is None else KeptTokens.of(KeptSets.none(0))
        return batch


GROUP_TOO_LARGE = (
    "the samples of a group have {} tokens together, more than trainer.micro_batch_tokens={}; this loss compares them, "
    "so they must be in one micro-batch: raise it"
)
EPISODE_TOO_LARGE = (
    "the samples of an episode have {} tokens, more than trainer.micro_batch_tokens={}; this loss compares episodes as "
    "wholes, so they must be in one micro-batch: raise it, or use a ratio per token (another alg, "
    "alg.correction.level: token)"
)


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
    whole_episodes: bool = False,
    sources: Sequence[str] = (),
    terms: Sequence[Term] = (),
) -> Plan:
    """Split an update into micro-batches of at most `max_tokens` tokens, the same number for every rank.

    The split affects only memory and speed, since weights are computed before it. share_prefixes: common prefixes count
    once per micro-batch (find_families). whole_episodes: an episode stays in one micro-batch. Images count with tokens.
    """
    if padded and share_prefixes:
        raise ValueError("padded rows share no prefixes")
    shares = share_out(terms, groups, norm, horizon=horizon)
    # with terms, a weight here tells only that a sample has tokens
    found = [share.weights for share in shares] or [token_weights(groups, norm, horizon=horizon)]
    weights = [max(own) for own in zip(*found, strict=True)]
    places = [i for i, w in enumerate(weights) if w]  # weight 0 needs no forward pass
    numbered = [
        (g, (g, n), s) for g, group in enumerate(groups) for n, s in zip(number_episodes(group), group, strict=True)
    ]
    kept = [numbered[i] for i in places]
    samples, in_group = [s for _, _, s in kept], [g for g, _, _ in kept]
    check_untrained(samples)
    families = find_families(samples, in_group) if share_prefixes else None
    episodes = renumber([episode for _, episode, _ in kept])
    are_single = len({*episodes}) == len(episodes)
    # what is in one micro-batch: whole groups, whole episodes, or single samples
    units = in_group if whole_groups else episodes if whole_episodes else list(range(len(samples)))
    try:
        if families is not None:
            whole = whole_groups or (whole_episodes and not are_single)
            bins = pack_families(samples, units if whole else families, max_tokens, ranks=ranks, whole=whole)
        else:
            bins = pack_units([len(s.token_ids) - 1 for s in samples], units, max_tokens, ranks=ranks, padded=padded)
    except TooLarge as error:
        too_large = GROUP_TOO_LARGE if whole_groups else SAMPLE_TOO_LARGE if are_single else EPISODE_TOO_LARGE
        raise RunStopped(too_large.format(error.tokens, max_tokens)) from error
    return Plan(
        samples=samples,
        weights=[weights[i] for i in places],
        # pack_into_bins deals bins out in turn, rank by rank
        bins=[bins[rank::ranks] for rank in range(ranks)],
        padded=padded,
        groups=in_group if whole_groups else None,
        families=families,
        episodes=episodes,
        has_seq_ids=whole_episodes or are_single,  # a sum per sequence needs all of its tokens in one batch
        sources=sources,
        terms=[share.take(places) for share in shares],
    )


def micro_batches(groups: list[Group], norm: LossNorm, max_tokens: int, **how: Any) -> list[list[Batch]]:
    """Return the batches of `plan_update`, [rank][micro-batch], as a trainer on a CPU has them."""
    return [[batch.to("cpu") for batch in rank] for rank in plan_update(groups, norm, max_tokens, **how).batches()]
