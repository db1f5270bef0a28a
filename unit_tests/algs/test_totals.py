"""Totals of an update: exact however the tokens are split over micro-batches and ranks, in stages, from one pass."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch

from algs.base import PolicyGradient
from algs.reductions import Reduction, count, exact_sum, gather, kth, largest, quantile
from algs.totals import Alone, Totals, measure_near, reduce_totals, sum_totals, total_alone
from core.errors import UserError
from core.types.samples import Policy, Tokens
from unit_tests.helpers.golden2 import GOLDEN2, RL2
from unit_tests.helpers.lock_step import reduce_on_ranks

WIDE = GOLDEN2["update_wide"]
LIVE = torch.tensor(RL2["mask"], dtype=torch.bool)


def tokens_of(values: torch.Tensor, ids: torch.Tensor | None = None) -> tuple[Policy, Tokens]:
    """Tokens whose log-probability is their value."""
    own = {} if ids is None else {"seq_ids": ids}
    return Policy(logp=values), Tokens(weight=torch.ones_like(values), **own)


class Asks(PolicyGradient):
    """Ask for the reductions of a function of the values."""

    def __init__(self, *stages):
        super().__init__()
        object.__setattr__(self, "stages", stages)

    def totals(self, policy, tokens):
        sent = {}
        for stage in self.stages:
            sent = yield stage(policy.logp, tokens, sent)


def reduce(alg: PolicyGradient, parts: Sequence[torch.Tensor], ranks: int = 1) -> list[Totals]:
    """Reduce parts that are dealt to ranks in turn; all ranks must agree."""
    return reduce_on_ranks(alg, [[tokens_of(p) for p in parts[r::ranks]] for r in range(ranks)])


def split(values: torch.Tensor, n: int, seed: int = 0) -> list[torch.Tensor]:
    """Split shuffled values into n parts, some of them empty."""
    draw = np.random.default_rng(seed)
    cut = np.sort(draw.integers(0, len(values) + 1, n - 1))
    return [torch.from_numpy(p) for p in np.split(draw.permutation(values.numpy()), cut)]


def test_order_statistics_are_the_oracles():
    wide = WIDE["radix_select"]
    values = torch.tensor(wide["values"], dtype=torch.float32)
    alg = Asks(lambda x, *_: {f"{k}": kth(x, k=k) for k in wide["k"]})
    got = reduce(alg, split(values, 5), ranks=3)[0].reduced
    assert [float(got[f"{k}"]) for k in wide["k"]] == wide["kth_largest"]
    entropy = torch.tensor(RL2["ent"], dtype=torch.float64)
    alg = Asks(lambda x, *_: {q: quantile(x, float(q[1:])) for q in WIDE["quantile"]})
    got = reduce(alg, split(entropy[LIVE], 4), ranks=2)[0].reduced
    for q, want in WIDE["quantile"].items():
        assert float(got[q]) == pytest.approx(want["update"], abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kth_value_is_that_of_a_sort(dtype):
    """Negative values, zeros of both signs, ties, infinities and tiny values; any k, any split."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(2000, generator=draw, dtype=dtype)
    values[:50] = values[50]
    values[50:60], values[60:64], values[64] = 0.0, -0.0, 1e-40
    values[65], values[66] = math.inf, -math.inf
    ordered = values.sort(descending=True).values
    ks = [1, 2, 49, 60, 999, 1000, 1999, 2000]
    alg = Asks(lambda x, *_: {f"{k}": kth(x, k=k) for k in ks} | {"most": largest(x), "fifth": kth(x, fraction=0.2)})
    for ranks in (1, 3):
        got = reduce(alg, split(values, 7), ranks)[0].reduced
        assert [float(got[f"{k}"]) for k in ks] == [float(ordered[k - 1]) for k in ks]
        assert float(got["most"]) == math.inf
        assert int((values >= got["fifth"]).sum()) == 400
        assert got["fifth"].dtype == dtype


def test_quantiles_are_those_of_numpy():
    values = torch.from_numpy(np.random.default_rng(0).normal(size=101))
    qs = [0.0, 0.1, 0.333, 0.5, 0.77, 1.0]
    got = reduce(Asks(lambda x, *_: {f"{q}": quantile(x, q) for q in qs}), split(values, 6), ranks=2)[0].reduced
    assert [float(got[f"{q}"]) for q in qs] == pytest.approx([np.quantile(values, q) for q in qs], abs=1e-15)


def test_a_quantile_at_an_infinite_value_is_that_value():
    values = torch.tensor([math.inf, 1.0, math.inf])
    got = reduce(Asks(lambda x, *_: {"top": quantile(x, 1.0), "low": quantile(x, 0.0)}), [values])[0].reduced
    assert (float(got["top"]), float(got["low"])) == (math.inf, 1.0)
    inner = reduce(Asks(lambda x, *_: {"top": quantile(x, 0.5)}), [values.clamp(min=2)])[0].reduced
    assert float(inner["top"]) == math.inf


def test_what_does_not_count_is_in_no_reduction():
    values = torch.tensor([math.nan, 2.0, 7.0, 1.0, math.inf])
    counts = torch.tensor([False, True, False, True, False])
    asked = {"sum": exact_sum, "top": largest, "middle": lambda x, where: quantile(x, 0.5, where=where)}
    alg = Asks(lambda x, t, _: {name: make(x, where=counts[t.seq_ids]) for name, make in asked.items()})
    places = torch.arange(5)
    for cut in ([5], [2, 3], [1, 1, 3]):
        parts = [[tokens_of(v, i)] for v, i in zip(values.split(cut), places.split(cut), strict=True)]
        got = reduce_on_ranks(alg, parts)[0].reduced
        assert {name: float(x) for name, x in got.items()} == {"sum": 3.0, "top": 2.0, "middle": 1.5}


def test_sums_are_rounded_once_whatever_the_split():
    """Values from 1e-18 to 1e18 of both signs, whose floating-point sums differ from order to order."""
    draw = np.random.default_rng(0)
    values = torch.from_numpy(draw.normal(size=500) * 10.0 ** draw.integers(-10, 18, 500))
    alg = Asks(lambda x, *_: {"sum": exact_sum(x), "n": count(x), "above": count(x > 0)})
    got = [reduce(alg, split(values, n, seed=n), ranks)[0].reduced for n, ranks in [(1, 1), (3, 2), (9, 4), (60, 7)]]
    assert {float(g["sum"]) for g in got} == {float(got[0]["sum"])}
    assert len({float(sum(p.sum() for p in split(values, n, seed=n))) for n in (1, 3, 9, 60)}) > 1
    # bits below 2^-64 are rounded away, at most 500 times
    assert float(got[0]["sum"]) == pytest.approx(float(sum(map(Fraction, values.tolist()))), rel=1e-15)
    assert {int(g["n"]) for g in got} == {500} and {int(g["above"]) for g in got} == {int((values > 0).sum())}


def test_the_sum_of_squares_is_the_oracles():
    old, beh = (torch.tensor(RL2[name], dtype=torch.float64) for name in ("old", "beh"))
    squares = (old - beh).square()[LIVE]
    got = reduce(Asks(lambda x, *_: {"sum": exact_sum(x)}), split(squares, 5), ranks=3)[0].reduced
    assert float(got["sum"]) == math.fsum(squares.tolist())
    assert float(got["sum"]) == pytest.approx(WIDE["fixed_point_sum"]["m2_sum"], abs=24 * 2.0**-33)


def test_counts_of_tokens_beyond_a_floats_integers_are_exact():
    """Float32 cannot tell 2^24 + 1 from 2^24: integers are added as integers."""

    class Many(Alone):
        def sum_over_rows(self, values):
            assert values.dtype == torch.int64
            return values + 2**24

    [got] = sum_totals(Asks(lambda x, *_: {"n": count(x)}), [tokens_of(torch.zeros(1))], Many())
    assert int(got.reduced["n"]) == 2**24 + 1


def test_a_value_per_sequence_is_gathered_in_order():
    parts = [
        tokens_of(torch.tensor([0.5, 0.5, -2.0, 0.5]), torch.tensor([0, 0, 1, 0])),
        tokens_of(torch.zeros(0), torch.zeros(0, dtype=torch.int64)),
        tokens_of(torch.tensor([1.5, 9.0, 9.0]), torch.tensor([0, 1, 1])),
    ]
    alg = Asks(lambda x, tokens, _: {"all": gather(x, tokens.seq_ids), "low": gather(x, tokens.seq_ids, where=x < 9)})
    for cut in ([parts], [parts[:1], parts[1:]], [parts[:1], parts[1:2], parts[2:]]):
        got = reduce_on_ranks(alg, cut)[0]
        assert got.reduced["all"].tolist() == [-2.0, 0.5, 1.5, 9.0]
        assert got.reduced["low"].tolist() == [-2.0, 0.5, 1.5]
    assert got.first["low"].isnan().tolist() == [False, False, False, False]


def test_ranks_that_share_their_rows_count_once():
    """Two sequence groups of two ranks, of which only the first contributes; rows -1, 3 and rows 2, 2, 0.5."""
    values = [[-1.0, 3.0], [2.0, 2.0, 0.5]]
    seen = [[tokens_of(torch.tensor(v), torch.arange(len(v)))] for v in values]
    alg = Asks(lambda x, t, _: {"all": gather(x, t.seq_ids), "sum": exact_sum(x), "cut": kth(x, k=2)})
    running = [reduce_totals(alg, seen[rank // 2], rank=rank, ranks=4) for rank in range(4)]
    parts, done = [next(one) for one in running], []
    while not done:
        total, parts = parts[0] + parts[2], []
        for one in running:
            try:
                parts.append(one.send(total.clone()))
            except StopIteration as end:
                done.append(end.value[0].reduced)
    assert len(done) == 4
    for got in done:
        assert got["all"].tolist() == [-1.0, 0.5, 2.0, 2.0, 3.0]
        assert float(got["sum"]) == 6.5 and float(got["cut"]) == 2.0


def test_nothing_that_counts_and_nothing_finite_give_nan():
    """A comparison with NaN selects no token, and a loss with it is not finite, so the update is skipped."""
    none = Asks(lambda x, *_: {"cut": kth(x, k=3, where=x > 9), "q": quantile(x, 0.5, where=x > 9)})
    got = reduce(none, [torch.tensor([1.0, 2.0])])[0]
    assert all(value.isnan() for value in got.reduced.values())
    assert not (got.first["cut"] >= got.reduced["cut"]).any()
    for bad in (math.nan, math.inf, 2.0**64):
        got = reduce(
            Asks(lambda x, *_: {"sum": exact_sum(x)}), [torch.tensor([1.0, bad]), torch.tensor([2.0])], ranks=2
        )
        assert got[0].reduced["sum"].isnan()
    got = reduce(Asks(lambda x, *_: {"cut": kth(x, k=2)}), [torch.tensor([1.0, math.nan])])
    assert got[0].reduced["cut"].isnan()


class Counted:
    """Rank that counts its collectives, and passes of the model."""

    rank, ranks = 0, 1

    def __init__(self):
        self.calls = self.passes = 0

    def sum_over_rows(self, values):
        self.calls += 1
        return values

    def seen(self, parts: Sequence[torch.Tensor]) -> Iterator[tuple[Policy, Tokens]]:
        for part in parts:
            self.passes += 1
            yield tokens_of(part)


STAGES = (
    lambda x, _, t: {"n": count(x), "sum": exact_sum(x)},
    lambda x, _, t: {"cut": kth((x - t["sum"] / t["n"]).abs(), fraction=0.25)},
)


def test_stages_use_what_came_before_and_share_one_pass():
    """Values 0 to 7, mean 3.5: the two most distant are 0 and 7, both at 3.5."""
    rank = Counted()
    parts = [torch.tensor([0.0, 1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0, 6.0, 7.0])]
    totals = list(sum_totals(Asks(*STAGES), rank.seen(parts), rank))
    assert rank.passes == 2
    assert float(totals[0].reduced["cut"]) == 3.5 == float(totals[1].reduced["cut"])
    assert [t.first["cut"].tolist() for t in totals] == [[3.5, 2.5, 1.5], [0.5, 0.5, 1.5, 2.5, 3.5]]
    assert totals[0].first.keys() == {"cut"}, "a sum decides nothing by itself"
    alone = Counted()
    list(sum_totals(Asks(*STAGES), alone.seen([torch.cat(parts)]), alone))
    assert alone.calls == rank.calls, "whatever the number of micro-batches"


def test_without_totals_nothing_is_read():
    def never() -> Iterator[tuple[Policy, Tokens]]:
        raise AssertionError
        yield

    tokens = tokens_of(torch.zeros(2))[1]
    assert next(iter(sum_totals(PolicyGradient(), never(), Alone()))).add_to(tokens) is tokens


def test_totals_carry_no_gradient():
    policy, tokens = tokens_of(torch.tensor([1.0, 2.0], requires_grad=True))
    seen = total_alone(Asks(*STAGES, lambda x, *_: {"plain": x.sum()}), policy, tokens)
    assert not any(t.requires_grad for t in [*seen.totals.values(), *seen.first.values()])
    assert float(seen.totals["plain"]) == 3.0


def test_a_plain_sum_is_still_a_total():
    class Plain(PolicyGradient):
        def totals(self, policy, tokens):
            return {"w": policy.logp.sum(), "n": count(policy.logp)}

    got = reduce(Plain(), [torch.tensor([1.0, 2.0]), torch.tensor([]), torch.tensor([4.0])], ranks=2)
    assert [float(got[0].reduced[name]) for name in ("w", "n")] == [7.0, 3.0]


def test_tokens_at_a_threshold_are_marked():
    """Largest 2.0: the second token is 4e-6 below it, the third does not count, the last is further off."""
    x = torch.tensor([2.0, 2.0 - 4e-6, 2.0, 1.99], dtype=torch.float64)
    alg = Asks(lambda x, *_: {"cut": largest(x, where=torch.tensor([1, 1, 0, 1]) > 0), "n": count(x)})
    assert measure_near(total_alone(alg, *tokens_of(x)))["near_threshold"].tolist() == [1, 1, 0, 0]
    assert measure_near(tokens_of(x)[1]) == {}


def of_parity(x: torch.Tensor, *_) -> dict[str, Reduction]:
    return {"cut": kth(x, k=1 + len(x) % 2)}


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([lambda x, *_: {"cut": kth(x[:1], k=1)}], "cut has shape .1., expected one value per token, .2.: use `where`"),
        ([lambda x, *_: {"cut": kth(x.half(), k=1)}], "cut has dtype torch.float16, expected float32"),
        ([of_parity], "cut is another reduction in one micro-batch than in another"),
        ([lambda x, *_: {f"cut{len(x)}": kth(x, k=1)}], "asks for other reductions in one micro-batch"),
        ([STAGES[0], STAGES[0]], "asks for 'n' in two stages"),
    ],
)
def test_totals_that_cannot_agree_are_refused(stages, says):
    with pytest.raises(UserError, match=says):
        reduce(Asks(*stages), [torch.zeros(2), torch.zeros(3)])
