"""The section `tracking`: what the trackers of a run are told."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field, field_validator

from core.strict_model import StrictModel
from core.text.secrets import has_secret


class TrackingConfig(StrictModel):
    """Settings of the trackers. Keys and passwords are no keys of a recipe: they come from the environment."""

    samples_every: int = Field(10, ge=0)
    """Steps between two tables of samples, in reinforcement learning, for the trackers that have tables. 0: none. All
    samples are in the run folder's samples/ anyway."""
    samples: int = Field(8, ge=1)
    """Samples in such a table, from the first groups of the step."""
    mlflow_uri: str | None = None
    """MLflow's tracking server or store. Unset: the variable MLFLOW_TRACKING_URI, or else sqlite:///<run_dir>/mlflow.db.
    User and password come from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""
    mlflow_experiment: str | None = Field(None, min_length=1)
    """MLflow's experiment. Unset: the variable MLFLOW_EXPERIMENT_NAME, or else feynrl."""
    wandb_project: str | None = Field(None, min_length=1)
    """Project in Weights & Biases. Unset: the variable WANDB_PROJECT, or else feynrl."""
    wandb_entity: str | None = Field(None, min_length=1)
    """User or team in Weights & Biases. Unset: the variable WANDB_ENTITY, or else the one of the API key."""
    wandb_mode: Literal["online", "offline"] | None = None
    """offline: write into the run folder's wandb/, for `wandb sync` later. Unset: the variable WANDB_MODE, or else
    online, with the API key of the variable WANDB_API_KEY or of `wandb login`."""

    @field_validator("mlflow_uri")
    @classmethod
    def holds_no_secret(cls, value: str | None) -> str | None:
        if value is not None and has_secret(value):
            raise ValueError(
                "the address holds a user, a password or a token, and a recipe is copied into the run folder: put the "
                "whole address into the variable MLFLOW_TRACKING_URI, or the user and the password into "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return value

    def find_unused(self, trackers: Collection[str]) -> str | None:
        """Return a sentence on a key that was set for a tracker that is not used; None where all are used."""
        for name, field in type(self).model_fields.items():
            owner = name.partition("_")[0]
            is_set = getattr(self, name) != field.default
            if owner in ("mlflow", "wandb") and is_set and owner not in trackers:
                return f"tracking.{name} is set, and {owner} is not among the trackers: add it, or leave the key out"
        return None
