"""State, schedules and controllers of algorithms, against the numbers of the second oracle."""

import json
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import Field

from algs.base import PolicyGradient
from algs.bco import BCO
from algs.check.checker import check
from algs.grpo import GRPO
from algs.rae import RAE
from algs.schedules import Schedule, value_at
from algs.state import StepSeen
from algs.terms import KL, AdaptiveEntropy
from configs.load import validate
from core.errors import RunStopped, UserError
from core.types.arrays import from_json, to_json
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.golden2 import GOLDEN2

STATE = GOLDEN2["state"]


def step_of(number: int = 0, n: int = 1, **means: float) -> StepSeen:
    """Return a finished step of n samples with a reward."""
    sample = some_groups(1, 1)[0][0]
    return StepSeen(number=number, groups=[[sample] * n], means=means)


class Counter(PolicyGradient):
    """Counts samples, and keeps the last two losses."""

    def initial_state(self):
        return {"samples": 0, "losses": np.zeros(2)}

    def next_state(self, step):
        losses = np.append(self.state["losses"], step.mean("loss"))[-2:]
        return {"samples": self.state["samples"] + step.n_samples, "losses": losses}

    def loss(self, policy, tokens):
        return -policy.logp * self.state["samples"], {}


def test_the_adaptive_coefficient_of_the_kl_is_the_oracles():
    case = STATE["adaptive_kl"]
    alg = GRPO(kl=KL(coef=case["init"], target=case["target"], horizon=case["horizon"]))
    got = [alg.kl.current_coef(alg)]
    for number, kl in enumerate(case["kl_measured"]):
        alg = alg.after(step_of(number, case["n_steps"], kl_ref=kl))
        got.append(alg.kl.current_coef(alg))
    assert got == pytest.approx(case["coef"], rel=1e-15)
    assert alg.state == {"kl_coef": got[-1]}
    assert GRPO(kl=KL(coef=0.1)).state == {}


def test_the_adaptive_weight_of_the_entropy_is_the_oracles():
    case = STATE["adaptive_entropy"]
    control = AdaptiveEntropy(target=case["target"], delta=case["delta"], high=case["max"])
    alg = GRPO(adaptive_entropy=control)
    assert alg.needs_entropy and not GRPO().needs_entropy
    for number, step in enumerate(case["steps"]):
        used = step["used_coef"] * step["used_enabled"]
        assert alg.adaptive_entropy.current_coef(alg, alg.entropy_coef) == pytest.approx(used, abs=1e-18)
        alg = alg.after(step_of(number, entropy=step["entropy"]))
        assert alg.state["entropy_coef"] == pytest.approx(step["next_coef"], abs=1e-18)
        assert alg.state["entropy_on"] == step["next_enabled"]
    for number in range(100):
        alg = alg.after(step_of(number, entropy=0.1))
    assert alg.state["entropy_coef"] == case["max"]
    at_target = alg.after(step_of(entropy=case["target"])).state
    assert at_target["entropy_on"] == 0 and at_target["entropy_coef"] < case["max"]


def test_the_terms_move_beside_a_state_of_ones_own():
    alg = Counter(kl=KL(coef=0.5, target=0.1, horizon=2)).after(step_of(n=2, loss=3.0, kl_ref=1.0))
    assert {**alg.state, "losses": alg.state["losses"].tolist()} == {
        "samples": 2,
        "losses": [0.0, 3.0],
        "kl_coef": pytest.approx(0.6),
    }


def test_chords_schedule_is_the_oracles():
    case = STATE["chord_mu"]
    parts = [
        Schedule(start=0, end=case["peak"], steps=case["warmup"]),
        Schedule(start=case["peak"], end=case["valley"], steps=case["decay"], shape="cosine"),
    ]
    assert [value_at(parts, step) for step in range(len(case["mu"]))] == pytest.approx(case["mu"], abs=1e-15)


def played(reward: float | None, player: int, source: str = ""):
    sample = some_groups(1, 1)[0][0]
    return replace(sample, reward=reward, player=player, prompt=replace(sample.prompt, source=source))


def advantages_of(alg, groups) -> list[float]:
    done = alg.compute_advantages(groups)
    return [float(s.advantage[s.loss_mask][0]) for g in done for s in g]


def test_baselines_of_roles_are_the_oracles():
    case = STATE["rae"]
    groups = [[played(r, p)] for r, p in zip(case["rewards"], case["roles"], strict=True)]
    alg = RAE(decay=case["decay"])
    assert advantages_of(alg, groups) == pytest.approx(case["step_mean"]["advantage"])
    alg = alg.after(StepSeen(number=0, groups=groups, means={}))
    assert list(alg.state.items()) == [
        ("player0", pytest.approx(case["step_mean"]["baseline_after"][0], rel=1e-15)),
        ("player1", pytest.approx(case["step_mean"]["baseline_after"][1], rel=1e-15)),
    ]
    assert advantages_of(alg, [[played(1.0, 1), played(None, 0)]]) == pytest.approx([1 - 0.0125, 0.0])
    mixed = [[played(1.0, 1, "chess"), played(None, 1, "go")]]
    after = alg.after(StepSeen(number=1, groups=mixed, means={})).state
    assert after == {**alg.state, "chess.player1": pytest.approx(0.05)}, "a failed sample is in no mean"


def test_the_running_mean_of_bco_is_the_oracles():
    case, alg = STATE["bco_delta"], BCO()
    assert alg.state["delta"] == 0
    for number, (mean, want) in enumerate(
        zip([case["step_mean"], case["step_mean"] + 0.02], case["running"], strict=True)
    ):
        alg = alg.after(step_of(number, len(case["implicit_rewards"]), **{"bco/reward": mean}))
        assert alg.state["delta"] == pytest.approx(want, rel=1e-14)
    assert alg.state["completions"] == 12


FORGETFUL = """
from algs.grpo import GRPO
calls = []
class Forgetful(GRPO):
    def initial_state(self):
        return {"n": 0.0}
    def next_state(self, step):
        {move}
"""
HIDDEN = {
    "a number outside": ("calls.append(1); return {'n': len(calls)}", "step 0: next_state called twice"),
    "a number in the class": (
        "type(self).seen = getattr(type(self), 'seen', 0) + 1; return {'n': type(self).seen}",
        "step 0: next_state called twice",
    ),
    "a number in the copy": (
        "object.__setattr__(self, 'name', self.name or str(step.number)); return {'n': float(self.name)}",
        "step 1: resumed from a checkpoint before it: the state's n is 1.0 instead of 0.0",
    ),
    "a tensor": ("import torch; return {'n': torch.zeros(1)}", "the state's n is a Tensor, expected"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_memory_beside_the_state_is_found(name, tmp_path):
    move, words = HIDDEN[name]
    (tmp_path / "forgetful.py").write_text(FORGETFUL.replace("{move}", move))
    [found] = check(str(tmp_path / "forgetful.py"), letters="m")
    assert found.status == "FAILED" and words in found.detail, found


def test_a_state_is_followed_and_none_is_said():
    [found] = check("rae", letters="m")
    assert found.status == "ok" and found.detail.endswith("player0")
    [found] = check("grpo", letters="m")
    assert found.status == "n/a"


class Scheduled(PolicyGradient):
    mu: float = Field(0.5, ge=0, le=1)
    k: int = Field(2, ge=1)

    def loss(self, policy, tokens):
        return -policy.logp * self.mu, {}


def test_a_schedule_sets_its_hyper_parameter_at_every_step():
    parts = {"mu": {"start": 0.1, "end": 0.5, "steps": 4}, "kl.coef": {"start": 1, "end": 3, "steps": 2}}
    alg = Scheduled(schedules=parts | {"k": {"start": 1, "end": 4, "steps": 2}})
    assert (alg.mu, alg.kl.coef, alg.k) == (0.1, 1.0, 1), "from the start on, so that the start loads a reference"
    seen = [alg.with_state({}, step=step) for step in (0, 1, 2, 9)]
    assert [a.mu for a in seen] == pytest.approx([0.1, 0.2, 0.3, 0.5])
    assert [a.kl.coef for a in seen] == [1, 2, 3, 3] and [a.k for a in seen] == [1, 2, 4, 4]
    assert seen[1].scheduled_values() == {"mu": pytest.approx(0.2), "kl.coef": 2, "k": 2}
    again = Scheduled.model_validate(seen[1].model_dump())
    assert again.with_state({}, step=9).mu == 0.5, "the settings in a run's folder hold the schedule"
    assert pickle.loads(pickle.dumps(seen[1])).mu == seen[1].mu


WRONG = {
    "there is no numeric hyper-parameter clip_hgih .did you mean 'clip_high'": {
        "clip_hgih": {"start": 0.1, "end": 0.2, "steps": 3}
    },
    "there is no numeric hyper-parameter loss_norm": {"loss_norm": {"start": 0.1, "end": 0.2, "steps": 3}},
    "schedules.clip_low comes to 2: Input should be less than 1": {
        "clip_low": [{"start": 0.1, "end": 2, "steps": 3}, {"start": 0.1, "end": 0.2, "steps": 3}]
    },
    "schedules.kl.coef comes to 0, where the algorithm's required_columns is another than at 0.1, .*small number": {
        "kl.coef": {"start": 0.1, "end": 0, "steps": 3}
    },
    "the schedule of clip_low is empty": {"clip_low": []},
    r"schedules.clip_low.0.steps=0 is not valid: input should be greater than or equal to 1": {
        "clip_low": {"start": 0.1, "end": 0.2, "steps": 0}
    },
    r"schedules.clip_low.0.shape='sine' is not valid": {
        "clip_low": {"start": 0.1, "end": 0.2, "steps": 1, "shape": "sine"}
    },
}


@pytest.mark.parametrize("words", WRONG)
def test_a_schedule_that_cannot_be_is_one_sentence(words):
    with pytest.raises(UserError, match=words) as refused:
        validate(GRPO, {"schedules": WRONG[words]}, prefix="alg.")
    assert "\n" not in str(refused.value) and "alg." in str(refused.value)


BAD = {
    "is a Tensor, expected a number or a numpy array": torch.zeros(2),
    "is a bool, expected": True,
    "is a ndarray, expected": np.zeros((2, 2)),
    "is a str, expected": "a",
    "is a NoneType, expected": None,
    "is nan, and it must be finite": math.nan,
    "inf.*must be finite": np.array([1.0, math.inf]),
}


@pytest.mark.parametrize("words", BAD)
def test_a_state_of_anything_else_is_refused(words):
    with pytest.raises((UserError, RunStopped), match=words):
        Counter().with_state({"samples": 1, "losses": BAD[words]})


def test_the_state_cannot_be_changed_in_place():
    alg = Counter().with_state({"samples": 3, "losses": np.ones(2)})
    with pytest.raises(TypeError):
        alg.state["samples"] = 4
    with pytest.raises(ValueError, match="read-only"):
        alg.state["losses"][0] = 1
    with pytest.raises(UserError, match="asks for the mean of kl_ref, which the step did not measure; it has loss"):
        GRPO(kl=KL(coef=1.0, target=1.0)).after(step_of(loss=1.0))
    assert Counter().state["samples"] == 0 and alg.state["samples"] == 3


def test_a_state_returns_from_json_to_the_bit():
    alg = Counter().with_state({"samples": 0.1 + 0.2, "losses": np.array([1 / 3, 1e-300])})
    back = Counter().with_state(from_json(json.loads(json.dumps(to_json(dict(alg.state))))))
    assert back.state["samples"] == alg.state["samples"]
    assert back.state["losses"].tobytes() == alg.state["losses"].tobytes()


class Choosy(Scheduled):
    how: str = "state"

    def initial_state(self):
        return {"least": 0.5}

    def accept_group(self, group):
        return {"state": lambda: self.state["least"], "mu": lambda: self.mu, "k": lambda: self.k}[self.how]() > 0


def test_with_staleness_no_group_is_accepted_by_what_moves():
    for how, what in (("state", "the state"), ("mu", "mu"), ("k", None)):
        alg = Choosy(how=how, schedules={"mu": {"start": 0.1, "end": 0.5, "steps": 4}})
        assert alg.accept_group([])
        if what is None:
            assert alg.hide_state().accept_group([]), "it does not move"
            continue
        with pytest.raises(RunStopped, match=f"Choosy.accept_group reads {what}, which moves .*set max_staleness: 0"):
            alg.hide_state().accept_group([])
