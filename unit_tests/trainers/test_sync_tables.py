"""Weight sync in exact numbers and sentences: checksums, proofs, deltas and pauses."""

from __future__ import annotations

import errno
import struct
import zlib
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core.errors import ProofFailed, TransportFailed
from trainers.weight_sync import store
from trainers.weight_sync.base import transfer_errors
from trainers.weight_sync.delta import Changes, DeltaDecoder, DeltaEncoder
from trainers.weight_sync.fingerprint import checksum, describe_difference, sum_rows, verify_sync
from trainers.weight_sync.store import explain_failure, write_manifest

MASK = (1 << 64) - 1
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def splitmix(seed: str, n: int) -> int:
    """The n-th number of the weights of a dimension, in Python's integers."""
    x = ((zlib.crc32(seed.encode()) << 31) + n) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return (x ^ x >> 31) | 1


def plain_checksum(x: Tensor) -> int:
    """The formula at the top of fingerprint.py, element by element."""
    full = tuple(x.shape) or (1,)
    if not x.numel():
        return 0
    per_word = 8 // x.element_size() if full[-1] * x.element_size() % 128 == 0 else 1
    words = x.reshape(full).contiguous().view(WORDS[x.element_size() * per_word])
    total = 0
    for at in product(*map(range, words.shape)):
        word = int(words[at])
        weights = [splitmix(f"{x.dtype} {full} {dim}", n) for dim, n in enumerate(at)]
        total += (1 + word + (word >> 32)) * prod(weights)
    return total % (1 << 64)


@settings(max_examples=40)
@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    shape=st.sampled_from([(), (1,), (0, 3), (5,), (3, 64), (2, 3, 128), (4, 30), (2, 2, 2, 3), (3, 16)]),
    seed=st.integers(0, 99),
)
def test_a_checksum_is_the_sum_of_the_formula(dtype, shape, seed):
    size = torch.empty(shape, dtype=dtype).nbytes
    chance = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (size,), dtype=torch.uint8, generator=chance).view(dtype).reshape(shape)
    assert checksum(x) == checksum(x.view(shape).clone(), shape=x.shape, start=[0] * x.ndim) == plain_checksum(x)
    if x.ndim > 1 and len(x) > 1:
        parts = [checksum(x[:1], shape=x.shape), checksum(x[1:], shape=x.shape, start=[1] + [0] * (x.ndim - 1))]
        assert sum(parts) % (1 << 64) == plain_checksum(x)


def test_rows_are_summed_in_blocks_of_any_size():
    words, weight = torch.arange(12).reshape(3, 4) + (5 << 32), torch.tensor([1, 3, 5, 7])
    want = [sum((int(w) + (int(w) >> 32)) * k for w, k in zip(row, (1, 3, 5, 7), strict=True)) for row in words]
    for block in (1, 4, 7, 8, 100):
        assert sum_rows(words, weight, block_words=block).tolist() == want


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.most = max(self.most, made.numel() if isinstance(made, Tensor) else 0)
        return made


@pytest.mark.parametrize(("block", "most"), [(4, 10), (10, 10), (19, 10), (25, 20), (1000, 40)])
def test_no_more_than_a_block_or_a_row_is_read_at_a_time(block, most):
    words, weight = torch.ones(4, 10, dtype=torch.int16), torch.arange(10)
    with Largest() as largest:
        assert sum_rows(words, weight, block_words=block).tolist() == [45] * 4
    assert largest.most == most


@pytest.mark.parametrize(
    ("shard", "shape", "start", "says"),
    [
        ((4, 30), (4, 64), None, "a shard of (4, 30) at (0, 0) of a tensor of (4, 64) does not end at a word"),
        ((4, 32), (4, 64), (0, 2), "a shard of (4, 32) at (0, 2) of a tensor of (4, 64) does not end at a word"),
    ],
)
def test_a_shard_that_cuts_a_word_is_named(shard, shape, start, says):
    with pytest.raises(ValueError) as raised:
        checksum(torch.ones(shard).bfloat16(), shape=shape, start=start)
    assert str(raised.value) == says
    assert checksum(torch.ones(4, 32).bfloat16(), shape=(4, 64), start=(0, 4))
    assert checksum(torch.ones(4, 30).bfloat16(), shape=(4, 60), start=(0, 1)), "no words, as no row is of 128 bytes"


SENT = {"a": 10, "b": 20, "c": 30, "d": 40}


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([SENT], None),
        ([SENT, SENT, SENT], None),
        ([{}, SENT], "rank 0 did not load a, b, c and 1 more"),
        ([SENT, {"d": 1}], "rank 1 did not load a, b, c"),
        ([SENT | {"e": 1, "f": 2, "g": 3, "h": 4, "i": 5}], "rank 0 loaded e, f, g and 2 more, which was not sent"),
        ([SENT | {"e": 1}], "rank 0 loaded e, which was not sent"),
        ([SENT | {"b": 21, "d": 0}], "rank 0 loaded other values of b, d than were sent"),
        ([SENT, SENT, SENT | {"b": 21}], "ranks 0 to 2 together loaded other values of b than were sent"),
        ([SENT | {"a": 30}], "rank 0 loaded other values of a than were sent"),  # thrice, of one rank
        ([SENT | {"a": 3}, SENT | {"a": 7}], None),
        ([SENT | {"a": 0}, SENT | {"a": 0}], "ranks 0 to 1 together loaded other values of a than were sent"),
    ],
)
def test_a_difference_is_one_sentence(ranks, says):
    assert describe_difference(SENT, ranks) == says


def verify(loaded: Sequence[Any], probed: Sequence[Sequence[float]], **more: Any) -> float:
    return verify_sync(SENT, loaded, expected_logp=[-1.0, -2.0], probe_logp=probed, bound=0.25, **more)


def test_a_proof_returns_the_worst_engines_difference_or_names_the_engine():
    same = [[SENT], [SENT]]
    assert verify(same, [[-1.0, -2.5], [-1.25, -2.0]]) == 0.25, "the bound itself is allowed"
    assert verify(same, [[-1.125, -2.0], [-1.25, -2.25]]) == 0.25
    assert verify(same, []) == verify([[SENT]], [[-1.0, -2.0]]) == 0.0
    for engines, name in ((None, 1), ([4, 7], 7)):
        with pytest.raises(ProofFailed) as raised:
            verify([[SENT], [SENT | {"b": 1}]], [], engines=engines)
        assert str(raised.value) == (
            f"the weights of engine {name} are not the trainer's after the sync: rank 0 loaded other values of b than "
            "were sent"
        )
        with pytest.raises(ProofFailed) as raised:
            verify(same, [[-1.0, -2.0], [-1.0, -2.75]], engines=engines)
        said = (
            f"engine {name} was sent the trainer's weights, but its log-probabilities of the probe prompt differ from "
            "the trainer's by 0.38 on average, where at most 0.25 is expected"
        )
        assert str(raised.value) == said
        with pytest.raises(ProofFailed) as raised:
            verify(same, [[-1.0, -2.0], [-1.0, -2.75]], engines=engines, explain=lambda: "the routers differ")
        assert str(raised.value) == f"{said}; the routers differ"


# Deltas -------------------------------------------------------------------------------------------------------


def unpack(coded: Tensor) -> tuple[int, int, bytes]:
    """Number of changes, bytes of a gap, and the planes of gaps and values."""
    data = coded.numpy().tobytes()
    return *struct.unpack("<qB", data[:9]), zlib.decompress(data[9:])


def encode(old: Tensor, new: Tensor) -> tuple[str, Tensor, Changes]:
    encoder = DeltaEncoder()
    encoder.begin("whole")
    assert encoder.encode([("w", old)])[0][0] == "=w"
    encoder.begin("changes")
    [(name, coded)] = encoder.encode([("w", new)])
    decoder = DeltaDecoder()
    decoder.decode([("=w", old)])
    [(back, whole)] = decoder.decode([(name, coded)])
    assert back == "w" and torch.equal(whole, new)
    return name, coded, encoder.changes


@pytest.mark.parametrize(
    ("places", "width", "gaps"),
    [
        ([1, 3], 1, b"\2\2"),
        ([0, 255], 1, b"\1\xff"),
        ([0, 256], 2, b"\1\0\0\1"),  # 1 and 256, first bytes first
        ([299, 66_000], 4, b"\x2c\xa5\1\0\0\1\0\0"),  # 300 = 0x12c and 65,701 = 0x100a5
    ],
)
def test_a_delta_has_the_bytes_that_the_module_tells(places, width, gaps):
    old = torch.zeros(70_000, dtype=torch.int16).view(torch.bfloat16)
    new = old.view(torch.int16).clone()
    new[places] = torch.tensor([0x0102, 0x0304], dtype=torch.int16)
    name, coded, changes = encode(old, new.view(torch.bfloat16))
    assert name == "+w", "of equal length are the values"
    assert unpack(coded) == (2, width, gaps + b"\2\4\1\3")
    assert changes == Changes(values=70_000, changed=2, tensors=1, by_xor=0)


def test_a_delta_larger_than_its_tensor_is_left_and_each_sync_counts_anew():
    old = torch.zeros(4, dtype=torch.uint8)
    name, coded, changes = encode(old, old + 1)
    assert name == "=w" and coded.tolist() == [1] * 4 and changes == Changes(values=4, changed=4, tensors=1)
    same = torch.zeros(999, dtype=torch.uint8)
    n = encode(same, same)[1].nbytes
    assert [encode(same[:size], same[:size])[0] for size in (n, n + 1)] == ["=w", "+w"], "an equal size saves nothing"
    encoder = DeltaEncoder()
    for coding, sent in (("whole", "=w"), ("changes", "+w"), ("changes", "+w"), ("whole", "=w"), ("plain", "w")):
        encoder.begin(coding)
        assert [name for name, _ in encoder.encode([("w", torch.zeros(999))])] == [sent]
        assert encoder.changes == (Changes(values=999, tensors=1) if coding == "changes" else Changes())
    encoder.begin("changes")
    with pytest.raises(KeyError):
        encoder.encode([("w", torch.zeros(999))])  # nothing is kept of a sync that was plain


# A store that fails -------------------------------------------------------------------------------------------


class Refused(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}\nand more")
        self.status = status


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (NotImplementedError("put"), "this kind of store takes no objects"),
        (PermissionError("no\nmore"), "access is denied (no)"),
        *((Refused(status), f"access is denied (status {status})") for status in (401, 403)),
        *((Refused(status), "") for status in (400, 402, 404, 500)),
        *((OSError(code, "full"), "there is no room left") for code in (errno.ENOSPC, errno.EDQUOT)),
        (OSError(errno.EIO, "broken"), ""),
        *((ValueError(f"a {text} b"), "there is no such bucket") for text in ("NoSuchBucket", "bucket does not exist")),
        (ValueError("no such key"), ""),
    ],
    ids=repr,
)
def test_an_error_of_a_store_is_final_or_may_pass(error, why):
    outer = RuntimeError("wrapped twice")
    outer.__cause__ = FileNotFoundError("wrapped")
    outer.__cause__.__cause__ = error
    assert explain_failure(error) == why
    assert explain_failure(outer) == ("" if isinstance(error, NotImplementedError) else why)


def test_a_store_that_fails_is_asked_four_times_in_3_5_seconds(monkeypatch, tmp_path):
    waited: list[float] = []
    monkeypatch.setattr(store.time, "sleep", waited.append)
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportFailed) as raised:
        write_manifest(f"{tmp_path}/file", [])
    assert waited == [0.5, 1.0, 2.0]
    assert str(raised.value).startswith(
        f"weights did not get through over disk: cannot write to {tmp_path}/file: FileExistsError: "
    )
    with pytest.raises(TransportFailed) as raised:
        store.read_chunk_bytes(f"{tmp_path}/file#1234-0")
    assert str(raised.value).endswith(f"disk: cannot read {tmp_path}/file: _Incomplete: it has 0 of 1,234 bytes")
    with pytest.raises(TransportFailed) as raised:
        store.read_chunk_bytes(f"{tmp_path}/file#0-0")
    assert str(raised.value).endswith("file: _Incomplete: its hash is another than when it was written")


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_an_error_of_a_transport_is_its_first_line_without_the_place(error):
    for text, reason in (
        ("[enforce fail at a.cc:12] Connection closed\nat b", "Connection closed"),
        ("[a] [b] cut", "cut"),
        ("cut", "cut"),
    ):
        with pytest.raises(TransportFailed) as raised, transfer_errors("gloo"):
            raise error(text)
        assert str(raised.value) == f"weights did not get through over gloo: {reason}"
    with pytest.raises(ValueError, match=r"^mine$"), transfer_errors("gloo"):
        raise ValueError("mine")
