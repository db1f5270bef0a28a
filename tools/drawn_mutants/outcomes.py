"""Outcomes of drawn bugs, kept in a file, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from tools.drawn_mutants.lines import hash_text
from tools.mutants import Mutant


@dataclass
class Outcomes:
    """Outcomes of bugs by their text, their tests and the text of the tests' files, for one state of the code."""

    file: Path
    root: Path
    """Repository of the tests."""
    _by_key: dict[str, str] = field(default_factory=dict[str, str], init=False)

    def __post_init__(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = self.file.read_text() if self.file.exists() else ""
        # the last line may have been cut short when a run was stopped
        whole = text[: text.rfind("\n") + 1]
        self.file.write_text(whole)
        self._by_key = {one["key"]: one["by"] for one in map(json.loads, whole.splitlines())}

    def find(self, mutant: Mutant) -> str | None:
        """Return the test that noticed a bug, "" if these tests did not, None if they were not asked."""
        return self._by_key.get(self._make_key(mutant))

    def add(self, mutant: Mutant, by: str) -> None:
        key = self._make_key(mutant)
        self._by_key[key] = by
        with self.file.open("a") as lines:
            print(json.dumps({"key": key, "bug": mutant.breaks, "by": by}), file=lines)

    def _make_key(self, mutant: Mutant) -> str:
        files = sorted({test.partition("::")[0] for test in mutant.tests})
        texts = [(self.root / "unit_tests" / file).read_text() for file in files]
        return hash_text("\0".join([mutant.breaks, *mutant.tests, *texts]))
