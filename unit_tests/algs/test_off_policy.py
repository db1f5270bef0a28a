"""algs.check looks off-policy: at ratios far from 1 and with another engine, whatever the settings are called."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from algs.check.checker import Result, check
from algs.grpo import GRPO
from core.types.samples import Group, Sample, ScoredColumn

LOSS = """
import torch
from algs.base import GroupRelative
from algs.ops import clipped_surrogate, importance_ratio, sequence_ratio
from algs.terms import Correction
class Mine(GroupRelative):
    {fields}
    def loss(self, policy, tokens):
        ratio = importance_ratio(policy.logp, tokens.prox_logp)
        engine = (tokens.prox_logp - tokens.rollout_logp).exp()
        A = tokens.advantage
        return {loss}, {{}}
"""
TWICE = (
    r"with pi_prox / pi_rollout at \S+ the gradient is weighted by its power of {}; correction.level=token comes on top"
)
FOUND: dict[str, tuple[str, str, str, str]] = {
    # fields, loss, letter, what is said
    "an engine ratio beside the correction": (
        "", "-importance_ratio(policy.logp, tokens.rollout_logp) * A", "k", TWICE.format(2)
    ),
    "a clipped one": (
        "", "clipped_surrogate(importance_ratio(policy.logp, tokens.rollout_logp), A, 0.2, 0.2)", "k", TWICE.format(2)
    ),
    "one of whole sequences": (
        "whole_episodes = property(lambda self: True)",
        "clipped_surrogate(sequence_ratio(policy.logp, tokens.rollout_logp, tokens.seq_ids), A, 3e-4, 4e-4)",
        "k",
        TWICE.format(2),
    ),
    "a detached one": ("", "-ratio * A * engine.clamp(max=9.0)", "k", TWICE.format(2)),
    "half of one": ("", "-ratio * A * engine.sqrt()", "k", TWICE.format("1.5")),
    "two without a correction": (
        "correction: Correction = Correction(level='none')",
        "-importance_ratio(policy.logp, tokens.rollout_logp) * A * engine",
        "k",
        "power of 2; divide by rollout_logp once",
    ),
    "numbers of a clip in the other order": (
        "",
        "clipped_surrogate(ratio, A, 0.28, 0.2)",
        "l",
        r"vanishes below ratio 0\.7[12]\d* with A=-1 and above 1\.20?\d* with A=\+1: the lower bound is the wider one",
    ),
    "a clip on the wrong side": (
        "",
        "-torch.where(A > 0, ratio.clamp(min=0.8), ratio.clamp(max=1.28)) * A",
        "l",
        r"with A=\+1 the gradient vanishes below ratio (0\.8|0\.79)\d* and nowhere above 1: the clip binds",
    ),
    "the larger of the two": (
        "", "torch.minimum(-ratio * A, -ratio.clamp(0.8, 1.28) * A)", "l", "the clip binds on the wrong side"
    ),
    "a wrong side of one sign": (
        "",
        "-torch.where(A > 0, ratio, ratio.clamp(max=1.28)) * A",
        "l",
        r"with A=-1 the gradient vanishes above ratio 1\.28\d* and nowhere below 1",
    ),
    "a gradient that turns around": (
        "", "-(ratio - 0.1 * ratio.square()) * A", "l", r"at A=\+1, ratio \d+\.\d+ the gradient is -\S+ times that"
    ),
    "a stretch above 1 that turns around": (
        "",
        "-ratio * A * (1 - 2.0 * ((ratio > 3) & (ratio < 9)))",
        "l",
        r"at A=\+1, ratio 3\.\d+ the gradient is -1?\S+ times that at ratio 1",
    ),
    "a stretch below 1 that turns around": (
        "",
        "-ratio * A * (1 - 2.0 * ((ratio > 0.1) & (ratio < 0.3)))",
        "l",
        r"at A=\+1, ratio 0\.2\d+ the gradient is -\S+ times that at ratio 1",
    ),
    "an overflow": (
        "", "-(policy.logp - tokens.prox_logp).mul(40).exp() * A / 40", "l", "the gradient is (nan|inf) times that"
    ),
    "a turn farther out than any clip": (
        "",
        "-(gap := policy.logp - tokens.prox_logp).exp() * A * (1 - 2.0 * (gap > 20))",
        "l",
        r"at A=\+1, ratio 7\.2e\+10 the gradient is -7\.2e\+10 times that at ratio 1",
    ),
    "swapped bounds under other names": (
        "eps_low: float = 0.2; eps_high: float = 0.28",
        "clipped_surrogate(ratio, A, self.eps_high, self.eps_low)",
        "h",
        r"eps_high from 0\.28 to 0\.14 moves the gradient at A=-1, ratio 0\.8524 from 0\.8524 to -?0: eps_low's side",
    ),
}  # fmt: skip


def write(folder: Path, fields: str, loss: str) -> str:
    file = folder / "mine.py"
    file.write_text(LOSS.format(fields=fields or "pass", loss=loss))
    return str(file)


@pytest.mark.parametrize("name", FOUND)
def test_what_is_wrong_off_policy_is_found(name, tmp_path):
    fields, loss, letter, said = FOUND[name]
    [result] = check(write(tmp_path, fields, loss), letters=letter)
    assert result.status == "FAILED" and re.search(said, result.detail), result


RIGHT: dict[str, tuple[str, str]] = {
    "a plain ratio": ("", "-ratio * A"),
    "the upper bound wider": ("", "clipped_surrogate(ratio, A, 0.2, 0.28)"),
    "equal bounds": ("", "clipped_surrogate(ratio, A, 0.2, 0.2)"),
    "a cap of the ratio": ("", "-ratio.clamp(max=1.5) * A"),
    "a dual clip alone": ("", "-torch.where(A > 0, ratio, ratio.clamp(max=3.0)) * A"),
    "a dual clip": ("", "clipped_surrogate(ratio, A, 0.2, 0.2, 3.0)"),
    "a mask on both sides": ("", "-ratio * A * ((ratio > 0.7) & (ratio < 1.4))"),
    "a wider lower bound that is declared": (
        "clip_low: float = 0.3; clip_high: float = 0.2",
        "clipped_surrogate(ratio, A, self.clip_low, self.clip_high)",
    ),
    "bounds under other names": (
        "eps_low: float = 0.2; eps_high: float = 0.28",
        "clipped_surrogate(ratio, A, self.eps_low, self.eps_high)",
    ),
    "a soft gate": ("", "-4 * torch.sigmoid(ratio - 1) * A"),
    "a pair of other numbers": (
        "heat_low: float = 0.2; heat_high: float = 0.28",
        "-ratio * A * (1 + 0 * self.heat_low * self.heat_high)",
    ),
    "a pull to the engine's policy": ("", "-ratio * A + 0.5 * (policy.logp - tokens.rollout_logp).square()"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_off_policy_holds(name, tmp_path):
    results = check(write(tmp_path, *RIGHT[name]), letters="hkl")
    assert [r for r in results if r.status == "FAILED"] == []


class WeighsAdvantages(GRPO):
    """It corrects for the engine in the advantages, and the default correction comes on top."""

    @property
    def required_columns(self) -> frozenset[ScoredColumn]:
        return frozenset({"prox_logp"})

    def compute_advantages(self, groups: list[Group]) -> list[Group]:
        def weigh(s: Sample) -> Sample:
            assert s.advantage is not None
            return replace(s, advantage=s.advantage * np.exp(s.columns["prox_logp"] - s.rollout_logp))

        return [[weigh(s) for s in g] for g in super().compute_advantages(groups)]


def test_a_correction_in_the_advantages_counts_too():
    [k] = check(WeighsAdvantages, letters="k")
    assert k.status == "FAILED" and "weighted by its power of 2; correction.level=token comes on top" in k.detail
    assert check(WeighsAdvantages, {"correction": {"level": "none"}}, letters="k")[0].status == "ok"


def details(results: list[Result]) -> dict[str, str]:
    return {r.letter: r.detail for r in results}


def test_what_was_not_examined_is_said():
    said = details(check("grpo", {"correction": {"level": "none"}}, letters="k"))
    assert said["k"] == "not corrected; examined with single tokens and correction.level=none"
    narrow = {"correction": {"level": "geometric", "mode": "mask", "low": 0.99, "high": 1.01}}
    assert "masked at 16 of 20 points" in details(check("grpo", narrow, letters="k"))["k"]
    said = details(check("cispo", letters="hl"))
    assert "min_weight none: not examined" in said["h"]
    assert said["l"] == "it vanishes nowhere (ratios from 0.042 to 23.6, single tokens)"
    said = details(check("grpo", {"dual_clip": 3.0}, letters="l"))
    assert all(re.search(words, said["l"]) for words in (r"A=\+1 it vanishes above 1\.28", r"A=-1 it vanishes above 3"))
