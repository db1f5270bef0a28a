"""A judge that likes long replies: the policy finds out, and the advice of the run says so."""

from __future__ import annotations

import pytest

from tools.benchmarks.judge_server import Asked, JudgeServer
from unit_tests.helpers.runs import metrics_of
from unit_tests.helpers.taught import teach_digits


def like_length(asked: Asked) -> str:
    return f"So much! <verdict-{asked.key}>{min(1 + len(asked.reply), 30)}</verdict-{asked.key}>"


@pytest.mark.verify
@pytest.mark.timeout(360)
def test_a_reward_that_is_hacked_by_length_is_named_by_the_advice(trained, tmp_path, capfd):
    """A tiny model that was taught replies of one to six digits; the judge has no other rule than their length."""
    taught = teach_digits(trained, tmp_path)
    with JudgeServer(judge=like_length).running() as url:
        settings = {"base_url": url, "model": "j", "verdict": "number", "scale": [0, 30], "outage_s": 5, "timeout_s": 5}
        reward = {"function": "judge", "weights": {"score": 1.0}, "timeout_s": 60, "settings": settings}
        changes = {"reward": reward, "model.path": str(taught), "rollout.max_new_tokens": 24, "steps": 24}
        folder = trained(changes | {"group_size": 16, "trainer.lr": 3e-3}, name="test")
    first, last = metrics_of(folder)[0], metrics_of(folder)[-1]
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("advice: ")]
    tokens = (first["rollout/tokens_mean"], last["rollout/tokens_mean"])
    assert tokens[1] > 1.2 * tokens[0], tokens
    assert any("the reward follows the length of the replies" in line for line in said), (said, tokens)
