"""Findings of the set-up checks, printed as a line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from core.errors import UserError

Level = Literal["ok", "warning", "error"]
Say = Callable[[str], None]
"""Print a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Outcome of a check."""

    check: str
    level: Level
    found: str
    """Observation, with the fix for a warning or an error."""

    def __str__(self) -> str:
        """
        >>> print(Finding(check="python", level="ok", found="3.11"))
        ok       python        3.11
        """
        return f"{self.level:<8} {self.check:<13} {self.found}"


def attempt(check: str, look: Callable[[], str]) -> Finding:
    """Return the finding of `look`; a UserError that it raises becomes an error finding."""
    try:
        return Finding(check=check, level="ok", found=look())
    except UserError as error:
        return Finding(check=check, level="error", found=str(error))


def show_all(findings: Iterable[Finding], say: Say) -> list[Finding]:
    """Print each finding as soon as its check is done; return them all."""
    shown: list[Finding] = []
    for finding in findings:
        say(str(finding))
        shown.append(finding)
    return shown
