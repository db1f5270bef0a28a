"""Git state of the code, for summary.json and the trackers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from core.types.run_summary import GitState

CLONE = Path(__file__).resolve().parent.parent.parent


def read_git_state(clone: Path = CLONE) -> GitState | str:
    """Return the state of a clone, or a sentence if there is no clone or git fails."""
    try:
        commit = _ask_git(clone, "rev-parse", "HEAD")
        branch = _ask_git(clone, "rev-parse", "--abbrev-ref", "HEAD")
        # Only files that git knows: run folders and notes beside the code are no change of it.
        changed = _ask_git(clone, "status", "--porcelain", "--untracked-files=no")
    except OSError:
        return "unknown: git is not installed"
    except subprocess.CalledProcessError as error:
        said = str(error.stderr).strip().splitlines()
        return f"unknown: {said[0] if said else 'git failed'}"
    return GitState(commit=commit, branch=branch, changed_files=len(changed.splitlines()))


def describe_git(clone: Path = CLONE) -> dict[str, str]:
    """Return the git state as text under dotted keys, for trackers; empty if unknown."""
    state = read_git_state(clone)
    return {} if isinstance(state, str) else {f"git.{key}": str(value) for key, value in state.items()}


def _ask_git(clone: Path, *question: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(clone), *question]  # somebody may commit at this moment
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
