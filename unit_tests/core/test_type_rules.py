"""Rules of the types of a step, whole: the sentence of each broken one, and small tables of what the others give."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from core.errors import RunStopped
from core.types.action_tokens import NotActions, find_bins, find_centres, read_action_tokens
from core.types.allowed_tokens import EVERY_TOKEN, LOWEST, AllowedTokens
from core.types.arrays import INTS, from_json, is_equal, to_column, to_json
from core.types.batch import MissingColumn, Policy, Tokens
from core.types.images import PlacedImage
from core.types.kept_sets import KeptSets
from core.types.measures import At, Measure, Stored, check_rows, entropy_of, list_teachers
from core.types.routes import (
    check_routes,
    describe_routes,
    dtype_for,
    extend,
    fill_unknown,
    find_unknown,
    restore_routes,
    to_tensor,
    unknown_of,
)
from core.types.terms import find_columns, find_observed, find_term_tokens, find_trainable
from core.types.turns import check_turns, find_runs
from unit_tests.helpers.examples import six_tokens
from unit_tests.helpers.sentences import tell


def test_runs_are_the_longest_spans_of_sampled_tokens():
    table = {"": (), "0": (), "1": ((0, 1),), "0110": ((1, 3),), "1011": ((0, 1), (2, 4)), "111": ((0, 3),)}
    assert {text: find_runs(np.array([one == "1" for one in text], dtype=bool)) for text in table} == table


SPANS = "turns of a Sample must be spans [begin, end) in order, none empty, within its 6 tokens; found "
TURNS: list[tuple[dict[str, Any], str]] = [
    ({"turns": ((2, 4), (5, 7))}, f"{SPANS}[(2, 4), (5, 7)]"),
    ({"turns": ((2, 4), (3, 4))}, f"{SPANS}[(2, 4), (3, 4)]"),
    ({"turns": ((2, 4), (5, 5))}, f"{SPANS}[(2, 4), (5, 5)]"),
    (
        {"turns": ((2, 5),)},
        "the turn (2, 5) of a Sample contains a token that the policy did not choose; a turn must lie within "
        "action_mask",
    ),
    ({"turns": ((2, 4),)}, "the turns of a Sample cover 2 of its 3 sampled tokens; add the span of every reply"),
    (
        {"turn_rewards": (1.0,)},
        "turn_rewards of a Sample must be empty or have one number per turn; found 1 for 2 turns",
    ),
    (
        {"turn_numbers": (1, 2, 3)},
        "turn_numbers of a Sample must be empty or have one number per turn; found 3 for 2 turns",
    ),
    ({"turn_rewards": (1.0, float("nan"))}, "turn_rewards of a Sample must be finite, found [1.0, nan]"),
    ({"turn_numbers": (3, 3)}, "turn_numbers of a Sample must rise from turn to turn, found [3, 3]"),
    ({"turn_numbers": (3, 2)}, "turn_numbers of a Sample must rise from turn to turn, found [3, 2]"),
]


@pytest.mark.parametrize(("given", "sentence"), TURNS, ids=[sentence[:60] for _, sentence in TURNS])
def test_turns_that_do_not_fit_are_one_sentence(given, sentence):
    assert tell(lambda: six_tokens(**given)) == sentence
    fine = six_tokens(turns=((2, 3), (3, 4), (5, 6)), turn_rewards=(0.0, 1.0, -1.0), turn_numbers=(0, 4, 5))
    assert fine.spans == ((2, 3), (3, 4), (5, 6)) and six_tokens().spans == ((2, 4), (5, 6))
    check_turns((), (), (), np.zeros(3, dtype=bool))


LENGTH = "the arrays of a Sample must have one length: token_ids has 6, "
ARRAYS: list[tuple[dict[str, Any], str]] = [
    ({"versions": [-1] * 5}, f"{LENGTH}versions has the shape [5]"),
    ({"columns": {"mine": np.zeros((6, 2, 1))}}, f"{LENGTH}mine has the shape [6, 2, 1]"),
    ({"columns": {"values": np.zeros((6, 2))}}, f"{LENGTH}values has the shape [6, 2]"),
    ({"advantage": [0.0] * 7}, f"{LENGTH}advantage has the shape [7]"),
    ({"excluded": [True]}, f"{LENGTH}excluded has the shape [1]"),
    (
        {"origin": "demonstration", "versions": [-1] * 5 + [0]},
        "no policy sampled a demonstration: its rollout_logp must be 0 and its versions -1 at all tokens; a sample of "
        'another policy has origin="other"',
    ),
    (
        {"images": [PlacedImage(None, 1, 3), PlacedImage(None, 2, 4)]},  # type: ignore[arg-type]
        "images of a Sample must have spans [begin, end) in order within its 6 tokens; found [(1, 3), (2, 4)]",
    ),
    (
        {"routes": np.zeros((5, 2, 1), dtype=np.uint8)},
        "routes must be [tokens, layers, k] in uint8 or uint16 for 6 tokens, found [5, 2, 1] in uint8",
    ),
    (
        {"routes": np.zeros((6, 2, 1), dtype=np.int16)},
        "routes must be [tokens, layers, k] in uint8 or uint16 for 6 tokens, found [6, 2, 1] in int16",
    ),
    ({"kept": [[1]] * 5}, "kept of a Sample must have a set per token: 5 for 6 tokens"),
    (
        {"kept": [[1]] * 6},
        "kept of a Sample must have a set for each sampled token, and empty sets for the others",
    ),
]


@pytest.mark.parametrize(("given", "sentence"), ARRAYS, ids=[sentence[-60:] for _, sentence in ARRAYS])
def test_arrays_that_do_not_fit_are_one_sentence(given, sentence):
    assert tell(lambda: six_tokens(**given)) == sentence


def test_a_sample_counts_what_is_sampled_and_trained():
    first, cut = six_tokens(chosen="101101"), six_tokens(excluded=[False] * 5 + [True])
    failed = six_tokens(failure="it \x1b broke", chosen="101101")
    assert [(s.n_sampled, s.n_trained, s.loss_mask.tolist()) for s in (six_tokens(), first, cut, failed)] == [
        (3, 3, [False, False, True, True, False, True]),
        (4, 3, [False, False, True, True, False, True]),
        (3, 2, [False, False, True, True, False, False]),
        (4, 0, [False] * 6),
    ]
    assert failed.failure == r"it \x1b broke"
    assert not any(s.loss_mask.flags.writeable for s in (six_tokens(), first, cut, failed))
    given = np.arange(6.0)
    scored = six_tokens().with_advantage(given)
    given[0] = 9.0
    assert scored.advantage is not None and scored.advantage.tolist() == [*range(6)]
    assert scored.advantage.dtype == np.float32 and not scored.advantage.flags.writeable
    assert six_tokens() == six_tokens() != six_tokens(stop="length") and six_tokens() != 3


def test_kept_sets_that_do_not_fit_are_one_sentence():
    ids, wide = np.zeros(2, dtype=np.int32), np.array([0, 2])
    assert tell(lambda: KeptSets(ids=ids, offsets=wide)) == (
        "kept sets must be int32, found int32 ids and int64 offsets"
    )
    rise = "offsets of kept sets must rise from 0 to the number of ids, 2"
    for offsets in ([], [0, 1], [1, 2], [0, 2, 1, 2]):
        assert tell(lambda given=offsets: KeptSets(ids=ids, offsets=to_column(given, INTS))) == rise
    sets = KeptSets.of_lists([[3, 5], [], [4]])
    assert sets.contain(np.array([5, 5, 3])).tolist() == [True, False, False]
    assert sets.take(np.array([2, 0, 0])) == KeptSets.of_lists([[4], [3, 5], [3, 5]])
    assert KeptSets.join([sets, KeptSets.none(1)]) == KeptSets.of_lists([[3, 5], [], [4], []])
    assert len(KeptSets.join([])) == 0 and KeptSets.join([sets]) is sets and sets != 3


def test_a_missing_column_is_told_with_the_places_that_set_it():
    tokens = Tokens(weight=torch.ones(2), columns={"mine": torch.zeros(2)})
    sentence = (
        "tokens.{} is not there; name it in required_columns of the algorithm (compute_advantages sets returns, "
        "reference_point and advantage; whole_groups adds group_ids; if an episode has several samples, "
        "whole_episodes adds seq_ids; at observed tokens of a term there are no columns, and at demonstrated tokens "
        "no rollout_logp)"
    )
    assert tell(lambda: tokens.ref_logp, MissingColumn) == sentence.format("ref_logp")
    assert tell(lambda: tokens.column("other"), MissingColumn) == sentence.format("other")
    assert tell(lambda: tokens.xyz, AttributeError) == "xyz"
    assert [tokens.has(name) for name in ("weight", "mine", "ref_logp", "other")] == [True, True, False, False]
    changed = tokens.replace(ref_logp=torch.ones(2))
    assert changed.has("ref_logp") and changed.has("mine") and not tokens.has("ref_logp")
    policy = Policy(logp=torch.zeros(1), measures={"a": torch.ones(1), "b": torch.ones(1)})
    names = "and not in required_columns, which computes it before the update instead. Measures of this pass: "
    assert tell(lambda: policy.c, MissingColumn) == (
        f"policy.c is not there; name it in the algorithm's measures, {names}a, b"
    )
    assert tell(lambda: Policy(logp=torch.zeros(1)).c, MissingColumn).endswith(f"{names}none")
    assert [one.item() for one in policy.apply(lambda x: x + 1).list_tensors()] == [1, 2, 2]
    assert pickle.loads(pickle.dumps(policy)).measures == policy.measures, "which asks for attributes before any is set"
    assert tell(lambda: Policy.__new__(Policy).logp, AttributeError) == "logp"
    assert tell(lambda: policy.__len__, AttributeError) == "__len__"
    both = Policy(logp=torch.zeros(1), entropy=torch.ones(1))
    assert [one.item() for one in both.apply(lambda x: x + 1).list_tensors()] == [1, 2]


def test_tokens_of_a_term_are_those_of_its_place():
    def mark(mask: Any) -> str:
        return "".join("01"[int(one)] for one in mask)

    image: Any = [PlacedImage(None, 4, 5)]  # type: ignore[arg-type]
    cases = {
        "plain": six_tokens(chosen="001010"),
        "excluded": six_tokens(chosen="001010", excluded=[False] * 3 + [True] * 2 + [False]),
        "image": six_tokens(chosen="001000", images=image),
        "failed": six_tokens(chosen="001010", failure="no"),
        "shown": six_tokens(chosen="001010", origin="demonstration"),
        "none": six_tokens(chosen="000000"),
    }
    found = {
        name: [mark(find_term_tokens(s, where)) for where in ("sampled", "observed", "demonstrated")]
        + [mark(find_trainable(s))]
        for name, s in cases.items()
    }
    assert found == {
        "plain": ["001010", "000101", "000000", "011111"],
        "excluded": ["001000", "000001", "000000", "011001"],
        "image": ["001000", "000101", "000000", "011101"],
        "failed": ["000000", "000000", "000000", "000000"],
        "shown": ["000000", "000000", "001010", "011111"],
        "none": ["000000", "000000", "000000", "011111"],
    }
    plain, shown = cases["plain"], cases["shown"]
    every = np.ones(6, dtype=bool)
    assert mark(find_term_tokens(plain, lambda s: every)) == "011111"
    assert mark(find_term_tokens(plain, "sampled", frozenset({"b"}))) == "000000"
    assert mark(find_term_tokens(plain, "sampled", frozenset({"a", "b"}))) == "001010"
    assert mark(find_observed(plain)) == "000101"
    assert [find_columns(s, m) for s, m in ((plain, plain.loss_mask), (plain, every), (shown, shown.loss_mask))] == [
        *("all", "none", "no rollout")
    ]
    assert find_columns(shown, ~every) == "all"
    for wrong in (every[:5], [True] * 6):
        assert tell(lambda given=wrong: find_term_tokens(plain, lambda s: given)) == (  # type: ignore[arg-type]
            f"the tokens of a term must be a mask of 6 booleans, one per token of the sample, found {wrong!r:.80}"
        )


def test_a_measure_gives_one_float_per_row():
    s = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).clamp(min=1e-30).log()
    at = At(labels=torch.zeros(2), read_column=lambda name: torch.ones(2), read_stored=lambda name: stored,
            compute_teacher=lambda name: calls.append(name) or torch.zeros(2))  # fmt: skip
    calls: list[str] = []
    stored = Stored(columns=torch.zeros(2, 1), logp=torch.zeros(2, 1), live=torch.zeros(2, 1))
    assert entropy_of(s, at).tolist() == pytest.approx([np.log(2), 0.0])
    assert at.teacher("a") is at.teacher("a") and calls == ["a"] and at.stored("x") is stored
    assert at.column("x").tolist() == [1, 1]
    assert list_teachers({"x": Measure(entropy_of, ("b", "a")), "y": Measure(entropy_of, ("b",))}) == ["a", "b"]
    fine = check_rows("mine", torch.zeros(2, dtype=torch.float64), s)
    assert fine.dtype == torch.float32
    for found, shown in ((torch.zeros(2, 1), "[2, 1] of torch.float32"), (torch.zeros(2).long(), "[2] of torch.int64"),
                         (3.0, "float")):  # fmt: skip
        assert tell(lambda given=found: check_rows("mine", given, s)) == (
            f"the measure mine returns {shown}, expected one float per row of s, [2]: sum over the tokens with "
            ".sum(-1), and over nothing else"
        )


def test_allowed_tokens_are_columns_and_back():
    some, but = AllowedTokens(allowed=(1, 3)), AllowedTokens(banned=(0,))
    logits = torch.tensor([[2.0, 4.0, 6.0, 8.0]], dtype=torch.bfloat16)
    assert some.restrict(logits, 2.0).tolist() == [[2.0, 4.0]]
    assert but.restrict(logits, 2.0).tolist() == [[LOWEST, 2.0, 3.0, 4.0]]
    assert EVERY_TOKEN.restrict(logits, 0.5).dtype == torch.float32
    assert some.to_columns(torch.tensor([3, 1])).tolist() == [1, 0] and some.to_ids(torch.tensor([1])).tolist() == [3]
    assert but.to_columns(torch.tensor([3])).tolist() == but.to_ids(torch.tensor([3])).tolist() == [3]
    assert [one.is_everything for one in (EVERY_TOKEN, some, but)] == [True, False, False]
    wrong = (
        "a sample contains token {}, which the policy may not choose (rollout.allowed_tokens, and the placeholders of "
        "images); the engine's generate() must keep to EngineConfig.allowed_tokens"
    )
    labels = torch.tensor([3, 1, 0, 2])
    assert tell(lambda: some.check_labels(labels), RunStopped) == wrong.format(0)
    assert tell(lambda: but.check_labels(labels), RunStopped) == wrong.format(0)
    for allowed, fine in ((some, labels[:2]), (but, labels[:2]), (EVERY_TOKEN, labels)):
        allowed.check_labels(fine)


def test_actions_are_bins_and_bins_are_centres():
    assert (
        tell(lambda: read_action_tokens("<act_1>go <act_2>"), NotActions) == "'go' is no action token such as <act_0>"
    )
    assert tell(lambda: read_action_tokens("<act_07>" + "x" * 50), NotActions) == (
        f"'<act_07>{'x' * 32}' is no action token such as <act_0>"
    )
    assert read_action_tokens(" <act_0> <act_12>\n<act_999999999>") == [0, 12, 999999999]
    assert find_bins([0.0, 2.5, 9.9, 10.0, -3.0], 0.0, 10.0, 4) == [0, 1, 3, 3, 0]
    assert find_bins([[1.0], [2.0]], [[0.0], [2.0]], [[2.0], [4.0]], 2) == [1, 0]
    assert find_centres([0, 1], [0.0, 2.0], [2.0, 4.0], 2).tolist() == [0.5, 3.5]


def test_routes_keep_the_first_choice_and_mark_what_is_unknown():
    assert [str(dtype_for(n)) for n in (8, 255, 256, 65535)] == ["uint8", "uint8", "uint16", "uint16"]
    one = np.array([[[1, 2]], [[255, 255]]], dtype=np.uint8)
    later = np.array([[[3, 4]], [[5, 6]], [[255, 255]]], dtype=np.uint8)
    assert unknown_of(one) == 255 and find_unknown(one).tolist() == [[False], [True]]
    assert extend(one, 3).tolist() == [[[1, 2]], [[255, 255]], [[255, 255]]]
    assert fill_unknown(one, later).tolist() == [[[1, 2]], [[5, 6]], [[255, 255]]]
    assert fill_unknown(None, later) is later
    tensor = to_tensor(one)
    assert tensor.tolist() == [[[1, 2]], [[-1, -1]]] and tensor.dtype == torch.int16
    assert np.array_equal(restore_routes(describe_routes(later)), later)
    check_routes(one, 2)
    assert not one.flags.writeable
    assert tell(lambda: check_routes(one[:, 0], 2)).startswith("routes must be [tokens, layers, k] in uint8 or uint16")


def test_arrays_are_compared_and_written():
    assert tell(lambda: to_column([1.5], INTS), ValueError) == "[1.5] cannot be written as int32"
    assert to_column([1.5], np.dtype(np.float32)).dtype == np.float32
    a, b = np.array([1, 2]), np.array([1, 3])
    pairs = [(a, a.copy()), (a, b), (a, [1, 2]), ({"x": a}, {"x": a}), ({"x": a}, {"x": b}), ({"x": a}, {"y": a})]
    assert [is_equal(*pair) for pair in pairs] == [True, False, False, True, False, False]
    assert is_equal(3, 3) and not is_equal(3, 4) and not is_equal({"x": a}, 3)
    nested = {"a": {"b": np.array([1, 2], dtype=">i2")}, "c": [1]}
    back = from_json(to_json(nested))
    assert is_equal(back, nested) and back["a"]["b"].dtype == np.dtype("=i2")
