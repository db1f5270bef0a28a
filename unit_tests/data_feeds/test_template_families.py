"""Thirty families of chat templates: tokens of rows, pairs and episodes are those of the whole text, one by one.

A family that cannot be trained in some way is refused in a sentence that names the reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unit_tests.helpers.family_matrix import TALKS, expected_refusal, try_every_family, write_page
from unit_tests.helpers.template_families import FAMILIES

Outcomes = dict[tuple[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return try_every_family(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("kind", TALKS)
def test_every_family_trains_on_the_tokens_of_the_whole_text(outcomes, kind):
    wrong = []
    for name in FAMILIES:
        for way, outcome in outcomes[name, kind].items():
            expected = expected_refusal(name, kind, way)
            if not (re.search(expected, outcome) if expected else outcome == ""):
                wrong.append(f"{name}, {way}: {outcome or 'not refused'}")
    assert not wrong, "\n".join(wrong)


def test_most_families_train_in_one_turn_in_several_and_in_episodes(outcomes):
    trained = [
        name
        for name in FAMILIES
        if not any(outcomes[name, kind][way] for kind in list(TALKS)[:2] for way in outcomes[name, kind])
    ]
    assert len(FAMILIES) >= 25 and len(trained) >= len(FAMILIES) - 1


def test_the_page_of_families_is_what_they_do(outcomes):
    page = Path(__file__).parents[2] / "docs" / "chat_templates.md"
    assert page.read_text() == write_page(outcomes), "run: python -m unit_tests.helpers.family_matrix"
