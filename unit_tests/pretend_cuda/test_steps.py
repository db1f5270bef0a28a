"""Every algorithm and every kind of step computes on the pretend CUDA device what it computes on the CPU.

float32 is equal to the bit. `python -m unit_tests.pretend_cuda.steps` prints the table.
"""

import re
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from algs import list_algorithms
from unit_tests.helpers import seeing
from unit_tests.helpers.pretend_cuda import needs_pretend_cuda
from unit_tests.pretend_cuda.steps import Case, Models, Result, list_cases, train_on_both

pytestmark = [needs_pretend_cuda, pytest.mark.usefixtures("one_thread")]
CASES = list_cases()
EXACT = {"aot": 2, "clip_cov": 2, "kl_cov": 2, "p3o": 2, "p4o": 4, "tilted": 1}
"""Exact sums and gathers of an update: an integer of 160 bits is divided on the host, and a size is read there."""
IN_CHUNKS = ("gkd", "minillm")
"""Algorithms with the logits of a frozen model, whose head computes in chunks."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


FAST = {"grpo", "ppo", "sft", "dpo", "opd", "gkd", "chord", "clip_cov"}
"""Algorithms whose every case is fast: one of each kind. Of the others only the shared layout is; the rest verify."""


def mark_long(name: str, alg: str, *, is_fast: bool = False) -> Any:
    return name if is_fast or alg in FAST else pytest.param(name, marks=pytest.mark.verify)


@pytest.mark.parametrize("name", [mark_long(n, c.alg, is_fast=c.layout == "shared") for n, c in CASES.items()])
def test_a_step_is_that_of_the_cpu_to_the_bit(models, name):
    want, got = train_on_both(CASES[name], models)
    assert torch.equal(got.gradient, want.gradient) and got.gradient.norm() > 0
    assert torch.equal(got.columns, want.columns)
    assert got.metrics == want.metrics
    check_waits(CASES[name], got)


def check_waits(case: Case, got: Result) -> None:
    """The host reads norms and metrics; only transformers' own code reads more, for rows that are padded or images."""
    exact = sum(n for line, n in got.other_syncs.items() if line.startswith("algs/reductions.py"))
    assert exact == EXACT.get(case.alg, 0) * case.updates
    # clip_cov reads in every micro-batch how many tokens it drops
    known = r"module\(\*\*.*inputs|^algs/reductions.py|^algs/clip_cov.py.*fraction"
    own = [line for line in got.other_syncs if not re.search(known, line)]
    # of a head in chunks the first pass is checked
    in_chunks = "logits_mib" in case.trainer or case.alg in IN_CHUNKS
    assert len(own) == in_chunks and all("allclose" in line for line in own)
    by_others = case.layout == "padded" or case.model in seeing.FAMILIES or case.alg == "clip_cov"
    assert by_others or got.other_syncs.total() == len(own) + exact
    learners = 2 if case.alg == "ppo" else 1
    # of each update whether the gradient is finite, and its norm; of the step the metrics
    assert got.syncs.total() - got.other_syncs.total() <= 2 * learners * case.updates + 1


HALF = {alg: Case(alg=alg, dtype="bfloat16", max_tokens=90) for alg in list_algorithms()}
HALF |= {
    "sliding windows": Case(dtype="bfloat16", model="windows"),
    "packed": Case(dtype="bfloat16", layout="packed"),
    "images": Case(alg="sft", dtype="bfloat16", model="qwen2_5_vl", max_tokens=200),
}


@pytest.mark.parametrize("name", [mark_long(name, case.alg) for name, case in HALF.items()])
def test_half_precision_takes_the_kernel_of_variable_lengths(models, name):
    with sdpa_kernel(SDPBackend.MATH):  # of the CPU's kernels the one that computes bfloat16 in float32, as ours does
        want, got = train_on_both(HALF[name], models)
    assert got.varlen_calls > 0
    assert (got.gradient - want.gradient).norm() <= 0.01 * want.gradient.norm() > 0
