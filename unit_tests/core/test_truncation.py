"""The kept set is a pure function of logits, and equals the oracle's."""

import pytest
import torch

from core.types.allowed_tokens import LOWEST
from core.types.truncation import EVERYTHING_KEPT, Truncation
from unit_tests.helpers.golden2 import GOLDEN2

SUPPORT = GOLDEN2["support"]
ROWS = {
    "top_k2": Truncation(top_k=2),
    "top_p0.5": Truncation(top_p=0.5),
    "top_p0.9": Truncation(top_p=0.9),
    "min_p0.2": Truncation(min_p=0.2),
    "top_k3_then_top_p0.6": Truncation(top_k=3, top_p=0.6),
}
RULES = {
    "top_p0.8": Truncation(top_p=0.8),
    "top_p0.5": Truncation(top_p=0.5),
    "top_k3": Truncation(top_k=3),
    "min_p0.3": Truncation(min_p=0.3),
    "top_k4_top_p0.7": Truncation(top_k=4, top_p=0.7),
    "none": EVERYTHING_KEPT,
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_order_and_ties_are_the_oracles(name, dtype):
    """Three rows: ties at the k-th, all equal, one token with nearly all of the mass."""
    logits = torch.tensor(SUPPORT["kept_sets"]["logits"], dtype=dtype)
    assert ROWS[name].find_kept(logits).int().tolist() == SUPPORT["kept_sets"][name]


@pytest.mark.parametrize("name", RULES)
def test_the_kept_set_of_the_enumeration_is_the_oracles(name):
    found = RULES[name].find_kept(torch.tensor(SUPPORT["logits"]))
    assert found.int().tolist() == SUPPORT["rules"][name]["kept"]
    assert RULES[name].is_off == (name == "none")


def test_two_rules_are_applied_in_order():
    """min-p leaves three tokens of 0.5, 0.25 and 0.15; of their mass 0.9, 0.8 is reached by the first two."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.06, 0.04]).log()
    assert Truncation(min_p=0.2).find_kept(logits).tolist() == [True, True, True, False, False]
    assert Truncation(top_p=0.8).find_kept(logits).tolist() == [True, True, True, False, False]
    assert Truncation(min_p=0.2, top_p=0.8).find_kept(logits).tolist() == [True, True, False, False, False]
    assert Truncation(min_p=0.2, top_k=2).find_kept(logits).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("lowest", [LOWEST, -torch.inf])
@pytest.mark.parametrize(
    "rules", [EVERYTHING_KEPT, Truncation(top_k=4), Truncation(top_p=0.999999), Truncation(min_p=1e-9)]
)
def test_a_banned_token_is_never_kept(lowest, rules):
    logits = torch.tensor([1.0, lowest, 0.0, lowest])
    assert rules.find_kept(logits).tolist() == [True, False, True, False]


def test_at_least_one_token_is_kept_and_more_is_kept_by_looser_rules():
    torch.manual_seed(0)
    logits = torch.randn(40, 1000) * 3
    for strict, loose in (
        (Truncation(top_p=0.01), Truncation(top_p=0.5)),
        (Truncation(top_k=1), Truncation(top_k=2000)),
        (Truncation(min_p=0.99), Truncation(min_p=0.01)),
    ):
        few, many = strict.find_kept(logits), loose.find_kept(logits)
        assert few.gather(-1, logits.argmax(-1, keepdim=True)).all()
        assert (few <= many).all() and few.sum() < many.sum()


def test_without_top_p_a_token_of_almost_no_mass_is_kept():
    """In double precision the first token has all of the mass, so nothing is left before the second."""
    logits = torch.tensor([0.0, -100.0, -200.0])
    assert Truncation(top_k=3).find_kept(logits).tolist() == [True, True, True]
    assert Truncation(top_p=0.999999).find_kept(logits).tolist() == [True, False, False]
    # a token is kept where those before it have less than the mass that is asked for
    assert Truncation(top_p=0.5).find_kept(torch.zeros(2)).tolist() == [True, False]
