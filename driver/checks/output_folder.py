"""Folder `save_to`: checked at the start, and replaced atomically at the end."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from algs.base import Algorithm
from algs.teachers import list_paths
from configs.schema import RLConfig, RunConfig
from core.errors import RunStopped, UserError, writing
from core.text.atomic_write import PARTIAL
from driver.checks.weight_store import check_weight_store
from modeling.saved_model import SavedModelWrong

MARKER = "feynrl.json"
"""File in every model folder saved by a run. Folders without it are never replaced."""


def check_output_folders(cfg: RunConfig, alg: Algorithm) -> None:
    """Raise UserError if the final model could not be saved to `save_to`, or would overwrite something else.

    So does a folder for weights that cannot be used.
    """
    check_weight_store(cfg)
    if cfg.save_to is None:
        return
    opponent = cfg.rollout.opponent_folder if isinstance(cfg, RLConfig) else None
    reads = [cfg.model.path, *list_paths(alg.teachers), *([] if opponent is None else [opponent])]
    key, folder = f"save_to={cfg.save_to}", Path(cfg.save_to).absolute()
    # Saving would replace the model that a resumed run starts from.
    if used := [path for path in reads if folder.resolve() == Path(path).resolve()]:
        raise UserError(f"{key} is a model that this run reads ({used[0]}): name another folder")
    if Path(cfg.run_dir).resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{key} holds run_dir={cfg.run_dir}: name a folder of its own")
    # At the end the folder is replaced by a new one, and neither of these can be.
    if folder.is_symlink():
        raise UserError(f"{key} is a link: name the folder that it leads to, {folder.resolve()}")
    if os.path.ismount(folder):
        raise UserError(f"{key} is a mount point: name a folder in it, such as {folder / 'model'}")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{key} is a file: name a folder")
    if folder.exists() and (held := sorted(os.listdir(folder))) and MARKER not in held:
        raise UserError(
            f"{key} holds {held[0]}, and no run of FeynRL saved it: name another folder, or empty this one first"
        )
    # The folder may not exist yet, so its nearest existing parent decides.
    there = next(parent for parent in folder.parents if parent.exists())
    if not there.is_dir():
        raise UserError(f"{key} lies below {there}, which is a file: name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{key}: {there} cannot be written to: name another folder")


def check_run_dir(run_dir: str) -> None:
    """Raise UserError if no run folder can be made in `run_dir`, or in its nearest parent where it does not exist."""
    folder = Path(run_dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        # tried, because the rights of a folder do not say all
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise UserError(
            f"run_dir={run_dir}: no folder can be made in {there} ({error.strerror}): name another folder, or make room"
        ) from error


async def save_in_one_step(folder: Path, write: Callable[[Path], Any], facts: dict[str, Any]) -> None:
    """Write a model to a temporary folder with `write`, add the marker, and rename it to `folder`.

    The temporary folder is removed if that fails, but not for SavedModelWrong, which names it.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    with writing(folder, meaning="the model is not saved there; a checkpoint (checkpoint.every) would have kept it"):
        if partial.exists():
            shutil.rmtree(partial)
        try:
            await write(partial)
            (partial / MARKER).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        except SavedModelWrong:
            raise  # most of what was trained is in the folder, and may be all that is left of it
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)  # it may be what filled the disk
            raise
        # A folder cannot be replaced atomically, but the complete new folder exists before the old one is removed.
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)


async def write_each(writes: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Call all, and raise the first failure: the disk of one folder may be full, and that of another not."""
    failures: list[RunStopped] = []
    for write in writes:
        try:
            await write()
        except RunStopped as error:
            failures.append(error)
    if failures:
        raise failures[0]
