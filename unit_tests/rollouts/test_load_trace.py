"""The trace of a load: what vLLM's loaders write adds up to what was sent, by whatever way they write it."""

import pytest
import torch

from rollouts.engines.vllm_support.load_trace import LoadTrace
from trainers.weight_sync.fingerprint import checksum

EXPERTS = torch.arange(4 * 16 * 32, dtype=torch.float32).view(4, 16, 32)


def load_plainly(sent, target):
    target.copy_(sent)


def load_by_expert(sent, target):
    for e in range(4):
        target[e].copy_(sent[e])


def load_transposed(sent, target):
    for e in range(4):
        target[e].copy_(sent[e].t().contiguous().t())


def load_half_of_a_clone(sent, target):
    for e in range(4):
        flipped = sent[e].t().contiguous()
        target[e, :, :16].copy_(flipped[:16].t())
        target[e, :, 16:].copy_(flipped[16:].t())


def load_halves_of_a_clone_of_a_half(sent, target):
    for first in (0, 8):
        flipped = sent[:, first : first + 8].transpose(1, 2).contiguous()
        for at in (0, 4):
            target[:, first + at : first + at + 4].copy_(flipped[:, :, at : at + 4].transpose(1, 2))


def load_cast(sent, target):
    for e in range(4):
        target[e].copy_(sent[e].to(torch.float64).to(torch.float32))


def load_in_halves(sent, target):
    for gate, half in zip(target.chunk(2, 1), sent.chunk(2, 1), strict=True):
        gate.copy_(half)


def load_with_even_rows_first(sent, target):
    """As vLLM's Llama 4 orders the rows of a head for its rotary embeddings."""
    target.copy_(sent.view(4, 8, 2, 32).transpose(1, 2).reshape(4, 16, 32))


def load_halves_with_even_rows_first(sent, target):
    """By two ranks, of which each has half of the heads."""
    for mine, part in zip(
        target.chunk(2), sent.view(4, 8, 2, 32).transpose(1, 2).reshape(4, 16, 32).chunk(2), strict=True
    ):
        mine.copy_(part)


WAYS = [
    *(load_plainly, load_by_expert, load_transposed, load_half_of_a_clone, load_halves_of_a_clone_of_a_half),
    *(load_cast, load_in_halves, load_with_even_rows_first, load_halves_with_even_rows_first),
]


def trace(load, sent):
    seen = LoadTrace()
    seen.expect([("before", torch.ones(3)), ("experts", sent)])
    with seen:
        load(sent, torch.zeros(4, 16, 32))
    return seen.consumed()


@pytest.mark.parametrize("load", WAYS)
def test_the_sum_is_that_of_the_sent_tensor(load):
    # as a view of a larger buffer, as it arrives over gloo
    buffer = torch.cat([torch.ones(8), EXPERTS.flatten(), torch.ones(8)])
    sent = buffer[8:-8].view(4, 16, 32)
    assert trace(load, sent) == {"experts": checksum(EXPERTS)}


@pytest.mark.parametrize("load", WAYS)
def test_a_clone_that_was_changed_before_it_is_loaded_is_seen(load):
    def spoil_and_load(sent, target):
        spoiled = sent.clone()
        spoiled[3].mul_(2)
        load(spoiled, target)

    assert trace(spoil_and_load, EXPERTS)["experts"] != checksum(EXPERTS)


def test_the_stride_of_a_dimension_of_one_element_does_not_matter():
    """A transposed tensor of one channel, whose rows are in order, may be loaded in another one."""
    sent = EXPERTS.view(1, 4, 512).transpose(0, 1)
    assert trace(load_with_even_rows_first, sent) == {"experts": checksum(sent)}


def test_half_of_the_heads_in_another_order_is_half_of_the_sum():
    def load_first(sent, target):
        target[:2].copy_(sent.view(4, 8, 2, 32).transpose(1, 2).reshape(4, 16, 32)[:2])

    assert trace(load_first, EXPERTS) == {"experts": checksum(EXPERTS[:2], shape=(4, 16, 32), start=(0, 0, 0))}


def test_an_expert_that_is_not_written_changes_the_sum():
    def load_three(sent, target):
        for e in range(3):
            target[e].copy_(sent[e].t().contiguous().t())

    assert trace(load_three, EXPERTS)["experts"] != checksum(EXPERTS)


@pytest.mark.parametrize(("shape", "parts"), [((64, 32), 1), ((1, 2048), 1), ((4, 8, 64), 1), ((64, 32), 2)])
def test_a_reshaped_copy_counts_as_what_was_sent(shape, parts):
    """As a loader writes a convolution's kernel into a matrix."""
    buffer = torch.cat([torch.ones(8), EXPERTS.flatten()])
    sent, seen = buffer[8:].view(4, 16, 32), LoadTrace()
    seen.expect([("experts", sent)])
    with seen:
        for mine, part in zip(torch.zeros(shape).chunk(parts), sent.view(shape).chunk(parts), strict=True):
            mine.copy_(part)
    assert seen.consumed() == {"experts": checksum(EXPERTS)}


def test_a_rank_without_a_part_adds_nothing_and_has_loaded_the_tensor():
    rows, seen = torch.arange(6.0).view(3, 2), LoadTrace()
    seen.expect([("rows", rows), ("others", torch.ones(2))])
    with seen:
        torch.zeros(0, 2).copy_(rows[3:])
    assert seen.consumed() == {"rows": 0}


def test_one_column_of_a_tensor_counts_at_its_place():
    """A view with a dimension of one element, whose stride says nothing."""
    sent, seen = torch.arange(12.0).view(3, 4), LoadTrace()
    seen.expect([("sent", sent)])
    with seen:
        torch.zeros(3, 1).copy_(sent[:, 2:3])
        torch.zeros(3, 1).copy_(sent[:, 3:])
    assert seen.consumed() == {"sent": checksum(sent[:, 2:], shape=(3, 4), start=(0, 2))}


def test_a_repeated_or_skipping_copy_of_a_tensor_does_not_count():
    """No blocks of rows in it, so nobody can tell what of it is written."""
    for view in (lambda t: t.view(64, 32)[:, None].expand(64, 2, 32), lambda t: t.view(4, 4, 4, 32)[:, :, :2]):
        seen = LoadTrace()
        seen.expect([("experts", EXPERTS)])
        with seen:
            copied = view(EXPERTS).clone(memory_format=torch.contiguous_format)
            torch.zeros(copied.shape).copy_(copied)
        assert seen.consumed() == {}


def write(sent, part, dtype=torch.float32):
    """The trace of a load that writes a part into a tensor of its shape."""
    seen = LoadTrace()
    seen.expect([("experts", sent)])
    with seen:
        torch.zeros(part.shape, dtype=dtype).copy_(part)
    return seen.consumed()


def test_a_part_of_a_reshaped_tensor_counts_as_that_part():
    """As a rank writes its rows of a convolution's kernel: the others may be missing."""
    sent = torch.cat([torch.ones(8), EXPERTS.flatten()])[8:].view(4, 16, 32)
    for part, first, last in (
        (sent.view(64, 32)[:32], 0, 2),
        (sent.view(64, 32)[32:], 2, 4),
        (sent.view(4, 512)[1:], 1, 4),
        (sent.view(2, 2, 512)[1], 2, 4),
        (sent.view(64, 32)[16:32], 1, 2),
    ):
        want = checksum(EXPERTS[first:last], shape=(4, 16, 32), start=(first, 0, 0))
        assert write(sent, part) == {"experts": want}, part.shape


def test_a_reshaped_part_that_is_no_whole_rows_does_not_count():
    for part in (EXPERTS.view(64, 32)[8:24], EXPERTS.view(4, 512)[:, :256], EXPERTS.view(4, 8, 2, 32)[:, :, 0]):
        assert write(EXPERTS, part) == {}, part.shape


def test_a_reshaped_copy_that_was_rounded_is_seen():
    assert write(EXPERTS, EXPERTS.view(64, 32), torch.bfloat16)["experts"] != checksum(EXPERTS)


def test_a_part_that_is_written_several_times_over_does_not_count():
    sent, seen = torch.arange(4.0), LoadTrace()
    seen.expect([("scales", sent)])
    with seen:
        torch.zeros(8).copy_(sent[1])
    assert seen.consumed() == {}
    seen.expect([("scale", scale := torch.tensor(3.0))])
    with seen:
        torch.zeros(1).copy_(scale)
    assert seen.consumed() == {"scale": checksum(scale)}, "a number in a row of one"
