"""Gradients of groups into which episodes of another policy were mixed, and the benchmarks that tell of them."""

import pytest

from tools.benchmarks.estimators import Groups, list_estimators
from tools.benchmarks.samplers import Measured, interval, list_rows


def test_recorded_episodes_with_exact_weights_leave_the_gradient_as_it_is():
    groups = Groups(n_own=3, n_others=1)
    assert groups.probability.sum() == pytest.approx(1)
    found = {name: groups.measure(coefs) for name, coefs in list_estimators(groups).items()}
    direction, size, sd = found["RLOO: w = pi/mu, baseline of the own samples"]
    assert (direction, size) == pytest.approx((1, 1), abs=1e-9)
    # and their weight is small where the policy is rare, so the spread hardly grows
    assert sd < 0.8 * found["mixed, w = pi/mu, mixed baseline"][2]
    assert found["RLOO: w = min(pi/mu, 2), own baseline"][1] < 0.95
    assert found["log-probabilities unknown, taken as w = 1"][0] < 0.7


def test_the_table_of_samplers_tells_a_run_without_success_from_one_with():
    def run(arm: str, seed: int, samples: int, reached: bool = True) -> Measured:
        return Measured(arm=arm, seed=seed, samples=samples, reached=reached, steps=4, best=0.91, seconds=1.0)

    rows = list_rows([run("uniform", 0, 100), run("uniform", 1, 300), run("thompson", 0, 50, reached=False)])
    assert rows[0][:6] == ["uniform", "2", "2 of 2", "200", "-1,071 to 1,471", "1.00"]
    assert rows[1][:6] == ["thompson", "1", "0 of 1", ">= 50", "-", "0.50"]
    assert interval([1.0]) is None
