"""Numbers of each algorithm: its default, and numbers just inside and just outside of what is allowed.

Each test also runs the algorithm as it comes, on a group of two replies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from algs import is_algorithm, list_algorithms, load_algorithm_class
from algs.base import Algorithm, assign_advantages
from algs.by_source import BySource
from algs.divergences import Divergence
from algs.objective import check_terms
from algs.terms import KL, AdaptiveEntropy, Correction, Overlong
from algs.totals import prepare_update, total_alone
from core.loading import resolve
from core.strict_model import StrictModel
from core.types.arrays import DOUBLE
from core.types.samples import Group, Policy, Tokens
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.variants import NEEDED, OFF

Range = tuple[list[float], list[float]]
ANY: Range = ([-2.0, 3.0], [])
ABOVE_0: Range = ([1e-9], [0.0])
FROM_0: Range = ([0.0], [-1e-9])
ABOVE_1: Range = ([1 + 1e-9], [1.0])
BETWEEN: Range = ([1e-9, 1 - 1e-9], [0.0, 1.0])
"""0 and 1 themselves are outside."""
SHARE: Range = ([0.0, 1.0], [-1e-9, 1 + 1e-9])
BELOW_1: Range = ([0.0, 1 - 1e-9], [-1e-9, 1.0])
UP_TO_1: Range = ([1e-9, 1.0], [0.0, 1 + 1e-9])
COUNT: Range = ([1], [0])
LOW, HIGH = ("clip_low", 0.2, BETWEEN), ("clip_high", 0.2, ABOVE_0)
HIGHER = ("clip_high", 0.28, ABOVE_0)
Number = tuple[str, Any, Range]
NUMBERS: dict[str, list[Number]] = {
    "aot": [("beta", 0.1, ABOVE_0)],
    "bco": [("beta", 0.1, ABOVE_0)],
    "by_source": [],
    "chord": [("mu", 0.1, SHARE)],
    "cispo": [("max_weight", 5.0, ABOVE_0), ("min_weight", 0.0, FROM_0)],
    "clip_cov": [
        *(LOW, HIGH, ("fraction", 2e-4, SHARE)),
        *(("cov_above", 1.0, ANY), ("cov_below", 5.0, ANY), ("seed", 0, ([-2, 3], []))),
    ],
    "distill": [],
    "dpo": [
        *(("beta", 0.1, ABOVE_0), ("target_margin", 0.0, FROM_0), ("nll_coef", 0.0, FROM_0)),
        *(("label_smoothing", 0.0, ([0.0, 0.5 - 1e-9], [-1e-9, 0.5])), ("length_decay", 1.0, SHARE)),
    ],
    "dpo_nll": [("nll_mean", 1.0, ABOVE_0)],
    "dppo": [("delta_low", 0.15, ABOVE_0), ("delta_high", 0.15, ABOVE_0), ("max_weight", 20.0, ABOVE_0)],
    "dro": [("tau", 0.2, ABOVE_0)],
    "echo": [("alpha", 0.1, FROM_0)],
    "erc": [("beta_low", 0.05, BETWEEN), ("beta_high", 0.05, ABOVE_0)],
    "gdpo": [],
    "gkd": [],
    "gmpo": [("clip", 0.4, ABOVE_0)],
    "gpg": [],
    "grpo": [LOW, HIGHER, ("dual_clip", None, ABOVE_1)],
    "gspo": [("clip_low", 3e-4, BETWEEN), ("clip_high", 4e-4, ([1e-9, 0.1], [0.0, 0.1 + 1e-9]))],
    "ipo_rl": [("delta", 0.3, ABOVE_0), ("kl_tau", 0.0, FROM_0)],
    "kl_cov": [("fraction", 2e-3, SHARE), ("coef", 1.0, FROM_0)],
    "kto": [("beta", 0.1, ABOVE_0), ("desirable_weight", 1.0, ABOVE_0), ("undesirable_weight", 1.0, ABOVE_0)],
    "luffy": [("gamma", 0.1, ABOVE_0)],
    "m2po": [("threshold", 0.04, ABOVE_0)],
    "minillm": [],
    "offline_dro": [("beta", 0.1, ABOVE_0)],
    "opd": [("coef", 1.0, ABOVE_0), ("early", 0.0, FROM_0)],
    "opo": [],
    "opsd": [("delta", 0.2, ABOVE_0), ("kl_coef", 1e-3, FROM_0)],
    "orpo": [("lam", 0.1, ABOVE_0)],
    "otb": [],
    "p3o": [],
    "p4o": [],
    "passk": [LOW, HIGHER, ("k", 2, ([2], [1])), ("threshold", 0.5, ANY)],
    "positive_nll": [("mu", 0.1, FROM_0), ("threshold", 1.0, ANY)],
    "ppo": [
        *(LOW, HIGH, ("dual_clip", None, ABOVE_1), ("value_clip", None, ABOVE_0)),
        *(("gamma", 1.0, UP_TO_1), ("lam", 0.95, SHARE), ("critic_lam", None, SHARE)),
        *(("critic_lr", 1e-5, ([1e-9, 100.0], [0.0, 100.1])), ("critic_warmup", 0, ([0], [-1]))),
    ],
    "qae": [LOW, HIGHER, ("quantile", 0.4, BETWEEN)],
    "rae": [("decay", 0.95, BELOW_1)],
    "raft": [("threshold", 0.5, ANY), ("clip", None, BETWEEN)],
    "reinforce_pp": [LOW, HIGH, ("gamma", 1.0, UP_TO_1)],
    "reward_model": [("target_margin", 0.0, FROM_0), ("center", 0.0, FROM_0)],
    "rloo": [],
    "sapo": [("tau_pos", 1.0, ABOVE_0), ("tau_neg", 1.05, ABOVE_0)],
    "scalerl": [],
    "sdpo": [("threshold", 1.0, ANY), ("max_weight", 2.0, ABOVE_0), ("ema", 0.05, BETWEEN)],
    "sft": [],
    "tilted": [("beta", 0.1, ABOVE_0)],
    "top_entropy": [("quantile", 0.8, BELOW_1)],
    "topr": [],
    "vespo": [
        *(("k_pos", 2.0, ABOVE_0), ("k_neg", 3.0, ABOVE_0), ("rollout_cap", None, ABOVE_0)),
        *(("lambda_pos", 3.0, ABOVE_0), ("lambda_neg", 2.0, ABOVE_0)),
    ],
    "wpo": [],
}
SWITCHES: dict[str, dict[str, bool]] = {
    "chord": {"phi": True},
    "dpo": {"length_norm": False, "reference_free": False},
    "grpo": {"leave_one_out": False, "whiten": False, "dynamic_sampling": False},
    "minillm": {"length_norm": True},
    "ppo": {"whiten": True, "bootstrap_truncated": False},
    "reinforce_pp": {"baseline": False},
    "rloo": {"leave_one_out": True, "whiten": False},
    "sft": {"dft": False},
}


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_group() -> Group:
    """A good reply and a bad one, of two tokens each, with all that a model could say of them."""
    names = ("prox_logp", "ref_logp", "teacher_logp", "values", "prox.collision")
    columns = {name: [0.0, -0.5 - 0.1 * n, -0.7 - 0.1 * n] for n, name in enumerate(names)}
    mask = [False, True, True]
    return [sample_of([1, 2, 3 + int(r)], mask, reward=r, columns=columns, dtype=DOUBLE) for r in (1.0, 0.0)]


def run_as_it_comes(alg: Algorithm) -> list[float]:
    """Losses of four tokens, of two sequences, under the algorithm and all of its terms."""
    groups = prepare_update(alg, assign_advantages(alg, [make_group()]))
    advantages = [a for s in groups[0] if s.advantage is not None for a in s.advantage[1:].tolist()]
    logp, ids = tensor(-0.5, -1.0, -1.5, -2.0), torch.tensor([0, 0, 1, 1])
    tokens = Tokens(
        weight=torch.full((4,), 0.25, dtype=torch.float64),
        seq_ids=ids,
        group_ids=torch.zeros_like(ids),
        advantage=tensor(*(advantages or (0.0,) * 4)),
        rollout_logp=logp + 0.1,
        prox_logp=logp - 0.1,
        ref_logp=logp - 0.2,
        teacher_logp=logp + 0.2,
        values=logp,
        returns=logp + 1,
        reference_point=torch.full_like(logp, 0.5),
        columns={"prox.spread_before": -logp, "clip_key": tensor(0.1, 0.2, 0.3, 0.4)},
    )
    policy = Policy(logp=logp, entropy=-logp, measures=dict.fromkeys(alg.measures, -logp))
    seen = total_alone(alg, policy, tokens)
    check_terms(alg)
    if alg.model_kind == "reward":
        return alg.value_loss(logp, seen)[0].tolist()
    losses = [term.loss for term in alg.terms] or [alg.loss]
    return [x for loss in losses for x in loss(policy, seen)[0].tolist()]


def check_numbers(cls: type[StrictModel], settings: dict[str, Any], numbers: list[Number]) -> None:
    for key, default, (inside, outside) in numbers:
        assert getattr(cls(**{k: v for k, v in settings.items() if k != key}), key) == default, key
        for number in inside:
            assert getattr(cls(**settings | {key: number}), key) == number, (key, number)
        for number in outside:
            with pytest.raises(ValidationError):
                cls(**settings | {key: number})


@pytest.mark.parametrize("name", NUMBERS)
def test_an_algorithm_has_its_defaults_and_bounds(name: str):
    cls = load_algorithm_class(resolve(name, "algs", offers=is_algorithm, key="alg.name"))
    settings = NEEDED.get(name, {})
    alg = cls(**settings)
    assert all(abs(x) < 100 for x in run_as_it_comes(alg))
    check_numbers(cls, settings | (OFF if name == "vespo" else {}), NUMBERS[name])
    switches = SWITCHES.get(name, {})
    assert {key: getattr(alg, key) for key in switches} == switches


def test_the_table_has_every_algorithm():
    assert {*NUMBERS} == {*list_algorithms()}


SECTIONS: list[tuple[type[StrictModel], dict[str, Any], list[Number]]] = [
    (Correction, {}, [("low", 0.5, FROM_0), ("high", 2.0, ABOVE_0)]),
    (Correction, {}, [("token_high", 2.0, ABOVE_0), ("max_drift", None, ABOVE_0)]),
    (KL, {"coef": 0.5}, [("coef", 0.0, FROM_0), ("target", None, ABOVE_0), ("horizon", 10_000, COUNT)]),
    (KL, {"coef": 0.5}, [("reset_every", None, COUNT), ("ema", None, BETWEEN)]),
    (KL, {"coef": 0.5, "ema": 0.5}, [("ema_every", 1, COUNT)]),
    (AdaptiveEntropy, {}, [("target", None, ABOVE_0), ("delta", 1e-4, ABOVE_0), ("high", 5e-3, ABOVE_0)]),
    (Overlong, {}, [("max_tokens", None, COUNT), ("buffer", None, COUNT), ("coef", 1.0, ABOVE_0)]),
    (Divergence, {}, [("beta", 0.5, SHARE)]),
    (Divergence, {"beta": 0.0}, [("topk", None, COUNT)]),
]


@pytest.mark.parametrize(("cls", "settings", "numbers"), SECTIONS)
def test_a_section_has_its_defaults_and_bounds(cls, settings, numbers):
    check_numbers(cls, settings, numbers)
    assert KL().reset_optimizer is False


def test_numbers_of_every_policy_gradient_have_their_bounds():
    for name, settings in (("grpo", {"credit": "turn"}), ("ppo", {"credit": "turn"})):
        cls = load_algorithm_class(resolve(name, "algs", offers=is_algorithm, key="alg.name"))
        check_numbers(cls, settings, [("turn_discount", 1.0, SHARE), ("entropy_coef", 0.0, FROM_0)])


def test_a_mixture_has_a_source():
    with pytest.raises(ValidationError, match="by_source"):
        BySource(by_source={})
    assert BySource(by_source={"a": {"name": "sft"}}).coefs == {}
