"""Resume a run automatically after the death of a process: keys on_failure and max_resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from configs.schema import RunConfig
from core.errors import ProcessDied
from core.text.plain_text import print_line
from driver.checkpoint import list_checkpoints
from driver.load_recipe import Loaded

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")


def run_with_resumes(attempt: Callable[[Loaded[C]], T], loaded: Loaded[C]) -> T:
    """Run `attempt`; after the death of a process, resume from the newest checkpoint if the recipe allows it.

    Raises ProcessDied if the recipe does not allow it, or after max_resumes.
    """
    resumes = loaded.cfg.max_resumes if loaded.cfg.on_failure == "resume" else 0
    for n in range(1, resumes + 1):
        try:
            return attempt(loaded)
        except ProcessDied as death:
            # Without a new checkpoint, resume again from where this attempt began.
            newest = _find_newest(death) or loaded.cfg.resume
            where = newest or "the start, because there is no checkpoint yet"
            print_line(f"stopped: {death}")
            print_line(f"on_failure=resume: resuming from {where} ({n} of max_resumes={resumes})")
            loaded = replace(loaded, cfg=loaded.cfg.model_copy(update={"resume": newest}))
    # The last attempt is outside the loop, so that its error is raised.
    return attempt(loaded)


def _find_newest(death: ProcessDied) -> str | None:
    """Return the newest complete checkpoint before the last step. The last step's checkpoint cannot be resumed."""
    found = list_checkpoints(death.run_folder / "checkpoints", say=print_line) if death.run_folder is not None else []
    return next((str(c.folder) for c in reversed(found) if c.state.steps_done < death.steps), None)
