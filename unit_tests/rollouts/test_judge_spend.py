"""Calls and tokens that judges have cost so far: counted, continued by a resumed run, and bounded by a budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from configs.judge_schema import JudgeBudgetConfig
from core import judge_metrics as names
from core.types.samples import Sample
from rollouts.scheduling.judge_spend import JudgeSpend
from unit_tests.helpers.examples import some_groups

CALLS, TOKENS = names.JUDGE_SPENT_CALLS, names.JUDGE_SPENT_TOKENS


def judged(**counts: float) -> Sample:
    return replace(some_groups(1, 1)[0][0], counts={f"judge/{name}": value for name, value in counts.items()})


ONE, OTHER = judged(calls=2.0, tokens_in=10.0, tokens_out=3.0), judged(calls=1.0, tokens_in=5.0)
SILENT = judged(calls=1.0, without_usage=1.0)


def test_calls_and_tokens_add_up_over_groups_and_a_resume():
    spend = JudgeSpend()
    assert spend.measure() == {} and spend.describe_excess() == ""
    spend.count([ONE, OTHER, judged()])
    spend.count([ONE])
    assert spend.measure() == {CALLS: 5.0, TOKENS: 31.0}
    (resumed := JudgeSpend()).restore(spend.measure())
    resumed.count([OTHER])
    assert resumed.measure() == {CALLS: 6.0, TOKENS: 36.0}
    (fresh := JudgeSpend()).restore({"loss": 1.0})
    fresh.count([OTHER])
    assert fresh.measure() == {CALLS: 1.0, TOKENS: 5.0}


def test_tokens_that_were_not_counted_make_no_sum_after_a_resume():
    spend = JudgeSpend()
    spend.count([ONE, SILENT])
    assert spend.measure() == {CALLS: 3.0}
    (resumed := JudgeSpend(JudgeBudgetConfig(tokens=1000))).restore(spend.measure())
    resumed.count([ONE])
    assert resumed.measure() == {CALLS: 5.0}, "the tokens of the calls before are not known"
    assert resumed.describe_excess() == (
        "reward.judge_budget.tokens=1000 cannot be measured, because the server of the judge reports no usage of "
        "tokens: resume with reward.judge_budget.calls in its place"
    )


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"calls": 3}, "reward.judge_budget.calls=3 is used up, 3 were spent: resume with a larger one"),
        ({"calls": 4}, ""),
        ({"tokens": 18}, "reward.judge_budget.tokens=18 is used up, 18 were spent: resume with a larger one"),
        ({"tokens": 19}, ""),
        ({"calls": 9, "tokens": 1}, "reward.judge_budget.tokens=1 is used up, 18 were spent: resume with a larger one"),
    ],
)
def test_a_budget_is_used_up_when_all_of_it_is_spent(limits, said):
    spend = JudgeSpend(JudgeBudgetConfig(**limits))
    spend.count([ONE, OTHER])
    assert spend.describe_excess() == said
