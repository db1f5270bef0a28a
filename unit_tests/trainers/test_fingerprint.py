"""The checksum that proves a weight sync."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainers.weight_sync.fingerprint import (
    checksum,
    choose_block_words,
    fingerprint,
    sum_rows,
)

WRAP = 1 << 64


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (64,), (7,), (6, 64), (5, 3), (4, 6, 128)])
def test_every_single_bit_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = tensor(*shape, dtype=dtype)
    before = checksum(x)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = 8 * x.element_size()
    seen = {before}
    for bit in range(bits):
        flipped = x.clone().reshape(-1)
        flipped.view(integers)[-1] ^= -(1 << bit) if bit == bits - 1 else 1 << bit
        seen.add(checksum(flipped.view(x.shape)))
    assert len(seen) == 1 + bits


def test_two_flipped_signs_do_not_cancel() -> None:
    x = tensor(8, 64).abs()
    flipped = x.clone()
    flipped[3, 3::4] *= -1  # the top element of every word of a row: sixteen sign bits
    assert checksum(x) != checksum(flipped)


def test_place_shape_and_dtype_count() -> None:
    x = tensor(64, 64)
    others = [x.t(), x.flip(0), x.flip(1), x.view(32, 128), x.view(torch.float16), x.roll(4, dims=1)]
    assert len({checksum(x), *map(checksum, others)}) == 1 + len(others)
    zeros = [torch.zeros(64, 64), torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(32, 128)]
    assert len(set(map(checksum, zeros))) == len(zeros)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_of_any_dimension_add_up(dim: int) -> None:
    x = tensor(4, 6, 128)
    shards = x.chunk(2, dim)
    begin = [0, 0, 0]
    begin[dim] = shards[0].shape[dim]
    parts = [checksum(shards[0], shape=x.shape), checksum(shards[1], shape=x.shape, start=begin)]
    assert sum(parts) % WRAP == checksum(x)
    swapped = [checksum(shards[1], shape=x.shape), checksum(shards[0], shape=x.shape, start=begin)]
    assert sum(swapped) % WRAP != checksum(x)


def test_a_shard_of_zeros_counts_by_its_place() -> None:
    """A rank whose part of a matrix is all zeros holds something, and not nothing."""
    x = tensor(8, 64)
    x[4:] = 0
    top, bottom = checksum(x[:4], shape=x.shape), checksum(x[4:], shape=x.shape, start=[4, 0])
    assert bottom != 0 and (top + bottom) % WRAP == checksum(x)
    assert bottom != checksum(x[4:], shape=x.shape), "the same zeros at the top are others"
    empty = torch.zeros(8, 64)
    halves = [checksum(part, shape=empty.shape, start=[at, 0]) for part, at in zip(empty.chunk(2), (0, 4), strict=True)]
    assert 0 not in halves and sum(halves) % WRAP == checksum(empty)


class Calls(TorchDispatchMode):
    """Count the operations, which are launches on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_gpu_reads_large_blocks() -> None:
    """Views are counted as well, so that the bound is above the number of launches."""
    a_gib = torch.empty(1 << 17, 1 << 10, dtype=torch.int64, device="meta")
    with Calls() as calls:
        sum_rows(a_gib, a_gib[0], block_words=choose_block_words(torch.device("cuda:0")))
    assert calls.count < 300


def test_the_sums_do_not_depend_on_the_blocks() -> None:
    words, weight = torch.randint(-(1 << 62), 1 << 62, (300, 64)), torch.arange(64) * 2 + 1
    want = sum_rows(words, weight, block_words=1)
    for device in ("cpu", "cuda:0"):
        assert torch.equal(sum_rows(words, weight, block_words=choose_block_words(torch.device(device))), want)


def test_a_shard_that_cuts_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match="does not end at a word"):
        checksum(tensor(4, 30), shape=(4, 64))


def test_order_does_not_matter() -> None:
    named = [("a", tensor(8, 8)), ("b", tensor(3, seed=1))]
    assert fingerprint(named) == fingerprint(reversed(named))


def test_a_small_model_takes_a_fraction_of_a_second() -> None:
    named = [(f"layers.{i}.weight", tensor(1, 576).expand(1536, 576).contiguous()) for i in range(150)]  # 265 MB
    begin = time.process_time()  # of this process alone, however busy the machine is
    fingerprint(named)
    assert time.process_time() - begin < 2.0  # it takes 0.25 s
