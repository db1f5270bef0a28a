"""Parts of the doctor on made-up numbers: moved weights, packages, memory and disks, verdicts, and prices of knobs."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.doctor import setup_checks
from analysis.doctor.examine import move_weights
from analysis.doctor.findings import Finding, attempt
from analysis.doctor.gap import Gap
from analysis.doctor.knobs import HEADER, Price, measure_changed, measure_memory, read_knobs
from analysis.doctor.setup_checks import (
    check_disk,
    check_packages,
    check_python,
    check_shared_memory,
    check_temporary,
    describe_devices,
    describe_network,
    find_existing,
    find_version,
    list_wanted,
)
from analysis.doctor.target import find_target
from analysis.doctor.trials import Toggle, Trial
from analysis.doctor.verdict import Facts, decide
from configs.trainer_schema import CheckpointConfig
from core.types.samples import Sample
from driver.checks.explain import estimate_memory
from driver.start.devices import count_gpus
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.sentences import tell

N = 10_000
"""Numbers of a tensor: enough for a mean of noise to be known within some percent."""
MEAN = math.sqrt(2 / math.pi)
"""Mean absolute value of normal noise of size 1."""


class Moving:
    """Trainer whose log-probabilities fall by the mean distance of each tensor from where it was, added up."""

    def __init__(self, *weights: Tensor, bound: float) -> None:
        self.start, self.weights = [*weights], [*weights]
        self.bound, self.cfg = bound, SimpleNamespace(seed=3)

    def copy_weights(self) -> list[Tensor]:
        return [w.clone() for w in self.weights]

    def set_weights(self, weights: list[Tensor]) -> None:
        self.weights = weights

    def score(self, samples: list[Sample]) -> list[Sample]:
        away = sum(float((w - s).abs().mean()) for w, s in zip(self.weights, self.start, strict=True))
        return [replace(s, columns={"prox_logp": np.float32(-away) * s.action_mask}) for s in samples]


@pytest.mark.parametrize(
    ("bound", "share"),
    # 25 bounds are 0.05, and at most 0.5 nats; a share moves by its (3 + 0.02) x MEAN, which is 2.41
    [(0.002, 0.05), (0.0001, 0.01), (1.0, 0.5), (0.02, 0.5), (0.007, 0.1)],
)
def test_weights_are_moved_by_the_least_share_that_can_be_seen(bound, share):
    bench: Any = Moving(torch.zeros(N), torch.full((N,), 3.0), bound=bound)
    samples = bench.score([sample_of([3, 1, 2], [False, True, True])])
    moved = move_weights(bench, samples)
    assert moved == pytest.approx(share * 3.02 * MEAN, rel=0.05)
    # half of a new adapter is zero, and moves as if it were of the size 0.02
    assert [float((w - s).std()) for w, s in zip(bench.weights, bench.start, strict=True)] == [
        pytest.approx(share * 0.02, rel=0.05),
        pytest.approx(share * 3.0, rel=0.05),
    ]
    again: Any = Moving(*bench.start, bound=bound)
    assert move_weights(again, samples) == moved, "the noise is of the seed"


def test_weights_that_move_nothing_are_moved_as_far_as_any():
    bench: Any = Moving(torch.zeros(N), bound=0.02)
    moved = move_weights(bench, bench.score([sample_of([3, 1], [False, True])]))
    assert moved == pytest.approx(0.5 * 0.02 * MEAN, rel=0.05)


ALWAYS = ["torch", "transformers", "numpy", "pydantic", "pyarrow", "datasets", "peft"]
ON_RAY = [*ALWAYS, "ray", "deepspeed"]


@pytest.mark.parametrize(
    ("kind", "changes", "wanted"),
    [
        ("rl", {}, ALWAYS),
        ("sl", {}, ALWAYS),
        ("rl", {"backend": "ray"}, ON_RAY),
        ("sl", {"backend": "ray"}, ON_RAY),
        ("rl", {"backend": "ray", "rollout.engine": "vllm"}, [*ON_RAY, "vllm"]),
    ],
)
def test_packages_are_wanted_where_a_recipe_imports_them(recipe, kind, changes, wanted):
    assert list_wanted(find_target(recipe(changes, kind=kind), []).loaded.cfg) == wanted


def test_only_a_run_that_samples_needs_room_for_samples(recipe):
    loaded = find_target(recipe(kind="sl"), []).loaded
    estimate = estimate_memory(loaded)
    assert "(checkpoints 0.00, models 0.00, samples 0.00)" in check_disk(loaded.cfg, estimate).found
    loaded = find_target(recipe(), []).loaded
    # 10^6 steps x 16 samples x 40 tokens x 6 bytes
    many = check_disk(loaded.cfg.model_copy(update={"steps": 10**6}), estimate_memory(loaded))
    assert "(checkpoints 0.00, models 0.00, samples 3.58)" in many.found


def make_trial(before: float, after: float) -> Trial:
    gaps = [Gap(mean=mean, p99=mean, largest=mean, kl=0.0, tokens=64) for mean in (before, after)]
    return Trial(toggle=Toggle.DTYPE, change="in float32", before=gaps[0], after=gaps[1], means="it rounds")


@pytest.mark.parametrize(
    ("before", "after", "left"),
    [
        (0.5, 0.125, 0.25),
        (0.25, 0.5, 2.0),
        (0.0, 0.3, 1.0),
        (math.nan, 0.3, 1.0),
        (0.3, math.nan, 1.0),
        (0.5, 0.0, 0.0),
    ],
)
def test_what_a_change_leaves_of_a_gap_is_a_share_of_it(before, after, left):
    assert make_trial(before, after).left == left


def test_a_trial_is_a_line_of_its_toggle_numbers_and_change():
    lines = [make_trial(0.5, after).describe(0.002) for after in (0.25, 0.0001)]
    assert [line.split() for line in lines] == [
        ["dtype", "0.5", "->", "0.25", "in", "float32"],
        ["dtype", "0.5", "->", "0.0001", "closes", "it", "in", "float32"],
    ]
    assert {line.index("in float32") for line in lines} == {17 + 10 + 3 + 10 + 11}


# ---------------------------------------------------------------- the machine


def with_free(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=int(gib * 2**30)))


SHM = "enlarge it, in a container with --shm-size"


@pytest.mark.parametrize(
    ("free", "level", "found"),
    [
        (1.0, "ok", "1.0 GiB are free in {}"),
        (0.99, "warning", "0.99 GiB are free in {}, where 1 are wanted: make room, or set TMPDIR"),
        (0.26, "warning", "0.26 GiB are free in {}, where 1 are wanted: make room, or set TMPDIR"),
        (0.25, "error", "0.25 GiB are free in {}, where 1 are wanted: make room, or set TMPDIR"),
    ],
)
def test_a_temporary_folder_wants_a_gibibyte(monkeypatch, tmp_path, free, level, found):
    with_free(monkeypatch, free)
    finding = Finding(check="temporary", level=level, found=found.format(tmp_path))
    assert check_temporary(tmp_path) == finding


@pytest.mark.parametrize(
    ("kind", "bucket", "free", "level", "found"),
    [
        # a quarter, and two buckets
        ("rl", 64, 0.375, "ok", "0.4 GiB are free in {}, and about 0.38 are wanted"),
        ("rl", 64, 0.374, "warning", f"0.4 GiB are free in {{}}, and about 0.38 are wanted: {SHM}"),
        ("rl", 1024, 2.24, "warning", f"2.2 GiB are free in {{}}, and about 2.25 are wanted: {SHM}"),
        ("sl", 64, 0.25, "ok", "0.2 GiB are free in {}, and about 0.25 are wanted"),
    ],
)
def test_shared_memory_has_room_for_two_buckets(recipe, monkeypatch, tmp_path, kind, bucket, free, level, found):
    changes = {"backend": "ray"} | ({"weight_sync.bucket_mib": bucket} if kind == "rl" else {})
    cfg = find_target(recipe(changes, kind=kind), []).loaded.cfg
    with_free(monkeypatch, free)
    assert check_shared_memory(cfg, tmp_path) == Finding(
        check="shared memory", level=level, found=found.format(tmp_path)
    )
    missing = check_shared_memory(cfg, tmp_path / "no")
    told = f"{tmp_path}/no is not there: mount one (in a container --shm-size), Ray and NCCL use it"
    assert missing == Finding(check="shared memory", level="error", found=told)


@pytest.mark.parametrize(("free", "level"), [(12.51, "ok"), (12.49, "warning"), (10.01, "warning"), (9.99, "error")])
def test_a_disk_wants_a_fifth_more_than_the_run_writes(recipe, monkeypatch, tmp_path, free, level):
    """Five checkpoints of 1.4 GiB, and three models of 1 GiB."""
    loaded = find_target(recipe(), []).loaded
    changes = {"checkpoint": CheckpointConfig(every=1, keep=3, best="reward/mean"), "save_to": str(tmp_path)}
    cfg = loaded.cfg.model_copy(update=changes)
    estimate = replace(estimate_memory(loaded), checkpoint=1.4, saved=1.0)
    with_free(monkeypatch, free)
    found = check_disk(cfg, estimate)
    told = f"up to 10.00 GiB in run_dir (checkpoints 7.00, models 3.00, samples 0.00), and {free:.1f} GiB are free"
    more = ": make room, name another run_dir, or lower checkpoint.keep"
    assert found == Finding(check="disk", level=level, found=told + (more if level != "ok" else ""))
    without = check_disk(loaded.cfg, estimate)
    assert "(checkpoints 0.00, models 1.00, samples 0.00)" in without.found


def test_the_nearest_folder_that_exists_is_looked_at(tmp_path):
    assert find_existing(tmp_path / "a" / "b") == find_existing(tmp_path) == tmp_path
    assert find_existing(Path("~/no/such/folder")) == Path.home()


def test_devices_are_told_with_the_ranks_that_they_are_for(recipe):
    machine = f"{count_gpus()} GPUs and {os.cpu_count()} CPU cores, for "
    for kind, changes, takes in (
        ("rl", {}, "one process"),
        ("sl", {}, "one process"),
        ("rl", {"backend": "ray"}, "1 trainer and 1 engine ranks"),
        ("sl", {"backend": "ray"}, "1 trainer and 0 engine ranks"),
    ):
        cfg = find_target(recipe(changes, kind=kind), []).loaded.cfg
        assert attempt("devices", lambda cfg=cfg: describe_devices(cfg)).found == machine + takes
    assert re.fullmatch(r"\w+ loops back; port \d+ was free", describe_network(cfg))


def test_packages_are_as_pinned_or_each_is_told():
    pytest_is, numpy_is = find_version("pytest"), find_version("numpy")
    pins = {"pytest": f"{pytest_is}+cpu", "numpy-cpu": str(numpy_is)}
    [fine] = check_packages(pins, ["pytest", "numpy"])
    same = f"as in constraints.txt: pytest {pytest_is}, numpy {numpy_is}"
    assert fine == Finding(check="packages", level="ok", found=same)
    tested = "was tested (constraints.txt): run make install"
    told = [*check_packages({"numpy": "1.0"}, ["pytest", "no-such-package", "numpy"])]
    assert [(one.check, one.level, one.found) for one in told] == [
        ("packages", "warning", f"pytest is {pytest_is}, and no version {tested}"),
        ("packages", "error", "no-such-package is not installed: run make install"),
        ("packages", "warning", f"numpy is {numpy_is}, and 1.0 {tested}"),
    ]
    assert check_python("3.11.4", ">=3.11,<3.14") == Finding(check="python", level="ok", found="3.11.4")
    assert check_python("3.14.0", ">=3.11,<3.14").found == (
        "3.14.0, and FeynRL wants >=3.11,<3.14: make a new .venv with such a Python (make install)"
    )


# ---------------------------------------------------------------- the verdict


def make_gap(mean: float) -> Gap:
    return Gap(mean=mean, p99=2 * mean, largest=3 * mean, kl=0.0, tokens=1200)


def make_facts(**changes: Any) -> Facts:
    usual = {"bound": 0.002, "first": make_gap(0.001), "second": make_gap(0.001), "moved": 0.1, "changed": 3}
    rest = {"sequences": 4, "fingerprint": None, "surprise": -0.25, "sigmas": -1.5}
    return Facts(**usual | rest | changes)


def test_the_facts_beside_the_gaps_are_three_lines():
    rest = "ids                     the text of 3 of 4 sequences has other ids when it is tokenised again"
    for changes, lines in (
        ({}, ("by their fingerprint those that were sent", "0.25 nats less surprising", "1.5")),
        ({"fingerprint": "other a", "surprise": 0.5, "sigmas": 2.0}, ("other a", "0.5 nats more surprising", "2.0")),
    ):
        weights, surprise, sigmas = lines
        assert make_facts(**changes).describe_rest().splitlines() == [
            f"weights of the engine   {weights}",
            rest,
            f"tokens                  {surprise} than the trainer expects ({sigmas} standard errors)",
        ]


@pytest.mark.parametrize(
    ("mean", "sigmas", "otherwise"),
    [(0.002, -6.1, True), (0.002, 6.1, True), (0.002, 6.0, False), (0.0021, 9.0, False), (0.0, -6.0, False)],
)
def test_tokens_are_drawn_otherwise_from_six_standard_errors_on(mean, sigmas, otherwise):
    assert make_facts(second=make_gap(mean), sigmas=sigmas).draws_otherwise == otherwise


AGREES = "gap 0.001 nats"
DRAWN = (
    "and returns log-probabilities at 1: gap 0.001 nats, but the tokens are 0.25 nats less surprising than these say "
    "(2 standard errors)"
)


@pytest.mark.parametrize(
    ("changes", "fitted", "kind", "sentence"),
    [
        (
            {},
            None,
            "none",
            "no mismatch: 1,200 tokens of 4 sequences, mean 0.001, p99 0.002, largest 0.003, KL 0 nats; up to 0.002 on "
            "average is none",
        ),
        (
            {"first": make_gap(0.5)},
            None,
            "cause",
            "cause: the first sync of the weights was lost, and the next one arrived: gap 0.5 nats -> 0.001 nats",
        ),
        (
            {"fingerprint": "a is other"},
            None,
            "cause",
            "cause: the engine's fingerprint is not that of the weights that were sent (a is other), though its "
            f"log-probabilities are the trainer's: {AGREES}",
        ),
        (
            {"sigmas": -2.0},
            0.7,
            "cause",
            "cause: the engine draws its tokens at about temperature 0.7, or not from the whole distribution, " + DRAWN,
        ),
        (
            {"sigmas": -2.0},
            1.0,
            "cause",
            "cause: the engine draws its tokens not from the whole distribution, " + DRAWN,
        ),
    ],
    ids=["none", "lost", "fingerprint", "temperature", "truncated"],
)
def test_without_a_gap_the_facts_are_the_verdict(changes, fitted, kind, sentence):
    found = decide(make_facts(**changes), [], temperature=1.0, fitted=fitted)
    assert (found.kind, found.sentence) == (kind, sentence)


def test_weights_that_close_a_gap_are_told_with_the_fingerprint():
    trial = replace(make_trial(0.5, 0.0), change="sent again", means="they were lost")
    for fingerprint, toggle, end in (
        ("a is other", Toggle.WEIGHTS, "; its fingerprint says so too: a is other"),
        (None, Toggle.WEIGHTS, ""),
        ("a is other", Toggle.BATCH, ""),
    ):
        facts = make_facts(second=make_gap(0.5), fingerprint=fingerprint)
        found = decide(facts, [replace(trial, toggle=toggle)], temperature=1.0, fitted=None)
        assert (found.kind, found.cause) == ("cause", toggle)
        assert found.sentence == f"cause: they were lost: gap 0.5 nats -> 0 nats (sent again){end}"


def test_a_gap_that_stays_is_told_with_what_helps_most():
    trials = [make_trial(0.5, 0.4), make_trial(0.5, 0.3), make_trial(0.5, 0.45)]
    found = decide(make_facts(second=make_gap(0.5)), trials, temperature=1.0, fitted=None, hints="it is tied")
    assert (found.kind, found.cause, found.sentence) == (
        "unknown",
        None,
        "cause unknown: mean 0.5, p99 1, largest 1.5, KL 0 nats, and no single toggle closes the gap; the largest part "
        "goes where in float32 (dtype): gap 0.5 nats -> 0.3 nats; it is tied",
    )


# ---------------------------------------------------------------- prices


def test_a_price_is_a_line_below_its_header():
    price = Price(knob="a=1", gap=make_gap(0.001), changed=0.25, tokens_per_s=123.4, memory_gib=1.5)
    assert price.describe().split() == ["a=1", "0.001", "0.003", "0", "25%", "123", "1.50"]
    assert HEADER.split() == ["knob", "mean", "largest", "KL", "changed", "tokens/s", "GiB"]
    assert len(price.describe()) == len(HEADER)
    refused = Price(knob="a=1", refused="no such option")
    assert refused.describe() == "a=1".ljust(40) + " refused: no such option"
    nothing = dict.fromkeys(("gap", "changed", "tokens_per_s", "memory_gib"))
    assert refused.to_json() == {"knob": "a=1", "refused": "no such option"} | nothing


def test_a_sample_has_changed_by_a_token_or_a_log_probability():
    one = sample_of([3, 1, 2], [False, True, True], rollout_logp=[0.0, -1.0, -2.0])
    token = sample_of([3, 1, 4], [False, True, True], rollout_logp=[0.0, -1.0, -2.0])
    logp = replace(one, rollout_logp=np.nextafter(one.rollout_logp, np.float32(-9)))
    assert measure_changed([one, token, logp, one], [one] * 4) == 0.5 and measure_changed([one], [one]) == 0.0


@pytest.mark.parametrize("text", ["max_num_seqs", "=8", ""])
def test_a_knob_without_name_and_value_is_refused(recipe, text):
    cfg = find_target(recipe(), []).loaded.cfg
    said = tell(lambda: read_knobs([text], cfg))
    assert said == f"--knob {text!r} is not of the form NAME=VALUE, such as kv_cache_dtype=fp8"


def test_memory_is_that_of_the_gpu_or_of_all_processes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = measure_memory()
    holding = "held = b'x' * 2**26; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", holding], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 2**26 < measure_memory() - before < 2**27
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 10))
    assert measure_memory() == 7


# ---------------------------------------------------------------- the weights that are looked at


@pytest.mark.parametrize("lora", [False, True])
def test_the_weights_of_a_run_are_its_newest_or_those_it_began_with(recipe, tmp_path, lora):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(recipe({"model.lora": {"r": 2}} if lora else {}), run / "config.yaml")
    began = find_target(str(run), [])
    path = began.loaded.cfg.model.path
    assert began.describe() == f"run {run}; weights: model.path={path}, where the run began"
    (run / "model").mkdir()
    (run / "model" / "config.json").touch()
    saved = find_target(str(run), [])
    # with an adapter the saved folder may hold that alone
    assert saved.loaded.cfg.model.path == (path if lora else str(run / "model")) and saved.checkpoint is None
    assert saved.describe() == (began.describe() if lora else f"run {run}; weights: {run / 'model'}")
    given = recipe()
    assert find_target(given, []).describe() == f"recipe {given}; weights: model.path={path}"


def test_a_network_that_does_not_loop_back_is_told(recipe, monkeypatch):
    cfg = find_target(recipe(), []).loaded.cfg

    def refuse(address: str) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(setup_checks, "listen_at", refuse)
    assert tell(lambda: describe_network(cfg)) == (
        "a port of 127.0.0.1 cannot be opened or reached (Too many open files), and the processes of a run meet there: "
        "look at the firewall, and at `ulimit -n`"
    )
    monkeypatch.setattr(setup_checks, "list_interfaces", lambda: {"eth0": ["10.0.0.7"]})
    said = "no network interface has the address 127.0.0.1: bring it up (ip link set lo up)"
    assert tell(lambda: describe_network(cfg)) == said
