"""Every algorithm holds, by no less evidence than before; `python -m unit_tests.algs.test_check_evidence` writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from algs import list_algorithms
from algs.check.checker import Result, check
from unit_tests.helpers.variants import NEEDED

pytestmark = pytest.mark.one_core

EVIDENCE = Path(__file__).parent.parent / "data" / "check_evidence.json"
"""What the program prints of some algorithms, which have all obligations between them."""
KNOWN: dict[str, dict[str, str]] = json.loads(EVIDENCE.read_text())
LETTERS = "abcdefghijklmnop"


def tell(results: list[Result]) -> dict[str, str]:
    """What the program prints of each obligation, without errors of rounding."""
    return {r.letter: re.sub(r"\b0e\+00\b|\d(\.\d+)?e-[1-9]\d", "~0", f"{r.status}: {r.detail}") for r in results}


@pytest.mark.parametrize(("name", "letter"), [(name, letter) for name, told in KNOWN.items() for letter in told])
def test_an_obligation_holds_by_the_evidence_it_had(name, letter):
    assert tell(check(name, NEEDED.get(name), letters=letter)) == {letter: KNOWN[name][letter]}


@pytest.mark.parametrize("name", KNOWN)
def test_no_other_obligation_applies(name):
    assert check(name, NEEDED.get(name), letters="".join(sorted({*LETTERS} - {*KNOWN[name]}))) == []


@pytest.mark.parametrize("name", sorted({*list_algorithms()} - {*KNOWN}))
def test_every_other_algorithm_holds_as_it_comes(name):
    results = check(name, NEEDED.get(name))
    assert [str(r) for r in results if r.status == "FAILED"] == []
    supervised = not any(r.letter == "d" for r in results)
    assert supervised == (name in ("sft", "orpo", "kto", "aot", "offline_dro", "reward_model"))


if __name__ == "__main__":
    told = {name: tell(check(name, NEEDED.get(name))) for name in KNOWN}
    EVIDENCE.write_text(json.dumps(told, indent=1) + "\n")
