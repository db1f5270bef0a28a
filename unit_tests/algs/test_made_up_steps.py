"""The made-up data of algs.check is always the same, so that a failure occurs again at the same token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algs.base import Algorithm
from algs.check import fixtures
from algs.check.distributions import draw_stored
from algs.chord import CHORD
from algs.dpo import DPO
from algs.grpo import GRPO
from algs.kto import KTO
from algs.offline_dro import OfflineDRO
from algs.sft import SFT
from core.types.samples import Group, Sample

STEPS = Path(__file__).parent.parent / "data" / "made_up_steps.json"
ALGORITHMS: dict[str, Algorithm] = {
    "policy gradient": GRPO(),
    "conversations": SFT(),
    "pairs": DPO(),
    "unpaired": KTO(),
    "scored": OfflineDRO(),
    "demonstrations": CHORD(),
}


ARMS = [[3, 2, 2, 3, 2, 2, 1, 2], [2, 1, 2, 1, 2, 2, 2, 2]]


def digest(values: Any) -> float:
    """Sum of all numbers, each with a weight of its own."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    return round(float(flat @ np.cos(np.arange(len(flat)))), 6)


def describe(s: Sample) -> str:
    """Sample in one line, of each array a digest."""
    stored = [digest(np.concatenate(found)) for name, found in s.prompt.extra.items() if name != "topk_tokens"]
    columns = [f"{name} {digest(values)}" for name, values in sorted(s.columns.items())]
    mask = "".join(map(str, s.action_mask.astype(int)))
    return (
        f"{s.prompt.id} {s.token_ids.tolist()} {mask} {s.origin} {s.stop} {s.reward} {s.completion} {s.turn_rewards} "
        f"rollout {digest(s.rollout_logp)} {digest(s.versions)} {' '.join(columns)} stored {stored}"
    )


def describe_step(kind: str) -> dict[str, Any]:
    step = fixtures.made_up_step(ALGORITHMS[kind])
    return {
        "now": {name: digest(table) for name, table in step.now.items()},
        "samples": [describe(sample) for group in step.groups for sample in group],
    }


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_made_up_step_is_always_the_same(kind):
    """`python -m unit_tests.algs.test_made_up_steps` writes it."""
    assert describe_step(kind) == json.loads(STEPS.read_text())[kind]


def list_samples(groups: Iterable[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group]


def test_columns_that_are_not_asked_for_are_left_out():
    step = fixtures.made_up_step(DPO())
    for names in (frozenset[str](), frozenset({"ref_logp", "values"})):
        got = fixtures.keep_columns(step.groups, names)
        for before, after in zip(list_samples(step.groups), list_samples(got), strict=True):
            kept = before.columns.keys() & {*names, "token_rewards"} if before.n_trained else set[str]()
            assert after.columns.keys() == kept
            assert all(after.columns[name] is before.columns[name] for name in kept)
    several = [[replace(s, columns=s.columns | {"ids": np.zeros((len(s.token_ids), 2))}) for s in step.groups[0]]]
    assert all("ids" in s.columns for s in fixtures.keep_columns(several, frozenset())[0])


def test_groups_and_samples_are_shuffled_by_the_seed():
    groups = fixtures.made_up_step(GRPO()).groups
    orders = []
    for seed in range(3):
        got = fixtures.shuffle_groups(groups, seed)
        assert got == fixtures.shuffle_groups(groups, seed)
        assert sorted(s.completion for s in list_samples(got)) == sorted(s.completion for s in list_samples(groups))
        assert {len({s.prompt.id for s in group}) for group in got} == {1}
        orders.append([s.completion for s in list_samples(got)])
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [s.completion for s in list_samples(groups)] not in orders


def test_poison_is_at_the_tokens_that_are_not_kept():
    groups = [[s.with_advantage(np.ones(len(s.token_ids))) for s in g] for g in fixtures.made_up_step(CHORD()).groups]
    names = fixtures.list_poisonable(groups[0][0])
    assert names == ["rollout_logp", "prox_logp", "ref_logp", "teacher_logp", "values", "advantage", "token_rewards"]
    own = replace(groups[0][0], columns={"z": groups[0][0].columns["values"], "prox_logp": groups[0][0].rollout_logp})
    assert fixtures.list_poisonable(replace(own, advantage=None)) == ["rollout_logp", "prox_logp", "z"]
    mine = replace(groups[0][0], columns=groups[0][0].columns | {"a": own.columns["z"]})
    assert fixtures.list_poisonable(mine) == [*names, "a"], "the algorithm's own come last"

    def read(s: Sample, name: str) -> np.ndarray:
        found = {"rollout_logp": s.rollout_logp, "advantage": s.advantage}.get(name)
        return s.columns[name] if found is None else found

    for name in names:
        for keep in (None, lambda s: s.token_ids % 2 == 0):
            got = fixtures.poison_column(groups, name, 7.0, keep=keep)
            for before, after in zip(list_samples(groups), list_samples(got), strict=True):
                if name not in after.columns and name not in ("rollout_logp", "advantage"):
                    assert after is before
                    continue
                kept = before.loss_mask if keep is None else keep(before)
                if name == "rollout_logp" and before.origin == "demonstration":
                    kept = np.ones_like(kept)
                assert read(after, name).tolist() == np.where(kept, read(before, name), 7.0).tolist()
                for other in {*fixtures.list_poisonable(before)} - {name}:
                    assert read(after, other).tolist() == read(before, other).tolist()


@pytest.mark.parametrize("gap", [0.0, 0.25])
def test_on_policy_all_policies_are_the_current_one(gap):
    step = fixtures.made_up_step(CHORD())
    for before, after in zip(
        list_samples(step.groups), list_samples(fixtures.make_on_policy(step, engine_gap=gap)), strict=True
    ):
        now = step.now["logp"].numpy()[before.token_ids]
        assert after.columns["prox_logp"].tolist() == after.columns["ref_logp"].tolist() == now.tolist()
        assert after.columns["values"].tolist() == before.columns["values"].tolist()
        is_given = before.origin == "demonstration"
        assert after.rollout_logp.tolist() == (before.rollout_logp if is_given else now - gap).tolist()


def test_arms_have_one_token_for_each_ratio_and_advantage():
    ratios = torch.tensor([-0.5, 0.0, 2.0], dtype=torch.float64)
    groups, logp = fixtures.ratio_arms(ratios, (1.0, -1.0), engine_gap=0.25)
    assert logp.tolist() == [-1.5, -1.5, -1.0, -1.0, -1.0, -1.0]
    old = [-1.0, -1.0, -1.0, -1.0, -3.0, -3.0]
    assert [len(group) for group in groups] == [1] * 6
    for n, [s] in enumerate(groups):
        assert (s.prompt.id, s.token_ids.tolist(), s.action_mask.tolist()) == (f"{n}", [0, n], [False, True])
        assert s.rollout_logp.tolist() == [0.0, old[n] - 0.25] and s.versions.tolist() == [-1, 0]
        assert s.advantage is not None and s.advantage.tolist() == [0.0, 1.0 - 2.0 * (n % 2)]
        logps = {key: [0.0, old[n]] for key in ("prox_logp", "ref_logp", "teacher_logp")}
        zeros = {key: [0.0, 0.0] for key in ("values", "returns")}
        assert {name: values.tolist() for name, values in s.columns.items()} == logps | zeros
        assert (s.reward, s.completion) == (1.0, f"reply {n}")


def test_the_bandit_samples_its_arms_with_their_rewards():
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.float64)
    values = torch.arange(4.0, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    groups = fixtures.sample_bandit(logits, {"values": values}, draw)
    assert [[s.prompt.id for s in group] for group in groups] == [[f"bandit/{g}"] * 8 for g in range(2)]
    logp = logits.log_softmax(-1).tolist()
    for s in list_samples(groups):
        arm = int(s.token_ids[1])
        assert (s.token_ids[0], s.reward, s.rollout_logp.tolist()) == (0, [0.1, 0.2, 0.3, 1.0][arm], [0.0, logp[arm]])
        assert s.columns["values"].tolist() == [0.0, arm]
    assert [[int(s.token_ids[1]) for s in group] for group in groups] == ARMS
    many = list_samples(group for _ in range(40) for group in fixtures.sample_bandit(logits, {}, draw))
    shares = np.bincount([s.token_ids[1] for s in many], minlength=4) / len(many)
    assert np.abs(shares - logits.softmax(-1).numpy()).max() < 0.05
    assert fixtures.BEST == 3 and torch.allclose(
        fixtures.TEACHER.exp(), torch.tensor([0.05, 0.05, 0.05, 0.85]).double()
    )


@pytest.mark.parametrize("tokens", [[4], [3, 5, 7, 8]])
def test_stored_distributions_have_one_to_three_ids(tokens):
    stored = draw_stored(tokens)
    assert stored["topk_tokens"] == tokens
    for ids, logp, token in zip(stored["topk_ids"], stored["topk_logp"], tokens, strict=True):
        assert len(ids) == len(logp) == len({*ids}) == 1 + token % 3 and {*ids} <= {*range(7)}
        assert logp == sorted(logp, reverse=True) and sum(map(math.exp, logp)) < 1


def test_an_unknown_token_has_no_place():
    step = fixtures.made_up_step(GRPO())
    assert (
        step.locate_token(1) == "group 0, sample 0, token 1" and step.locate_token(17) == "group 0, sample 1, token 3"
    )
    with pytest.raises(ValueError) as refused:
        step.locate_token(10**6)
    assert str(refused.value) == "there is no token 1000000"


if __name__ == "__main__":
    STEPS.write_text(json.dumps({kind: describe_step(kind) for kind in ALGORITHMS}, indent=1) + "\n")
