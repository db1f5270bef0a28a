"""Mixtures of data sources: exact shares, whole passes, and no state to lose."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import UserError
from data_feeds.feed import Feed, Source
from data_feeds.rows.mixture import MOST_SLOTS, Curriculum, Mixture, interleave_sources, whole_parts

calmly = settings(deadline=None, max_examples=50)  # a busy machine's pauses are no failures
RATIOS = st.lists(st.integers(1, 40), min_size=1, max_size=9)
SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12)), min_size=1, max_size=4)
"""(ratio, rows) of each source."""


def mixture_of(ratios: list[int]) -> Mixture:
    return Mixture(whole_parts([float(r) for r in ratios], where="data.train"))


def feed_of(sizes: list[tuple[int, int]], *, replacement: bool = False) -> Feed:
    """Sources whose items are numbers: a feed does not look into them."""
    sources = [
        Source(name=f"s{d}", items=[(d, row) for row in range(rows)], stream=f"0/s{d}", replacement=replacement)
        for d, (_, rows) in enumerate(sizes)
    ]
    return Feed(sources=sources, mixture=mixture_of([ratio for ratio, _ in sizes]))


@calmly
@given(RATIOS, st.integers(0, 300))
def test_any_window_of_the_pattern_has_exactly_the_ratios(ratios, start):
    mixture = mixture_of(ratios)
    parts = mixture.parts
    window = Counter(mixture.place_ticket(t)[0] for t in range(start, start + sum(parts)))
    assert [window[d] for d in range(len(parts))] == list(parts)
    assert [Fraction(p, sum(parts)) for p in parts] == [Fraction(r, sum(ratios)) for r in ratios]


@calmly
@given(RATIOS)
def test_every_prefix_is_within_one_row_of_the_ratios(ratios):
    parts = mixture_of(ratios).parts
    counts = [0] * len(parts)
    for t, source in enumerate(interleave_sources(parts), start=1):
        counts[source] += 1
        assert all(abs(n - Fraction(p * t, sum(parts))) < 1 for n, p in zip(counts, parts, strict=True)), t


def test_many_small_sources_do_not_hold_each_other_up():
    """The usual smooth round robin (whoever is furthest behind) is off by 1.125 rows here; see `interleave_sources`."""
    parts = (1, 3, 3, 3, 3, 1, 37, 37)
    counts = [0] * len(parts)
    for t, source in enumerate(interleave_sources(parts), start=1):
        counts[source] += 1
        assert max(abs(n - p * t / sum(parts)) for n, p in zip(counts, parts, strict=True)) < 1


@calmly
@given(RATIOS, st.integers(0, 500))
def test_draws_of_a_source_are_numbered_without_a_gap_and_counted_right(ratios, tickets):
    mixture = mixture_of(ratios)
    numbers: dict[int, list[int]] = {d: [] for d in range(len(ratios))}
    for t in range(tickets):
        source, nth = mixture.place_ticket(t)
        numbers[source].append(nth)
    assert all(seen == list(range(len(seen))) for seen in numbers.values())
    assert mixture.count_drawn(tickets) == [len(seen) for seen in numbers.values()]


@calmly
@given(SIZES, st.integers(0, 60), st.integers(1, 60))
def test_every_row_comes_once_per_pass_though_the_run_stopped_and_went_on(sizes, stopped, more):
    before, after = feed_of(sizes), feed_of(sizes)  # the second knows nothing of the first
    drawn = [before.draw(t) for t in range(stopped)] + [after.draw(t) for t in range(stopped, stopped + more)]
    for d, (_, rows) in enumerate(sizes):
        own = [item for item in drawn if item[0] == d]
        for begin in range(0, len(own), rows):
            a_pass = own[begin : begin + rows]
            assert len(set(a_pass)) == len(a_pass)
            assert len(a_pass) < rows or set(a_pass) == {(d, row) for row in range(rows)}


@calmly
@given(SIZES, st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_what_is_drawn_does_not_depend_on_how_tickets_are_dealt(sizes, per_step, ranks, replacement):
    feed, tickets = feed_of(sizes, replacement=replacement), range(30)
    whole = {t: feed.draw(t) for t in tickets}
    dealt = feed_of(sizes, replacement=replacement)
    steps = [tickets[i : i + per_step] for i in range(0, len(tickets), per_step)]
    for step in reversed(steps):
        for rank in range(ranks):
            assert all(dealt.draw(t) == whole[t] for t in step[rank::ranks])


@calmly
@given(SIZES)
def test_after_the_epochs_told_every_row_was_drawn_so_often(sizes):
    feed = feed_of(sizes)
    block = sum(feed.mixture.parts)
    tickets = block
    for _, rows in sizes:
        tickets *= rows  # of any source, a whole number of passes
    counts = Counter(feed.draw(t) for t in range(tickets)) if tickets <= 3000 else None
    told = feed.count_draws(tickets)
    for d, (_, rows) in enumerate(sizes):
        if len(sizes) == 1:
            assert told == {}
            continue
        epoch = told[f"data/s{d}/epoch"]
        assert epoch == int(epoch) == tickets * feed.mixture.parts[d] / block / rows
        assert counts is None or {counts[d, row] for row in range(rows)} == {epoch}


def test_with_replacement_rows_come_back_before_all_were_drawn():
    feed = feed_of([(1, 50)], replacement=True)
    drawn = [feed.draw(t) for t in range(50)]
    assert len(set(drawn)) < 45, "about 32 are to be expected"
    assert drawn != [feed.draw(t) for t in range(50, 100)]


def test_ratios_are_taken_as_written_and_refused_where_no_pattern_is_exact():
    assert whole_parts([0.7, 0.2, 0.1], where="") == (7, 2, 1)
    assert whole_parts([1e-3, 1], where="") == (1, 1000)
    with pytest.raises(UserError, match=rf"data.train: the ratios 0.333333, 1.0 .*at most {MOST_SLOTS}: round them"):
        whole_parts([0.333333, 1.0], where="data.train")


@calmly
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3), st.integers(0, 3)), max_size=3), st.integers(0, 100))
def test_phases_of_a_curriculum_are_exact_and_leave_no_gap_in_the_draws(phases, tickets):
    parts = [(rows, whole_parts([float(a), float(b)], where="")) for rows, a, b in phases if a + b]
    curriculum = Curriculum(tuple((rows, Mixture(p)) for rows, p in parts), Mixture((1, 2)))
    numbers: dict[int, list[int]] = {0: [], 1: []}
    for t in range(tickets):
        source, nth = curriculum.place_ticket(t)
        numbers[source].append(nth)
    assert all(seen == list(range(len(seen))) for seen in numbers.values())
    assert curriculum.count_drawn(tickets) == [len(seen) for seen in numbers.values()]
    begin = 0
    for rows, own in [*parts, (99, (1, 2))]:
        drawn = Counter(curriculum.place_ticket(t)[0] for t in range(begin, begin + rows))
        assert all(abs(drawn[d] - Fraction(own[d] * rows, sum(own))) < 1 for d in (0, 1))
        begin += rows


def test_a_curriculum_is_read_from_the_recipe_and_wrong_phases_are_refused(recipe, sums):
    from configs.schema import RLConfig
    from data_feeds.chat.template_args import make_tokenizer
    from data_feeds.feed import load_prompts
    from driver.load_recipe import load_recipe

    paths = {"easy": "train.parquet", "hard": "eval.parquet"}
    sources = [{"path": str(sums / file), "name": name} for name, file in paths.items()]

    def load(*phases: dict) -> RLConfig:
        return load_recipe(RLConfig, recipe({"data.train": sources, "data.curriculum": [*phases]}), []).cfg

    cfg = load({"rows": 3, "ratios": {"easy": 1, "hard": 0}}, {"rows": 4, "ratios": {"hard": 3, "easy": 1}})
    feed = load_prompts(cfg.data, "train", make_tokenizer(cfg.model, cfg.data), seed=0)
    drawn = [feed.draw(ticket).source for ticket in range(17)]
    assert drawn[:3] == ["easy"] * 3 and Counter(drawn[3:7]) == {"hard": 3, "easy": 1}
    assert Counter(drawn[7:]) == {"easy": 5, "hard": 5}
    assert feed.count_draws(17)["data/hard/rows"] == 8
    for ratios, says in (
        ({"easy": 1}, "a phase of curriculum names easy, and the sources of train are easy, hard: give each a ratio"),
        ({"easy": 0, "hard": 0}, "a phase of curriculum draws from no source"),
    ):
        with pytest.raises(UserError, match=says):
            load({"rows": 3, "ratios": ratios})
