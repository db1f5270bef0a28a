"""Folders that are no snapshot of a step, or whose weights or losses are not the step's: what they lack, as told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from analysis.capture.batch_file import read_batch, write_batch
from analysis.capture.recompute import replay
from analysis.capture.snapshot import read_snapshot
from analysis.capture.tokens import MANIFEST, captured_steps, read_captured, snapshot_folder
from analysis.capture.weights import load_adapter, make_trainer
from core.errors import RunStopped
from unit_tests.helpers.captured_step import Step, rewarded
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.runs import file_of
from unit_tests.helpers.sentences import tell

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose step 7 is captured, and step 9 not completely."""
    for step in (3, 7, 9, 123_456):
        snapshot_folder(tmp_path, step).mkdir(parents=True)
    for step in (3, 7):
        (snapshot_folder(tmp_path, step) / MANIFEST).write_text("{}")
    (tmp_path / "snapshots" / "step_7").mkdir()
    (tmp_path / "snapshots" / "step_7" / MANIFEST).touch()
    return tmp_path


def test_a_folder_that_is_no_snapshot_is_told_from_one_that_was_meant(run: Path):
    named = f"name one of the 2 in {run / 'snapshots'}, such as step_00007"
    for folder, why in (
        (run / "nowhere", "there is no such folder"),
        (run, named),
        (run / "snapshots", named),
        (run / "snapshots" / "step_00009", "it has no snapshot.json, so the run ended before it was complete"),
        (run / "snapshots" / "step_00009" / "x", "there is no such folder"),
    ):
        assert tell(lambda folder=folder: read_snapshot(folder)) == f"{folder} is not a snapshot: {why}"
    (run / "other").mkdir()
    why = "it has no snapshot.json; a run keeps snapshots with capture.every"
    assert tell(lambda: read_snapshot(run / "other")) == f"{run / 'other'} is not a snapshot: {why}"


def test_the_captured_steps_of_a_run_are_those_that_are_complete(run: Path):
    assert captured_steps(run) == [3, 7] and captured_steps(run / "nowhere") == []
    (snapshot_folder(run, 123_456) / MANIFEST).write_text("{}")
    assert captured_steps(run) == [3, 7, 123_456]
    file = snapshot_folder(run, 9) / MANIFEST
    assert tell(lambda: read_captured(run, 9)) == f"{run} has no complete snapshot of step 9: there is no {file}"


def test_a_snapshot_that_is_damaged_or_of_another_format_is_one_sentence(run: Path):
    folder = snapshot_folder(run, 7)
    (folder / "a.npz").write_bytes(b"123")
    for manifest, said in (
        ({"format": 2}, f"{folder}: the snapshot has format 2, and this version reads 1"),
        ({}, f"the snapshot {folder} is damaged: 'format'"),
        ({"format": 1}, f"the snapshot {folder} is damaged: 'sizes'"),
        *(
            (
                {"format": 1, "sizes": {"a.npz": 3, name: size}},
                f"the snapshot {folder} is damaged: {name} is missing or has another size than {size}",
            )
            for name, size in (("a.npz", 4), ("a.npz", 2), ("b.npz", 3))
        ),
        ({"format": 1, "sizes": {"a.npz": 3}}, f"the snapshot {folder} is damaged: 'run'"),
    ):
        (folder / MANIFEST).write_text(json.dumps(manifest))
        assert tell(lambda: read_snapshot(folder)) == said
    (folder / MANIFEST).write_text("{")
    assert tell(lambda: read_snapshot(folder)).startswith(f"the snapshot {folder} is damaged: Expecting property name")


@pytest.fixture
def capture(recipe, tmp_path):
    """Return the snapshot of a step, captured with these changes of the recipe."""

    def make(**changes: Any) -> Path:
        made = Step(recipe({"rollout.max_new_tokens": 24, "capture": {"every": 1}} | changes), tmp_path / "run")
        made.train(rewarded(some_groups(2)))
        return snapshot_folder(made.home, 0)

    return make


def change_manifest(folder: Path, change: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_files_of_a_snapshot_that_do_not_fit_each_other_are_told(capture, tmp_path):
    folder = capture()
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    lines[3]["pieces"].pop()
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    why = f"samples.jsonl and tokens.npz have other lengths for sample {lines[3]['sample']}"
    assert tell(lambda: read_captured(folder.parent.parent, 0)) == f"the snapshot {folder} is damaged: {why}"
    write_batch(tmp_path, some_groups(3, 2))
    with np.load(tmp_path / "batch.npz") as file:
        arrays = dict(file)
    sizes, lengths = arrays["group_sizes"], arrays["lengths"]
    said = "batch.jsonl and batch.npz hold other numbers of samples"
    for wrong in ({"group_sizes": sizes[:-1]}, {"group_sizes": sizes + 1}, {"lengths": lengths[:-1]}):
        np.savez(tmp_path / "batch.npz", **arrays | wrong)
        assert tell(lambda: read_batch(tmp_path), ValueError) == said


DETACHED = """
from algs.grpo import GRPO

class Detached(GRPO):
    def loss(self, policy, tokens):
        loss, metrics = super().loss(policy, tokens)
        return loss.detach(), metrics
"""


def test_a_loss_that_a_replay_cannot_compare_is_refused(capture, tmp_path):
    folder = capture()
    detached = file_of(tmp_path / "detached.py", DETACHED)
    assert tell(lambda: replay(folder, [detached])) == (
        "Detached: the loss has no gradient: compute it from policy.logp"
    )
    assert tell(lambda: replay(folder, ["grpo", "echo", "luffy"])) == (
        "--alg: echo has several terms, which a replay cannot compare: leave it out"
    )


def test_weights_that_were_overwritten_since_the_step_are_told(capture):
    folder = capture()
    path = read_snapshot(folder).manifest.run.model["path"]

    def change(manifest: Any) -> None:
        sums = manifest["updates"][0]["fingerprints"]["whole"]
        sums[min(sums)] += 1

    change_manifest(folder, change)
    assert tell(lambda: replay(folder, [])) == (
        f"{folder} does not hold its weights, and they were not found; looked in {path} (1 of 21 tensors differ, such "
        "as lm_head.weight): name the folder with --model, or capture with capture.weights=true"
    )


def test_a_run_of_a_gpu_with_its_own_kernel_is_replayed_on_a_cpu(capture):
    folder = capture()
    change_manifest(folder, lambda manifest: manifest["run"]["model"].update(attention="flash_attention_2"))
    assert replay(folder, []).is_reproduced


def test_a_step_whose_rows_were_laid_out_otherwise_is_split_anew(capture):
    folder = capture()

    def change(manifest: Any) -> None:
        layout = manifest["run"]["layout"]
        layout["padded"] = not layout["padded"]
        manifest["updates"][0]["bins"] = [[[0]]]  # of one sample alone, which is not the step

    change_manifest(folder, change)
    assert replay(folder, []).is_reproduced


def test_an_adapter_that_is_not_the_runs_is_refused(capture, tmp_path):
    folder = capture(**{"model.lora": {"r": 4}, "capture": {"every": 1, "weights": True}})
    trainer, other = make_trainer(read_snapshot(folder)), tmp_path / "other"
    shutil.copytree(folder / "weights" / "update_0", other)
    file = other / "adapter_model.safetensors"
    saved = load_file(file)
    [first, second, *_] = sorted(saved)
    for wrong, name in (
        ({n: t for n, t in saved.items() if n != second}, second),
        (saved | {n: saved[n][:1].clone() for n in (second, first)}, first),
    ):
        save_file(wrong, file)
        said = f"--model {other} does not hold the adapter of this run: {name} does not fit"
        assert tell(lambda: load_adapter(trainer, other, key="--model")) == said
    file.unlink()
    said = tell(lambda: load_adapter(trainer, other, key="--model"))
    assert said == f"--model {other}: adapter_model.safetensors cannot be read (No such file or directory: {file})"


def test_a_step_that_cannot_be_kept_leaves_the_reason_of_the_stop(recipe, tmp_path):
    loss = """
from algs.grpo import GRPO

class Endless(GRPO):
    def loss(self, policy, tokens):
        loss, metrics = super().loss(policy, tokens)
        return loss * float("inf"), metrics
"""
    changes = {"alg": {"file": file_of(tmp_path / "endless.py", loss)}, "capture.on": ["non_finite"]}
    made = Step(recipe(changes | {"trainer.max_skipped_updates": 1}), tmp_path / "run")
    made.home.mkdir()
    (made.home / "snapshots").touch()
    with pytest.raises(RunStopped, match="1 updates in a row"):
        made.train(rewarded(some_groups(2)))
    kept = f"{snapshot_folder(made.home, 0)} cannot be written: Not a directory"
    assert made.said == [
        f"WARNING: the step could not be kept: {kept}; the snapshot is incomplete, and will not be read"
    ]
