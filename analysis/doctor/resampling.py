"""Resampling toggles: the engine samples the same requests again, with a single change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

from analysis.doctor.bench import Bench, Weights
from analysis.doctor.gap import Gap, measure_gap
from analysis.doctor.rescoring import encode_again, load_in
from analysis.doctor.trials import Toggle, Trial
from core.types.samples import Sample

FEW = 8
"""Number of requests that are made sequentially, or token by token."""
FEW_TOKENS = 16
"""Tokens of a sequence that is sampled token by token."""


async def measure_again(bench: Bench, n: int | None = None, *, together: bool = True) -> Gap:
    """Sample the first n requests, or all of them, again; return how far engine and trainer are apart."""
    return measure_gap(bench.score(await bench.sample(bench.requests[:n], together=together)))


async def try_pushed_again(bench: Bench, before: Gap) -> Trial:
    """Send the weights once more, and sample again."""
    await bench.push_weights()
    after = await measure_again(bench)
    return Trial(
        toggle=Toggle.WEIGHTS,
        change="the weights were sent once more",
        before=before,
        after=after,
        means="the engine did not take the last update of the weights",
    )


async def try_batch_of_one(bench: Bench, samples: Sequence[Sample]) -> Trial:
    """Sample the requests in sequence, with batch size 1."""
    n = min(FEW, len(bench.requests))
    # few, because sequential requests take that many times as long
    after = await measure_again(bench, n, together=False)
    return Trial(
        toggle=Toggle.BATCH,
        change=f"{n} sequences were sampled one after the other",
        # the same requests before and after, or the choice of requests could close the gap
        before=measure_gap(samples[:n]),
        after=after,
        means="the engine's numbers depend on the other requests of the batch",
    )


async def try_token_by_token(bench: Bench, samples: Sequence[Sample]) -> Trial:
    """Sample every token in a separate request, so that no text of several tokens can be retokenised."""
    done = await bench.sample_by_token(bench.requests, tokens=FEW_TOKENS)
    changed = sum(_differs(bench, sample) for sample in done)
    return Trial(
        toggle=Toggle.TOKENISED_AGAIN,
        change="every token was sampled in a request of its own",
        before=measure_gap(samples),
        after=measure_gap(bench.score(done)),
        means="the ids that the engine returns are not those that it sampled, because a reply's text is tokenised "
        f"again ({changed} of {len(done)} replies that were sampled token by token have other ids then)",
    )


def _differs(bench: Bench, sample: Sample) -> bool:
    reply = sample.token_ids[sample.action_mask].tolist()
    return encode_again(bench, reply) != reply


async def try_cold_cache(bench: Bench, before: Gap, old: Weights) -> Trial:
    """Start another engine without a prefix cache, and send it the same weights; it samples after the last ones only.

    An engine that does not know the setting has at least an empty cache.
    """
    current = bench.copy_weights()
    await bench.engine.close()
    bench.open_engine(prefix_cache=False)
    # the same two transfers as to the first engine, so that the cache is the only difference
    bench.set_weights(old)
    await bench.push_weights()
    bench.set_weights(current)
    await bench.push_weights()
    after = await measure_again(bench)
    return Trial(
        toggle=Toggle.PREFIX_CACHE,
        change="another engine got the same weights, without a prefix cache",
        before=before,
        after=after,
        means="the engine's prefix cache returns what is not of the current weights",
    )


async def try_float32(bench: Bench, before: Gap) -> AsyncIterator[Trial]:
    """Compute in float32 with another engine and the trainer, if the recipe uses bfloat16."""
    if bench.cfg.model.dtype == "float32":
        return
    await bench.engine.close()
    bench.open_engine(dtype="float32")
    await bench.push_weights()
    sampled = await bench.sample(bench.requests)
    after = measure_gap(bench.score(sampled, partial(bench.run_model, model=load_in(bench, "float32"))))
    yield Trial(
        toggle=Toggle.DTYPE,
        change="another engine and the trainer computed in float32",
        before=before,
        after=after,
        means="engine and trainer round differently in model.dtype=bfloat16",
    )
