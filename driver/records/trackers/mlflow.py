"""MLflow tracker: tracking server or local store. Samples are tables (Artifacts, and MLflow's table view)."""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from typing import Any, ClassVar

from configs.tracking_schema import TrackingConfig
from core.text.plain_text import shorten_middle
from core.text.secrets import hide_secrets
from driver.records.trackers.base import Identity, Outcome, TrackedRun, Tracker

PER_REQUEST = 100
"""MLflow's limit of parameters or tags per request; the limit for metrics is higher."""
LONGEST_PARAM, LONGEST_TAG = 5950, 7950
"""MLflow's limits of values are 6000 and 8000 characters. Beyond them it cuts the end, or refuses the request."""
LONGEST_EXPERIMENT = 500
"""MLflow's limit of a name, in characters."""
TABLES_TAG, MOST_TABLES = "mlflow.loggedArtifacts", 100
"""Tag that lists the files MLflow shows as tables; a tag's length allows about 140 of ours. All files are kept."""
NO_PATH = re.compile(r"^\.\.|(?:^|(?<=/))(?:\.\.?(?=/|$)|/)|/$")
"""Parts of a name, as of a path, for which MLflow refuses the whole request: empty ones, `.` and `..`."""
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""MLflow's own defaults retry for ten minutes, during which a missing server is not reported."""
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Disables telemetry, printed addresses, and complaints about missing git."""


class Mlflow(Tracker):
    """Tracker that writes a run of an experiment."""

    packages: ClassVar = ("mlflow",)
    install: ClassVar = "run `make install`"

    @classmethod
    def refuse(cls, settings: TrackingConfig) -> str | None:
        experiment = choose_experiment(settings)
        if len(experiment) <= LONGEST_EXPERIMENT:
            return None
        return (
            f"MLflow takes at most {LONGEST_EXPERIMENT} characters as the name of an experiment: shorten "
            f"tracking.mlflow_experiment, or the variable MLFLOW_EXPERIMENT_NAME, which has {len(experiment)}"
        )

    def start(self, run: TrackedRun) -> Identity | None:
        for name, value in (PATIENCE | QUIET).items():
            # Before the import, because some are read then; values that the user has set are kept.
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self.tables: deque[dict[str, str]] = deque(maxlen=MOST_TABLES)
        uri = run.settings.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or None
        local = None if uri else run.folder.parent
        self.client = MlflowClient(uri or f"sqlite:///{run.folder.parent / 'mlflow.db'}")
        # Without secrets, because the identity is stored in the run folder.
        where = hide_secrets(self.client.tracking_uri)
        previous = run.previous.id if run.previous is not None and run.previous.where == where else None
        self.run_id = self._continue_run(previous) if previous else None
        if self.run_id is None:
            artifacts = f"file://{local / 'mlflow_artifacts'}" if local else None
            self.run_id = self._begin_run(choose_experiment(run.settings), run.name, artifacts)
        self._describe(run)
        return Identity(id=self.run_id, where=where)

    def _continue_run(self, run_id: str) -> str | None:
        """Return the run to continue; None if the server has deleted it."""
        from mlflow.exceptions import MlflowException

        try:
            found = self.client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if found.info.lifecycle_stage != "active":
            return None
        self.client.update_run(run_id, status="RUNNING")
        return run_id

    def _begin_run(self, experiment: str, name: str, artifacts: str | None) -> str:
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(experiment)
        if found is None:
            try:
                experiment_id = self.client.create_experiment(experiment, artifacts)
            except MlflowException:  # another run has made it meanwhile
                found = self.client.get_experiment_by_name(experiment)
                if found is None:
                    raise
                experiment_id = found.experiment_id
        else:
            experiment_id = found.experiment_id
        return self.client.create_run(experiment_id, run_name=name).info.run_id

    def _describe(self, run: TrackedRun) -> None:
        """Write the configuration as parameters, the recipe as an artifact, and facts, group, tags and notes as tags.

        MLflow parameters are immutable, so what a resumed run changes are tags, which move on with every resume.
        """
        from mlflow.entities import Param, RunTag

        assert self.run_id is not None
        found = self.client.get_run(self.run_id).data
        there = found.params
        values = {make_name(key): shorten_middle(str(value), LONGEST_PARAM) for key, value in run.config.items()}
        params = [Param(key, value) for key, value in values.items() if key not in there]
        changed = {
            f"resumed.{key}": value
            for key, value in values.items()
            if key in there and found.tags.get(f"resumed.{key}", there[key]) != value
        }
        asked = run.settings
        own = dict.fromkeys(asked.tags, "true")
        own |= {"group": asked.group} if asked.group else {}
        own |= {"mlflow.note.content": asked.notes} if asked.notes else {}
        facts = run.facts | {"run_folder": str(run.folder)} | own | changed
        tags = [RunTag(make_name(key), shorten_middle(value, LONGEST_TAG)) for key, value in facts.items()]
        for first in range(0, len(params), PER_REQUEST):
            self.client.log_batch(self.run_id, params=params[first : first + PER_REQUEST])
        for first in range(0, len(tags), PER_REQUEST):
            self.client.log_batch(self.run_id, tags=tags[first : first + PER_REQUEST])
        self.client.log_artifact(self.run_id, str(run.folder / "config.yaml"), f"recipe/{run.name}")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        assert self.run_id is not None
        # MLflow's timestamps are in milliseconds.
        now = int(time.time() * 1000)
        self.client.log_batch(
            self.run_id, metrics=[Metric(make_name(name), value, now, step) for name, value in values.items()]
        )

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        assert self.run_id is not None
        path = f"samples/step_{step:05d}.json"
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self.client.log_text(self.run_id, json.dumps(table), path)
        self.tables.append({"path": path, "type": "table"})
        self.client.set_tag(self.run_id, TABLES_TAG, json.dumps(list(self.tables)))

    def finish(self, outcome: Outcome) -> None:
        assert self.run_id is not None
        self.client.set_tag(self.run_id, "exit_reason", shorten_middle(outcome.exit_reason, LONGEST_TAG))
        if outcome.model is not None:
            self.client.set_tag(self.run_id, "model", shorten_middle(outcome.model, LONGEST_TAG))
        self.client.set_terminated(self.run_id, outcome.status.upper())


def choose_experiment(settings: TrackingConfig) -> str:
    """Return the name of the experiment."""
    return settings.mlflow_experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "feynrl"


def make_name(name: str) -> str:
    """Replace characters that MLflow does not allow in names, and parts of a path that is not the shortest.

    >>> make_name("reward/is it right?"), make_name("a" * 300) == "a" * 250
    ('reward/is it right_', True)
    >>> make_name("/a//b/"), make_name("../a/./b"), make_name("")
    ('_a/_b_', '__/a/_/b', '_')
    """
    # 250 characters are MLflow's limit of a name.
    allowed = re.sub(r"[^/\w.\- :]", "_", name)[:250]
    return NO_PATH.sub(lambda found: "_" * len(found[0]), allowed) or "_"
