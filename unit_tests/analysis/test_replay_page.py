"""The page of a replay: its numbers are the replay's, as text and in a real browser, and hostile text does nothing."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.capture.compare import ONE_SILENT, OPPOSITE
from analysis.capture.recompute import Replay, replay
from analysis.capture.replay import main as replay_main
from analysis.capture.token_maps import list_disagreements
from analysis.capture.tokens import snapshot_folder
from analysis.report.replay_page import SAMPLES, choose_samples, count_disagreements, write_replay_page
from core.errors import UserError
from tools.browser import MISSING, Browser, find_browser
from unit_tests.helpers.captured_step import NO_MASK, WRONG_SIGN, Step, rewarded
from unit_tests.helpers.examples import a_changed, some_groups
from unit_tests.helpers.pages import HOSTILE, Elements, unpack
from unit_tests.helpers.runs import file_of

pytestmark = [pytest.mark.one_core, pytest.mark.usefixtures("one_thread")]
LOSSES = ["run", "cispo", "wrong_sign", "no_mask"]


@pytest.fixture
def folder(recipe, tmp_path) -> Path:
    """A snapshot of two updates, the second beyond some clip bounds."""
    changes = {
        "rollout.max_new_tokens": 24,
        "updates_per_step": 2,
        "alg": {"name": "grpo", "clip_low": 0.01, "clip_high": 0.01},
        "trainer": {"lr": 0.1, "optimizer": "sgd", "max_grad_norm": 0.0},
        "capture": {"every": 1, "weights": True},
    }
    made = Step(recipe(changes), tmp_path / "run")
    rng = random.Random(3)
    made.train([[a_changed(s, reward=rng.random()) for s in g] for g in rewarded(some_groups(6, 4, seed=2))])
    return snapshot_folder(made.home, 0)


@pytest.fixture
def found(folder, tmp_path) -> Replay:
    """Three other losses on the second update."""
    files = [file_of(tmp_path / "wrong_sign.py", WRONG_SIGN), file_of(tmp_path / "no_mask.py", NO_MASK)]
    return replay(folder, ["cispo", *files], update=1, with_maps=True)


def with_pieces(found: Replay, *texts: str) -> Replay:
    """The same with other texts of the first tokens of every sample."""
    assert found.maps is not None
    samples = [replace(s, pieces=[*texts, *s.pieces[len(texts) :]]) for s in found.maps.samples]
    return replace(found, maps=replace(found.maps, samples=samples))


def floats(packed: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed), dtype="<f4")


def test_the_page_holds_the_numbers_of_every_token(found, tmp_path):
    maps = found.maps
    assert [loss.name for loss in maps.losses] == LOSSES
    assert write_replay_page(found, tmp_path / "page.html").startswith("page: ")
    page = Elements(tmp_path / "page.html")
    head, samples = json.loads(page.scripts["head"]), unpack(page.scripts["samples"])
    assert head["replay"] == found.to_json() and "maps" not in head["replay"]
    assert [(s["group"], s["sample"]) for s in samples] == [(g, i) for g in (1, 3, 5) for i in range(4)]
    assert [s["pieces"] for s in samples] == [s.pieces for s in maps.samples]
    for row, loss in zip(found.losses, maps.losses, strict=True):
        slope = np.concatenate([floats(s["losses"][loss.name]["slope"]) for s in samples])
        assert slope.tobytes() == loss.slope.tobytes()
        trained = np.isfinite(slope)
        assert (slope[trained] == 0).mean() == pytest.approx(row.silent)
        if row.clipped is None:
            assert all(s["losses"][loss.name]["clipped"] is None for s in samples)
        else:
            marks = np.concatenate([floats(s["losses"][loss.name]["clipped"]) for s in samples])
            assert np.isnan(marks).tolist() == (~trained).tolist()
            assert np.nanmean(marks.astype(np.float64)) == pytest.approx(row.clipped)
        counts = count_disagreements(loss)
        assert counts["opposite"] / counts["counted"] == pytest.approx(row.opposite)
        assert counts["one_silent"] / counts["counted"] == pytest.approx(row.one_silent)
    assert found.losses[0].clipped and found.losses[2].opposite and found.losses[3].one_silent


def test_the_listed_tokens_are_those_that_differ_most(found):
    maps = found.maps
    wrong = maps.losses[2]
    listed = list_disagreements(maps, wrong, 10_000)
    kinds = Counter(one.judged for one in listed)
    counts = count_disagreements(wrong)
    assert (kinds[OPPOSITE], kinds[ONE_SILENT]) == (counts["opposite"], counts["one_silent"])
    gaps = [abs(one.of_run - one.of_loss) for one in listed]
    assert gaps == sorted(gaps, reverse=True) and list_disagreements(maps, wrong, 3) == listed[:3]
    spans = [span for _, span in maps.spans()]
    for one in listed:
        place = spans[one.sample].start + one.token
        assert place < spans[one.sample].stop and wrong.judged[place] == one.judged
        assert one.of_loss == pytest.approx(np.nan_to_num(wrong.slope[place]))
    few = choose_samples(maps, {"wrong_sign": listed[:1]}, 1)
    assert few == [listed[0].sample], "what is listed can be opened"


def test_what_a_model_wrote_never_becomes_markup(found, tmp_path):
    write_replay_page(found, tmp_path / "page.html")
    tags = Elements(tmp_path / "page.html").tags
    write_replay_page(replace(with_pieces(found, *HOSTILE), reason=HOSTILE[1]), tmp_path / "page.html")
    page = Elements(tmp_path / "page.html")
    assert page.tags == tags and json.loads(page.scripts["head"])["replay"]["reason"] == HOSTILE[1]


def test_the_command_writes_the_page(folder, tmp_path, capsys):
    assert replay_main([str(folder), "--alg", "grpo", "--page", str(tmp_path / "new" / "page.html")]) == 0
    assert "\nreproduced: loss" in (said := capsys.readouterr().out) and "\npage: " in said
    assert json.loads(Elements(tmp_path / "new" / "page.html").scripts["head"])["replay"]["reproduced"] is True
    assert replay_main([str(folder), "--json", "--page", str(tmp_path / "alone.html")]) == 0
    assert json.loads(capsys.readouterr().out)["reproduced"] is True, "the page is told elsewhere"
    with pytest.raises(UserError, match=r"--page .* cannot be written: Is a directory"):
        replay_main([str(folder), "--page", str(tmp_path)])


def shown(browser: Browser, selector: str) -> list[list[str]]:
    """Every number of this kind: its data attributes but the value, and the value."""
    return browser.ask(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => "
        "[e.dataset.loss, e.dataset.key || e.dataset.layer || e.dataset.count, e.dataset.value])"
    )


def number_or_none(text: str) -> float | None:
    return float(text) if text else None


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_browser() is None, reason=MISSING)
def test_the_page_in_a_browser(found, tmp_path, tmp_path_factory):
    found = with_pieces(found, *HOSTILE)
    maps = found.maps
    assert len(maps.samples) <= SAMPLES
    page = tmp_path / "page.html"
    write_replay_page(found, page)
    with Browser(find_browser(), tmp_path_factory.mktemp("profile")) as browser:
        browser.open(page)
        rows = {row["name"]: row for row in found.to_json()["losses"]}
        for loss, key, value in shown(browser, "#losses .number"):
            assert number_or_none(value) == rows[loss][key], (loss, key)
        layers = [(loss, layer, float(value)) for loss, layer, value in shown(browser, "#layers .number")]
        assert sorted(layers) == sorted((n, layer, x) for n in LOSSES[1:] for layer, x in rows[n]["layers"].items())
        counted = {(loss, key): int(value) for loss, key, value in shown(browser, "summary [data-count]")}
        expected = {loss.name: count_disagreements(loss) for loss in maps.losses[1:]}
        assert counted == {(n, k): c[k] for n, c in expected.items() for k in ("opposite", "one_silent")}
        for i, (sample, span) in enumerate(maps.spans()):
            choose = "document.querySelector('select[aria-label=sample]')"
            browser.ask(f"void ({choose}.value = {i}, {choose}.dispatchEvent(new Event('change')))")
            browser.wait_for(f"document.querySelectorAll('.map').length == 4 && {choose}.value == {i}")
            for loss in maps.losses:
                check_map(browser, loss, span, sample.pieces)
        check_colors(browser, maps)
        browser.ask("document.querySelector('.disagreements[data-loss=wrong_sign]').open = true")
        browser.click(".disagreements[data-loss=wrong_sign] button")
        worst = list_disagreements(maps, maps.losses[2], 1)[0]
        browser.wait_for("document.querySelector('select[aria-label=\"color by\"]').value == 'judged'")
        assert browser.ask("document.querySelector('select[aria-label=sample]').value") == str(worst.sample)
        assert browser.ask("document.querySelectorAll('img, main script').length") == 0
        assert "hacked" not in browser.ask("document.title")
        assert browser.complaints() == []
        assert {address.split(":")[0] for address in browser.requests()} <= {"file", "about", "data"}


def check_map(browser: Browser, loss, span: slice, pieces: list[str]) -> None:
    """The tokens of a map are the sample's, letter by letter, with the numbers of the loss."""
    told = browser.ask(
        f"[...document.querySelectorAll('.map[data-loss={loss.name}] .tokens .token')].map((e) => "
        "[e.textContent, e.dataset.slope, e.dataset.clipped, e.dataset.judged])"
    )
    assert [text for text, *_ in told] == [piece.replace("\n", "⏎\n") for piece in pieces]
    for i, values in enumerate((loss.slope, loss.clipped, loss.judged), 1):
        numbers = np.array([np.float32(row[i] or "nan") for row in told])
        expected = np.full(len(pieces), np.nan) if values is None else values[span]
        np.testing.assert_array_equal(numbers, expected)


def check_colors(browser: Browser, maps) -> None:
    """A token has a colour where it is clipped, or in the other views has a gradient, or is disagreed on."""
    counts = {}
    for mode in ("clipped", "slope", "judged"):
        view = "document.querySelector('select[aria-label=\"color by\"]')"
        browser.ask(f"void ({view}.value = {mode!r}, {view}.dispatchEvent(new Event('change')))")
        browser.wait_for(f"{view}.value == {mode!r} && document.querySelectorAll('.map').length == 4")
        counts[mode] = browser.ask(
            "[...document.querySelectorAll('.map .token')].filter((e) => "
            "!['', 'rgba(0, 0, 0, 0)'].includes(getComputedStyle(e).backgroundColor) && "
            "!/, 0\\)$/.test(getComputedStyle(e).backgroundColor)).length"
        )
    *_, (_, span) = maps.spans()  # the one that is shown
    clipped = sum(int(np.nansum(loss.clipped[span])) for loss in maps.losses if loss.clipped is not None)
    judged = sum(int((loss.judged[span] > 0).sum()) for loss in maps.losses)
    assert counts["clipped"] == clipped and counts["judged"] == judged
    assert counts["slope"] <= sum(int((np.abs(loss.slope[span]) > 0).sum()) for loss in maps.losses)
    assert counts["slope"] > 0
