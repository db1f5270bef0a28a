"""The run page in a real browser: its numbers are the run's, a click opens samples, and hostile text does nothing."""

import json
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import yaml

import main_rl
from analysis.capture import tokens
from analysis.report.page import write_page
from tools.browser import MISSING, Browser, find_browser
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.long_run import make_run
from unit_tests.helpers.pages import HOSTILE, rewrite_sample
from unit_tests.helpers.runs import SEVENS, file_of, metrics_of

pytestmark = [
    pytest.mark.one_core,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_browser() is None, reason=MISSING),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(find_browser(), tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def runs(recipe, tmp_path) -> list[Path]:
    """Two real runs of the tiny model, and hostile text in the second."""
    reward = file_of(tmp_path / "sevens.py", SEVENS)
    for name, lr in (("first", 1e-2), ("second", 3e-3)):
        changes = {"name": name, "steps": 3, "trainer.lr": lr, "reward.function": reward}
        changes |= {"profile": {"steps": [1]}} if name == "first" else {}
        code, err = run_here(main_rl, "--config", recipe(changes))
        assert code == 0, err
    made = sorted((tmp_path / "runs").iterdir())
    rewrite_sample(made[1], 1, 0, completion=HOSTILE[0], answer=HOSTILE[1], stop=HOSTILE[0])
    rewrite_sample(made[1], 1, 1, completion="".join(HOSTILE), reward_parts={HOSTILE[0]: 1.0})
    return made


def numbers(browser: Browser, selector: str) -> dict[str, float]:
    """The numbers that the page shows, by the metric that they are of."""
    shown = browser.ask(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => "
        "[e.closest('[data-metric]').dataset.metric, e.dataset.value])"
    )
    return {metric: float(value) for metric, value in shown}


def test_the_page_of_two_real_runs(browser, runs, tmp_path):
    page = tmp_path / "page.html"
    write_page(runs, page, samples=16, everything=False)
    browser.open(page)
    logs = [metrics_of(run) for run in runs]
    traces = browser.ask("[...document.querySelectorAll('[data-fact=profile] a')].map((e) => e.href)")
    assert {Path(unquote(urlsplit(href).path)) for href in traces} == {*(runs[0] / "profile").iterdir()} != set()
    browser.ask("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    names = {name for log in logs for line in log for name in line} - {"step"}
    browser.wait_for("document.querySelectorAll('.card').length")
    merged = ask_names(browser, "[data-same]", "same")
    constant = numbers(browser, ".constants .number")
    assert {*ask_names(browser, ".card", "metric"), *merged, *constant} == names, "every metric once"
    assert constant == {
        name: logs[0][0][name] for name in names if len({line.get(name) for log in logs for line in log}) == 1
    }
    assert {"train/updates_skipped", "rollout/failed"} <= constant.keys() and "reward/correct" in merged
    for i, log in enumerate(logs):
        shown = numbers(browser, f"[data-run=r{i}] > .number")
        left = {k: v for k, v in log[-1].items() if k not in {"step", *merged, *constant}}
        assert shown == left, "the last value of each curve"
    check_smoothing(browser, logs)
    card = '.card[data-metric="reward/mean"]'
    browser.ask(f"document.querySelector({json.dumps(card)}).scrollIntoView({{block: 'center'}})")
    browser.wait_for(f"document.querySelector({json.dumps(card + ' .u-over')})")  # plots are made when they are seen
    browser.click(f"{card} .u-over")  # the middle of three steps
    browser.wait_for("document.querySelector('#step-title[data-step=\"1\"]') && document.querySelector('.sample')")
    key = browser.ask("document.getElementById('step-title').dataset.run")
    assert numbers(browser, ".metrics .number") == {k: v for k, v in logs[int(key[1])][1].items() if k != "step"}
    browser.open(page, "#samples/r1/1")
    browser.wait_for("document.querySelectorAll('.sample').length == 4")
    counts = browser.ask("[...document.querySelectorAll('.bar')].map((e) => Number(e.dataset.count))")
    assert sum(counts) == 16, "the histogram counts every sample"
    check_hostile(browser)
    for tab in ("time", "tokens", "recipe", "microscope"):
        browser.click(f'[data-tab="{tab}"]')
        browser.wait_for(f"document.querySelector('.tab[data-name={tab}][data-done]')")
        if tab == "tokens":
            browser.wait_for("document.querySelector('[data-total=generated]')")
            totals = browser.ask("[...document.querySelectorAll('[data-total=generated]')].map((e) => e.dataset.value)")
            assert [float(x) for x in totals] == [sum(line["rollout/tokens"] for line in log) for log in logs]
        if tab == "time":
            totals = browser.ask("[...document.querySelectorAll('[data-total=seconds]')].map((e) => e.dataset.value)")
            expected = [sum(line["time/step_s"] for line in log) for log in logs]
            assert [float(x) for x in totals] == pytest.approx(expected, rel=1e-12)
    assert browser.complaints() == []
    assert {address.split(":")[0] for address in browser.requests()} <= {"file", "about", "data"}


def ask_names(browser: Browser, selector: str, data: str) -> list[str]:
    return browser.ask(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.dataset.{data})")


def test_what_fell_between_two_steps_is_on_one_panel(browser, tmp_path):
    """Worked out from the files: rewards by part, source and length, and each prompt's means with their samples."""
    run = make_run(tmp_path / "made", steps=4, groups=6, size=8, words=5)
    rows = [read_step(run, step) for step in range(4)]
    rows[3] = [row | {"reward": 0.0 if row["group"] == 2 else row["reward"], "new_tokens": 5} for row in rows[3]]
    rows[1] = [row | {"reward": 1.0 if row["group"] == 2 else row["reward"], "new_tokens": 9} for row in rows[1]]
    for step in (1, 3):
        file = run / "samples" / f"step_{step:05d}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[step]))
    lines = [
        line | {"reward/mean": mean, "reward/correct": mean, "reward/polite": 1 - mean, "reward/easy": mean / 2}
        for line, mean in zip(metrics_of(run), (0.25, 0.75, 0.5, 0.375), strict=True)
    ]
    lines = [line | {"data/easy/rows": 8.0 * i} for i, line in enumerate(lines)]
    for line in lines:  # made up too
        del line["reward/others"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_page([run], tmp_path / "page.html", samples=48, everything=False)
    browser.open(tmp_path / "page.html", "#fell/r0")
    browser.wait_for("document.querySelector('.tab[data-name=fell][data-done]')")
    assert table_of(browser, "part")[:1] == [["reward/correct", 0.75, 0.375, -0.375]], "from the best step to the last"
    assert ["reward/polite", 0.25, 0.625, 0.375] in table_of(browser, "part")
    assert table_of(browser, "source") == [["reward/easy", 0.375, 0.1875, -0.1875]]
    means = [sum(row["reward"] for row in own) / 48 for own in (rows[1], rows[3])]
    short, long = table_of(browser, "length")
    assert short[:3] == ["5 tokens", None, 0] and short[3:5] == [pytest.approx(means[1]), 48]
    assert long[:3] == ["6 to 9 tokens", pytest.approx(means[0]), 48] and long[4] == 0
    prompt, then, _, now, _, change = table_of(browser, "prompts")[0]
    assert (prompt, then, now, change) == ("made-up/2", 1.0, 0.0, -1.0)
    assert len(table_of(browser, "prompts")) == 6
    browser.click('[data-part=prompts] button[data-step="3"][data-group="2"]')
    browser.wait_for("document.querySelector('.group.picked')")
    assert browser.ask("document.getElementById('step-title').dataset.step") == "3"
    assert browser.ask("document.querySelector('.group.picked').dataset.group") == "2"
    assert browser.complaints() == []


def read_step(run: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run / "samples" / f"step_{step:05d}.jsonl").read_text().splitlines()]


def table_of(browser: Browser, part: str) -> list[list]:
    """The rows of a table of the panel, numbers as numbers."""
    return browser.ask(
        f"[...document.querySelectorAll('[data-part={part}] tbody tr')].map((row) => [...row.cells].map((cell) => "
        "{ const n = cell.querySelector('.number'); if (!n) return cell.textContent; "
        "return n.dataset.value === '' ? null : Number(n.dataset.value); }))"
    )


def check_smoothing(browser: Browser, logs: list[list[dict]]) -> None:
    """The smoothed value is the exponential moving average over the steps so far, without the bias of its start."""
    slider = "document.querySelector('input[aria-label=smoothing]')"
    browser.ask(f"void ({slider}.value = 0.9, {slider}.dispatchEvent(new Event('input')))")
    browser.ask(f"void {slider}.dispatchEvent(new Event('change'))")
    for i, log in enumerate(logs):
        shown = numbers(browser, f"[data-metric='train/grad_norm'] [data-run=r{i}] > .smoothed")
        weights = [0.9**age for age in range(len(log))][::-1]
        mean = sum(w * line["train/grad_norm"] for w, line in zip(weights, log, strict=True)) / sum(weights)
        assert shown["train/grad_norm"] == pytest.approx(mean, rel=1e-9)


def check_hostile(browser: Browser) -> None:
    """What a model wrote is on the page letter by letter, and made no element."""
    browser.ask("document.querySelectorAll('.group').forEach((e) => e.click())")
    groups = browser.ask("document.querySelectorAll('.group').length")
    texts: list[str] = []
    for i in range(groups):
        browser.ask(f"document.querySelectorAll('.group')[{i}].click()")
        texts += browser.ask("[...document.querySelectorAll('.siblings, .prompt')].map((e) => e.textContent)")
    for text in (*HOSTILE, "".join(HOSTILE)):
        assert any(text in shown for shown in texts), text
    assert browser.ask("document.querySelectorAll('img, main script').length") == 0
    assert "hacked" not in browser.ask("document.title")


def test_all_samples_are_loaded_from_beside_the_page(browser, tmp_path):
    run = make_run(tmp_path / "made", steps=2, groups=6, size=8, words=5)
    write_page([run], tmp_path / "page.html", samples=8, everything=True)
    browser.open(tmp_path / "page.html", "#samples/r0/1")
    browser.wait_for("document.querySelectorAll('.group').length == 4")
    browser.ask("[...document.querySelectorAll('button')].find((e) => e.textContent == 'load all').click()")
    browser.wait_for("document.querySelectorAll('.group').length == 6")
    rows = [json.loads(line) for line in (run / "samples" / "step_00001.jsonl").read_text().splitlines()]
    shown: list[str] = []
    for i in range(6):
        browser.ask(f"document.querySelectorAll('.group')[{i}].click()")
        shown += browser.ask("[...document.querySelectorAll('.completion')].map((e) => e.textContent)")
    assert shown == [row["completion"] for row in rows]
    shutil.rmtree(tmp_path / "page_files")
    browser.open(tmp_path / "page.html", "#samples/r0/0")
    browser.wait_for("document.querySelector('.sample')")
    browser.ask("[...document.querySelectorAll('button')].find((e) => e.textContent == 'load all').click()")
    browser.wait_for("document.body.textContent.includes('step-r0-0.js is not beside this page')")


TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"properties": {"a": {}}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": HOSTILE[0]}}}
TURNS = [
    {"role": "assistant", "content": "", "tool_calls": [CALL], "tokens": 9, "reward": 0.25},
    {"role": "tool", "content": HOSTILE[1], "tool_call_id": "1"},
    {"role": "assistant", "content": "7", "reasoning": "easy", "tokens": 2},
]


def test_the_turns_of_an_episode_are_shown_one_by_one(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=1, groups=1, size=2, words=3)
    rewrite_sample(run, 0, 0, turns=TURNS, tools=[TOOL], counts={"tool_calls": 1.0})
    page = tmp_path / "page.html"
    write_page([run], page, samples=8, everything=False)
    browser.open(page, "#samples/r0/0")
    browser.wait_for("document.querySelectorAll('.turn').length == 3")
    turns = browser.ask("[...document.querySelectorAll('.turn .text')].map((e) => e.textContent)")
    assert turns == [f'add({{"a":{json.dumps(HOSTILE[0])}}})', HOSTILE[1], "(easy)\n7"]
    facts = browser.ask("[...document.querySelectorAll('.turn .hint')].map((e) => e.textContent)")
    assert facts == ["assistant · 9 tokens · earned 0.25", "tool", "assistant · 2 tokens"]
    assert browser.ask("document.querySelector('.prompt').textContent").startswith("may calladd(a) Add.")
    assert "tool calls 1" in browser.ask("document.querySelector('.sample footer').textContent")
    assert browser.ask("document.querySelectorAll('pre.completion').length") == 1, "the other sample is text as before"
    assert browser.ask("document.title") != "hacked"


def test_a_bar_of_the_histogram_keeps_the_groups_that_have_such_a_sample(browser, tmp_path):
    run = make_run(tmp_path / "made", steps=1, groups=6, size=8, words=5)
    rewrite_sample(run, 0, 17, reward=7.25)
    write_page([run], tmp_path / "page.html", samples=48, everything=False)
    browser.open(tmp_path / "page.html", "#samples/r0/0")
    browser.wait_for("document.querySelectorAll('.group').length == 6")
    browser.click('.bar[data-from="7.25"]')
    browser.wait_for("document.querySelectorAll('.group').length == 1")
    assert browser.ask("document.querySelector('.group').dataset.group") == "2"


def test_a_supervised_run_has_curves_and_says_that_it_has_no_samples(trained, browser, tmp_path):
    run = trained({"steps": 3}, kind="sl")
    write_page([run], tmp_path / "page.html", samples=8, everything=False)
    browser.open(tmp_path / "page.html")
    assert numbers(browser, '[data-metric="train/loss"] .number') == {"train/loss": metrics_of(run)[-1]["train/loss"]}
    for tab in ("time", "tokens", "samples"):
        browser.click(f'[data-tab="{tab}"]')
        browser.wait_for(f"document.querySelector('.tab[data-name={tab}][data-done]')")
    assert "This run has no samples." in browser.ask("document.body.textContent")


def test_a_captured_sample_is_shown_token_by_token(browser, tmp_path):
    run = make_run(tmp_path / "made", steps=3, groups=2, size=4, words=5)
    pieces = ["Say", " a", " number", "<img src=x onerror=alert(1)>", "\n", "</script>"]

    def column(scale: float):
        return np.array([np.nan] * 3 + [scale * x for x in (0.1, -2.0, 3.5)], dtype=np.float32)

    def sample(group: int, number: int):
        columns = {name: column((group + 1) * 0.3 + number) for name in tokens.TOKEN_COLUMNS}
        reward = number / 4
        return tokens.CapturedSample(step=1, group=group, sample=number, reward=reward, pieces=pieces, columns=columns)

    folder = tokens.snapshot_folder(run, 1)
    folder.mkdir(parents=True)
    tokens.write_captured(folder, [sample(group, number) for group in range(2) for number in range(4)])
    (folder / tokens.MANIFEST).write_text("{}")
    write_page([run], tmp_path / "page.html", samples=4, everything=True)
    browser.open(tmp_path / "page.html", "#microscope/r0/1")
    browser.wait_for("document.querySelectorAll('select[aria-label=sample] option').length == 4")
    browser.ask("[...document.querySelectorAll('button')].find((e) => e.textContent == 'load all').click()")
    browser.wait_for("document.querySelectorAll('select[aria-label=sample] option').length == 8")
    write_page([run], tmp_path / "page.html", samples=8, everything=False)
    browser.open(tmp_path / "page.html", "#samples/r0/1")
    browser.wait_for("document.querySelector('.sample[data-sample=\"2\"] header button')")
    browser.click('.sample[data-sample="2"] header button')
    browser.wait_for("document.querySelectorAll('.token[data-value]').length == 6")
    group = int(browser.ask("location.hash.split('/')[3]"))
    for name in tokens.TOKEN_COLUMNS:
        select = "document.querySelector('select[aria-label=\"color by\"]')"
        browser.ask(f"void ({select}.value = {name!r}, {select}.dispatchEvent(new Event('change')))")
        shown = browser.ask("[...document.querySelectorAll('.token[data-value]')].map((e) => e.dataset.value)")
        assert shown[:3] == ["", "", ""]
        expected = column((group + 1) * 0.3 + 2)[3:]
        assert [np.float32(x) for x in shown[3:]] == expected.tolist(), name
    assert browser.ask("[...document.querySelectorAll('.token[data-value]')].map((e) => e.textContent)") == [
        piece.replace("\n", "⏎\n") for piece in pieces
    ]
    assert browser.ask("document.querySelectorAll('img').length") == 0


def test_a_long_run_opens_in_a_small_page(browser, tmp_path):
    run = make_run(tmp_path / "long")
    write_page([run], tmp_path / "page.html", samples=32, everything=False)
    assert (tmp_path / "page.html").stat().st_size < 50e6
    browser.open(tmp_path / "page.html", "#samples/r0/150")
    browser.wait_for("document.querySelectorAll('.sample').length == 8")
    assert numbers(browser, ".metrics .number") == {k: v for k, v in metrics_of(run)[150].items() if k != "step"}


def test_hostile_names_of_a_run_are_text(browser, tmp_path):
    """Everything that has a name, wherever the page shows it: the run, its folder, metrics, warnings, the reason."""
    name = HOSTILE[0]
    run = make_run(tmp_path / "made", steps=3, groups=2, size=4, words=5)
    lines = [line | {f"eval/{one}": 0.5 * line["step"] for one in HOSTILE} for line in metrics_of(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = yaml.safe_load((run / "config.yaml").read_text()) if (run / "config.yaml").is_file() else {}
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"name": name, name: {name: name}}))
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").is_file() else {}
    hostile = {"exit_reason": f"stopped: {name}", "bottleneck": name, "before": {name: 1.0}, "after": {name: 2.0}}
    hostile |= {"warnings": [{"step": 1, "rule": name, "text": "".join(HOSTILE)}], "packages": {name: name}}
    hostile["git"] = {"commit": name, "branch": name, "changed_files": 1}
    (run / "summary.json").write_text(json.dumps(summary | hostile))
    for number, text in enumerate(HOSTILE):
        rewrite_sample(run, 1, number, id=text, failure=text, reward_parts={text: 1.0}, log=text)
    other = tmp_path / "<img src=x onerror='document.title=1'>"
    shutil.copytree(run, other)
    write_page([run, other], page := tmp_path / "page.html", samples=16, everything=False)
    browser.open(page)
    title = browser.ask("document.title")
    browser.ask("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    for tab in browser.ask("[...document.querySelectorAll('[data-tab]')].map((e) => e.dataset.tab)"):
        browser.click(f'[data-tab="{tab}"]')
        browser.wait_for(f"document.querySelector('.tab[data-name={tab}][data-done]')")
    browser.open(page, "#samples/r1/1")
    browser.wait_for("document.querySelector('.sample')")
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert browser.ask("document.title") == title and title != "hacked"
    assert name in browser.ask("document.body.textContent")


def test_lines_of_a_hundred_thousand_characters_stay_in_the_page(browser, tmp_path):
    line = "x" * 100_000
    run = make_run(tmp_path / "made", steps=2, groups=2, size=2, words=5)
    rewrite_sample(run, 1, 0, id=line, completion=line, failure=line, log=line, answer=line)
    rewrite_sample(run, 1, 1, prompt=[{"role": "user", "content": line}], reward_parts={line: 1.0}, notes=[line])
    write_page([run], page := tmp_path / "page.html", samples=16, everything=False)
    browser.open(page, "#samples/r0/1")
    browser.wait_for("document.querySelector('.sample')")
    browser.ask("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    assert line in browser.ask("document.body.textContent")
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
