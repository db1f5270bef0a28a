"""Which numbers a setting of an algorithm, a sampler or a judge may have: each bound just inside and just outside."""

from __future__ import annotations

from typing import Any

import pytest

from algs import find_algorithm
from algs.divergences import Divergence
from algs.schedules import Schedule
from algs.terms import KL, Correction, Overlong
from core.strict_model import StrictModel
from data_feeds.samplers.no_positive import NoPositive
from data_feeds.samplers.pools import Pools
from data_feeds.samplers.priority import Priority
from data_feeds.samplers.thompson import Thompson
from rewards.judging.settings import JudgeSettings
from unit_tests.helpers.intervals import check_interval
from unit_tests.helpers.variants import NEEDED, OFF

CLIP = {"clip_low": "(0 1)", "clip_high": "(0"}
INTERVALS: dict[str, dict[str, str]] = {
    "aot": {"beta": "(0"},
    "bco": {"beta": "(0"},
    "chord": {"mu": "[0 1]"},
    "cispo": {"max_weight": "(0", "min_weight": "[0"},
    "clip_cov": {**CLIP, "fraction": "[0 1]"},
    "dpo": {
        "beta": "(0",
        "label_smoothing": "[0 0.5)",
        "target_margin": "[0",
        "nll_coef": "[0",
        "length_decay": "[0 1]",
    },
    "dpo_nll": {"nll_mean": "(0"},
    "dppo": {"delta_low": "(0", "delta_high": "(0", "max_weight": "(0"},
    "dro": {"tau": "(0"},
    "echo": {"alpha": "[0"},
    "erc": {"beta_low": "(0 1)", "beta_high": "(0"},
    "gmpo": {"clip": "(0"},
    "grpo": {**CLIP, "dual_clip": "(1", "entropy_coef": "[0"},
    "gspo": CLIP,
    "ipo_rl": {"delta": "(0", "kl_tau": "[0"},
    "kl_cov": {"fraction": "[0 1]", "coef": "[0"},
    "kto": {"beta": "(0", "desirable_weight": "(0", "undesirable_weight": "(0"},
    "luffy": {"gamma": "(0"},
    "m2po": {"threshold": "(0"},
    "offline_dro": {"beta": "(0"},
    "opd": {"coef": "(0", "early": "[0"},
    "opsd": {"delta": "(0", "kl_coef": "[0"},
    "orpo": {"lam": "(0"},
    "passk": {**CLIP, "k": "[2"},
    "positive_nll": {"mu": "[0"},
    "ppo": {
        **CLIP,
        **{"dual_clip": "(1", "gamma": "(0 1]", "lam": "[0 1]", "critic_lam": "[0 1]"},
        **{"value_clip": "(0", "critic_warmup": "[0"},
    },
    "qae": {**CLIP, "quantile": "(0 1)"},
    "rae": {"decay": "[0 1)"},
    "raft": {"clip": "(0 1)"},
    "reinforce_pp": {**CLIP, "gamma": "(0 1]"},
    "reward_model": {"target_margin": "[0", "center": "[0"},
    "sapo": {"tau_pos": "(0", "tau_neg": "(0"},
    "sdpo": {"max_weight": "(0", "ema": "(0 1)"},
    "tilted": {"beta": "(0"},
    "top_entropy": {"quantile": "[0 1)"},
    "vespo": {"k_pos": "(0", "k_neg": "(0", "lambda_pos": "(0", "lambda_neg": "(0", "rollout_cap": "(0"},
}
TURNS = {"credit": "turn"}
OTHERS: dict[str, dict[str, Any]] = NEEDED | {"vespo": OFF}
"""Other settings with which the numbers of an algorithm are allowed."""
JUDGE = {"base_url": "http://h/v1", "model": "j", "temperature": 1.0, "anchors": "a.jsonl"}
SECTIONS: list[tuple[type[StrictModel], dict[str, Any], dict[str, str]]] = [
    (Divergence, {}, {"beta": "[0 1]"}),
    (Divergence, {"beta": 0.0}, {"topk": "[1"}),
    (Schedule, {"start": 0.0, "end": 1.0}, {"steps": "[1"}),
    (KL, {"coef": 0.1}, {"ema": "(0 1)", "target": "(0", "horizon": "[1", "reset_every": "[1"}),
    (Correction, {}, {"low": "[0", "high": "(0", "token_high": "(0", "max_drift": "(0"}),
    (Overlong, {"mode": "penalty", "buffer": 1}, {"max_tokens": "[1", "coef": "(0"}),
    (Thompson, {}, {"forget": "(0 1]"}),
    (NoPositive, {}, {"threshold": "(0 1]", "least_samples": "[1"}),
    (Pools, {}, {"unseen": "(0", "hard": "[0", "normal": "[0", "easy": "[0", "hard_below": "[0"}),
    (Priority, {}, {"alpha": "[0", "epsilon": "(0"}),
    (JudgeSettings, JUDGE, {"votes": "[1 99]", "seed": "[0", "parse_retries": "[0", "max_concurrency": "[1"}),
    (JudgeSettings, JUDGE, {"max_tokens": "[1", "anchors_every": "[1", "temperature": "[0 2]"}),
    *((find_algorithm({"name": name})[1], TURNS, {"turn_discount": "[0 1]"}) for name in ("grpo", "reinforce_pp")),
    *((find_algorithm({"name": name})[1], OTHERS.get(name, {}), keys) for name, keys in INTERVALS.items()),
]


@pytest.mark.parametrize(("cls", "settings", "intervals"), SECTIONS)
def test_a_number_may_be_all_of_its_interval_and_nothing_else(cls, settings, intervals):
    for key, interval in intervals.items():
        check_interval(cls, settings, key, interval)
