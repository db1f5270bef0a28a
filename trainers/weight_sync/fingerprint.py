"""A checksum of tensors that adds up over shards, to compare sent tensors with those that each rank loaded.

For a tensor x of shape [D0, .., Dn], read as integers along its last dimension,

    checksum(x) = sum over i0..in of  (1 + mix(x[i0, .., in])) * w0[i0] * .. * wn[in]   mod 2^64

with pseudo-random odd weights that depend on the dtype, the full shape and the dimension. Each element counts by its
place and its bits. The sum over any partition into shards is the sum over the whole, so ranks that hold slices of a
tensor can be compared with the rank that sent it:

    whole = checksum(x)                                                   x of shape [8, 64]
    top, bottom = checksum(x[:4], shape=[8, 64]), checksum(x[4:], shape=[8, 64], start=[4, 0])
    (top + bottom) % 2**64 == whole
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from core.errors import ProofFailed

_BITS = 64
_WORD_BYTES = 8
_ROW_BYTES_OF_WORDS = 128
"""Row length in bytes whose multiples are read 8 bytes at a time: up to 16 equal shards of a row end at a word."""
_CPU_BLOCK_WORDS = 1 << 15
"""Words per block: fits the cache, and is too small for torch to start threads, which would wait for busy cores."""
_GPU_BLOCK_WORDS = 1 << 22
"""Words per block, 32 MiB as integers. Smaller blocks would cost more launches, larger blocks more memory."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the checksum of every tensor, by name. The order does not matter."""
    return {name: checksum(tensor) for name, tensor in named}


@torch.no_grad()
def checksum(shard: Tensor, *, shape: Sequence[int] | None = None, start: Sequence[int] | None = None) -> int:
    """Compute the checksum of `shard`: the part of a tensor of shape `shape` that begins at index `start`.

    Without `shape` the shard is the whole tensor. The result is in 0..2^64-1; shards add up modulo 2^64. Any dtype of
    1, 2, 4 or 8 bytes. Raises ValueError for a shard that does not end at a word.
    """
    full = tuple(shard.shape if shape is None else shape) or (1,)
    begin = tuple(start or [0] * len(full))
    part = shard.reshape(tuple(shard.shape) or (1,))
    if shard.numel() == 0:
        return 0
    per_word = _elements_per_word(full[-1], shard.element_size())
    if begin[-1] % per_word or part.shape[-1] % per_word:
        raise ValueError(f"a shard of {tuple(part.shape)} at {begin} of a tensor of {full} does not end at a word")
    words = part.contiguous().view(_INTEGERS[shard.element_size() * per_word])
    extents = [*full[:-1], full[-1] // per_word]
    begins = [*begin[:-1], begin[-1] // per_word]
    seed = f"{shard.dtype} {full}"
    weights = [
        _make_weights(f"{seed} {dim}", extent)[at : at + size]
        for dim, (extent, at, size) in enumerate(zip(extents, begins, words.shape, strict=True))
    ]
    ones = prod(int(weight.sum()) for weight in weights)  # on the CPU: a GPU would be waited for, once per dimension
    weights = [weight.to(shard.device) for weight in weights]
    # the weights of a tensor are an outer product, so its sum is taken dimension by dimension, from the last
    block = choose_block_words(shard.device)
    total = sum_rows(words.reshape(-1, words.shape[-1]), weights[-1], block_words=block)
    for weight in reversed(weights[:-1]):
        total = (total.view(-1, len(weight)) * weight).sum(-1)
    return (int(total.sum()) + ones) % (1 << _BITS)


def describe_difference(sent: Mapping[str, int], ranks: Sequence[Mapping[str, int]]) -> str | None:
    """Describe how the tensors that the ranks of an engine loaded differ from the sent tensors; None if equal.

    The checksums of a tensor's shards must add up to the sent one, or to k times that if k ranks replicate it.
    """
    for rank, loaded in enumerate(ranks):
        if missing := [name for name in sent if name not in loaded]:
            return f"rank {rank} did not load {_list_some(missing)}"
        if extra := [name for name in loaded if name not in sent]:
            return f"rank {rank} loaded {_list_some(extra)}, which was not sent"
    changed = [name for name, value in sent.items() if not _adds_up(value, [loaded[name] for loaded in ranks])]
    if not changed:
        return None
    where = "rank 0" if len(ranks) == 1 else f"ranks 0 to {len(ranks) - 1} together"
    return f"{where} loaded other values of {_list_some(changed)} than were sent"


def _adds_up(whole: int, shards: list[int]) -> bool:
    copies = range(1, len(shards) + 1)
    return any((sum(shards) - k * whole) % (1 << _BITS) == 0 for k in copies)


def _list_some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _elements_per_word(row: int, itemsize: int) -> int:
    return _WORD_BYTES // itemsize if row * itemsize % _ROW_BYTES_OF_WORDS == 0 else 1


def choose_block_words(device: torch.device) -> int:
    """Return the number of words that `sum_rows` reads at a time on this device."""
    return _CPU_BLOCK_WORDS if device.type == "cpu" else _GPU_BLOCK_WORDS


def sum_rows(words: Tensor, weight: Tensor, *, block_words: int) -> Tensor:
    """Compute sum_j mix(words[i, j]) * weight[j]: [R, W] integers, [W] int64 -> [R] int64."""
    rows = max(1, block_words // words.shape[-1])
    sums = torch.empty(len(words), dtype=torch.int64, device=words.device)
    for at in range(0, len(words), rows):
        block = words[at : at + rows].to(torch.int64)
        # add the high half to the low one: else a flipped sign bit would be lost in the product's overflow
        sums[at : at + rows] = (block >> 32).add_(block).mul_(weight).sum(-1)
    return sums


@lru_cache(maxsize=512)
def _make_weights(seed: str, length: int) -> Tensor:
    """Return [length] odd int64 from splitmix64 of the seed."""
    x = torch.arange(length, dtype=torch.int64).add_(zlib.crc32(seed.encode()) << 31)
    x.mul_(_to_signed(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= (x >> shift) & ((1 << (_BITS - shift)) - 1)
        x.mul_(_to_signed(factor))
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x | 1


def _to_signed(value: int) -> int:
    return value - (1 << _BITS) if value >> (_BITS - 1) else value


def verify_sync(
    sent: Mapping[str, int],
    loaded: Sequence[Sequence[Mapping[str, int]]],
    *,
    expected_logp: Sequence[float],
    probe_logp: Sequence[Sequence[float]],
    bound: float,
    engines: Sequence[int] | None = None,
    explain: Callable[[], str] = str,
) -> float:
    """Verify loaded weights; return the largest mean difference of the probe. Raises ProofFailed on a mismatch.

    sent: checksums by tensor name. loaded: `Engine.read_fingerprint()` per engine, one mapping per rank.
    expected_logp: the trainer's log-probabilities of the probe prompt. probe_logp: `Engine.probe()` per engine.
    bound: largest mean absolute difference of the two, in nats. engines: their numbers; None is 0, 1, 2, ... explain:
    called after a mismatch of the probe, for what in the model may be the cause.
    """
    numbers = range(len(loaded)) if engines is None else engines
    for engine, ranks in zip(numbers, loaded, strict=True):
        if found := describe_difference(sent, ranks):
            raise ProofFailed(f"the weights of engine {engine} are not the trainer's after the sync: {found}")
    worst = 0.0
    for engine, logp in zip(numbers, probe_logp, strict=False):  # without a probe where the tests have none
        gaps = [abs(a - b) for a, b in zip(logp, expected_logp, strict=True)]
        mean = sum(gaps) / len(gaps)
        if not mean <= bound:  # also raises for nan
            raise ProofFailed(
                f"engine {engine} was sent the trainer's weights, but its log-probabilities of the probe prompt "
                f"differ from the trainer's by {mean:.2g} on average, where at most {bound:.2g} is expected"
                + (f"; {causes}" if (causes := explain()) else "")
            )
        worst = max(worst, mean)
    return worst
