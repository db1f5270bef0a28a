"""Data on its way to a step, whole: sentences of sources, rows, packing and samplers, and tables of what is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from configs.data_schema import HoldOutConfig, PromptDataConfig, RowDataConfig
from core.errors import RunStopped
from core.types.kept_sets import KeptSets
from core.types.terms import Term
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import Feed, load_examples, load_groups, load_prompts
from data_feeds.packing.batches import make_probe_batch, plan_update, share_out, token_weights
from data_feeds.packing.bin_packing import TooLarge, estimate_cost, pack_into_bins, pack_units
from data_feeds.packing.numbering import number_samples, renumber
from data_feeds.packing.prefix_bins import find_families, pack_families
from data_feeds.packing.splice import align, find_first_sampled, splice
from data_feeds.packing.terms import find_tokens, has_tokens
from data_feeds.packing.tokens import all_credited
from data_feeds.rows.check_replies import check_ends_in_reply, normalize_message, read_scored
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from unit_tests.helpers.chat_families import assistant, user
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.prompt_files import write
from unit_tests.helpers.sentences import tell


@pytest.fixture(scope="module")
def chat(tiny_path: str) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


TALK = [{"messages": [user(f"{n}+1="), assistant(str(n + 1))]} for n in range(4)]


def load(chat: ChatTokenizer, train: Any, kind: Any = "conversations", which: Any = "train", **keys: Any) -> Feed[Any]:
    settings: dict[str, Any] = {"max_prompt_tokens" if kind == "prompts" else "max_tokens": 30} | keys
    if kind == "prompts":
        data = PromptDataConfig(train=train, **settings)
        return load_prompts(data, which, chat, seed=0)
    return load_groups(RowDataConfig(train=train, **settings), which, chat, rows=kind, seed=0)


def test_a_source_that_would_train_nothing_is_told(chat, tmp_path):
    talk = write(tmp_path / "talk.jsonl", TALK)
    system = [{"messages": [{"role": "system", "content": "s"}, *row["messages"]]} for row in TALK]
    for label, only in ((True, "true"), (0, "false")):
        labelled = write(tmp_path / f"{only}.jsonl", [row | {"label": label} for row in TALK])
        assert tell(lambda given=labelled: load(chat, given, "unpaired")) == (
            f"data.train: every row's label is {only}: give rows of both labels, true and false"
        )
        assert len(load(chat, talk, "unpaired", "eval", eval=labelled).all()) == 4
    assert tell(lambda: load(chat, talk, train_on=["assistant", "tool"])) == (
        "data.train_on names the role tool, and no row of data.train has a turn of it; there are turns of assistant, "
        "user"
    )
    assert tell(lambda: load(chat, write(tmp_path / "system.jsonl", system), system_prompt="t")) == (
        "data.system_prompt: every row of data.train has a system turn of its own: leave it out"
    )
    mixed = write(tmp_path / "mixed.jsonl", [*system, TALK[0]])
    [*_, last] = load(chat, mixed, system_prompt="t").all()
    assert last[0].prompt.messages[0] == {"role": "system", "content": "t"}


def test_a_feed_says_what_it_uses_and_counts_what_it_draws(chat, tmp_path):
    asks = [{"messages": [user(f"{n}+1=")], "id": f"r{n % 3}", "x": n} for n in range(4)]
    long = [{"messages": [user("1" * 40)]}]
    for name, rows in (("a", [*asks, *long]), ("b", asks[:2])):
        write(tmp_path / f"{name}.jsonl", rows)
    paths = [{"path": str(tmp_path / f"{name}.jsonl"), "ratio": ratio} for name, ratio in (("a", 3), ("b", 1))]
    feed = load(chat, paths, "prompts", max_invalid_fraction=0.2)
    assert (feed.rows, feed.mixed) == (6, ["a", "b"])
    assert [prompt.id for prompt in feed.all()] == ["a/r0", "a/r1", "a/r2", "a/r0#3", "b/r0", "b/r1"]
    assert {prompt.source for prompt in feed.all()} == {"a", "b"} and feed.all()[3].extra == {"x": 3}
    assert feed.count_draws(10) == {
        **{"data/a/rows": 8.0, "data/a/epoch": 2.0, "data/b/rows": 2.0, "data/b/epoch": 1.0}
    }
    where = f"data.train[0]={tmp_path}/a.jsonl"
    why = "42 tokens, more than data.max_prompt_tokens=30"
    sentences, facts = feed.summary("data.train")
    repeats = "1 rows have the id of an earlier row: # and their row number are appended to it"
    assert sentences == [
        f"data.train: of a, 4 rows are used and 1 are invalid: 1 too_long (such as row 4: {why})",
        f"data.train: of a, {repeats}",
    ]
    case = {"rows": 1, "example": "4", "why": why}
    assert facts == {
        "a": {"form": "ours", "used": 4, "invalid": {"too_long": case}, "repeated_ids": 1},
        "b": {"form": "ours", "used": 2, "invalid": {}, "repeated_ids": 0},
    }
    few = "a larger fraction than data.max_invalid_fraction="
    assert tell(lambda: load(chat, paths, "prompts", max_invalid_fraction=0.19)) == (
        f"{where}: 1 of 5 rows are invalid, {few}0.19: 1 too_long (such as row 4: {why}); repair them, or raise that"
    )
    alone = load(chat, paths[1:], "prompts")
    assert (alone.mixed, alone.count_draws(9), [prompt.id for prompt in alone.all()]) == ([], {}, ["r0", "r1"])
    examples = load_examples(PromptDataConfig(train=paths, max_prompt_tokens=30), chat, "prompts", rows=1)
    assert [prompt.id for prompt in examples.all()] == ["a/r0", "b/r0"]
    talk = write(tmp_path / "talk.jsonl", TALK)
    shown = load_examples(RowDataConfig(train=talk, max_tokens=30, train_on=["user"]), chat, "conversations", rows=2)
    assert [group[0].n_trained > 0 for group in shown.all()] == [True, True]


def test_held_out_rows_are_named_and_cut_off(chat, tmp_path):
    talk = write(tmp_path / "talk.jsonl", TALK)
    data = {"eval": HoldOutConfig(from_train=1)}
    [note] = load(chat, talk, which="eval", **data).sources[0].notes
    assert note == f"data.eval: 1 rows of data.train={talk} are held out of training"
    assert len(load(chat, talk, **data).all()) == 3
    assert tell(lambda: load(chat, talk, eval=HoldOutConfig(from_train=4))) == (
        f"data.train={talk} has 4 different rows, and data.eval.from_train=4 leaves none of them for training: lower it"
    )


def test_invalid_rows_are_counted_by_reason_with_the_first_example():
    invalid = InvalidRows(looked_at=8)
    for row, reason, why in (("a", "empty", "x"), ("b", "bad_id", "y"), ("c", "empty", "z")):
        invalid.add(row, InvalidRow(reason, why))
    assert str(invalid) == "2 empty (such as row a: x), 1 bad_id (such as row b: y)"
    assert (invalid.rows, invalid.share, InvalidRows().share) == (3, 0.375, 0.0)
    invalid.check("k", "8 rows", has_valid=True, most=0.375)
    assert tell(lambda: invalid.check("k", "8 rows", has_valid=False, most=1.0)) == (
        f"k: none of 8 rows is valid: {invalid}"
    )


REPLIES: list[tuple[Callable[[], Any], str, str]] = [
    (
        lambda: check_ends_in_reply([assistant("x"), user("y")], "chosen"),
        "no_reply",
        "chosen must end in an assistant turn, found a turn of user",
    ),
    (lambda: check_ends_in_reply([assistant(" "), assistant("x")], "chosen"), "empty", "an assistant turn is empty"),
    (
        lambda: read_scored([assistant("x")], {}),
        "ends_in_reply",
        "messages end with an assistant turn, and completions are replies to them",
    ),
    *(
        (
            lambda texts=texts: read_scored([user("x")], {"completions": texts, "rewards": [1, 2]}),
            "no_reply",
            f"completions must be a list of texts, none empty, found {texts!r}",
        )
        for texts in (None, ["a", " "], ["a", 3])
    ),
    *(
        (
            lambda given=rewards: read_scored([user("x")], {"completions": '["a", "b"]', "rewards": given}),
            "bad_label",
            f"rewards must be a number for each of 2 completions: {rewards!r}",
        )
        for rewards in (None, [1], [1, "2"], [1, 2, 3], [1.0, float("inf")])
    ),
    (
        lambda: read_scored([user("x")], {"completions": ["a"], "rewards": [1]}),
        "no_reply",
        "it has one completion, and a reward alone says nothing: give several of a prompt",
    ),
]


@pytest.mark.parametrize(("check", "reason", "sentence"), REPLIES, ids=[one[2][:70] for one in REPLIES])
def test_replies_that_cannot_be_compared_are_one_sentence(check, reason, sentence):
    with pytest.raises(InvalidRow) as refused:
        check()
    assert (refused.value.reason, str(refused.value)) == (reason, sentence)


def test_replies_are_compared_without_white_space_and_ids():
    call: Any = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    said: Any = {"role": "assistant", "content": " x ", "tool_calls": [call]}
    assert normalize_message(said) == {"role": "assistant", "content": "x", "tool_calls": [call | {"id": ""}]}
    given = {"completions": '["a", "b"]', "rewards": "[1, 0.5]"}
    assert read_scored([user("x")], given) == [("a", 1.0), ("b", 0.5)]


def make(n: int, *, first: int = 1, **more: Any) -> Any:
    """A sample of n tokens, all of them chosen but for the first ones."""
    return sample_of([*range(1, n + 1)], [i >= first for i in range(n)], **more)


TOGETHER = (
    "together, more than trainer.micro_batch_tokens=5; this loss compares them, so they must be in one micro-batch"
)


def test_what_does_not_fit_a_micro_batch_is_one_sentence():
    def plan(groups: Any, most: int = 5, **how: Any) -> str:
        return tell(lambda: plan_update(groups, "token", most, padded=False, **how), RunStopped)

    alone = "a sequence of 6 tokens does not fit trainer.micro_batch_tokens=5: raise it"
    assert plan([[make(7)]]) == alone and plan([[make(7)]], whole_episodes=True) == alone
    assert plan([[make(4), make(4)]], whole_groups=True) == f"the samples of a group have 6 tokens {TOGETHER}: raise it"
    assert plan([[make(4, episode=0, reward=1.0), make(4, episode=0, reward=1.0)]], whole_episodes=True) == (
        "the samples of an episode have 6 tokens, more than trainer.micro_batch_tokens=5; this loss compares episodes "
        "as wholes, so they must be in one micro-batch: raise it, or use a ratio per token (another alg, "
        "alg.correction.level: token)"
    )
    nothing = "an update has no token to train on: its samples failed, or the algorithm excluded them (overlong.mode)"
    assert plan([[make(4, failure="no")]]) == nothing and tell(lambda: pack_into_bins([], 5), RunStopped) == nothing
    assert tell(lambda: pack_families([], [], 5), RunStopped) == nothing
    assert tell(lambda: pack_into_bins([6], 5), TooLarge) == alone
    assert tell(lambda: plan_update([[make(4)]], "token", 5, share_prefixes=True), ValueError) == (
        "padded rows share no prefixes"
    )
    assert tell(lambda: all_credited([make(3), make(3, advantage=[0.0] * 3)]), ValueError) == (
        "some samples of an update have an advantage and some have none: compute_advantages() must set all or none"
    )


def test_units_go_into_few_even_bins():
    table: list[tuple[list[int], int, int, list[list[int]], list[list[int]]]] = [
        # sizes, budget, ranks; bins of padded rows, and of packed ones
        ([4, 1, 3, 2], 6, 1, [[0], [3, 1], [2]], [[0, 1], [2, 3]]),
        ([4, 1, 3, 2], 12, 1, [[0, 2], [3, 1]], [[0, 2, 3, 1]]),
        ([4, 1, 3, 2], 16, 2, [[0, 2], [3, 1]], [[0, 1], [2, 3]]),
        ([5], 5, 2, [[0], []], [[0], []]),
        ([2, 2, 2, 2, 2], 4, 2, [[0, 1], [2, 3], [4], []], [[0, 4], [1], [3], [2]]),
        ([7, 5, 5, 3, 3, 3, 1], 9, 3, [[0], [3, 4], [5, 6], [], [1], [2]], [[0], [1], [2], [5], [3, 6], [4]]),
    ]
    for sizes, most, ranks, padded, packed in table:
        assert pack_into_bins(sizes, most, ranks=ranks, padded=True) == padded, sizes
        assert pack_into_bins(sizes, most, ranks=ranks, padded=False) == packed, sizes
    assert pack_units([3, 1, 2, 4], [0, 1, 0, 1], 8, ranks=1, padded=True) == [[1, 3], [0, 2]]
    assert pack_units([3, 1, 2, 4], [0, 1, 0, 1], 10, ranks=1, padded=False) == [[0, 2, 1, 3]]
    assert estimate_cost(6144) == 6144 * 1.5


def test_samples_that_share_a_prefix_are_a_family():
    def of(*ids: int) -> Any:
        return sample_of([*ids], [False] * (len(ids) - 1) + [True])

    prefix = [*range(100, 116)]
    alone = [of(*prefix, 1), of(*prefix, 2), of(*prefix[:15], 3), of(7, 8)]
    numbers = find_families(alone, [0, 1, 2, 3])
    assert numbers[0] == numbers[1] and len({*numbers}) == 3
    assert find_families(alone, [5, 5, 2, 3]) == [5, 5, 2, 3]
    # the last token of each is no input, so the first family has the 16 inputs of the prefix
    assert sorted(map(sorted, pack_families(alone, numbers, 17))) == [[0, 1], [2, 3]]
    plan = plan_update([[one] for one in alone], "token", 40, padded=False, share_prefixes=True)
    assert plan.measure_shared(plan.batches()) == pytest.approx(16 / 48)
    assert renumber("abcab") == [0, 1, 2, 0, 1] and renumber("abc", [0, 1, 0]) == [0, 0, 0]
    given: Any = {"counts": [1, 1], "has_seq_ids": True, "sources": ()}
    assert number_samples(alone[:2], [4, 2], [9, 9], **given) == {"group_ids": [0, 1], "seq_ids": [0, 0]}
    assert number_samples(alone[:2], None, None, **given | {"has_seq_ids": False}) == {}


def test_a_row_under_another_prompt_has_the_same_reply():
    kept = KeptSets.of_lists([[], [], [3, 9], [], [5]])
    routes = np.zeros((5, 1, 1), dtype=np.uint8)
    seen: dict[str, Any] = {"versions": [-1, -1, 7, -1, 8], "routes": routes}
    one = sample_of([1, 2, 3, 4, 5], [False, False, True, False, True], kept=kept, **seen)
    row = splice(one, [8, 8, 8])
    assert row.routes is None, "the engine's, under another prompt"
    assert row.token_ids.tolist() == [8, 8, 8, 3, 4, 5] and row.versions.tolist() == [-1, -1, -1, 7, -1, 8]
    assert row.action_mask.tolist() == [False, False, False, True, False, True]
    assert row.rollout_logp.tolist() == pytest.approx([0, 0, 0, 0.2, 0.3, 0.4])
    assert row.kept == KeptSets.of_lists([[], [], [], [3, 9], [], [5]]) and find_first_sampled(one) == 2
    scored = sample_of(row.token_ids.tolist(), row.action_mask.tolist(), columns={"x": [9, 9, 9, 1, 2, 3]})
    assert align(one, scored, "x").tolist() == [0, 0, 1, 2, 3]
    assert tell(lambda: splice(one, []), ValueError) == "a teacher's prompt has no tokens"


def test_terms_share_an_update_each_with_a_denominator_of_its_own():
    def loss(policy: Any, tokens: Any) -> Any:
        return -policy.logp, {}

    sampled, observed = Term("policy", loss), Term("world", loss, on="observed", norm="sequence")
    of_a = Term("a", loss, sources=frozenset({"a"}))
    one = sample_of([1, 2, 3, 4], [False, True, False, True])
    two = sample_of([1, 2, 3], [False, True, False], episode=None)
    shares = share_out([sampled, observed, of_a], [[one], [two]], "token", horizon=10)
    assert [(s.name, s.weights, s.has) for s in shares] == [
        ("policy", [1 / 3, 1 / 3], "all"),
        ("world", [0.5, 0.5], "none"),
        ("a", [0.0, 0.0], "all"),
    ]
    assert [mask.tolist() for mask in shares[1].masks] == [[False, False, True, False], [False, False, True]]
    assert shares[0].take([1]).weights == [1 / 3] and len(shares[0].take([1]).masks) == 1
    assert has_tokens([[one]], []) and not has_tokens([[make(3, failure="no")]], [sampled])
    assert tell(lambda: find_tokens(Term("x", loss, among="observed"), [[one]]), RunStopped) == (
        "the term x has tokens that its `among` does not count: it must count all of them"
    )
    branches = [make(3, episode=1), make(3, episode=1)]
    assert tell(lambda: find_tokens(observed, [branches]), RunStopped) == (
        "the term world is on observed tokens, and an episode of p has several samples, in which a reply of another "
        "sample cannot be told from what was observed: use an environment instead of an agent, or leave the term out"
    )
    assert token_weights([[one], [two]], "sequence", horizon=1, counts=[[4], [0]]) == [0.25, 0.0]
    probe = make_probe_batch([5, 6, 7])
    assert (probe.at.tolist(), probe.labels.tolist(), probe.tokens.weight.tolist()) == ([0, 1], [6, 7], [0, 0])
    assert probe.tokens.weight.dtype == torch.float32
