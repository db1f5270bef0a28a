"""Folders that are no snapshot of a step: what they lack, and which folder is meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.capture.snapshot import read_snapshot
from analysis.capture.tokens import MANIFEST, captured_steps, read_captured, snapshot_folder
from unit_tests.helpers.sentences import tell


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
