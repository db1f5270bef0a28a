"""Completions with rewards, and the policy that offline DRO finds on them, whoever sampled them."""

import json

import pytest
import torch

import main_sl
from algs.offline_dro import OfflineDRO
from configs.data_schema import RowDataConfig
from core.errors import UserError
from core.types.samples import Policy, Tokens
from data_feeds.feed import load_groups
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import folder_of, metrics_of

ASKED = [{"role": "user", "content": "1+1="}]
GOOD = {"messages": ASKED, "completions": ["2", "3", "11"], "rewards": [1.0, 0, 0.5]}


def load(chat, tmp_path, *rows):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = RowDataConfig(train=str(tmp_path / "rows.jsonl"), max_tokens=60, max_invalid_fraction=0.9)
    return load_groups(data, "train", chat, rows="scored", seed=0)


def test_a_row_is_a_group_with_the_rewards_of_its_completions(qwen, tmp_path):
    [group] = load(qwen, tmp_path, GOOD).all()
    assert [s.reward for s in group] == [1.0, 0.0, 0.5]
    trained = [s.token_ids[s.loss_mask].tolist() for s in group]
    assert [qwen.hf.decode(ids).strip() for ids in trained] == ["2<|im_end|>", "3<|im_end|>", "11<|im_end|>"]
    as_text = GOOD | {"completions": json.dumps(GOOD["completions"]), "rewards": "[1.0, 0, 0.5]"}
    assert load(qwen, tmp_path, as_text).all() == [group]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rewards": [1.0, 0.0]}, "bad_label"),
        ({"rewards": [1.0, 0.0, "high"]}, "bad_label"),
        ({"rewards": [1.0, 0.0, float("inf")]}, "bad_label"),
        ({"rewards": 0.5}, "bad_label"),
        ({"rewards": [1.0, 0.0, 10**400]}, "bad_label"),
        ({"completions": ["2"], "rewards": [1.0]}, "no_reply"),
        ({"completions": ["2", " ", "3"]}, "no_reply"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "2"}]}, "ends_in_reply"),
    ],
)
def test_a_row_that_says_nothing_of_its_completions_is_invalid(qwen, tmp_path, change, reason):
    feed = load(qwen, tmp_path, GOOD, GOOD | change)
    assert [*feed.sources[0].invalid.cases] == [reason]
    with pytest.raises(UserError, match="rewards"):
        load(qwen, tmp_path, {"messages": ASKED, "completions": ["2", "3"]})


@pytest.mark.parametrize("sampled", [[0.25] * 4, [0.7, 0.1, 0.1, 0.1]])
def test_the_minimum_is_the_tilted_reference_whatever_sampled_the_rows(sampled):
    beta, reward = 0.5, torch.tensor([1.0, 0.0, 0.3, -0.4], dtype=torch.float64)
    ref = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    weight, alg = torch.tensor(sampled, dtype=torch.float64), OfflineDRO(beta=beta)
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")
    # every pair of actions is a row of two replies of one token, as often as the other policy draws it
    a, b = (x.flatten() for x in torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"))
    actions = torch.stack([a, b], 1).flatten()
    often = (weight[a] * weight[b]).repeat_interleave(2) / 2
    rows = torch.arange(len(a)).repeat_interleave(2)
    ids = torch.arange(len(actions))

    def closure():
        optimizer.zero_grad()
        tokens = Tokens(
            weight=often, seq_ids=ids, group_ids=rows, advantage=reward[actions], ref_logp=ref.log()[actions]
        )
        loss, _ = alg.loss(Policy(logp=logits.log_softmax(-1)[actions]), tokens)
        total = (often * loss).sum()
        total.backward()
        return total

    optimizer.step(closure)
    tilted = ref * (reward / beta).exp()
    assert logits.softmax(-1).tolist() == pytest.approx((tilted / tilted.sum()).tolist(), abs=1e-4)


def test_a_run_prefers_the_completions_with_higher_rewards(tmp_path, recipe):
    rows = [{"messages": ASKED, "completions": [str(n), "x"], "rewards": [1.0, 0.0]} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"alg": {"name": "offline_dro", "beta": 0.5}, "data.train": str(tmp_path / "rows.jsonl"), "steps": 8}
    assert run_here(main_sl, "--config", recipe(changes | {"trainer.lr": 1e-2}, kind="sl")) == (0, "")
    steps = metrics_of(folder_of(tmp_path))
    assert steps[-1]["train/loss"] < 0.8 * steps[0]["train/loss"]
    assert steps[-1]["train/offline_dro/accuracy"] == 1.0
