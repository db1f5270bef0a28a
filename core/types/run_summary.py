"""Types of summary.json, written by a run and read by the run page."""

from __future__ import annotations

from typing import TypedDict


class GitState(TypedDict):
    """Git state of the code at the start of the run."""

    commit: str
    branch: str
    """`HEAD` if no branch is checked out."""
    changed_files: int
    """Number of tracked files that differ from the commit."""


class Warned(TypedDict):
    """Warning of the run, with advice."""

    step: int
    rule: str
    """Name of the rule in driver/records/advice.py."""
    text: str
