"""Parts of algs.check by hand: differences and how they are told, partitions, bounds of a clip, pairs of settings."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from algs.base import Algorithm, Metrics, PolicyGradient, with_prox
from algs.check.checker import Result, check, find_class, run_obligation
from algs.check.chunks import does_not_depend_on_the_chunk
from algs.check.fixtures import made_up_step
from algs.check.obligations import (
    APPLICABLE,
    OBLIGATIONS,
    expect_sound,
    has_the_gradient_of_its_loss,
    one_sided_slopes,
    pick,
    prefers_what_the_rows_prefer,
)
from algs.check.off_policy import (
    clips_on_the_right_side,
    corrects_the_engine_once,
    find_bound,
    find_moved,
    find_pairs,
    weigh,
)
from algs.check.partitions import describe_slopes, draw_partitions, keep_rows, run_in_lock_step, same_bits
from algs.check.update import (
    SPLITS,
    NotApplicable,
    ObligationFailed,
    Outcome,
    Split,
    compute_gradient,
    describe_any_difference,
    describe_difference,
    describe_updates,
    find_largest_difference,
    max_abs,
    slopes_by_ratio,
)
from algs.cispo import CISPO
from algs.compared import ComparesGroup
from algs.distill import Distill
from algs.dpo import DPO
from algs.erc import ERC
from algs.gpg import GPG
from algs.grpo import GRPO
from algs.gspo import GSPO
from algs.ppo import PPO
from algs.reductions import Collective
from algs.terms import Correction
from core.types.samples import Policy, Tokens
from unit_tests.helpers.sentences import tell

OFF = Correction(level="none")


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_largest_difference_of_gradients_is_told_with_its_place():
    step = made_up_step(GRPO())
    n = len(step.now["logp"])
    zero = {"logp": torch.zeros(n, dtype=torch.float64), "logits": torch.zeros(n, 7, dtype=torch.float64)}
    zero["logp"][0] = -2.0

    def change(name: str, place: Any, by: float) -> dict[str, Tensor]:
        changed = {key: table.clone() for key, table in zero.items()}
        changed[name][place] += by
        return changed

    assert max_abs(zero) == 2.0 and max_abs({}) == 0.0
    assert find_largest_difference(zero, zero)[0] == 0.0
    assert find_largest_difference(change("logp", 17, -0.5), zero) == (0.5, "logp", 17)
    assert find_largest_difference(change("logits", (18, 3), 0.25), zero) == (0.25, "logits", 18)
    assert find_largest_difference(change("logp", 1, math.nan), zero) == (math.inf, "logp", 1)
    for got, want in (
        (change("logp", 17, -0.5), "the gradient by logp at group 0, sample 1, token 3 is -0.5 instead of 0"),
        (change("logits", (1, 3), 0.25), "the gradient by logits at group 0, sample 0, token 1 is 0.25 instead of 0"),
        (change("logp", 0, 0.125), "the gradient by logp at group 0, sample 0, token 0 is -1.875 instead of -2"),
        (change("logp", 17, 1.9e-6), ""),
        (change("logp", 17, 2.1e-6), "the gradient by logp at group 0, sample 1, token 3 is 2.1e-06 instead of 0"),
    ):
        assert describe_difference(step, got, zero) == want
        same = Outcome(loss=1.0, gradient=zero, connected=True)
        other = want or "the loss is 1 instead of 1"
        assert describe_any_difference(step, Outcome(loss=1.0, gradient=got, connected=True), same) == other
    one, two = (Outcome(loss=x, gradient=zero, connected=True) for x in (1.0, 1.5))
    assert describe_any_difference(step, one, one) == ""
    assert describe_any_difference(step, two, one) == "the loss is 1.5 instead of 1"
    assert [describe_updates(stale) for stale in (True, False)] == ["several updates per step", "one update per step"]
    assert describe_slopes(step, "logits", change("logits", (17, 2), 0.5)["logits"], zero["logits"]) == (
        "the derivative by logits at group 0, sample 1, token 3 is 0.5 instead of 0.0 in one piece"
    )
    assert [str(s) for s in (SPLITS[0], SPLITS[2])] == [
        "micro-batches of at most 20 tokens on 1 ranks",
        "micro-batches of at most 30 tokens on 2 ranks with shared prefixes",
    ]
    assert str(Split(max_tokens=5, ranks=3, padded=False)) == "micro-batches of at most 5 tokens on 3 ranks"


def test_gradients_are_by_the_tables_that_a_loss_depends_on():
    x, y = tensor(2, 3).requires_grad_(), tensor(1).requires_grad_()
    assert {k: g.tolist() for k, g in compute_gradient((x * x).sum(), {"y": y, "x": x}).items()} == {"x": [4, 6]}
    assert compute_gradient(tensor(1).sum(), {"x": x}) == {}
    assert pick(17, "logp") == (17,) and pick(17, "logits") == (17, 2) and pick(50, "logits") == (50, 0)
    right, left = one_sided_slopes(lambda t: t["x"].abs().sum(), {"x": tensor(0, 3)}, "x", token=0, base=3.0)
    assert (right, left) == (pytest.approx(1), pytest.approx(-1))


def test_what_is_not_sound_is_told_with_its_numbers():
    good = Outcome(loss=1.0, gradient={"logp": tensor(1, -2)}, connected=True)
    expect_sound(good, "x")
    for bad, want in (
        ({"connected": False}, "x: the loss depends on the policy through detached values only, so backward() raises"),
        ({"loss": math.nan}, "x: the loss is nan, the largest gradient 2"),
        ({"gradient": {"logp": tensor(math.inf)}}, "x: the loss is 1, the largest gradient inf"),
    ):
        assert tell(partial(expect_sound, replace(good, **bad), "x"), ObligationFailed) == want


def test_partitions_are_of_few_rows_in_a_fixed_order():
    assert sorted(draw_partitions(3, None)) == sorted(
        [[(0, 1, 2)], [(0, 1), (2,)], [(0, 2), (1,)], [(0,), (1, 2)], [(0,), (1,), (2,)]]
    )
    assert draw_partitions(5, 4) == draw_partitions(5, None)[:4] and len(draw_partitions(5, None)) == 52
    step = made_up_step(GRPO())
    assert [len(g) for g in keep_rows(GRPO(), step.groups)] == [4, 3, 1]
    failed = [[replace(s, failure="no") if i < 2 else s for i, s in enumerate(g)] for g in step.groups]
    assert [len(g) for g in keep_rows(GRPO(), failed)] == [2, 1, 1, 2]
    pairs = made_up_step(DPO()).groups
    assert [len(g) for g in keep_rows(DPO(), [*pairs, *pairs])] == [2] * 8
    for a, b, same in (
        (tensor(1, math.nan), tensor(1, math.nan), True),
        (tensor(1, math.nan), tensor(1, 2), False),
        (tensor(1), tensor(1, 1), False),
        (tensor(1), torch.ones(1), False),
        (tensor(1), tensor(1 + 1e-15), False),
    ):
        assert same_bits(a, b) == same


def test_ranks_that_disagree_are_told():
    def adds(*parts: Tensor) -> Collective[list[float]]:
        seen = []
        for part in parts:
            total = yield part
            seen.append(float(total.sum()))
        return seen

    assert run_in_lock_step([adds(tensor(1), tensor(5)), adds(tensor(2), tensor(6))]) == [[3, 11], [3, 11]]
    assert tell(lambda: run_in_lock_step([adds(tensor(1)), adds(torch.ones(2))]), ObligationFailed) == (
        "the ranks reduce different tensors at the same time: [1] torch.float64, [2] torch.float32"
    )
    assert tell(lambda: run_in_lock_step([adds(tensor(1)), adds(tensor(1), tensor(2))]), ObligationFailed) == (
        "some ranks have reduced all totals, and others have not: they would wait for ever"
    )


def test_weights_and_bounds_of_a_clip_are_found():
    plain = GRPO(clip_low=0.2, clip_high=0.4, correction=OFF)
    at = tensor(0.5, 1.0, 1.3, 2.0).log()
    assert weigh(plain, at).T.tolist() == [pytest.approx([0.5, 1, 1.3, 0]), pytest.approx([0, 1, 1.3, 2])]
    assert slopes_by_ratio(plain, at[1:3], (1.0, -1.0, 0.0)).tolist() == [
        pytest.approx([-1, 1, 0]),
        pytest.approx([-1.3, 1.3, 0]),
    ]
    gap = math.log(2)
    assert weigh(GRPO(), tensor(0), engine_gap=gap).tolist() == [pytest.approx([2, 2])]
    assert weigh(GRPO(), tensor(0), engine_gap=2 * gap).tolist() == [pytest.approx([2, 2])], "capped at 2"
    dual = GRPO(clip_low=0.2, clip_high=0.4, dual_clip=3.0, correction=OFF)
    for alg, want in (
        (plain, [1.4, None, None, 0.8]),
        (dual, [1.4, None, 3.0, 0.8]),
        (GSPO(correction=OFF), [1.0004, None, None, 0.9997]),
        (CISPO(correction=OFF), [None] * 4),
    ):
        found = [find_bound(alg, sign, side) for sign in (1, -1) for side in (1, -1)]
        assert found == [None if x is None else pytest.approx(x, rel=1e-4) for x in want]
    assert [find_pairs(alg) for alg in (GRPO(), PPO(), CISPO(), ERC())] == [
        *([("clip_low", "clip_high")],) * 2,
        [("min_weight", "max_weight")],
        [("beta_low", "beta_high"), ("clip_low", "clip_high")],
    ]
    ratios = tensor(0.85, 1.0, 1.3, 2.0).log()
    before = slopes_by_ratio(plain, ratios, (1.0, -1.0))
    [(sign, at_ratio, was, now)] = find_moved(plain, "clip_high", ratios, before)
    assert (sign, math.exp(at_ratio), was, now) == (1.0, pytest.approx(1.3), pytest.approx(-1.3), 0.0)
    [(sign, at_ratio, was, now)] = find_moved(plain, "clip_low", ratios, before)
    assert (sign, math.exp(at_ratio), was, now) == (-1.0, pytest.approx(0.85), pytest.approx(0.85), 0.0)
    [(sign, at_ratio, was, now)] = find_moved(dual, "dual_clip", ratios, before)
    assert (sign, math.exp(at_ratio), was, now) == (-1.0, pytest.approx(2), pytest.approx(2), 0.0)
    assert find_moved(GRPO(dual_clip=1.5), "dual_clip", ratios, before) == [], "0.75 is refused"


def test_the_power_of_the_engines_ratio_is_told_where_no_cap_binds():
    capped = GRPO(correction=Correction(high=1.2))
    end = "; examined with single tokens and correction.level="
    assert corrects_the_engine_once(capped) == f"weighted by pi_prox / pi_rollout to the power of 1 near 1{end}token"
    assert corrects_the_engine_once(GRPO(correction=OFF)) == f"not corrected{end}none"


def test_an_obligation_is_told_in_a_line_whatever_happens():
    def raises(error: Exception) -> Any:
        def obligation(alg: Any) -> str:
            raise error

        return obligation

    for obligation, want in (
        (lambda alg: "fine", "(x) ok        a title: fine"),
        (raises(ObligationFailed("1 instead of 2")), "(x) FAILED    a title: 1 instead of 2"),
        (raises(NotApplicable("none")), "(x) n/a       a title: none"),
    ):
        assert str(run_obligation(GRPO(), "x", "a title", obligation=obligation)) == want
    broken = run_obligation(GRPO(), "x", "t", obligation=raises(KeyError("k")))
    assert broken.status == "FAILED" and broken.detail.startswith("KeyError: 'k' (") and ", line " in broken.detail
    assert __file__ in broken.detail and Result(letter="x", title="t", status="FAILED", detail=broken.detail) == broken
    assert find_class("grpo") is GRPO and "".join(letter for letter, *_ in OBLIGATIONS) == "abcdefghijklmnop"
    assert [[r.letter for r in check(name, letters="bp")] for name in ("grpo", "echo")] == [["b"], ["b", "p"]]
    assert {kind: len(letters) for kind, letters in APPLICABLE.items()} == {
        **{"policy gradient": 15, "conversations": 10, "pairs": 10, "unpaired": 10, "scored": 9}
    }


def test_an_algorithm_is_named_by_its_module_or_the_path_of_its_file(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    text = "from algs.grpo import GRPO\nclass {}(GRPO): ...\n"
    (tmp_path / "mine.py").write_text(text.format("Mine"))
    (tmp_path / "own" / "other.py").write_text(text.format("Other"))
    monkeypatch.chdir(tmp_path)
    names = ("grpo", "mine.py", "own/other.py", str(tmp_path / "mine.py"))
    assert [find_class(name).__name__ for name in names] == ["GRPO", "Mine", "Other", "Mine"]
    said = "alg.file=own/other is not a Python file: its name must end in .py"
    assert tell(lambda: find_class("own/other")) == said
    for name, key in (("nowhere.py", "file"), ("own/nowhere.py", "file"), ("nowhere", "name")):
        assert tell(lambda name=name: find_class(name)).startswith(f"alg.{key}")


class Bent(GRPO):
    """Its loss has a corner where a token has not moved since the step began, and where every n-th one is."""

    every: int = 0

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        held = with_prox(policy, tokens).prox_logp
        if self.every:
            is_corner = torch.arange(len(held)) % self.every == 0
            held = torch.where(is_corner, policy.logp.detach(), held)
        return (policy.logp - held).abs(), {}


def test_corners_of_a_loss_prove_nothing_of_its_gradient():
    said = tell(lambda: has_the_gradient_of_its_loss(Bent(every=1)), ObligationFailed)
    found = re.fullmatch(
        r"all (\d+) points are kinks, or the loss computes in less than float64: nothing is shown", said
    )
    assert found, said
    n = int(found[1])
    agree = "central differences agree at {} tokens"
    assert has_the_gradient_of_its_loss(GRPO()) == agree.format(n)
    # the second update finds prox_logp elsewhere
    assert has_the_gradient_of_its_loss(Bent()) == f"{agree.format(n // 2)}, {n // 2} kinks excluded"
    weak = has_the_gradient_of_its_loss(Bent(every=2))
    assert re.fullmatch(r".* tokens, \d+ kinks excluded: weak evidence, most points are kinks", weak), weak


def test_an_obligation_says_why_it_is_none_of_an_algorithm():
    for obligation, alg, why in (
        (does_not_depend_on_the_chunk, GRPO(), "it has no measures"),
        (
            clips_on_the_right_side,
            GPG(),
            "it has no clip_low and clip_high, nor another pair of low and high; (l) looks for clips",
        ),
        (
            prefers_what_the_rows_prefer,
            Distill(),
            "it compares distributions, and the rows' own tokens have no say",
        ),
    ):
        assert tell(lambda check=obligation, of=alg: check(of), NotApplicable) == why


class Unwritten(GRPO):
    """One of its settings raises."""

    soft: bool = False

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        if self.soft:
            raise NotImplementedError
        return super().loss(policy, tokens)


def test_a_setting_that_raises_has_an_effect_and_is_tried_no_more():
    [g] = check(Unwritten, letters="g")
    assert (g.status, g.detail) == ("ok", "soft")


class CountsIdleRanks(GRPO):
    """It trains more, the more micro-batches have no token."""

    def totals(self, policy: Policy, tokens: Tokens) -> dict[str, Tensor]:
        return {"idle": policy.logp.new_tensor(float(len(policy.logp) == 0))}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        return loss * (1 + tokens.totals["idle"]), metrics


def test_an_effect_of_idle_ranks_is_told_with_the_split_that_has_them():
    [a] = check(CountsIdleRanks, letters="a")
    where = r"one update per step, loss_norm \w+, micro-batches of at most 40 tokens on 17 ranks: the gradient "
    assert a.status == "FAILED" and re.match(where, a.detail), a


class Steep(GRPO):
    """Its weight overflows where the engine is far off the trainer."""

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        is_far = (tokens.prox_logp - tokens.rollout_logp).abs() > 1
        return loss * torch.where(is_far, math.inf, 1.0), metrics


def test_what_an_author_left_out_or_let_overflow_fails():
    said = tell(lambda: corrects_the_engine_once(Steep(correction=OFF)), ObligationFailed)
    assert said == "with pi_prox / pi_rollout at exp(2) the gradient is not finite"
    for cls, where in ((Algorithm, "base"), (PolicyGradient, "base"), (ComparesGroup, "compared")):
        [a] = check(cls, letters="a")
        assert a.status == "FAILED" and re.match(rf"NotImplementedError: .*algs/{where}\.py, line \d+\)", a.detail), a
