"""Compared losses on made-up numbers: which are refused, what each sees of a sample, and what is logged of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algs.grpo import GRPO
from analysis.capture.losses import NamedLoss, credit_groups, parse_losses
from analysis.compared_losses.measure import as_needed_by
from analysis.compared_losses.observer import ComparedLosses, describe_lack
from core.errors import UserError
from core.types.samples import Policy
from unit_tests.helpers.examples import a_changed, some_groups
from unit_tests.helpers.sentences import tell

NAN, INF = float("nan"), float("inf")
MINE, OTHER = SimpleNamespace(model="mine"), SimpleNamespace(model="other")
NOTHING: dict[str, Any] = {
    **{"terms": (), "teachers": {}, "required_columns": frozenset[str](), "needs_entropy": False, "state": {}},
    **{"schedules": {}, "measures": {}, "needs_siblings": False, "whole_groups": False, "whole_episodes": False},
}
TERMS = "has terms, or the run's algorithm has, and tokens of several terms cannot be compared"
MOVES = "changes from step to step (its state, or schedules), and only the run's algorithm does"
TEACHER = "needs t of the teacher mine, which the run does not have as this loss declares it"
GROUPS = "compares whole groups, which the run's algorithm splits over micro-batches"
EPISODES = "compares episodes as wholes, and an agent's may be split over micro-batches by the run's algorithm"


def column(name: str) -> str:
    return f"needs the column {name}, which the run's algorithm does not compute"


@pytest.mark.parametrize(
    ("asked", "own", "run", "lack"),
    [
        ({}, {}, {}, ""),
        ({"terms": (1,)}, {}, {}, TERMS),
        ({}, {"terms": (1,)}, {}, TERMS),
        ({"required_columns": {"ref_logp", "prox_logp"}}, {}, {}, column("prox_logp")),
        ({"required_columns": {"ref_logp", "prox_logp"}}, {}, {"updates_per_step": 2}, column("ref_logp")),
        ({"required_columns": {"ref_logp", "prox_logp"}}, {"required_columns": {"prox_logp"}}, {}, column("ref_logp")),
        ({"required_columns": {"ref_logp"}}, {"required_columns": {"ref_logp", "values"}}, {}, ""),
        ({"teachers": {"s": OTHER, "t": MINE}}, {"teachers": {"s": OTHER}}, {}, TEACHER),
        ({"teachers": {"t": MINE}}, {"teachers": {"t": OTHER}}, {}, TEACHER),
        ({"teachers": {"t": MINE}}, {"teachers": {"s": OTHER, "t": MINE}}, {}, ""),
        (
            {"needs_entropy": True},
            {},
            {},
            "needs the entropy, which the run's algorithm does not compute (alg.entropy_coef is 0)",
        ),
        ({"needs_entropy": True}, {"needs_entropy": True}, {}, ""),
        ({"state": {"a": 1}}, {"state": {"a": 1}}, {}, MOVES),
        ({"schedules": {"a": 1}}, {"schedules": {"a": 1}}, {}, MOVES),
        ({"measures": {"b": 1, "a": 1}}, {}, {}, "reads policy.a, which is computed for the run's algorithm only"),
        ({"needs_siblings": True}, {}, {"group_size": 1}, "compares the samples of a group, and group_size is 1"),
        ({"needs_siblings": True}, {}, {}, ""),
        ({}, {}, {"group_size": 1}, ""),
        ({"whole_groups": True}, {}, {}, GROUPS),
        ({"whole_groups": True}, {"whole_groups": True}, {}, ""),
        ({"whole_episodes": True}, {}, {"agent": "a"}, EPISODES),
        ({"whole_episodes": True}, {"whole_episodes": True}, {"agent": "a"}, ""),
        ({"whole_episodes": True}, {}, {}, ""),
        ({}, {}, {"agent": "a"}, ""),
    ],
)
def test_what_a_loss_needs_and_the_run_does_not_have_is_named(asked, own, run, lack):
    alg, runs = (SimpleNamespace(**NOTHING | more) for more in (asked, own))
    run = {"updates_per_step": 1, "group_size": 2, "agent": None} | run
    cfg: Any = SimpleNamespace(rollout=SimpleNamespace(agent=run.pop("agent")), **run)
    assert describe_lack(alg, cfg, runs) == lack  # pyright: ignore[reportArgumentType]


def test_a_loss_without_entropy_is_measured_without():
    policy = Policy(logp=torch.zeros(2), entropy=torch.ones(2))
    for coef, there in ((0.0, False), (0.1, True)):
        found = as_needed_by(GRPO(entropy_coef=coef), policy)
        assert found.logp is policy.logp and (found.entropy is policy.entropy) == there


def test_numbers_of_compared_losses_are_logged_where_they_are_finite():
    alg: Any = None
    said: list[str] = []
    compared = ComparedLosses([NamedLoss(name=name, alg=alg) for name in "ab"], 8, stale=False, say=said.append)
    step: Any = None
    rest = {"loss": 9.0, "compare_losses/c/loss": INF, "compare_losses/b/loss": 2.0}
    own: dict[str, float] = {"compare_losses/a/loss": NAN, "compare_losses/a/x": 1.0}
    logged: list[dict[str, float]] = []
    for measured in (own, own, own | {"compare_losses/a/x": -INF}, {"compare_losses/a/loss": 3.0}):
        logged.append(asyncio.run(compared.on_step(step, measured | rest, {})))
    of_b = {"compare_losses/b/loss": 2.0}
    assert logged == [of_b | {"compare_losses/a/x": 1.0}] * 2 + [of_b, of_b | {"compare_losses/a/loss": 3.0}]
    where = "where it is not finite it is left out of the log"
    assert said == [
        f"WARNING: compare_losses/a/{name} is {value}; {where}" for name, value in (("loss", NAN), ("x", -INF))
    ]


@pytest.mark.parametrize("stale", [False, True])
def test_a_loss_sees_its_own_columns_and_no_credit_of_another(stale):
    """A sample that lacks one of them is trained on by nobody."""
    [group] = some_groups(1, 3)
    columns = {name: [0.5] * 24 for name in ("ref_logp", "prox_logp", "values")}
    columns = [{n: values[: len(s.token_ids)] for n, values in columns.items()} for s in group]
    del columns[1]["ref_logp"]
    given = [a_changed(s, columns=own, excluded=s.action_mask) for s, own in zip(group, columns, strict=True)]
    loss = NamedLoss(name="x", alg=GRPO(kl={"coef": 0.1}))  # pyright: ignore[reportArgumentType]
    [found] = credit_groups(loss, [given], stale=stale)
    names = {"ref_logp", "prox_logp"} if stale else {"ref_logp"}
    assert [{*s.columns} for s in found] == [names, names - {"ref_logp"}, names]
    assert [bool(s.loss_mask.any()) for s in found] == [True, False, True]
    assert all(
        (s.advantage is None) or (s.advantage != old.advantage).any() for s, old in zip(found, given, strict=True)
    )


def test_losses_have_names_of_their_own():
    def parse(*given: Any) -> list[str]:
        return [loss.name for loss in parse_losses(given, key="--alg", max_new_tokens=8)]

    assert parse("grpo", {"name": "grpo", "as": "b"}, "gspo") == ["grpo", "b", "gspo"]
    said = tell(lambda: parse("gspo", "grpo", {"name": "gspo"}), UserError)
    assert said == "--alg: two losses are called gspo: give one of them another name, by the setting as"
    said = tell(lambda: parse("sft"), UserError)
    assert said == "--alg: 'sft' trains on given text, and only losses of sampled text can be compared"
