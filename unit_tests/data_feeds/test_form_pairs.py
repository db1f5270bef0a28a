"""Rows with the columns of two forms, and of another kind of row: which form is recognised, or what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import UserError
from data_feeds.rows.find_form import find_form
from unit_tests.helpers.row_forms import CONVERSATIONS, PAIRS, PLAIN, PROMPTS, SCORED, UNPAIRED

EXAMPLES: dict[Any, dict[str, Any]] = {
    "conversations": CONVERSATIONS | PLAIN,
    "pairs": PAIRS,
    "unpaired": UNPAIRED,
    "scored": SCORED,
    "prompts": PROMPTS,
}
KEPT = Path(__file__).parents[1] / "data" / "form_pairs.json"
"""Form of each example with the columns of another; `python -m unit_tests.data_feeds.test_form_pairs` writes it."""


def recognise(kind: Any, row: dict[str, Any]) -> str:
    try:
        return find_form(kind, [row], key="data.train=x", path="x").form.name
    except UserError as error:
        return "refused" if "\n" not in str(error) else "no sentence"


def tell(kind: Any, row: dict[str, Any], given: str = "auto") -> str:
    """Return the form and what is read of it, or the sentence of the error."""
    try:
        fit = find_form(kind, [row], key="data.train=x", path="x", given=given)
        return f"{fit.name}: {fit}"
    except UserError as error:
        return str(error)


def list_misfits(kind: Any) -> list[str]:
    """Return what is told of rows of the other kinds, of a row without known columns, and of other forms by name."""
    others = [one for other in EXAMPLES if other != kind for one in [*EXAMPLES[other].values()]]
    told = {tell(kind, row): None for row, *_ in others if isinstance(row, dict)}
    own = next(iter(EXAMPLES[kind].values()))[0]
    named = [tell(kind, own, given) for given in ("alpaca", "verl", "kto_tag", "turn_pairs", "shargpt", "xyz")]
    return [*told, tell(kind, {"a": 1}), *named]


def list_unions(kind: Any) -> dict[str, dict[str, list[str]]]:
    """Return the examples whose columns were added, by the form that is recognised then, for each example."""
    rows: dict[str, dict[str, Any]] = {}
    for name, (row, *_) in EXAMPLES[kind].items():
        # one of those that have the same columns
        if isinstance(row, dict) and all(row.keys() != one.keys() for one in rows.values()):
            rows[name] = row
    found: dict[str, dict[str, list[str]]] = {}
    for name, row in rows.items():
        by_form: dict[str, list[str]] = {}
        for other, more in rows.items():
            by_form.setdefault(recognise(kind, more | row), []).append(other)
        found[name] = by_form
    return found


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_row_with_the_columns_of_two_forms_is_one_of_them_or_refused(kind):
    found = list_unions(kind)
    for name, by_form in found.items():
        for form, others in by_form.items():
            known = {EXAMPLES[kind][one][1] for other in others for one in (name, other)}
            assert form in {"refused", "ours", *known}, (name, others)
    assert found == json.loads(KEPT.read_text())[kind]


@pytest.mark.parametrize("kind", EXAMPLES)
def test_rows_of_another_kind_are_told_in_one_sentence(kind):
    told = list_misfits(kind)
    assert told == json.loads(KEPT.read_text())[f"misfits of {kind}"]
    assert not any("\n" in sentence for sentence in told)


if __name__ == "__main__":
    kept = {kind: list_unions(kind) for kind in EXAMPLES} | {f"misfits of {k}": list_misfits(k) for k in EXAMPLES}
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in kept.items()]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
