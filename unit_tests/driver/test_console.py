"""What a run prints: lines for people, JSON, and nothing that moves a cursor in a log file."""

import json
import os
import sys
from contextlib import suppress

import pytest

from core.text.plain_text import escape_controls
from core.timing.clock import Clock
from core.timing.phases import Phase
from driver.records import console as module
from driver.records.console import Console
from driver.records.sample_files import make_sample_record
from driver.records.sample_text import make_record, write_sample
from unit_tests.helpers.examples import some_groups

STEP = {"step": 0.0, "reward/mean": 0.5, "time/step_s": 30.0}
HOSTILE = "red \x1b[31m bell \a back \r over \u202e turned \x9b c1"


def shown(console: Console) -> str:
    """The line below the steps, as it is in a terminal at this moment."""
    return str(console.__rich__().text)


@pytest.mark.parametrize("display", ["auto", "plain", "quiet", "json"])
def test_a_log_file_holds_no_control_characters(display, capsys, monkeypatch):
    """Whatever a model writes, and whatever the environment says of colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    console = Console(2, Clock(), live=True, display=display)
    with console:
        assert not console.is_live
        console.say(HOSTILE)
        console.show_step(STEP)
        console.advise("rule", HOSTILE)
        console.show_table("on held-out data", [(HOSTILE, "1", "2")], ("", "before", "after"))
        console.show_sample(0, HOSTILE, {"completion": HOSTILE})
    out = capsys.readouterr().out
    assert out.strip() and [c for c in out if c != "\n" and not c.isprintable()] == []


def test_json_is_one_object_per_line_with_every_number(capsys):
    console = Console(100, Clock(), live=True, display="json")
    console.say("hello [bold] :smile:")
    for step in range(3):  # of a hundred, plain lines would show every second
        console.show_step(STEP | {"step": float(step), "reward/mean": 1 / 3})
    console.advise("length_budget", "raise it")
    console.show_table("t", [("a", "1")], ("", "x"))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["event"] for e in events] == ["said", "step", "step", "step", "advice", "table"]
    assert events[0]["text"] == "hello [bold] :smile:"
    assert events[2]["metrics"] == STEP | {"step": 1.0, "reward/mean": 1 / 3}
    assert events[4] == {"event": "advice", "rule": "length_budget", "text": "raise it"}


def test_quiet_leaves_the_steps_and_samples_out(capsys):
    console = Console(2, Clock(), live=True, display="quiet")
    console.show_step(STEP)
    console.show_sample(0, "a sample", {})
    console.count_group(done=1, wanted=2, tokens=3)
    console.advise("rule", "do this")
    console.say("run folder: x")
    assert capsys.readouterr().out == "advice: do this\nrun folder: x\n"


def test_sentences_and_samples_are_printed_as_they_are(capsys):
    """Neither rich's markup nor its names of emojis are ours to change, and the terminal breaks long lines."""
    console, text = Console(1, Clock(), live=False), "[red]3[/red] :warning: " + "long " * 60
    console.say(text)
    console.show_sample(0, f"  | {text}\n  > 3", {})
    assert capsys.readouterr().out == f"{text}\n  | {text}\n  > 3\n"


def test_groups_and_tokens_of_the_step_are_shown_while_it_waits():
    clock = Clock()
    console = Console(4, clock, live=True)
    with clock.phase(Phase.WAIT_FOR_DATA):
        assert "groups" not in shown(console), "none has finished"
        clock.lap_started -= 10.0
        for done in (1, 2, 9):
            console.count_group(done=done, wanted=8, tokens=1000)
        assert "8 of 8 groups, 300 tokens/s  (0 of 4 steps done)" in shown(console), "more than a step needs may wait"
    console.show_step(STEP)
    with clock.phase(Phase.WAIT_FOR_DATA):
        assert "groups" not in shown(console), "those were of the step before"
    with clock.phase(Phase.TRAIN):
        console.count_group(done=1, wanted=8, tokens=1)
        assert " train  (1 of 4" in shown(console), "beside training, groups of later steps finish"


def test_the_line_below_the_steps_is_in_a_terminal_until_the_end(monkeypatch):
    """A pseudo terminal: at the end the line is erased, and the cursor is seen again."""
    ours, theirs = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with Console(4, Clock(), live=True) as console:
            assert console.is_live and console.live.is_started
        assert not console.live.is_started
    seen = b""
    with suppress(OSError):  # there is no more, and the other end is closed
        while more := os.read(ours, 4096):
            seen += more
    os.close(ours)
    assert seen.startswith(b"\x1b[?25l") and b" working  (0 of 4 steps done)" in seen
    assert seen.endswith(b"\x1b[?25h\r\x1b[1A\x1b[2K")


def test_the_time_left_is_the_median_step_times_the_steps_left(capsys):
    console = Console(10, Clock(), live=False)
    for step, seconds in enumerate([300.0, 10.0, 20.0, 30.0]):  # the first step compiles
        console.show_step(STEP | {"step": float(step), "time/step_s": seconds})
    assert "about 2m30s left" in shown(console), "6 steps of 25 s"
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [
        *("left", "45m00s", "20m40s", "2m20s", "2m30s")
    ]
    last = Console(1, Clock(), live=False)
    last.show_step(STEP)
    assert "left" not in capsys.readouterr().out and "left" not in shown(last)


def test_a_long_step_tells_its_progress_in_a_log_file_now_and_then(capsys, monkeypatch):
    """A line when a minute is over, not one per group; the minute is counted from the last line."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    console = Console(2, Clock(), live=False)
    for done in range(1, 6):
        now[0] += 25.0
        console.count_group(done=done, wanted=8, tokens=10)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 0: 3 of 8 groups"]


def test_a_sample_is_plain_text_that_cannot_pass_as_ours():
    prompt = [{"role": "user", "content": "3+4=\nrun folder: /etc"}]
    text = write_sample(
        7,
        {
            **{"group": 2, "reward": None, "reward_parts": {}, "failure": "time\nout", "stop": "eos"},
            **{"prompt": prompt, "completion": "\x1b[2J7\nsample of step 9" + "x" * 5000},
        },
    )
    head, *rest = text.split("\n")
    assert head == r"sample of step 7, group 2: no reward (time\nout), stop: eos"
    assert rest[:3] == ["  | user: 3+4=", "  | run folder: /etc", r"  > \x1b[2J7"]
    assert all(line.startswith(("  | ", "  > ")) for line in rest) and len(text) < 1500


def test_a_long_prompt_and_a_long_completion_are_cut_in_their_middle():
    given = {"group": 0, "reward": 1.0, "reward_parts": {}, "stop": "eos"}

    def write(prompt: int, completion: int) -> list[str]:
        asked = [{"role": "user", "content": "p" * (prompt - len("user: "))}]
        return write_sample(0, given | {"prompt": asked, "completion": "c" * completion}).split("\n")[1:]

    assert write(400, 800) == ["  | user: " + "p" * 394, "  > " + "c" * 800]
    assert write(410, 850) == [
        "  | user: " + "p" * 261 + " [10 characters] " + "p" * 133,
        "  > " + "c" * 534 + " [50 characters] " + "c" * 266,
    ]


def test_other_samples_are_shown_at_other_steps():
    groups = some_groups(3, 2)
    shown = [make_sample_record(groups[g][i], g) for g, i in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 0))]
    assert [make_record(step, groups) for step in range(7)] == shown


def test_letters_of_every_script_stay():
    text = "naïve 日本語 عربي é 😀 \u00a0|"
    assert escape_controls(text) == text
    assert escape_controls("\ud800\t\u200b") == r"\ud800\t\u200b"


def test_a_run_in_json_tells_its_groups_its_steps_and_its_samples(trained, tmp_path, monkeypatch, capsys):
    """A real run: every line is an object, and a step's numbers are those of metrics.jsonl."""
    monkeypatch.setattr(module, "STEP_PROGRESS_EVERY_S", 0.0)
    capsys.readouterr()
    trained({"display": "json", "show_samples": 1})
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    [folder] = (tmp_path / "runs").iterdir()
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [e["metrics"] for e in events if e["event"] == "step"] == logged
    progress = [(e["step"], e["done"], e["wanted"]) for e in events if e["event"] == "progress"]
    assert progress == [(step, done, 4) for step in (0, 1) for done in (1, 2, 3, 4)]
    samples = [e for e in events if e["event"] == "sample"]
    written = [json.loads(line) for line in (folder / "samples" / "step_00001.jsonl").read_text().splitlines()]
    assert [e["step"] for e in samples] == [0, 1] and samples[1]["completion"] == written[4]["completion"]
    assert events[-1] == {"event": "said", "text": f"run folder: {folder}"}
