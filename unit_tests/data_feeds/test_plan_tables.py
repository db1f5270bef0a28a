"""Tables of plans: which samples share a micro-batch, and what a plan and its batches say of them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from PIL import Image

from configs.eval_schema import EvalConfig, EvalDataConfig, EvalSetConfig
from core.types.images import PlacedImage, read_image
from core.types.samples import Sample
from core.types.terms import Term
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.packing.batches import make_probe_batch, plan_update
from data_feeds.packing.prefix_bins import pack_families
from data_feeds.rows.eval_sets import PromptSet, load_sets
from unit_tests.helpers.chat_families import user
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.prompt_files import write
from unit_tests.helpers.sentences import tell


def family(name: int, prompt: int, replies: list[int]) -> list[Sample]:
    """Samples of one prompt, and replies of these lengths that share nothing."""
    shown = [1000 * name + t for t in range(prompt)]
    rows = [
        [*shown, *range(1000 * name + 100 * (i + 1), 1000 * name + 100 * (i + 1) + n)] for i, n in enumerate(replies)
    ]
    return [sample_of(ids, [t >= prompt for t in range(len(ids))]) for ids in rows]


FAMILIES = [family(1, 6, [5, 9, 5, 3]), family(2, 3, [12]), family(3, 9, [2, 2, 30]), family(4, 2, [4, 4, 4, 4, 4, 4])]


def test_families_are_cut_where_it_pays():
    samples = [s for one in FAMILIES for s in one]
    numbers = [n for n, one in enumerate(FAMILIES) for _ in one]
    table: list[tuple[int, int, bool, Any]] = [
        # budget, ranks, whole families; bins
        (40, 1, False, [[5, 6, 7], [8, 9, 10, 11, 12, 13, 4], [0, 1, 2, 3]]),
        (60, 1, False, [[5, 6, 7, 4], [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]]),
        (200, 1, False, [[5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 4]]),
        (40, 2, False, [[5, 6, 7], [0, 1, 2, 3], [4], [8, 9, 10, 11, 12, 13]]),
        (200, 2, False, [[5, 6, 7, 4], [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]]),
        (200, 3, False, [[5, 6, 7], [8, 9, 10, 11, 12, 13, 4], [0, 1, 2, 3]]),
        (200, 5, False, [[7], [2, 3, 5, 6], [8, 9, 10, 11, 12, 13], [0, 1], [4]]),
        (45, 9, False, [[7], [0, 1], [4], [2, 3], [5, 6], [8, 9, 10], [11, 12, 13], [], []]),
        (60, 3, True, [[5, 6, 7], [8, 9, 10, 11, 12, 13, 4], [0, 1, 2, 3]]),
    ]
    for most, ranks, whole, want in table:
        assert pack_families(samples, numbers, most, ranks=ranks, whole=whole) == want, (most, ranks, whole)
    order = [13, 2, 5, 0, 9, 7, 1, 11, 3, 12, 4, 8, 6, 10]
    mixed = pack_families([samples[i] for i in order], [numbers[i] for i in order], 60, ranks=2)
    assert sorted(sorted(order[i] for i in b) for b in mixed) == sorted(
        map(sorted, pack_families(samples, numbers, 60, ranks=2))
    )


def test_a_plan_tells_who_is_where():
    """Two groups: an episode of two samples beside one of its own; a failed sample and one that is not trained on."""

    def make(*ids: int, **more: Any) -> Sample:
        return sample_of([*ids], [False] + [True] * (len(ids) - 1), **more)

    first = [make(1, 2, 3, episode=0), make(1, 4, episode=1), make(1, 5, episode=0)]
    second = [make(7, 8, failure="no"), make(7, 9, 10, 11), sample_of([21, 23], [False, False])]
    plan = plan_update([first, second], "sequence", 100, padded=False, horizon=5)
    assert plan.samples == [*first, second[1]] and plan.weights == pytest.approx([1 / 9, 1 / 3, 1 / 9, 1 / 9])
    assert (plan.episodes, plan.groups, plan.families, plan.has_seq_ids) == ([0, 1, 0, 2], None, None, False)
    assert [mask.tolist() for mask in plan.list_masks()] == [s.loss_mask.tolist() for s in plan.samples]
    [[batch]] = plan.batches()
    assert not batch.tokens.has("seq_ids") and not batch.tokens.has("group_ids") and plan.padding == 0
    whole = plan_update(
        [first, second], "sequence", 100, padded=False, share_prefixes=True, whole_groups=True, whole_episodes=True
    )
    assert (whole.groups, whole.families, whole.has_seq_ids) == ([0, 0, 0, 1], [0, 0, 0, 1], True)
    [[batch]] = whole.batches(torch.float64)
    assert batch.tokens.weight.dtype == torch.float64 and batch.tokens.weight.sum() == pytest.approx(1)
    by_label = dict(zip(batch.labels.tolist(), batch.tokens.seq_ids.tolist(), strict=True))
    assert by_label[2] == by_label[3] == by_label[5] != by_label[4] != by_label[9] == by_label[10] == by_label[11]
    in_group = dict(zip(batch.labels.tolist(), batch.tokens.group_ids.tolist(), strict=True))
    assert len({in_group[n] for n in (2, 3, 4, 5)}) == 1 and in_group[9] != in_group[2]
    padded = plan_update([first, second], "token", 4, ranks=2)
    sizes = [[[len(padded.samples[i].token_ids) - 1 for i in b] for b in rank] for rank in padded.bins]
    full = sum(len(b) * max(b) for rank in sizes for b in rank if b)
    assert padded.padding == pytest.approx(1 - 7 / full) and len(padded.bins) == 2
    idle = padded.make_idle_batch(torch.float64)
    assert (idle.input_ids.tolist(), idle.at.tolist(), idle.labels.tolist()) == ([1], [], [])
    assert idle.tokens.weight.tolist() == [] and idle.tokens.weight.dtype == torch.float64

    def loss(policy: Any, tokens: Any) -> Any:
        return -policy.logp, {}

    terms = [Term("a", loss), Term("b", loss, on=lambda s: s.token_ids % 2 == 0, norm="constant")]
    of_terms = plan_update([first, second], "token", 100, padded=False, terms=terms, horizon=5)
    [[batch]] = of_terms.batches(torch.float64)
    # the token 5 is of the first term alone, 2 of both: the first gives the weight
    a, b = batch.terms["a"], batch.terms["b"]
    weights = dict(zip(batch.labels.tolist(), batch.tokens.weight.tolist(), strict=True))
    assert {n: pytest.approx(w) for n, w in weights.items()} == dict.fromkeys((2, 3, 4, 5, 9, 10, 11), 1 / 7)
    assert sorted(batch.labels[a.at].tolist()) == [2, 3, 4, 5, 9, 10, 11]
    assert sorted(batch.labels[b.at].tolist()) == [2, 4, 10] and b.tokens.weight.tolist() == pytest.approx([1 / 15] * 3)
    assert [mask.tolist() for mask in of_terms.list_masks()] == [s.loss_mask.tolist() for s in of_terms.samples]
    nothing = of_terms.make_idle_batch()
    assert {name: (t.at.tolist(), t.tokens.weight.tolist()) for name, t in nothing.terms.items()} == {
        "a": ([], []),
        "b": ([], []),
    }


def test_a_probe_scores_all_text_and_no_token_of_an_image():
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "PNG")
    placed = PlacedImage(read_image(out.getvalue()), 2, 4)
    probe = make_probe_batch([5, 6, 60, 60, 7, 8], [placed])
    assert (probe.at.tolist(), probe.labels.tolist()) == ([0, 3, 4], [6, 7, 8])
    assert probe.input_ids.tolist() == [5, 6, 60, 60, 7] and probe.images == (placed.image,)


@pytest.fixture(scope="module")
def chat(tiny_path: str) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


def test_sets_of_an_evaluation_have_what_the_recipe_says(chat, tmp_path):
    first = write(
        tmp_path / "a.jsonl", [{"messages": [user(f"{n}+1=")], "answer": str(n + 1), "x": n} for n in range(4)]
    )
    long = {"messages": [user("1" * 60)]}
    second = write(tmp_path / "b.jsonl", [long, *({"messages": [user(f"{n}-1=")]} for n in range(3))])

    def load(*sets: dict[str, Any], **keys: Any) -> list[PromptSet]:
        data = EvalDataConfig(sets=[EvalSetConfig(**one) for one in sets], **{"max_prompt_tokens": 40} | keys)
        return load_sets(EvalConfig.model_construct(data=data, samples=3), chat)

    one, other = load(
        {"path": first, "rows": 2, "samples": 5}, {"path": second, "name": "z"}, max_invalid_fraction=0.25, by=["x"]
    )
    assert ([p.id for p in one.prompts], [p.answer for p in one.prompts]) == (["0", "1"], ["1", "2"])
    assert (one.name, one.samples, one.invalid.rows, one.form, one.notes) == ("a", 5, 0, "ours", [])
    assert (other.name, other.samples, other.invalid.rows, other.form) == ("z", 3, 1, "ours")
    assert [p.messages[0]["content"] for p in other.prompts] == ["0-1=", "1-1=", "2-1="]
    assert [p.messages[0]["role"] for p in load({"path": first}, system_prompt="s")[0].prompts] == ["system"] * 4
    assert tell(lambda: load({"path": first}, {"path": second})).startswith(
        f"data.sets[1]={second}: 1 of 4 rows are invalid, a larger fraction than data.max_invalid_fraction=0"
    )
    assert tell(lambda: load({"path": first}, by=["x", "set"])) == (
        "data.by names the column set, under which the table has the data sets: rename the column in the files, or "
        "leave it out, because each of several sets has a row"
    )
    assert tell(lambda: load({"path": first}, by=["x", "y", "w"])) == (
        "data.by names the column y, and no row has one; the other columns are x"
    )
    asks = write(tmp_path / "c.jsonl", [{"messages": [user("1+1=")]}])
    assert tell(lambda: load({"path": asks}, by=["y"])) == (
        "data.by names the column y, and no row has one; the other columns are none"
    )
