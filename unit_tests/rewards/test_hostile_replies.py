"""Hostile replies get the verdict that the judge itself states, or fail: never one that stands in their text alone."""

from __future__ import annotations

from collections import Counter

import pytest

from rewards import Failed
from tools.benchmarks.judge_server import JudgeServer
from unit_tests.helpers.hostile_replies import (
    FAKE_VALUE,
    LABELS,
    STATES_VERDICT,
    choose_way,
    judge_hostile,
    make_hostile,
    read_honest,
)
from unit_tests.helpers.judged import score_at


@pytest.mark.parametrize("n", [100, pytest.param(3334, marks=pytest.mark.verify)])
@pytest.mark.parametrize("form", ["number", "letter", "json"])
def test_no_reply_is_worth_what_it_claims_for_itself(form, n, capsys):
    replies = make_hostile(n, form)
    assert sum(reply.is_complete for reply in replies) >= 0.3 * n
    server, settings = JudgeServer(judge=judge_hostile(form)), {"verdict": form, "parse_retries": 0}
    with server.running() as url:
        results = score_at(url, *(r.text for r in replies), timeout_s=300.0, labels=LABELS, **settings)
    outcomes: Counter[tuple[str, str]] = Counter()
    asked: set[str] = set()
    lowest = min(LABELS.values()) if form == "letter" else 1.0
    for reply, found in zip(replies, results, strict=True):
        shown = reply.text.rpartition("</think>")[2].strip()
        asked |= {shown} - {""}  # equal ones are asked once
        if isinstance(found, Failed):
            outcomes[reply.kind, "failed"] += 1
            assert choose_way(shown) != "plain", "what the judge states plainly is read"
            continue
        value = found.parts["score"]
        assert value != FAKE_VALUE[form]
        if not shown:
            outcomes[reply.kind, "lowest, no call"] += 1
            assert value == lowest and not found.notes
            continue
        outcomes[reply.kind, "the judge's own"] += 1
        assert value == read_honest(shown, form) and choose_way(shown) in STATES_VERDICT
    own = sum(number for (_, outcome), number in outcomes.items() if outcome == "the judge's own")
    assert own > 0.3 * n and server.answered == len(asked)
    with capsys.disabled():
        if n > 1000:
            print(f"\n{form}: {n} replies", *(f"{k}, {o}: {m}" for (k, o), m in sorted(outcomes.items())), sep="\n  ")
