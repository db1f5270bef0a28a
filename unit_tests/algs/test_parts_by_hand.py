"""Parts of algorithms by hand: terms beside totals, keys that drop tokens, pairs, and the credit of groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algs.base import accepts_group, with_prox
from algs.chord import CHORD
from algs.clip_cov import ClipCov, draw_keys
from algs.dpo import DPO
from algs.gdpo import GDPO
from algs.grpo import GRPO
from algs.objective import (
    Objective,
    add_terms,
    add_totals,
    check_demonstrations,
    check_terms,
    compute_objective,
    select,
    view_first,
)
from algs.opd import OPD
from algs.passk import PassK
from algs.ppo import PPO
from algs.raft import RAFT
from algs.sdpo import SDPO
from algs.teachers import append_text, grade_tokens
from algs.terms import KL
from algs.totals import Totals, total_alone
from core.errors import RunStopped
from core.types.batch import TermTokens
from core.types.samples import Batch, Policy, Prompt, Sample, Tokens
from core.types.terms import Term
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.sentences import tell


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def a_reply(n: int = 2, **more: Any) -> Sample:
    """A prompt of one token, and a reply of n."""
    return sample_of([*range(1, n + 2)], [False] + [True] * n, **more)


def credit(alg: Any, *groups: list[Sample]) -> list[list[float]]:
    """Advantages of the trained tokens, by sample."""
    return [s.advantage[s.loss_mask].tolist() for g in alg.compute_advantages([*groups]) for s in g]


class TwoTerms(GRPO):
    """Twice log pi on its first term, and the square on the second."""

    @property
    def terms(self) -> tuple[Term, ...]:
        return (
            Term("one", lambda p, t: (2 * p.logp, {"seen": p.logp}), on="observed", coef=0.5),
            Term("two", lambda p, t: (p.logp.square(), {}), on="demonstrated", coef=3.0),
        )


def a_batch() -> Batch:
    """Four tokens, of which the first term has 0 to 2 and the second 2 and 3."""
    places, weights = {"one": [0, 1, 2], "two": [2, 3]}, {"one": [0.1, 0.2, 0.3], "two": [0.6, 0.4]}
    tokens = {name: Tokens(weight=tensor(*weights[name])) for name in places}
    whole, empty = Tokens(weight=tensor(0.1, 0.2, 0.3, 0.4)), torch.zeros(4, dtype=torch.int64)
    inputs = dict.fromkeys(("input_ids", "position_ids", "segment_ids", "parents", "lengths", "at", "labels"), empty)
    terms = {name: TermTokens(at=torch.tensor(at), tokens=tokens[name]) for name, at in places.items()}
    return Batch(**inputs, tokens=whole, terms=terms)


def test_terms_add_up_at_their_tokens_with_weights_of_their_own():
    policy = Policy(
        logp=tensor(-1, -2, -3, -4).requires_grad_(), entropy=tensor(1, 2, 3, 4), measures={"m": tensor(5, 6, 7, 8)}
    )
    batch = a_batch()
    done = compute_objective(TwoTerms(), policy, batch)
    # half of 2 x log pi at the weights of the whole, and at token 2 also 3 x 9 x 0.6 / 0.3
    assert done.loss.tolist() == pytest.approx([-1, -2, -3 + 54, 48]) and done.loss.requires_grad
    (w1, one), (w2, two) = done.of_terms
    assert (w1.tolist(), w2.tolist(), done.metrics) == ([0.1, 0.2, 0.3], [0.6, 0.4], {})
    assert {name: x.tolist() for name, x in one.items()} == {
        "term/one/seen": [-1, -2, -3],
        "term/one/loss": [-2, -4, -6],
        "term/one/coef": [0.5] * 3,
    }
    assert {name: x.tolist() for name, x in two.items()} == {"term/two/loss": [9, 16], "term/two/coef": [3, 3]}
    bare = done.detach()
    assert not bare.loss.requires_grad and bare.loss.tolist() == done.loss.tolist()
    assert not any(x.requires_grad for _, metrics in bare.of_terms for x in metrics.values())
    assert [[*metrics] for _, metrics in bare.of_terms] == [[*one], [*two]]
    assert not Objective(loss=policy.logp, metrics={"x": 2 * policy.logp}).detach().metrics["x"].requires_grad

    seen, own = view_first(policy, batch)
    assert (seen.logp.tolist(), own) == ([-1, -2, -3], batch.terms["one"].tokens)
    assert (seen.entropy.tolist(), seen.measures["m"].tolist()) == ([1, 2, 3], [5, 6, 7])
    assert select(Policy(logp=tensor(1, 2)), torch.tensor([1])).entropy is None
    assert view_first(policy, replace(batch, terms={})) == (policy, batch.tokens)

    totals = Totals(reduced={"t": tensor(7)}, first={"t": tensor(1, 2, 3)})
    given = add_totals(batch, totals)
    assert [own.at.tolist() for own in given.terms.values()] == [[0, 1, 2], [2, 3]]
    assert [own.tokens.weight.tolist() for own in given.terms.values()] == [[0.1, 0.2, 0.3], [0.6, 0.4]]
    assert [[*own.tokens.totals] for own in given.terms.values()] == [["t"], ["t"]], "every term reads them"
    assert [[*own.tokens.first] for own in given.terms.values()] == [["t"], []] and not given.tokens.totals
    alone = add_totals(replace(batch, terms={}), totals)
    assert ([*alone.tokens.totals], [*alone.tokens.first]) == (["t"], ["t"])


def test_the_loss_of_terms_is_the_sum_of_those_that_are_told():
    means = {
        "term/a/coef": 2.0,
        "term/a/loss": 3.0,
        "term/b/coef": 0.5,
        "term/b/loss": -4.0,
        "term/c/coef": 1.0,
        "x": 1.0,
    }
    assert add_terms(means) == means | {"loss": 4.0}
    for without in ({}, {"loss": 2.0, "x": 1.0}, {"term/c/coef": 1.0}):
        assert add_terms(without) == without


def test_terms_and_demonstrations_are_refused_in_a_sentence():
    shown = replace(
        a_reply(origin="demonstration", rollout_logp=[0.0] * 3, versions=[-1] * 3),
        prompt=Prompt(id="row 3", messages=[]),
    )
    assert tell(lambda: check_demonstrations(GRPO(), [[a_reply()], [shown]]), RunStopped) == (
        "row 3 has a demonstration, and GRPO trains on none: use an algorithm with a term on demonstrated tokens "
        "(alg.name=chord), or remove the column demonstration from the data set"
    )
    for alg, group in ((CHORD(), [shown]), (GRPO(), [a_reply()]), (GRPO(), [replace(shown, failure="timeout")])):
        check_demonstrations(alg, [group])

    class Twice(GRPO):
        terms = property(lambda self: (Term("rl", self.loss), Term("x", self.loss), Term("rl", self.loss)))

    class WithValues(PPO):
        terms = property(lambda self: (Term("rl", self.loss),))

    assert tell(lambda: check_terms(Twice())) == (
        "Twice: two terms have the same name, found ['rl', 'x', 'rl']: rename one"
    )
    assert tell(lambda: check_terms(WithValues())) == (
        "WithValues: a value or reward model has no terms: leave `terms` out"
    )


def splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def list_keys(name: str, ids: list[int], seed: int) -> Iterator[float]:
    """Keys as the docstring has them, in whole numbers of Python."""
    start = sum(splitmix((ord(c) * 0x94D049BB133111EB + i) % 2**64) for i, c in enumerate(name))
    total = 0
    for place, token in enumerate(ids):
        total += splitmix((token * 0xBF58476D1CE4E5B9 + place) % 2**64)
        yield (splitmix((total + start + seed * 0x9E3779B97F4A7C15) % 2**64) >> 40) / 2**24


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_a_key_depends_on_seed_prompt_and_the_tokens_before(seed):
    sample = replace(a_reply(4), prompt=Prompt(id="row 12", messages=[]))
    assert draw_keys(sample, seed).tolist() == [*list_keys("row 12", [1, 2, 3, 4, 5], seed)]
    [[ready]] = ClipCov(seed=seed).prepare_update([[sample]])
    assert ready.columns["clip_key"].tolist() == draw_keys(sample, seed).tolist()


def test_clip_cov_drops_the_smallest_keys_of_free_tokens():
    """Covariances 1 1 2 2 3 3 2 2; ratios 1.3 at token 2, 1 / 1.3 at token 3, and 1.6 at token 4."""
    advantage, logp = tensor(1, -1, 1, -1, 1, -1, 2, -2), tensor(1, -1, 2, -2, 3, -3, 1, -1)
    prox = logp - tensor(1, 1, 1.3, 1 / 1.3, 1.6, 1, 1, 1).log()
    keys = {"clip_key": tensor(0.9, 0.8, 0.1, 0.2, 0.05, 0.04, 0.7, 0.6)}
    tokens = Tokens(weight=torch.ones(8), advantage=advantage, prox_logp=prox, columns=keys)
    for low, high, above, below, fraction, want in (
        (0.3, 0.5, 1.0, 3.0, 0.0, [2]),
        (0.2, 0.5, 1.0, 3.0, 0.26, [2, 7]),
        (0.3, 0.2, 1.0, 3.0, 0.2, [3]),
        (0.2, 0.2, 1.0, 3.0, 0.0, [7]),
        (0.3, 0.5, 1.0, 3.0, 0.26, [2, 3]),
        (0.3, 0.5, 1.0, 3.0, 0.4, [2, 3, 7]),
        (0.3, 0.5, 1.0, 10.0, 0.0, [5]),
        (0.3, 0.7, 1.0, 10.0, 0.26, [4, 5]),
        (0.3, 0.7, 2.0, 10.0, 0.4, [4, 5]),
        (0.3, 0.5, 0.5, 2.0, 0.0, [1]),
    ):
        alg = ClipCov(clip_low=low, clip_high=high, cov_above=above, cov_below=below, fraction=fraction)
        loss, told = alg.loss(Policy(logp=logp), total_alone(alg, Policy(logp=logp), tokens))
        assert told["dropped"].nonzero().flatten().tolist() == want == (loss == 0).nonzero().flatten().tolist()
    once = tokens.replace(prox_logp=None)  # a single update: every token is free
    dropped = total_alone(ClipCov(cov_below=3.0), Policy(logp=logp), once)
    assert (dropped.first["dropped"] >= dropped.totals["dropped"]).nonzero().flatten().tolist() == [2]
    assert with_prox(Policy(logp=logp), once).prox_logp.tolist() == logp.tolist()


def test_pairs_of_unequal_length_by_hand():
    """A chosen reply of 3 tokens and a rejected one of 2, without a reference."""
    pair = [a_reply(3, reward=1.0), a_reply(2, reward=0.0)]
    decay = DPO(reference_free=True, length_decay=0.5, nll_coef=0.25, beta=1.0)
    assert credit(decay, pair) == [[1.0, 1.0, 0.5], [-1.0, -1.0]]
    assert credit(DPO(), pair[::-1]) == [[-1.0, -1.0], [1.0, 1.0, 1.0]]
    assert credit(DPO(length_norm=True), pair) == [pytest.approx([1 / 3] * 3), [-0.5, -0.5]]
    logp, ids = tensor(-1, -2, -3, -4, -5), torch.tensor([0, 0, 0, 1, 1])
    tokens = Tokens(
        weight=torch.ones(5), advantage=tensor(1, 1, 0.5, -1, -1), seq_ids=ids, group_ids=torch.zeros_like(ids)
    )
    loss, told = decay.loss(Policy(logp=logp), tokens)
    margin = -1 - 2 - 1.5 + 9
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-margin)) + 0.25 * 2] * 5)
    assert {name: x.tolist() for name, x in told.items()} == {
        "pair/chosen": [-4.5] * 5,
        "pair/rejected": [-9] * 5,
        "pair/margin": [4.5] * 5,
        "pair/accuracy": [1] * 5,
    }


def test_credit_of_groups_by_hand():
    """Rewards of three replies of which one failed, with parts, thresholds and ties."""
    scored = [a_reply(reward=r) for r in (1.0, 0.0, 0.5)]
    failed = replace(a_reply(), reward=None, failure="timeout")
    best = a_reply(reward=2.0)
    std = math.sqrt(0.25) + 1e-6
    for alg, groups, want in (
        (PassK(form="best"), [scored], [0.5 / std, 0, 0]),
        (PassK(form="best"), [[*scored[:2], scored[0]]], [0, 0, 0]),
        (PassK(form="best"), [[scored[0]]], [0]),
        # 2 of 4 pass: the pairs of failures are 1 of 6, and a failure's pairs fail in 1 of 3
        (
            PassK(k=2, threshold=0.5),
            [[*scored, scored[1]]],
            [x / math.sqrt(5 / 36) for x in (1 / 6, 1 / 6 - 1 / 3, 1 / 6, 1 / 6 - 1 / 3)],
        ),
        (PassK(k=3), [scored], [0, 0, 0]),
        (PassK(k=2), [[scored[1]] * 3], [0, 0, 0]),
        (PassK(k=2), [[scored[0]]], [0]),
        (RAFT(keep="positive", threshold=0.5), [scored], [1, None, 1]),
        (RAFT(keep="best"), [[scored[2], best, best]], [None, 1, None]),
        (RAFT(threshold=9.0), [scored], [0, 0, 0]),
    ):
        got = alg.compute_advantages([[replace(s) for s in g] for g in groups])
        told = [s.advantage[1] if s.loss_mask.any() else None for g in got for s in g]
        assert told == [None if x is None else pytest.approx(x, rel=1e-4, abs=1e-9) for x in want], (alg, told)
    assert [RAFT().accept_group(g) for g in ([scored[0]], [scored[1]], [failed])] == [True, False, False]
    assert RAFT(keep="best").find_kept([failed]) == [False]


def test_parts_of_a_reward_count_the_same_whatever_their_size():
    def parts(a: float, b: float) -> Sample:
        return a_reply(reward=a + b, reward_parts={"a": a, "b": b})

    group = [parts(0, 10), parts(1, 10), parts(2, 40)]
    a = [x / (1 + 1e-4) for x in (-1, 0, 1)]
    deviation = math.sqrt(300) + 1e-4
    sums = [x + y / deviation for x, y in zip(a, (-10, -10, 20), strict=True)]
    assert GDPO().sum_parts(group) == pytest.approx(sums, rel=1e-9)
    scale = math.sqrt(sum((z - sum(sums) / 3) ** 2 for z in sums) / 2) + 1e-4
    got = GDPO().compute_advantages([[*group, replace(a_reply(), reward=None, failure="timeout")]])[0]
    assert [s.advantage[1] for s in got] == pytest.approx([(z - sum(sums) / 3) / scale for z in sums] + [0], rel=1e-5)
    same = [parts(1, 2), parts(1, 2)]
    assert [GDPO(dynamic_sampling=on).accept_group(same) for on in (False, True)] == [True, False]
    assert GDPO(dynamic_sampling=True).accept_group(group)


def test_teachers_read_the_answer_or_the_best_other_solution():
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    prompt = Prompt(id="p", messages=messages, answer="42")
    assert append_text(messages, "!") == [messages[0], {"role": "user", "content": "Q!"}]

    def solution(n: int, reward: float | None, **more: Any) -> Sample:
        return replace(
            a_reply(),
            prompt=prompt,
            reward=reward,
            completion=f"s{n}",
            token_ids=np.array([1, n, n], dtype=np.int32),
            **more,
        )

    right, twin, better, wrong = (solution(n, r) for n, r in ((5, 1.0), (3, 1.0), (9, 2.0), (1, 0.5)))
    alg = SDPO(shown="<{solution}>")
    for sample, group, want in (
        (wrong, [right, wrong], "s5"),
        (wrong, [right, twin, wrong], "s3"),
        (wrong, [twin, better, right], "s9"),
        (better, [better, wrong], None),
        (right, [right, solution(4, None, failure="timeout")], None),
        (solution(1, 0.0, episode=2), [solution(2, 1.0, episode=2), solution(7, 1.0, episode=3)], "s7"),
    ):
        shown = alg.show_solution(sample, group)
        assert (shown and shown[-1]["content"]) == (want and f"Q<{want}>")
    assert alg.accept_group([wrong, right]) and not alg.accept_group([right]) and not alg.accept_group([wrong, wrong])
    graded = grade_tokens(a_reply(columns={"t": [0.5, 0.5, 0.5]}), "t")
    assert graded.advantage is not None and graded.advantage.tolist() == pytest.approx([0.5, 0.4, 0.3])


def test_tokens_count_more_before_the_teacher_objects():
    alg = OPD(teacher="x", coef=2.0, early=0.5)
    sample = a_reply(3, columns={"teacher_logp": [9.0, 1.1, -2.8, 1.3]})  # above the engine by 1, -3 and 1
    weights = [1.5, 1 + 0.5 * (1 - 1 / 5), 1 + 0.5 * (1 - 4 / 5)]
    assert credit(alg, [sample]) == [pytest.approx([2 * g * w for g, w in zip((1, -3, 1), weights, strict=True)])]
    assert alg.weigh_early(np.zeros(3)).tolist() == [1.5] * 3


def test_turns_decide_whether_a_group_teaches():
    """Two episodes of two turns, of equal rewards; only their turns tell them apart."""
    mask = [False, True, False, True]

    def episode(first: float, reward: float = 1.0) -> Sample:
        return sample_of([1, 2, 3, 4], mask, reward=reward, turn_rewards=[first, 0.0])

    same, other = [episode(0.5), episode(0.5)], [episode(0.5), episode(0.25)]
    by_turn = GRPO(dynamic_sampling=True, credit="turn")
    plain = GRPO(dynamic_sampling=True)
    none = replace(episode(0.5), reward=None, failure="timeout")
    for alg, group, want in (
        (by_turn, same, False),
        (by_turn, other, True),
        (by_turn, [other[0], none], False),
        (plain, other, False),
        (plain, [episode(0.0), episode(0.0, reward=0.0)], True),
        (GRPO(credit="turn"), same, True),
    ):
        assert alg.accept_group(group) == accepts_group(alg, group) == want


def test_the_kl_in_the_reward_is_taken_from_the_whole_episode():
    alg = GRPO(kl=KL(coef=0.5, place="reward"))
    columns = {"prox_logp": [9.0, -1.0, -2.0], "ref_logp": [9.0, -1.5, -2.25]}
    sample = a_reply(reward=1.0, columns=columns)
    assert alg.kl_rewards(sample).tolist() == [-0.25, -0.125] and alg.penalised_reward(sample) == 0.625
    assert alg.turn_rewards(sample).tolist() == [0.625] and alg.turn_returns(sample).tolist() == [0.625]
    failed = replace(sample, reward=None, failure="timeout")
    assert (alg.penalised_reward(failed), alg.turn_rewards(failed), alg.turn_returns(failed)) == (None, None, None)
    assert GRPO().kl_rewards(sample).tolist() == [0, 0] and alg.kl_rewards(failed).tolist() == []
