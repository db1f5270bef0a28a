"""Totals of several ranks in one process, which must agree about every collective."""

from collections.abc import Sequence

from algs.base import Algorithm
from algs.check.partitions import run_in_lock_step
from algs.totals import Totals, reduce_totals
from core.types.samples import Policy, Tokens


def reduce_on_ranks(alg: Algorithm, seen: Sequence[Sequence[tuple[Policy, Tokens]]]) -> list[Totals]:
    """Reduce the totals of micro-batches, by rank; return them by micro-batch, rank after rank."""
    n = len(seen)
    done = run_in_lock_step([reduce_totals(alg, own, rank=r, ranks=n) for r, own in enumerate(seen)])
    results = [totals for rank in done for totals in rank]
    want = describe(results[0])
    assert all(describe(one) == want for one in results)
    return results


def describe(totals: Totals) -> dict[str, str]:
    """Write the reduced numbers, so that NaN equals NaN."""
    return {name: str(value.tolist()) for name, value in totals.reduced.items()}
