"""Weights & Biases tracker, online or offline (in the run folder's wandb/, for `wandb sync`). Samples are tables."""

from __future__ import annotations

import netrc
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from configs.tracking_schema import TrackingConfig
from core.errors import quote
from core.timing.deadlines import TRACKER_FINISH_TIMEOUT_S
from driver.records.trackers.base import Identity, Outcome, TrackedRun, Tracker

SERVER = "https://api.wandb.ai"
MODES = {"": "online", "run": "online", "dryrun": "offline"}
"""Deprecated names of the modes."""
LONGEST_PROJECT, REFUSED_IN_PROJECT = 128, frozenset("/\\#?%:")
"""W&B's rules of a project's name. A run would lose its tracker in the first step."""
QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
"""Disables error reports to W&B, and output between our lines."""


class Wandb(Tracker):
    """Tracker that writes a run of a project."""

    packages: ClassVar = ("wandb",)
    install: ClassVar = "run `make install`"

    @classmethod
    def refuse(cls, settings: TrackingConfig) -> str | None:
        mode, project = choose_mode(settings), choose_project(settings)
        if len(project) > LONGEST_PROJECT or not REFUSED_IN_PROJECT.isdisjoint(project):
            return (
                f"W&B takes no project {quote(project)}: give tracking.wandb_project, or the variable WANDB_PROJECT, "
                f"at most {LONGEST_PROJECT} characters, and none of {' '.join(sorted(REFUSED_IN_PROJECT))} (a team is "
                "tracking.wandb_entity)"
            )
        if mode not in ("online", "offline"):
            return f"wandb is named, and the variable WANDB_MODE is {mode}: unset it, or leave wandb out"
        if mode == "online" and not has_key(os.environ.get("WANDB_BASE_URL") or SERVER):
            return (
                "wandb has no API key: set the variable WANDB_API_KEY, run `wandb login`, or set tracking.wandb_mode "
                "to offline"
            )
        return None

    def start(self, run: TrackedRun) -> Identity | None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import wandb

        self.wandb: Any = wandb  # half typed
        self.offline = choose_mode(run.settings) == "offline"
        settings, project = run.settings, choose_project(run.settings)
        # An id is known only within its project, so a run of another project is not continued.
        where = f"{settings.wandb_entity or os.environ.get('WANDB_ENTITY') or ''}/{project}"
        previous = run.previous.id if run.previous is not None and run.previous.where == where else None
        self.run: Any = self.wandb.init(
            project=project,
            entity=settings.wandb_entity,
            # A continued run keeps its name.
            name=None if previous else run.name,
            group=settings.group,
            tags=settings.tags or None,
            notes=settings.notes,
            id=previous,
            resume="allow" if previous else None,
            dir=str(run.folder),
            mode=choose_mode(settings),
            config=run.config,
            # A resumed run may have other settings than the run that it continues.
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",  # the terminal is ours
                silent=True,
                disable_git=True,  # an address of git may hold a token; our facts have the commit
                disable_code=True,
                save_code=False,
                finish_timeout=TRACKER_FINISH_TIMEOUT_S,
            ),
        )
        self.run.config.update({"facts": run.facts, "run_folder": str(run.folder)}, allow_val_change=True)
        # a name of its own for each process: a resumed run may have another recipe
        recipe = wandb.Artifact(re.sub(r"[^\w.-]", "-", f"recipe-{run.name}")[:128], type="recipe")
        recipe.add_file(str(run.folder / "config.yaml"))
        self.run.log_artifact(recipe)
        # with our own step a resumed run may log again what the first one logged after its checkpoint
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        return Identity(id=self.run.id, where=where)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.run.log({"step": step, **values})

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        table = self.wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({"step": step, "samples": table})

    def finish(self, outcome: Outcome) -> None:
        self.run.summary.update({"exit_reason": outcome.exit_reason, "model": outcome.model})
        if self.offline:
            self.farewell = f"wandb: offline; `wandb sync {Path(self.run.dir).parent}` sends this run"
        self.run.finish(exit_code=int(outcome.status != "finished"))
        self.wandb.teardown()  # its process ends here, and not with the processes of the run

    def abandon(self) -> None:
        self.wandb.teardown()  # what it would do when Python ends, where it would wait, or print a traceback


def choose_mode(settings: TrackingConfig) -> str:
    """Return online, offline, or another value of the variable WANDB_MODE."""
    given = settings.wandb_mode or os.environ.get("WANDB_MODE") or ""
    return MODES.get(given, given)


def choose_project(settings: TrackingConfig) -> str:
    """Return the name of the project."""
    return settings.wandb_project or os.environ.get("WANDB_PROJECT") or "feynrl"


def has_key(server: str) -> bool:
    """Tell whether W&B would find an API key; otherwise it would prompt in the terminal."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    files = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        # without a file that can be read, W&B could not read it either
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(file.expanduser())).authenticators(urlsplit(server).netloc):
                return True
    return False
