"""The measurements of a training step's memory and speed run, and print what they promise."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data_feeds.packing.batches import micro_batches
from tools.benchmarks.random_task import make_groups
from tools.benchmarks.train_throughput import count_flops, find_peak
from unit_tests.helpers.models import random_model

ROOT = Path(__file__).parent.parent.parent


def test_the_operations_of_a_model_are_counted():
    """6 per weight and token, and attention; the embedding multiplies nothing."""
    model = random_model("qwen3", vocab_size=128)
    [[batch]] = micro_batches(make_groups(2, 1, prompt=3, response=5, vocabulary=64), "token", 100)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    head = model.lm_head.weight.numel()
    attention = 3 * 4 * 2 * 64 * 2 * (7 * 8 // 2)  # two layers, two heads of 32, two sequences of 7 inputs
    assert len(batch.input_ids) == 14 and len(batch.labels) == 10
    assert count_flops(model, batch) == 6 * (weights - head) * 14 + 6 * head * 10 + attention


@pytest.mark.parametrize(
    ("device", "tflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-80GB", 312)],
)
def test_a_gpu_is_found_by_its_name(device, tflops):
    assert find_peak(device) == tflops * 1e12


@pytest.mark.verify
@pytest.mark.skipif(torch.cuda.is_available(), reason="so small a model needs less than a GPU's allocator rounds to")
def test_memory_is_measured_and_chunks_take_less():
    small = ["--tokens", "512", "2048", "--vocabulary", "20000", "--logits-mib", "32"]
    command = [sys.executable, "-m", "tools.benchmarks.memory", *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    _, _, titles, few, many, _, goal = done.stdout.splitlines()
    assert titles.split()[:6] == ["tokens", "logits", "at", "once", "in", "chunks"]
    assert few.split()[0] == "512" and many.split()[0] == "2048" and goal.endswith("reached")
