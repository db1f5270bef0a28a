"""Keys of `tracking`: settings of the trackers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, field_validator

from core.strict_model import StrictModel
from core.text.secrets import refuse_secret


class TrackingConfig(StrictModel):
    """Settings of the trackers. API keys and passwords come from environment variables, never from a recipe."""

    group: str | None = Field(None, min_length=1, max_length=100)
    """Name under which the trackers show this run together with others: W&B's group, and MLflow's tag `group`."""
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field([])
    """Words to find the run by: W&B's tags, and tags of MLflow with the value true."""
    notes: str | None = Field(None, min_length=1, max_length=5000)
    """Text about the run, for W&B's notes, MLflow's description and TensorBoard's text."""
    samples_every: int = Field(10, ge=0)
    """Steps between two tables of samples in RL, for trackers that support tables. 0: none. The run folder's samples/
    contains all samples anyway."""
    samples: int = Field(8, ge=1)
    """Number of samples in a table, from the first groups of the step."""
    mlflow_uri: str | None = None
    """MLflow tracking server or store. Unset: the variable MLFLOW_TRACKING_URI, or else sqlite:///<run_dir>/mlflow.db.
    User and password come from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""
    mlflow_experiment: str | None = Field(None, min_length=1)
    """MLflow experiment. Unset: the variable MLFLOW_EXPERIMENT_NAME, or else feynrl."""
    wandb_project: str | None = Field(None, min_length=1)
    """Weights & Biases project. Unset: the variable WANDB_PROJECT, or else feynrl."""
    wandb_entity: str | None = Field(None, min_length=1)
    """Weights & Biases user or team. Unset: the variable WANDB_ENTITY, or else the owner of the API key."""
    wandb_mode: Literal["online", "offline"] | None = None
    """offline: write to the run folder's wandb/, for a later `wandb sync`. Unset: the variable WANDB_MODE, or else
    online, with the API key of WANDB_API_KEY or `wandb login`."""

    prometheus_port: int = Field(9400, ge=1, le=65535)
    """Port of the driver at which Prometheus reads the newest numbers."""
    prometheus_host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on. The default is of this machine alone; the numbers are not protected."""

    @field_validator("mlflow_uri")
    @classmethod
    def holds_no_secret(cls, value: str | None) -> str | None:
        names = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        where = f"into the variable MLFLOW_TRACKING_URI, or the user and the password into {names}"
        refuse_secret(value, f"the whole address {where}")
        return value

    def find_unused(self, trackers: Collection[str]) -> str | None:
        """Return an error about a key of an unused tracker; None if all keys are used."""
        for name, field in type(self).model_fields.items():
            # A key's prefix names its tracker: mlflow_uri, wandb_project.
            owner = name.partition("_")[0]
            is_set = getattr(self, name) != field.default
            if name in ("group", "tags", "notes") and is_set and not {*trackers} - {"jsonl", "prometheus"}:
                return f"tracking.{name} is set, and no tracker shows it: add mlflow, wandb or tensorboard to trackers"
            if owner in ("mlflow", "wandb", "prometheus") and is_set and owner not in trackers:
                return f"tracking.{name} is set, and {owner} is not among the trackers: add it, or leave the key out"
        return None
