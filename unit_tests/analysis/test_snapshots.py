"""Snapshots of whole runs: with Ray, DeepSpeed and vLLM, and of a run that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from analysis.capture.recompute import replay
from analysis.capture.snapshot import read_snapshot
from analysis.capture.step_recorder import fingerprint_weights
from analysis.capture.tokens import MANIFEST, SNAPSHOTS, captured_steps, read_captured, snapshot_folder
from analysis.capture.weights import load_checkpoint
from core.errors import UserError
from core.metrics import find_metric
from unit_tests.helpers.runs import ROOT, SEVENS, file_of, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.verify
def test_one_process_reproduces_two_deepspeed_ranks_and_the_shadow_agrees(trained, tmp_path):
    changes = {
        "backend": "ray",
        "rollout.engine": "vllm",
        "rollout.kv_cache_gib": 0.1,
        "trainer": {"ranks": 2, "zero_stage": 2, "lr": 1e-3},
        "updates_per_step": 2,
        "reward.function": file_of(tmp_path / "sevens.py", SEVENS),
        "capture": {"every": 1, "weights": True},
        "checkpoint.every": 1,
        "compare_losses": [{"as": "twin", "name": "grpo"}, "cispo"],
    }
    folder = trained(changes)
    assert captured_steps(folder) == [0, 1]
    for step, metrics in enumerate(metrics_of(folder)):
        assert all(find_metric(name) for name in metrics), metrics
        assert {"compare_losses/cispo/capped", "time/capture_s"} <= metrics.keys()
        for name in ("loss", "clip_frac_high", "approx_kl", "mismatch/kl", "mismatch/ess"):
            assert metrics[f"compare_losses/twin/{name}"] == metrics[f"train/{name}"], name
        found = [replay(snapshot_folder(folder, step), ["cispo"] if u else [], update=u) for u in range(2)]
        assert all(f.difference is not None and f.difference <= 1e-6 for f in found), found
        norms = [f.recomputed["grad_norm"] for f in found]
        assert sum(norms) / 2 == pytest.approx(metrics["train/grad_norm"], rel=1e-6)
    snapshot = read_snapshot(snapshot_folder(folder, 1))
    of_checkpoint = load_checkpoint(snapshot, folder / "checkpoints" / "step_00001")
    assert fingerprint_weights(of_checkpoint) == snapshot.manifest.updates[0].fingerprints, "of both ranks' shards"
    captured = read_captured(folder, 1)
    assert len(captured) == 16 and all("".join(c.pieces) for c in captured)
    assert all(np.isfinite(c.columns["logp_difference"]).any() for c in captured)
    gaps = [float(np.nanmax(np.abs(c.columns["logp_difference"]))) for c in captured]
    first = [c.group % 2 == 0 for c in captured]
    assert max(gap for gap, f in zip(gaps, first, strict=True) if f) < 1e-4, "trained on as it was sampled"
    assert min(gap for gap, f in zip(gaps, first, strict=True) if not f) > 1e-3, "the first update came in between"
    assert all(np.nanmax(np.abs(np.log(c.columns["ratio"]) - c.columns["logp_difference"])) < 1e-4 for c in captured)
    assert len(snapshot.manifest.updates[0].bins) == 2


@pytest.mark.one_core
def test_a_snapshot_that_a_killed_run_did_not_complete_is_ignored(recipe, tmp_path):
    """The run is held at the second file of a snapshot by a pipe that nobody reads, and is killed there."""
    command = [sys.executable, "main_rl.py", "--config", recipe({"capture.every": 30, "steps": 1000})]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait_for(pattern: str) -> Path:
        while not (found := [*(tmp_path / "runs").glob(f"*/{pattern}")]):
            assert run.poll() is None, "the run ended by itself"
            time.sleep(0.02)
        return found[0]

    try:
        home = wait_for(f"{SNAPSHOTS}/step_00000/{MANIFEST}").parent.parent.parent
        snapshot_folder(home, 30).mkdir()
        os.mkfifo(snapshot_folder(home, 30) / "batch.jsonl")
        wait_for(f"{SNAPSHOTS}/step_00030/batch.npz")
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert captured_steps(home) == [0] and replay(snapshot_folder(home, 0), []).is_reproduced
    for read in (lambda: read_captured(home, 30), lambda: replay(snapshot_folder(home, 30), [])):
        with pytest.raises(UserError, match=r"no complete snapshot|the run ended before it was complete"):
            read()
