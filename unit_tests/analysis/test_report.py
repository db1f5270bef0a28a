"""The run page as text: what is read, chosen and embedded. test_report_browser.py opens it."""

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import analysis.report.__main__ as program
import main_sl
from analysis.report.page import UPLOT, assemble_script, write_page
from analysis.report.run_files import read_run
from analysis.report.selection import Entry, choose_samples
from analysis.report.token_account import PARTS, account_tokens
from core.types.run_summary import GitState
from driver.records.git_state import read_git_state
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.long_run import make_run
from unit_tests.helpers.pages import HOSTILE, Elements, rewrite_sample, unpack
from unit_tests.helpers.runs import ROOT, metrics_of


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A small made-up run; tests copy it before they change it."""
    return make_run(tmp_path_factory.mktemp("made") / "made", steps=3, groups=6, size=8, words=5)


@pytest.fixture
def run(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def page_of(runs: list[Path], folder: Path, *, samples: int = 32, everything: bool = False) -> Elements:
    write_page(runs, folder / "page.html", samples=samples, everything=everything)
    return Elements(folder / "page.html")


def test_every_number_of_the_log_is_in_the_page(run, tmp_path):
    page = page_of([run], tmp_path)
    got = unpack(page.scripts["metrics-r0"])
    lines = metrics_of(run)
    assert got["steps"] == [line["step"] for line in lines]
    for i, line in enumerate(lines):
        assert {name: values[i] for name, values in got["values"].items()} == {
            k: v for k, v in line.items() if k != "step"
        }


def test_held_out_curves_begin_before_training_and_end_after_it(run, tmp_path):
    lines = metrics_of(run)
    held_out = {step: {"step": step, "eval/reward/mean": step / 10} for step in (0, 2, len(lines))}
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in held_out.values())
    got = unpack(page_of([run], tmp_path).scripts["metrics-r0"])
    assert got["steps"] == [*range(len(lines) + 1)] and got["trained"] == [*range(len(lines))]
    want = [held_out.get(step, {}).get("eval/reward/mean") for step in got["steps"]]
    assert got["values"]["eval/reward/mean"] == want and got["values"]["train/loss"][-1] is None


def test_a_step_has_all_rewards_and_a_selection_and_on_request_the_rest(run, tmp_path):
    page = page_of([run], tmp_path, samples=10, everything=True)
    rows = [json.loads(line) for line in (run / "samples" / "step_00001.jsonl").read_text().splitlines()]
    step = unpack(page.scripts["step-r0-1"])
    assert step["reward"] == [row["reward"] for row in rows] and step["group"] == [row["group"] for row in rows]
    kept = [(group, sample) for group in step["groups"] for sample in group["samples"]]
    assert len(kept) == 10
    for group, sample in kept:
        row = [row for row in rows if row["group"] == group["group"]][sample["sample"]]
        assert sample["completion"] == row["completion"] and group["prompt"] == row["prompt"]
    name, data = re.fullmatch(
        r'feynrl_receive\("(.+)","(.+)"\)\n', (tmp_path / "page_files" / "step-r0-1.js").read_text()
    ).groups()
    whole = unpack(data)
    assert name == "step-r0-1"
    assert [s["completion"] for group in whole["groups"] for s in group["samples"]] == [
        row["completion"] for row in rows
    ]


def test_what_a_model_wrote_is_data_and_never_markup(run, tmp_path):
    before = page_of([run], tmp_path).tags
    rewrite_sample(run, 0, 0, completion=HOSTILE[0], id=HOSTILE[1], prompt=[{"role": "user", "content": HOSTILE[2]}])
    (run / "config.yaml").write_text("name: " + json.dumps("".join(HOSTILE)) + "\n")
    (run / "summary.json").write_text(
        json.dumps({"exit_reason": HOSTILE[1], "warnings": [{"step": 1, "rule": "x", "text": HOSTILE[0]}]})
    )
    page = page_of([run], tmp_path, samples=48)
    assert page.tags == before
    assert json.loads(page.scripts["head"])["runs"][0]["config"]["name"] == "".join(HOSTILE)
    samples = [s for group in unpack(page.scripts["step-r0-0"])["groups"] for s in group["samples"]]
    assert HOSTILE[0] in [sample["completion"] for sample in samples]


def test_the_page_asks_for_nothing_and_runs_one_script_only(run, tmp_path):
    page_of([run], tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", text)
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src &#x27;none&#x27;; script-src &#x27;sha256-") and "self" not in policy


def test_the_same_run_makes_the_same_bytes(run, tmp_path):
    pages = []
    for name in ("a", "b"):
        write_page([run], tmp_path / name, samples=4, everything=False)
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


HUGE = 10**400
"""JSON can hold it, and no float can."""
BAD = {
    "no such folder": (lambda run: shutil.rmtree(run), "is no folder"),
    "not a run": (lambda run: (run / "metrics.jsonl").unlink(), "has no metrics.jsonl"),
    "no step": (lambda run: (run / "metrics.jsonl").write_text("\n"), "holds no step"),
    "a broken line": (lambda run: (run / "metrics.jsonl").write_text('{"step": 0}\n{"st\n'), "line 2 is not JSON"),
    "not a number": (lambda run: (run / "metrics.jsonl").write_text('{"step": 0, "a/b": "1"}'), "a/b is 1"),
    "not finite": (lambda run: (run / "metrics.jsonl").write_text('{"step": 0, "a/b": NaN}'), "a/b is nan"),
    "too large": (lambda run: (run / "metrics.jsonl").write_text(f'{{"step": 0, "a/b": {HUGE}}}'), "a/b is 1000"),
    "deep": (lambda run: (run / "samples" / "step_00000.jsonl").write_text("[" * 5000), "is nested too deeply"),
    "a deep recipe": (lambda run: (run / "config.yaml").write_text("[" * 5000), "config.yaml is nested too deeply"),
    "no step number": (lambda run: (run / "metrics.jsonl").write_text("[]"), "has no step"),
    "two runs": (lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 1}'), "step 1 comes after"),
    "no recipe": (lambda run: (run / "config.yaml").unlink(), "config.yaml cannot be read"),
    "no YAML": (lambda run: (run / "config.yaml").write_text("a: ["), "config.yaml is not YAML"),
    "an empty recipe": (lambda run: (run / "config.yaml").write_text(""), "holds no keys"),
    "a broken summary": (lambda run: (run / "summary.json").write_text("{"), "summary.json is not JSON"),
    "a list for a summary": (lambda run: (run / "summary.json").write_text("[]"), "is no JSON object"),
    "a broken sample": (lambda run: cut(run / "samples" / "step_00002.jsonl"), "step_00002.jsonl, line"),
    "no sample": (
        lambda run: (run / "samples" / "step_00000.jsonl").write_text('{"a": 1}'),
        "no sample, it has no group",
    ),
}


def cut(file: Path) -> None:
    file.write_text(file.read_text()[:-20])


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence(run, what):
    spoil, said = BAD[what]
    spoil(run)
    code, err = run_here(program, str(run))
    assert code == 2 and err.startswith("error: ") and said in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("group", {}, "group is {}, and a whole number is expected"),
        ("id", [], "id is [], and a text is expected"),
        ("reward", "x", "reward is x, and a finite number is expected"),
        ("reward", [1.0], "reward is [1.0], and a finite number is expected"),
        ("reward", HUGE, "reward is 1000"),
        ("new_tokens", "3", "new_tokens is 3, and a finite number is expected"),
        ("advantage", {}, "advantage is {}, and a finite number is expected"),
        ("reward_parts", 3, "reward_parts is 3, and an object of numbers is expected"),
        ("reward_parts", {"a": "x"}, "a is x, and a finite number is expected"),
        ("counts", [], "counts is [], and an object of numbers is expected"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_a_sample_that_no_run_wrote_is_one_sentence(run, key, value, said):
    rewrite_sample(run, 1, 1, **{key: value})
    code, err = run_here(program, str(run))
    assert code == 2 and f"step_00001.jsonl, line 2: {said}" in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--samples=-1", "from 0 on"),
        ("--out={}/run/summary.json/a", "cannot be written"),
        ("--samples=0 --all --out={}/run/summary.json/a", "--all: .*a_files cannot be written"),
        ("--all --out=.", "--out . cannot be written: it is a folder"),
    ],
)
def test_a_bad_argument_is_one_sentence(run, tmp_path, flags, said):
    code, err = run_here(program, str(run), *flags.format(tmp_path).split())
    assert code == 2 and re.search(said, err) and err.count("\n") == 1, err


def test_the_page_of_one_run_lies_in_its_folder(run, capsys):
    code, err = run_here(program, str(run))
    assert code == 0, err
    assert (run / "report.html").is_file() and f"page: {run}/report.html (" in capsys.readouterr().out


def test_a_run_that_goes_on_is_shown_without_the_samples_being_written(run, tmp_path):
    (run / "summary.json").unlink()
    cut(run / "samples" / "step_00002.jsonl")
    notes = write_page([run], tmp_path / "page.html", samples=4, everything=False)
    page = Elements(tmp_path / "page.html")
    assert "without the samples of step 2" in notes[0]
    assert "step-r0-1" in page.scripts and "step-r0-2" not in page.scripts
    assert "the run goes on" in json.loads(page.scripts["head"])["runs"][0]["exit_reason"]


def test_a_reward_that_is_not_finite_is_told(run, tmp_path):
    rewrite_sample(run, 0, 3, reward=float("nan"))
    step = unpack(page_of([run], tmp_path, samples=48).scripts["step-r0-0"])
    assert step["reward"][3] is None
    assert "NaN" in next(s["failure"] for g in step["groups"] for s in g["samples"] if s["reward"] is None)


def test_warnings_come_from_the_summary_and_the_log(run, tmp_path):
    told = {"warnings": [{"step": 1, "rule": "entropy", "text": "low"}]}
    (run / "summary.json").write_text(json.dumps({"exit_reason": "stopped: x", **told}))
    lines = metrics_of(run)
    lines[1] |= {"train/updates_skipped": 2.0, "rollout/failed": 1.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [head] = json.loads(page_of([run], tmp_path).scripts["head"])["runs"]
    texts = [one["text"] for one in head["warnings"]]
    assert head["warnings"][0] == {"step": 1, "text": "low"} and head["exit_reason"] == "stopped: x"
    assert "2 updates were skipped" in texts[1] and "1 samples have no reward" in texts[2]


def test_a_real_runs_code_and_warnings_are_in_its_summary_and_on_the_page(recipe, tmp_path):
    result = main_sl.run(recipe({"steps": 3, "trainer.warmup_updates": 3}, kind="sl"))
    summary = json.loads((result.folder / "summary.json").read_text())
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    state: GitState = summary["git"]
    assert state["commit"] == commit and state["branch"] and state["changed_files"] >= 0
    [warned] = summary["warnings"]
    assert warned["step"] == 2 and warned["rule"] == "warmup_at_end" and "still warming up" in warned["text"]
    [head] = json.loads(page_of([result.folder], tmp_path).scripts["head"])["runs"]
    assert dict(head["facts"])["git"].startswith(f"{commit} on {state['branch']}, {state['changed_files']} file")
    assert head["warnings"] == [{"step": 2, "text": warned["text"]}]


def test_a_resumed_run_counts_the_steps_of_the_one_before(recipe, tmp_path):
    changes = {"checkpoint.every": 2, "run_dir": str(tmp_path / "first"), "steps": 2}
    main_sl.run(path := recipe(changes, kind="sl"))
    [first] = (tmp_path / "first").iterdir()
    second = main_sl.run(path, [f"resume={first}", "steps=3"]).folder
    shown = json.loads(page_of([first, second], tmp_path).scripts["head"])["runs"]
    said = [dict(head["facts"])["steps"] for head in shown]
    assert said == ["2 of 2", "3 of 3, the first 2 by the resumed run"]


def test_code_that_is_no_clone_says_so(run, tmp_path):
    state = read_git_state(tmp_path)
    assert isinstance(state, str) and state.startswith("unknown: fatal: not a git repository")
    (run / "summary.json").write_text(json.dumps({"git": state}))
    [head] = json.loads(page_of([run], tmp_path).scripts["head"])["runs"]
    assert dict(head["facts"])["git"] == state


entries = st.lists(
    st.builds(Entry, st.integers(0, 5), st.none() | st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=40
)


@settings(max_examples=60, deadline=None)
@given(entries, st.integers(0, 50))
@example([Entry(g, None) for g in (0, 1, 2)] + [Entry(2, 0.0), Entry(2, 0.5), Entry(3, None)], 8)
def test_a_selection_keeps_its_limit_and_the_extremes(samples, limit):
    chosen = choose_samples(samples, limit, step=3)
    kept = [i for group in chosen for i in group.samples]
    assert len(kept) == len(set(kept)) <= limit and chosen == choose_samples(samples, limit, step=3)
    assert all(samples[i].group == group.group for group in chosen for i in group.samples)
    groups = {sample.group for sample in samples}
    if limit >= len(samples) * 4:
        assert sorted(kept) == list(range(len(samples))), "all, where all fit"
    known = [s.reward for s in samples if s.reward is not None]
    if known and limit >= 8 and len(groups) > 1:
        assert max(known) in [samples[i].reward for i in kept] and min(known) in [samples[i].reward for i in kept]


def test_siblings_stay_together():
    samples = [Entry(i // 8, float(i % 8 == i // 8)) for i in range(512)]
    chosen = choose_samples(samples, 32, step=0)
    assert [len(group.samples) for group in chosen] == [8, 8, 8, 8]
    assert chosen != choose_samples(samples, 32, step=1), "another step shows others of equal groups"


def test_the_best_worst_most_divided_and_failed_groups_come_first():
    rewards = [[3.0, 3.5], [9.0, 8.0], [4.0, 4.0], [1.0, 2.0], [2.0, 8.5], [4.0, None], [5.0, 5.0], [6.0, 6.5]]
    samples = [Entry(g, reward) for g, own in enumerate(rewards) for reward in own]
    chosen = choose_samples(samples, 10, step=0)
    assert [(group.group, group.why) for group in chosen[:4]] == [
        (1, "best"),
        (3, "worst"),
        (4, "most divided"),
        (5, "failed"),
    ]
    assert len(chosen) == 5 and chosen[4].why == "random"
    equal = choose_samples([Entry(i // 4, 1.0) for i in range(32)], 8, step=0)
    assert {group.why for group in equal} == {"random"}, "where all rewards are equal, none is the best"


def test_the_parts_of_the_tokens_add_up():
    rows = [
        {"new_tokens": 10, "advantage": 0.0, "failure": ""},
        {"new_tokens": 20, "advantage": 1.0, "failure": ""},
        {"new_tokens": 30, "advantage": -1.0, "failure": ""},
        {"new_tokens": 9, "advantage": None, "failure": "timeout"},
        {"new_tokens": 6, "advantage": 0.0, "failure": "timeout"},  # as most algorithms write it
    ]
    line = {
        "rollout/tokens": 75.0,  # 15 of them failed
        "rollout/wasted_fraction": 0.4,  # 40 of 100: the failed ones, and 25 of a rejected group
        "train/tokens": 50.0,  # 10 were excluded
        "train/clip_frac_high": 0.1,
        "train/clip_frac_low": 0.02,
    }
    account = account_tokens(line, rows)
    expected = {"contributing": 34.0, "clipped": 6.0, "no_signal": 10.0, "not_trained": 10.0, "rejected": 40.0}
    assert account == pytest.approx(expected) and list(account) == list(PARTS)
    assert account_tokens({"train/tokens": 5.0}, []) == {}, "supervised learning samples nothing"


def test_the_vendored_library_is_the_one_that_its_readme_names():
    readme = (UPLOT / "README.md").read_text()
    named = dict(re.findall(r"^\| `([\w.]+)` \| `([0-9a-f]{64})` \|$", readme, re.MULTILINE))
    assert set(named) == {"uPlot.iife.min.js", "uPlot.min.css", "LICENSE"}
    for name, digest in named.items():
        assert hashlib.sha256((UPLOT / name).read_bytes()).hexdigest() == digest, name
    assert "MIT" in (UPLOT / "LICENSE").read_text()


def test_the_script_writes_text_and_never_markup():
    own = assemble_script().replace((UPLOT / "uPlot.iife.min.js").read_text(), "")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|fetch\(", own)
    assert len(own) > 10_000


def test_files_of_another_folder_are_no_steps(run):
    (run / "samples" / "notes.jsonl").write_text("x")
    assert sorted(read_run(run).sample_files) == [0, 1, 2]
