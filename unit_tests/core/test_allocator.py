"""Memory of a loop that frees as much as it allocates, as the head in chunks does."""

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

keep_freed_memory()
if sys.argv[1] == "kept":
    head.mapping_tensors = head.nullcontext
chunks, hidden, weight = 48, torch.randn(48 * 64, 32), nn.Parameter(torch.randn(40_000, 32))

def score(logits, rows):
    return logits.float().logsumexp(-1)[None]

def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

before = peak()
hidden.requires_grad_()
head._Chunks.apply(hidden, score, 64, weight).sum().backward()
print(peak() - before)
"""


def measure_peak(how: str) -> int:
    """Return the MiB that all chunks took together; one has 10 MiB of logits."""
    command = [sys.executable, "-c", CHUNKS, how]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
def test_chunks_of_the_head_take_the_memory_of_a_few():
    kept, mapped = measure_peak("kept"), measure_peak("mapped")
    assert mapped < 150 < kept, (mapped, kept)
