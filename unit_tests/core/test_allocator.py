"""Memory of a loop that frees as much as it allocates, as the head in chunks does."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CHUNKS = """
import sys
import torch
from torch import nn
from torch.nn.functional import linear
from core.allocator import keep_freed_memory
from modeling import head

def add_apart(total, of_logits, hidden):
    total.total = total.total + of_logits.T @ hidden

keep_freed_memory()
if sys.argv[1] == "kept":
    head.mapping_tensors = head.nullcontext
elif sys.argv[1] == "apart":
    head._Sum.add = add_apart

def score(logits, rows):
    return logits.float().logsumexp(-1)[None]

def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

def measure(tokens, chunk, width):
    hidden, weight = torch.randn(tokens, width, requires_grad=True), nn.Parameter(torch.randn(40_000, width))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    before = peak()
    head._Chunks.apply(hidden, score, chunk, weight).sum().backward()
    return peak() - before

print(measure(48 * 64, 64, 32) if sys.argv[2] == "logits" else measure(16, 4, 512))
"""


MAPS = """
import ctypes
import json
from core.allocator import keep_freed_memory, mapping_tensors

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype = ctypes.c_void_p

def count_maps(size):
    before = libc.mallinfo2().hblks
    assert libc.malloc(ctypes.c_size_t(size))
    return libc.mallinfo2().hblks - before

keep_freed_memory()
with mapping_tensors():
    inside = [count_maps(size) for size in (2**19, 2**20, 2**24)]
print(json.dumps([inside, count_maps(2**24)]))
"""


FREED = """
import ctypes
import json
from core.allocator import keep_freed_memory, return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024

keep_freed_memory()
before, blocks = resident(), [libc.malloc(ctypes.c_size_t(2**20)) for _ in range(64)]
for block in blocks:
    ctypes.memset(block, 1, 2**20)
for block in blocks:
    libc.free(ctypes.c_void_p(block))
kept = resident() - before
return_freed_memory()
print(json.dumps([kept, resident() - before]))
"""


def measure_peak(how: str, what: str) -> int:
    """Return the MiB of a backward pass: of 48 chunks with 10 MiB of logits each, or with a weight of 78 MiB."""
    command = [sys.executable, "-c", CHUNKS, how, what]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library, or an old one")
def test_tensors_of_a_mib_or_more_are_mapped_in_the_body_alone():
    done = subprocess.run([sys.executable, "-c", MAPS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[0, 1, 1], 0]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_freed_memory_is_kept_until_it_is_returned():
    done = subprocess.run([sys.executable, "-c", FREED], cwd=ROOT, capture_output=True, text=True, check=True)
    kept, left = json.loads(done.stdout)
    assert left < 16 < 48 < kept, "MiB of 64"


@pytest.mark.one_core
@pytest.mark.slow
def test_chunks_of_the_head_take_the_memory_of_a_few():
    kept, mapped = measure_peak("kept", "logits"), measure_peak("mapped", "logits")
    assert mapped < 150 < kept, (mapped, kept)


@pytest.mark.one_core
@pytest.mark.slow
def test_the_gradient_of_the_heads_weight_is_added_up_in_place():
    apart, in_place = measure_peak("apart", "weight"), measure_peak("mapped", "weight")
    assert in_place < 200 < apart, (in_place, apart)
