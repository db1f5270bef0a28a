"""One gradient of several terms, however it is cut, and the log of each term."""

import json
from dataclasses import replace

import numpy as np
import pytest

import main_sl
from algs.chord import CHORD
from algs.dpo_nll import DPOWithNLL
from algs.echo import ECHO
from configs.schema import RLConfig
from core.errors import UserError
from core.types.samples import Group
from data_feeds.packing.batches import micro_batches
from driver.load_recipe import load_recipe
from driver.start.observers import plan_observers
from unit_tests.helpers.examples import families, run_here, some_groups
from unit_tests.helpers.local_trainers import change
from unit_tests.helpers.runs import evaluations_of, folder_of, metrics_of

ALGS = {
    "echo": ECHO(alpha=0.5, entropy_coef=0.01),
    "chord": CHORD(mu=0.4, loss_norm="sequence"),
    "dpo": DPOWithNLL(reference_free=True),
}


def groups_of(name: str, groups: list[Group]) -> list[Group]:
    if name == "dpo":
        pairs = [[replace(s, reward=1.0 - i) for i, s in enumerate(g[:2])] for g in groups]
        return ALGS[name].compute_advantages(pairs)
    if name == "echo":
        return groups
    return [
        [*g[:-1], replace(g[-1], origin="demonstration", rollout_logp=0 * g[-1].rollout_logp, versions=UNKNOWN(g[-1]))]
        for g in groups
    ]


def UNKNOWN(sample):
    return np.full_like(sample.versions, -1)


@pytest.mark.parametrize("name", ALGS)
@pytest.mark.parametrize("shares", [False, True])
def test_several_terms_do_not_depend_on_how_a_step_is_cut(tiny_path, name, shares):
    alg, groups = ALGS[name], groups_of(name, families() if shares else some_groups())
    how = {"horizon": 30, "terms": alg.terms, "whole_groups": alg.whole_groups}
    [whole] = micro_batches(groups, alg.loss_norm, 10_000, **how)
    want, metrics = change(tiny_path, alg, whole)
    how |= {"padded": False, "share_prefixes": shares, "ranks": 3}
    pieces = [b for rank in micro_batches(groups[::-1], alg.loss_norm, 80, **how) for b in rank]
    assert len(pieces) > 2
    got, cut_metrics = change(tiny_path, alg, pieces, layout="packed", attention="auto" if shares else "sdpa")
    assert (got - want).norm() < 1e-5 * want.norm()
    assert cut_metrics == pytest.approx(metrics, abs=1e-5)
    parts = [metrics[f"term/{term.name}/loss"] * term.coef for term in alg.terms]
    assert metrics["loss"] == pytest.approx(sum(parts), rel=1e-6)
    assert all(metrics[f"term/{term.name}/coef"] == pytest.approx(term.coef) for term in alg.terms)


def test_the_gradient_is_the_sum_of_two_algorithms(tiny_path):
    """ECHO at coefficients a and 0 differs by a times the cross-entropy on the observed tokens."""
    groups = some_groups()
    found = [
        change(tiny_path, alg, micro_batches(groups, "token", 10_000, terms=alg.terms)[0])[0]
        for alg in (ECHO(alpha=0.0), ECHO(alpha=0.5), ECHO(alpha=1.0))
    ]
    none, half, one = found
    assert (none + one - 2 * half).norm() < 1e-5 * one.norm()
    assert (one - none).norm() > 0.1 * none.norm()


def test_a_supervised_run_logs_its_terms(tmp_path, recipe):
    rows = [{"messages": f"{i}+1=", "chosen": f"{i + 1}", "rejected": f"{i}"} for i in range(6)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    alg = {"name": "dpo_nll", "reference_free": True, "nll_mean": 0.5}
    changes = {"alg": alg, "data.train": str(path), "data.eval": str(path), "eval_every": 1}
    assert run_here(main_sl, "--config", recipe(changes, kind="sl")) == (0, "")
    folder = folder_of(tmp_path)
    steps = metrics_of(folder)
    parts = [step["train/term/pair/loss"] + 0.5 * step["train/term/nll/loss"] for step in steps]
    assert [step["train/loss"] for step in steps] == pytest.approx(parts)
    assert all("eval/term/nll/loss" in step for step in evaluations_of(folder).values())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"alg": {"name": "echo"}, "capture": {"every": 1}}, "leave capture out"),
        ({"alg": {"name": "echo"}, "compare_losses": ["gspo"]}, "several terms cannot be compared"),
        ({"compare_losses": ["echo"]}, "several terms cannot be compared"),
    ],
)
def test_what_records_one_loss_per_token_refuses_several(recipe, changes, why):
    with pytest.raises(UserError, match=why):
        plan_observers(load_recipe(RLConfig, recipe(changes), []))
