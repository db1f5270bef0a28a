"""What is said of the hub where a name is not found: the places that were asked, and what helps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from core import hub


def test_a_name_that_is_not_found_was_looked_for_somewhere(monkeypatch):
    fix = "name a local folder or file, or fill the cache where there is a network and set HF_HUB_OFFLINE=1"
    cache = f"the cache {constants.HF_HUB_CACHE} does not hold it: {fix}"
    offline = f"HF_HUB_OFFLINE is set, and {cache}"
    asked = f"{constants.ENDPOINT} was asked: check the name, or name a local folder or file"
    gone = f"{constants.ENDPOINT} did not answer (status 503), and {cache}"
    for failures, is_offline, said in (
        ([], True, offline),
        ([""], True, offline),
        ([], False, asked),
        ([""], False, asked),
        (["status 503"], True, gone),
        (["status 503"], False, gone),
    ):
        monkeypatch.setattr(hub, "_failures", failures)
        monkeypatch.setattr(constants, "is_offline_mode", lambda answer=is_offline: answer)
        assert hub.describe_hub() == said


@pytest.mark.parametrize(("status", "failure"), [(200, ""), (404, ""), (499, ""), (500, "status 500")])
def test_a_hub_that_answers_is_there_unless_it_fails(status, failure, monkeypatch):
    asked: list[Any] = []

    def head(url: str, *, timeout: float) -> Any:
        asked.append((url, timeout))
        return SimpleNamespace(status_code=status)

    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: SimpleNamespace(head=head))
    assert hub.find_hub_failure() == failure and asked == [(constants.ENDPOINT, hub.HUB_TIMEOUT_S)]
