"""Credit at the edges: failed samples, a sample alone, equal rewards, rewards without parts, gaps in the mask."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from algs.base import Algorithm, accepts_group
from algs.credit import group_advantages, reward_std, whiten
from algs.gdpo import GDPO
from algs.gpg import GPG
from algs.grpo import GRPO
from algs.kto import KTO
from algs.minillm import MiniLLM
from algs.opo import OPO
from algs.otb import OTB
from algs.passk import PassK
from algs.positive_nll import PositiveNLL
from algs.ppo import PPO
from algs.scalerl import ScaleRL
from algs.state import StepSeen
from algs.stored import with_stored
from algs.terms import KL
from algs.turns import returns_std
from core.types.samples import Group, Prompt, Sample
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.sentences import tell


def reply(reward: float | None = 0.0, n: int = 2, **more: Any) -> Sample:
    """A prompt of one token, and a reply of n; without a reward it has failed."""
    sample = sample_of([*range(1, n + 2)], [False] + [True] * n, reward=reward, **more)
    return replace(sample, failure="timeout") if reward is None else sample


def untrained(reward: float) -> Sample:
    """A reply of one token that is not trained on."""
    return replace(reply(reward, 1), excluded=np.array([False, True]))


def credit(alg: Algorithm, *groups: Group) -> list[float]:
    """Advantage of each sample's first token of the reply."""
    return [float(s.advantage[1]) for g in alg.compute_advantages([*groups]) for s in g if s.advantage is not None]


COUNTED: list[tuple[list[float | None], list[bool], dict[str, Any], list[float]]] = [
    # the mean over the others of a sample that it does not count is the mean
    ([1.0, 0.0, 3.0], [True, True, False], {"leave_one_out": True}, [1.0, -1.0, 2.5]),
    ([1.0, 1.0, 3.0], [True, True, False], {}, [0.0, 0.0, 2.0]),
    ([1.0, 1.0, 3.0], [True, True, False], {"scale": "batch", "batch_std": 4.0}, [0.0, 0.0, 0.5]),
    ([1.0, 1.0, 3.0], [True, True, False], {"scale": "mean"}, [0.0, 0.0, 2.0]),
    ([1.0, 1.0, 3.0], [True, True, False], {"scale": "group"}, [0.0, 0.0, 0.0]),
    ([1.0, 0.0, 3.0], [True, False, False], {}, [0.0, 0.0, 0.0]),
    ([1.0, None, 3.0], [True, True, False], {}, [0.0, 0.0, 0.0]),
    ([4.0, 0.0, None], [True, True, False], {"scale": "mean"}, [1.0, -1.0, 0.0]),
    ([1.0, -1.0], [True, True], {"scale": "mean"}, [0.0, 0.0]),
    ([-1.0, -3.0], [True, True], {"scale": "mean"}, [0.0, 0.0]),
]


@pytest.mark.parametrize(("rewards", "counted", "how", "want"), COUNTED)
def test_samples_outside_the_baseline_are_compared_with_it(rewards, counted, how, want):
    assert group_advantages(rewards, counted=counted, **how) == pytest.approx(want)


def test_fewer_than_two_rewards_have_the_deviation_1():
    assert [reward_std(r) for r in ([], [5.0], [5.0, None])] == [1.0] * 3
    assert reward_std([1.0, None, 3.0]) == pytest.approx(math.sqrt(2) + 1e-6, rel=1e-9)
    assert [returns_std(r) for r in ([], [np.array([5.0, 1.0])], [np.array([5.0]), None])] == [1.0] * 3
    assert [row.tolist() for row in whiten([np.zeros(0), np.zeros(0)])] == [[], []] and whiten([]) == []


FAILED = reply(None)
EDGES: list[tuple[Algorithm, list[Group], list[float]]] = [
    # the baseline counts tokens: 3/4 of three tokens of reward 1 and one of reward 0
    (OPO(), [[reply(1.0, 3), reply(0.0, 1), FAILED]], [0.25, -0.75, 0.0]),
    (OPO(), [[reply(1.0)], [reply(0.1), reply(0.1, 5), reply(0.1, 3)]], [0.0] * 4),
    (OPO(), [[untrained(1.0), untrained(0.0)], [untrained(5.0), reply(1.0), reply(0.0)]], [0.0, 0.0, 0.0, 0.5, -0.5]),
    # 4 samples with a reward, of which 2 are in a group that teaches, and 3 have a reward that is not 0
    (GPG(), [[reply(1.0), reply(0.0), FAILED], [reply(1.0), reply(1.0)]], [1.0, -1.0, 0.0, 0.0, 0.0]),
    (GPG(counts="nonzero"), [[reply(1.0), reply(0.0)], [reply(1.0), reply(1.0)]], [2 / 3, -2 / 3, 0.0, 0.0]),
    (GPG(), [[reply(1.0)], [FAILED]], [0.0, 0.0]),
    # centred rewards 1/2 and -1/2, so the deviation is 1/2; neither a failure nor an equal group counts in it
    (ScaleRL(), [[reply(1.0), reply(0.0), FAILED], [reply(1.0), reply(1.0)]], [1.0, -1.0, 0.0, 0.0, 0.0]),
    (ScaleRL(), [[reply(1.0)], [reply(1.0), reply(1.0)]], [0.0] * 3),
    (PassK(form="best"), [[reply(2.0), FAILED, reply(0.0)]], [2 / (math.sqrt(2) + 1e-6), 0.0, 0.0]),
    (
        PassK(k=2),
        [[reply(1.0), FAILED, reply(0.0), reply(0.0)]],
        [(1 / 3) / math.sqrt(2 / 9), 0, -(1 / 6) / math.sqrt(2 / 9), -(1 / 6) / math.sqrt(2 / 9)],
    ),
]


@pytest.mark.parametrize(("alg", "groups", "want"), EDGES)
def test_failed_equal_and_single_samples_by_hand(alg: Algorithm, groups: list[Group], want: list[float]):
    assert credit(alg, *groups) == pytest.approx(want, rel=1e-5, abs=1e-12)


def test_scalerl_leaves_out_prompts_of_equal_rewards_and_no_others():
    [taught, equal] = ScaleRL().compute_advantages([[reply(1.0), reply(0.0)], [reply(1.0), reply(1.0)]])
    assert [s.n_trained for s in taught] == [2, 2] and [s.n_trained for s in equal] == [0, 0]
    [alone] = ScaleRL().compute_advantages([[reply(1.0), reply(1.0)]])
    assert [s.n_trained for s in alone] == [2, 2], "an update needs a token"


def test_a_reward_without_parts_is_one_part_and_a_part_may_lack():
    assert GDPO().sum_parts([reply(1.0), reply(0.0), FAILED]) == pytest.approx(
        [x / (math.sqrt(0.5) + 1e-4) for x in (0.5, -0.5, 0.0)]
    )
    both = [reply(parts["a"], reward_parts=parts) for parts in ({"a": 1.0, "b": 2.0}, {"a": 0.0, "b": 0.0}, {"a": 0.0})]
    a, b = (1 / 3) / (math.sqrt(1 / 3) + 1e-4), 1 / (math.sqrt(2) + 1e-4)
    assert GDPO().sum_parts(both) == pytest.approx([2 * a + b, -a - b, -a])
    assert GDPO().sum_parts([reply(1.0)]) == [0.0]


def test_good_samples_are_the_policys_own_with_the_threshold_or_more():
    alg = PositiveNLL(threshold=0.5)
    shown = {"rollout_logp": [0.0] * 3, "versions": [-1] * 3}
    for sample, is_good in (
        (reply(0.5), True),
        (reply(0.49), False),
        (FAILED, False),
        (reply(1.0, origin="demonstration", **shown), False),
        (reply(1.0, origin="other"), False),
    ):
        assert alg.find_positives(sample).tolist() == [False, is_good, is_good]


def test_a_token_earns_what_the_teacher_says_of_those_after_it():
    """The teacher prefers three tokens by 1, 2 and 4; an environment's token lies between them."""
    columns = {"teacher_logp": [9.0, 1.0, 9.0, 3.0, 5.0], "prox_logp": [7.0, 0.0, 7.0, 1.0, 1.0]}
    sample = sample_of([1, 2, 3, 4, 5], [False, True, False, True, True], columns=columns)
    assert MiniLLM(teacher="x", length_norm=False).later_rewards(sample).tolist() == [6.0, 4.0, 0.0]
    assert MiniLLM(teacher="x").later_rewards(sample).tolist() == [3.0, 4.0, 0.0]
    one = sample_of([1, 2], [False, True], columns={"teacher_logp": [0.0, 1.0], "prox_logp": [0.0, 0.0]})
    assert MiniLLM(teacher="x").later_rewards(one).tolist() == [0.0]
    assert MiniLLM(teacher="x").later_rewards(FAILED).tolist() == []


def test_otb_compares_with_siblings_that_have_a_trained_token():
    """Energies 1 - 2 x 1 + 2 = 1 of each token: W is 1, then 2."""
    columns = {"prox_logp": [0.0] * 3, "prox.collision": [2.0] * 3}
    one, other = (reply(r, columns=columns) for r in (1.0, 0.0))
    empty = replace(one, excluded=np.ones_like(one.action_mask))
    short = sample_of([1, 2], [False, True], reward=0.0, columns={name: row[:2] for name, row in columns.items()})
    for group, want in (
        ([one, other], [[0.5, 0.5], [-0.5, -0.5]]),
        ([one, short], [[0.5, 1.0], [-0.5]]),  # nobody to compare the second token with
        ([one, FAILED], [[0.0, 0.0], []]),
        ([one, empty], [[0.0, 0.0], []]),
        ([one, empty, other], [[0.5, 0.5], [], [-0.5, -0.5]]),
    ):
        assert [row.tolist() for row in OTB().compare(group)] == [pytest.approx(row, abs=1e-7) for row in want]


def test_a_completion_that_ended_keeps_its_last_token():
    columns = {"values": [0.0, 0.25, 0.5]}
    for stop, trained in (("eos", [True, True]), ("length", [True, False])):
        [[done]] = PPO(bootstrap_truncated=True, whiten=False).compute_advantages(
            [[reply(1.0, stop=stop, columns=columns)]]
        )
        assert done.loss_mask.tolist() == [False, *trained]


def test_without_mismatched_answers_the_reference_point_is_0():
    alg = KTO(desirable_weight=2.0, undesirable_weight=0.5)
    [[good], [bad]] = alg.compute_advantages([[reply(1.0)], [reply(0.0)]])
    assert (good.advantage[1], bad.advantage[1]) == (2.0, -0.5)
    assert [s.columns["reference_point"].tolist() for s in (good, bad)] == [[0.0] * 3] * 2


def test_one_player_with_a_signal_is_enough():
    def episode(player: int, reward: float) -> Sample:
        return replace(reply(reward), player=player)

    equal, unequal = ([episode(p, r) for r in rewards] for p, rewards in ((0, (1.0, 1.0)), (1, (1.0, 0.0))))
    alg = GRPO(dynamic_sampling=True)
    assert accepts_group(alg, [*equal, *unequal]) and not accepts_group(alg, equal)


def test_two_schedules_of_one_section_both_hold():
    low, high = ({"start": 0.1, "end": 0.5, "steps": 4}, {"start": 2.0, "end": 4.0, "steps": 2})
    alg = GRPO.model_validate({"schedules": {"correction.low": low, "correction.high": high}})
    for step, want in ((0, (0.1, 2.0)), (1, (0.2, 3.0)), (2, (0.3, 4.0)), (9, (0.5, 4.0))):
        correction = alg.with_state({}, step=step).correction
        assert (correction.low, correction.high) == pytest.approx(want), step
    assert (alg.correction.low, alg.correction.high, alg.correction.mode) == (0.1, 2.0, "truncate")


@pytest.mark.parametrize(("kl", "want"), [(0.0, 0.48), (0.09, 0.49), (0.1, 0.5), (0.11, 0.51), (9.0, 0.52)])
def test_the_coefficient_of_the_kl_moves_by_a_fifth_at_most(kl: float, want: float):
    """0.5 x (1 + error x 2 samples / 10), where the error is between -0.2 and 0.2."""
    step = StepSeen(number=0, groups=[[reply(1.0), reply(0.0), FAILED]], means={"kl_ref": kl})
    after = GRPO(kl=KL(coef=0.5, target=0.1, horizon=10)).after(step)
    assert after.state["kl_coef"] == pytest.approx(want)


STORED: dict[str, Any] = {"topk_tokens": [2, 3], "topk_ids": [[7, 8], [9]], "topk_logp": [[-1.0, -2.0], [-0.5]]}
LISTS = "the row r: topk_ids and topk_logp must be lists of one length, and not empty, per token"
OTHER = (
    "the row r: topk_tokens are not the 2 tokens that are trained on here: write it with this run's tokenizer, chat "
    "template and system prompt"
)


def test_stored_lists_lie_at_their_tokens_with_empty_slots():
    sample = sample_of([1, 2, 4, 3], [False, True, False, True], prompt=Prompt(id="r", messages=[], extra=STORED))
    columns = with_stored(sample, "topk").columns
    assert columns["topk_ids"].tolist() == [[-1, -1], [7, 8], [-1, -1], [9, -1]]
    assert columns["topk_logp"].tolist() == [[-1, -1], [-1, -2], [-1, -1], [-0.5, -1]]
    failed = replace(sample, failure="timeout")
    assert with_stored(failed, "topk") is failed


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *(
            ({f"topk_{key}": None}, f"the row r has no topk_{key}: write it with python -m data_prep.distill")
            for key in ("tokens", "ids", "logp")
        ),
        ({"topk_tokens": [2, 4]}, OTHER),
        ({"topk_tokens": [2]}, OTHER),
        ({"topk_logp": [[-1.0], [-0.5]]}, LISTS),
        ({"topk_ids": [[7, 8]], "topk_logp": [[-1.0, -2.0]]}, LISTS),
        ({"topk_ids": [[7, 8], []], "topk_logp": [[-1.0, -2.0], []]}, LISTS),
    ],
)
def test_stored_lists_that_do_not_fit_are_refused(change: dict[str, Any], sentence: str):
    extra = {name: value for name, value in (STORED | change).items() if value is not None}
    sample = sample_of([1, 2, 3], [False, True, True], prompt=Prompt(id="r", messages=[], extra=extra))
    assert tell(lambda: with_stored(sample, "topk")) == sentence
