"""Create a run's trackers, their facts about the run, and their tables of samples."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from configs.eval_schema import EvalConfig
from configs.load import flatten_settings
from configs.schema import RunConfig
from configs.tracking_schema import TrackingConfig
from core.text.secrets import hide_secrets, hide_settings
from core.types.samples import Group
from driver.checkpoint import Checkpoint
from driver.records.git_state import describe_git
from driver.records.run_folder import list_packages
from driver.records.sample_files import make_sample_record
from driver.records.sample_text import join_messages
from driver.records.trackers import load_trackers
from driver.records.trackers.base import TrackedRun
from driver.records.trackers.hub import Trackers, find_previous
from driver.start.devices import count_gpus

GPU_FILES = Path("/proc/driver/nvidia/gpus")


def make_trackers(
    cfg: RunConfig | EvalConfig, folder: Path, say: Callable[[str], None], checkpoint: Checkpoint | None = None
) -> Trackers:
    """Create the recipe's trackers, not yet started; after a resume they continue the previous run.

    checkpoint: checkpoint to resume. An evaluation has no trackers, only result files.
    """
    names, settings = (
        ([], TrackingConfig.model_validate({})) if isinstance(cfg, EvalConfig) else (cfg.trackers, cfg.tracking)
    )
    classes = load_trackers(names)
    run = TrackedRun(
        name=folder.name,
        folder=folder,
        # Without secrets: trackers send the configuration to a server.
        config=flatten_settings(hide_settings(cfg.model_dump(mode="json"))),
        # Without another tracker nobody reads them, and reading them starts git.
        facts=describe_machine() | describe_git() if set(names) - {"jsonl"} else {},
        settings=settings,
        first_step=0 if checkpoint is None else checkpoint.state.steps_done,
        previous=None,
    )
    return Trackers(
        classes,
        run,
        previous={} if checkpoint is None else find_previous(checkpoint.folder.parent.parent),
        say=say,
    )


def describe_machine() -> dict[str, str]:
    """Return package versions, and the hardware of the driver's machine."""
    import psutil

    return {
        "python": platform.python_version(),
        **{f"package.{name}": version for name, version in list_packages().items()},
        "hardware.machine": f"{platform.system()} {platform.machine()}",
        "hardware.cpu_cores": str(os.cpu_count()),
        "hardware.memory_gib": f"{psutil.virtual_memory().total / 2**30:.1f}",
        "hardware.gpus": str(count_gpus()),
        **({"hardware.gpu": names} if (names := describe_gpus()) else {}),
    }


def describe_gpus() -> str:
    """Return the GPU models, read from the kernel driver's files so that CUDA does not start in this process."""
    files = sorted(GPU_FILES.glob("*/information"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return ", ".join(line.partition(":")[2].strip() for line in lines if line.startswith("Model"))


def make_sample_rows(step: int, groups: list[Group], n: int) -> list[dict[str, Any]]:
    """Return the first n samples as rows of a table, with strings and numbers only."""
    first = islice(((i, s) for i, group in enumerate(groups) for s in group), n)
    records = [make_sample_record(s, i) for i, s in first]
    return [
        {
            "step": step,
            "group": record["group"],
            "prompt": join_messages(record["prompt"]),
            "completion": record["completion"],
            "reward": record["reward"],
            "advantage": record["advantage"],
            "stop": record["stop"],
            "new_tokens": record["new_tokens"],
            # An error may quote an address with its password, and a tracker sends rows to a server.
            "failure": hide_secrets(record["failure"]),
        }
        for record in records
    ]
