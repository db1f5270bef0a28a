"""Types of what a run writes into summary.json and the run page reads."""

from __future__ import annotations

from typing import TypedDict


class GitState(TypedDict):
    """State of the code when the run began."""

    commit: str
    branch: str
    """`HEAD` where no branch is checked out."""
    changed_files: int
    """Tracked files that differ from the commit."""


class Warned(TypedDict):
    """Warning that the run gave, with its advice."""

    step: int
    rule: str
    """Name of the rule in driver/records/advice.py."""
    text: str
