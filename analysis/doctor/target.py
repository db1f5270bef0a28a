"""Target of the doctor: a recipe, or a run folder with the newest weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.load import read_recipe, read_yaml
from configs.schema import RLConfig, SLConfig
from core.errors import UserError, quote
from driver.checkpoint import list_checkpoints
from driver.load_recipe import Loaded, load_config_of_run, load_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Configuration, and location of the weights."""

    loaded: Loaded[Any]
    given: str
    weights: str
    """Source of the weights, in words."""
    checkpoint: Path | None = None
    """Checkpoint with the examined weights; None examines those of model.path."""

    def describe(self) -> str:
        return f"{self.given}; weights: {self.weights}"


def find_target(given: str, overrides: Sequence[str]) -> Target:
    """Read the recipe, or the configuration of a run. Raises UserError that names the file or the key, and the fix."""
    folder = Path(given)
    if not folder.is_dir():
        cls = SLConfig if is_supervised(read_recipe(given)) else RLConfig
        loaded: Loaded[Any] = load_recipe(cls, given, overrides)
        return Target(loaded=loaded, given=f"recipe {given}", weights=f"model.path={loaded.cfg.model.path}")
    file = folder / "config.yaml"
    if not file.is_file():
        raise UserError(f"{quote(given)} is no run folder, it has no config.yaml: name a run folder or a recipe")
    cls = SLConfig if is_supervised(read_yaml(str(file))) else RLConfig
    # a resumed run is looked at as it is now, and not to be resumed once more
    loaded = load_config_of_run(cls, file, ["resume=null", *overrides])
    return _with_newest_weights(loaded, folder)


def is_supervised(raw: dict[str, Any]) -> bool:
    """Return True for a recipe of main_sl.py, which has no engine and no groups.

    >>> is_supervised({"rows_per_step": 5}), is_supervised({"rollout": {}, "steps": 2})
    (True, False)
    """
    return not {"rollout", "reward", "groups_per_step", "group_size"} & raw.keys()


def _with_newest_weights(loaded: Loaded[Any], folder: Path) -> Target:
    """Take the newest checkpoint; without one the model that the run saved; without that the one it began with."""
    given, model = f"run {folder}", folder / "model"
    if found := list_checkpoints(folder / "checkpoints"):
        newest = found[-1]
        where = f"the checkpoint after step {newest.state.steps_done}"
        return Target(loaded=loaded, given=given, weights=where, checkpoint=newest.folder)
    # with LoRA the saved folder may hold the adapter alone
    if (model / "config.json").is_file() and loaded.cfg.model.lora is None:
        cfg = loaded.cfg.model_copy(update={"model": loaded.cfg.model.model_copy(update={"path": str(model)})})
        return Target(loaded=replace(loaded, cfg=cfg), given=given, weights=str(model))
    return Target(loaded=loaded, given=given, weights=f"model.path={loaded.cfg.model.path}, where the run began")
