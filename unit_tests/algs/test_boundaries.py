"""What happens exactly at a bound: of ratios, drifts, lengths and weights; and the settings that a check tries."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from algs.check.cuts import cut_after_every_turn, cut_in_alternation
from algs.check.fixtures import made_up_step
from algs.check.instruments import list_modes, list_own_fields, propose_values, record_reads, with_settings
from algs.clip_cov import ClipCov, draw_keys
from algs.grpo import GRPO
from algs.ops import (
    clip_metrics,
    clipped_surrogate,
    effective_sample_size,
    importance_ratio,
    k3,
    reaches_cap,
    reaches_clamp,
    sequence_ratio,
)
from algs.opsd import OPSD
from algs.terms import Correction, overlong_penalty
from core.types.samples import Policy, Tokens
from unit_tests.helpers.examples import a_sample


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_token_that_has_moved_by_delta_is_still_trained():
    """With delta 0.25, from a probability of 1/2: at 1/4 it is trained, and just below it is not."""
    logp = tensor(math.log(0.25), math.log(0.2499), math.log(0.5)).requires_grad_()
    rollout = tensor(*[math.log(0.5)] * 3)
    tokens = Tokens(weight=torch.ones(3), rollout_logp=rollout, teacher_logp=rollout + 0.1)
    loss, metrics = OPSD(delta=0.25, kl_coef=2.0).loss(Policy(logp=logp), tokens)
    assert metrics["masked"].tolist() == [0.0, 1.0, 0.0]
    gap = (logp - rollout).detach()
    want = 2 * gap.square() - gap.exp() * (0.1 - gap) * tensor(1, 0, 1)
    torch.testing.assert_close(loss.detach(), want)
    torch.testing.assert_close(metrics["teacher_kl"], gap - 0.1)
    [slope] = torch.autograd.grad(loss.sum(), logp)
    torch.testing.assert_close(slope, 4 * gap - gap.exp() * (0.1 - gap) * tensor(1, 0, 1))


def test_bounds_of_a_ratio_themselves_are_inside():
    ratio, up, down = tensor(0.5, 0.4, 1.5, 1.6), torch.ones(4), -torch.ones(4)
    assert clip_metrics(ratio, up, 0.5, 0.5)["clip_frac_high"].tolist() == [0, 0, 0, 1]
    assert clip_metrics(ratio, down, 0.5, 0.5)["clip_frac_low"].tolist() == [0, 1, 0, 0]
    assert not any(clip_metrics(ratio, 0 * up, 0.5, 0.5)[f"clip_frac_{side}"].any() for side in ("high", "low"))
    torch.testing.assert_close(clip_metrics(ratio, up, 0.5, 0.5)["approx_kl"], ratio - 1 - ratio.log())
    assert clipped_surrogate(ratio, up, 0.5, 0.5).tolist() == pytest.approx([-0.5, -0.4, -1.5, -1.5])
    assert clipped_surrogate(ratio, down, 0.5, 0.5).tolist() == pytest.approx([0.5, 0.5, 1.5, 1.6])
    assert clipped_surrogate(ratio, down, 0.5, 0.5, 1.5).tolist() == pytest.approx([0.5, 0.5, 1.5, 1.5])
    assert clipped_surrogate(ratio, up, 0.5, 0.5, 0.1).tolist() == pytest.approx([-0.5, -0.4, -1.5, -1.5])
    zero = torch.zeros(3, dtype=torch.float64)
    assert reaches_clamp(tensor(20, 19.9, 0), zero, zero).tolist() == [1, 0, 0]
    assert reaches_clamp(zero, zero, tensor(-20, 3, 21)).tolist() == [1, 0, 1]
    assert reaches_clamp(tensor(11, 11, 0), tensor(0, 0, 20), tensor(-9, -8, 0)).tolist() == [1, 0, 1]
    assert reaches_cap(tensor(-10, -9.9, 10), zero).tolist() == [1, 0, 0]
    assert importance_ratio(tensor(25, -25, 1), zero).tolist() == pytest.approx([math.exp(20), math.exp(-20), math.e])


def test_far_below_the_reference_k3_goes_on_in_a_line():
    d = tensor(-12, -10, -1, 0, 2)
    slope = 1 - math.exp(10)
    want = [math.exp(10) - 11 - 2 * slope, math.exp(10) - 11, math.e - 2, 0.0, math.exp(-2) + 1]
    assert k3(d, torch.zeros(5)).tolist() == pytest.approx(want)


@pytest.mark.parametrize(
    ("mode", "want"),
    [("truncate", [0.25, 0.5, 1, 2, 2]), ("clip", [0.5, 0.5, 1, 2, 2]), ("mask", [0, 0.5, 1, 2, 0])],
)
def test_a_correction_keeps_what_is_at_its_bounds(mode: Literal["truncate", "clip", "mask"], want):
    prox = tensor(0.25, 0.5, 1, 2, 4).log()
    correction = Correction(mode=mode, low=prox[1].exp().item(), high=prox[3].exp().item())
    assert correction.compute_weights(prox, torch.zeros(5), None).tolist() == pytest.approx(want)


def test_sequences_are_weighted_as_a_whole():
    ids, prox, zero = torch.tensor([0, 0, 1, 1]), tensor(2, 8, 1, 0.25).log(), torch.zeros(4)
    assert sequence_ratio(prox, zero, ids).tolist() == pytest.approx([4, 4, 0.5, 0.5])
    assert sequence_ratio(prox, zero, ids, product=True).tolist() == pytest.approx([16, 16, 0.25, 0.25])
    whole: dict[str, Any] = {"low": 0.3, "high": 20.0}
    weigh = [
        Correction(level=level, mode=mode, token_high=3.0, **whole).compute_weights(prox, zero, ids).tolist()
        for level in ("sequence", "geometric")
        for mode in ("truncate", "mask")
    ]
    assert [pytest.approx(row) for row in weigh] == [
        *[[16, 16, 0.25, 0.25], [16, 16, 0, 0], [4, 4, 0.5, 0.5], [2, 3, 1, 0.25]]
    ]


def test_a_sequence_that_has_drifted_by_the_limit_keeps_its_gradient():
    rollout, ids = tensor(-1, -1, -1, -1), torch.tensor([0, 0, 1, 1])
    logp = rollout - tensor(0.25, 0.75, 0.5, 0.6)
    tokens = Tokens(
        weight=torch.ones(4), rollout_logp=rollout, prox_logp=logp, seq_ids=ids, advantage=tensor(-1, -1, -1, 1)
    )
    for limit, drift_from, want in (
        (0.5, "rollout", [False, False, True, False]),
        (0.49, "rollout", [True, True, True, False]),
        (0.1, "prox", [False] * 4),
    ):
        correction = Correction(level="none", max_drift=limit, drift_from=drift_from)
        assert correction.find_drifted(logp, tokens).tolist() == want
        loss, metrics = correction.correct(torch.full((4,), torch.inf), logp, tokens)
        assert loss.tolist() == [0.0 if drifted else torch.inf for drifted in want]
        assert metrics.keys() == {"mismatch/drifted"} and metrics["mismatch/drifted"].tolist() == want


def test_the_penalty_of_length_grows_over_its_buffer():
    lengths = (0, 5, 6, 7, 8, 9, 10, 11)
    got = [overlong_penalty(n, max_tokens=10, buffer=4) for n in lengths]
    assert got == [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]


def test_the_effective_size_of_no_token_is_whole():
    def size(n: int, w: float, w2: float) -> float:
        totals = {"a/n": torch.tensor(n), "a/w": tensor(w)[0], "a/w2": tensor(w2)[0]}
        return float(effective_sample_size(totals, "a/"))

    assert [size(0, 0, 0), size(4, 4, 4), size(2, 4, 10), size(1, 0, 0)] == [1, 1, 0.8, 0]


@pytest.mark.parametrize(
    ("annotation", "value", "others"),
    [
        (float, 0.2, [0.4, 0.1, 1.2, -0.8]),
        (int, 2, [4, 1, 3, 1]),
        (float, 0.0, [1.0, -1.0]),
        (bool, True, [False]),
        (bool, False, [True]),
        (Literal["a", "b", "c"], "b", ["a", "c"]),
        (float | None, None, [2.0, 0.5, 10.0, 0.1]),
        (float | None, 2.0, [4.0, 1.0, 3.0, 1.0, None]),
        (str, "x", []),
        (type(None), None, [None]),
    ],
)
def test_other_values_of_a_setting_are_tried(annotation, value, others):
    assert propose_values(annotation, value) == others


def test_settings_are_those_of_the_algorithms_own_file():
    assert [*list_own_fields(GRPO())] == ["clip_low", "clip_high", "dual_clip"]
    changed = with_settings(GRPO(), {"clip_high": 0.5, "kl.coef": 0.1})
    assert changed is not None and (changed.clip_high, changed.kl.coef, changed.clip_low) == (0.5, 0.1, 0.2)
    assert with_settings(GRPO(), {"clip_high": -1.0}) is None
    reads = set[str]()
    twin = record_reads(GRPO(), reads)
    assert not reads and twin.clip_low == 0.2 and reads & {*GRPO.model_fields} == {"clip_low"}
    modes = [mode for mode, _ in list_modes(GRPO())]
    kl = {"kl.coef": 0.1, "kl.estimator": "auto"}
    assert modes == [
        {},
        {"clip_low": 0.4},
        {"clip_high": 0.56},
        {"dual_clip": 2.0},
        {"dual_clip": 10.0},
        {**kl, "kl.place": "loss"},
        {**kl, "kl.place": "reward"},
        {"overlong.mode": "penalty", "overlong.max_tokens": 8, "overlong.buffer": 6},
        {"overlong.mode": "filter"},
        {"credit": "turn", "turn_discount": 0.5},
        {"credit": "episode", "turn_discount": 1.0},
    ]


def test_episodes_are_cut_where_their_turns_end():
    long, *others = made_up_step(GRPO()).groups[0]
    assert len(long.spans) == 4, "in alternation both samples have several turns"
    group = [replace(long, stop="length"), *others]
    for cut in (cut_after_every_turn, cut_in_alternation):
        branches = cut(group)
        for episode, s in enumerate(group):
            own = [b for b in branches if b.episode == episode] or [s]
            trained = sum(b.action_mask.astype(int) @ (1 << b.token_ids.astype(object)) for b in own)
            assert trained == s.action_mask.astype(int) @ (1 << s.token_ids.astype(object)), "each token once"
            ends = [len(b.token_ids) for b in own]
            assert max(ends) == len(s.token_ids)
            for b in own:
                n = len(b.token_ids)
                assert b.token_ids.tolist() == s.token_ids[:n].tolist() and b.reward == s.reward
                assert b.rollout_logp.tolist() == [x * y for x, y in zip(s.rollout_logp, b.action_mask, strict=False)]
                assert [*b.versions] == [0 if own else -1 for own in b.action_mask]
                assert b.stop == (s.stop if n == len(s.token_ids) else "eos")
                assert {name: v.tolist() for name, v in b.columns.items()} == {
                    name: v[:n].tolist() for name, v in s.columns.items()
                }
                if b is not s:
                    turns = [s.spans.index(span) for span in b.turns]
                    assert b.turn_rewards == tuple(s.turn_rewards[k] for k in turns)
                    step = 2 if cut is cut_in_alternation else len(s.spans)
                    assert turns == [*range(turns[0], len(s.spans), step)]
                    assert n == (len(s.token_ids) if turns[-1] == len(s.spans) - 1 else b.turns[-1][1])
                    assert b.turn_numbers == (tuple(turns) if cut is cut_in_alternation else ())
    counts = [len(s.spans) for s in group]
    number = [e if n > 1 else None for e, n in enumerate(counts)]
    in_turns = [number[e] for k in range(max(counts)) for e, n in enumerate(counts) if k < n]
    assert [b.episode for b in cut_after_every_turn(group)] == in_turns
    backwards = [number[e] for e, n in reversed([*enumerate(counts)]) for _ in range(2 if n > 1 else 1)]
    assert [b.episode for b in cut_in_alternation(group)] == backwards


def test_clip_cov_clips_below_and_above_by_its_own_bounds():
    ratio, advantage = tensor(0.85, 0.95, 1.2, 1.6), tensor(-1, -1, 1, 1)
    marks, threshold = {"dropped": tensor(0, 0, 0, 0)}, {"dropped": tensor(1)}
    tokens = Tokens(weight=torch.ones(4), prox_logp=torch.zeros(4), advantage=advantage, first=marks, totals=threshold)
    loss, metrics = ClipCov(clip_low=0.1, clip_high=0.5).loss(Policy(logp=ratio.log()), tokens)
    assert loss.tolist() == pytest.approx([0.9, 0.95, -1.2, -1.5])
    assert [metrics[f"clip_frac_{side}"].tolist() for side in ("low", "high")] == [[1, 0, 0, 0], [0, 0, 0, 1]]


def test_keys_of_tokens_are_spread_over_0_to_1():
    keys = draw_keys(a_sample(random.Random(0), length=4000), seed=0)
    assert keys.min() >= 0 and 0.99 < keys.max() < 1 and keys.mean() == pytest.approx(0.5, abs=0.03)
