"""A full disk, on a small file system: the sentence says so, and what can still be written is."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import main_sl
from core.errors import RunStopped
from core.text.atomic_write import replacing, write_whole
from core.types.samples import Prompt, make_sample
from driver.records.run_folder import RESERVE, RunFolder
from driver.records.sample_files import write_samples
from driver.records.trackers.jsonl import Jsonl
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import folder_of

KIB = 1024


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    (there := tmp_path / "disk").mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(there)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield there
    subprocess.run(["umount", "-l", str(there)], check=True)


def fill(disk: Path, *, leave: int = 0, name: str = "ballast") -> Path:
    """Fill the disk but for some bytes."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    ballast = disk / name
    ballast.write_bytes(bytes(free - leave))
    return ballast


def say_full(needed: str, room: str) -> str:
    return rf"cannot be written: the disk is full: about {needed} MiB are needed, and there was room for {room} MiB"


@pytest.mark.parametrize(
    ("changes", "leave", "path"),
    [({"checkpoint.every": 1}, 900, r"checkpoints/step_00001.partial"), ({}, 300, "model.partial")],
    ids=["checkpoint", "model"],
)
def test_a_run_on_a_full_disk_says_so_and_how_much_it_needs(recipe, disk, tmp_path, changes, leave, path):
    fill(disk, leave=leave * KIB)
    (tmp_path / "runs").symlink_to(disk)
    code, err = run_here(main_sl, "--config", recipe({**changes, "save_to": str(tmp_path / "copy")}, kind="sl"))
    # 144,576 parameters of four bytes, and three numbers of the optimizer for each
    needed = "2.21" if changes else "0.55"
    assert code == 1 and err.count("\n") == 1 and re.search(path + " " + say_full(needed, r"0\.\d+"), err), err
    folder = folder_of(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit_reason"].startswith("stopped: ") and "the disk is full" in summary["exit_reason"]
    assert not [*folder.rglob("*.partial")] and not (folder / RESERVE).exists()
    assert (tmp_path / "copy" / "config.json").is_file() == (not changes), "the other disk has room"


def a_sample(text: str):
    return make_sample(
        prompt=Prompt(id="p", messages=[]),
        token_ids=np.arange(3),
        action_mask=[False, True, True],
        rollout_logp=[0.0, -1.0, -1.0],
        versions=[-1, 0, 0],
        completion=text,
    )


def test_samples_and_metrics_that_fit_a_full_disk_are_whole_lines(disk):
    log = Jsonl()
    log.path, log.file = disk / "metrics.jsonl", (disk / "metrics.jsonl").open("ab", buffering=0)
    log.metrics(0, {"a": 1.0})
    fill(disk, leave=40 * KIB)
    with pytest.raises(
        RunStopped, match="step_00001.jsonl " + say_full("0.13", "0.04") + "; the steps before are logged"
    ):
        write_samples(disk / "step_00001.jsonl", [[a_sample(letter * 15_000) for letter in "abcdefghi"]])
    kept = [json.loads(line)["completion"][0] for line in (disk / "step_00001.jsonl").read_text().splitlines()]
    assert kept == ["a", "b"]
    fill(disk, name="more")
    with pytest.raises(RunStopped, match=r"metrics\.jsonl cannot be written: the disk is full"):
        log.metrics(1, {"long": 1.0} | {f"x{i}": 1.0 for i in range(500)})
    log.finish(None)  # type: ignore[arg-type]
    assert [json.loads(line) for line in log.path.read_text().splitlines()] == [{"a": 1.0}]


def test_the_summary_has_its_room_and_leaves_no_part(disk):
    folder = RunFolder(str(disk), "x", {"a": 1})
    ballast = fill(disk)
    folder.write_summary(exit_reason="stopped: the disk is full")
    assert json.loads((folder.path / "summary.json").read_text())["exit_reason"].startswith("stopped")
    with ballast.open("ab") as file, pytest.raises(OSError, match="No space"):
        while True:
            os.write(file.fileno(), bytes(KIB))
    for write in (lambda: write_whole(folder.path / "a.json", "x" * 10**5), lambda: _write_by_name(folder.path / "b")):
        with pytest.raises(RunStopped, match="the disk is full"):
            write()
    assert not [*disk.rglob("*.partial")]
    assert "stopped" in (folder.path / "summary.json").read_text(), "the one before stays"


def _write_by_name(path: Path) -> None:
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(bytes(10**6))


def test_what_is_written_when_the_body_fails_is_removed(tmp_path):
    with pytest.raises(KeyError), replacing(tmp_path / "a") as partial:
        partial.write_text("half")
        raise KeyError("a bug")
    assert [*tmp_path.iterdir()] == []
