"""Rewards as text functions, and as guests of processes that they may wreck."""

from __future__ import annotations

import asyncio
import operator
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from fractions import Fraction
from multiprocessing import Pipe
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rewards.pool
from core.errors import UserError
from core.types.samples import Prompt
from rewards import gsm8k, load_reward, resolve_reward
from rewards.pool import RewardPool, RewardResult
from unit_tests.helpers.examples import is_running
from unit_tests.helpers.one_reward import compute_one, one_reward
from unit_tests.helpers.processes import wait_until

ROOT = Path(__file__).parent.parent.parent


def score(name: str, answer: str, reply: str) -> dict[str, float]:
    prompt = Prompt(id="test/0", messages=[{"role": "user", "content": "?"}], answer=answer)
    return load_reward(resolve_reward(name), {})(prompt, [{"role": "assistant", "content": reply}])


@pytest.mark.parametrize(
    ("reply", "correct"),
    [("46", 1.0), (" 46\n", 1.0), ("47", 0.0), ("4 6", 0.0), ("it is 46", 0.0), ("", 0.0)],
)
def test_arithmetic_wants_the_answer_and_nothing_else(reply: str, correct: float) -> None:
    assert score("arithmetic", "46", reply) == {"correct": correct}


def test_arithmetic_refuses_a_row_without_an_answer() -> None:
    with pytest.raises(ValueError, match="has no answer"):
        score("arithmetic", " ", "")


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        ("1200", "She has $1,200."),
        ("1200", "#### 1,200"),
        ("1200", "#### $1,200.00"),
        ("1200", r"The total is \$1{,}200.00."),
        ("12", "12.0"),
        ("12.50", "It costs 12.5 dollars"),
        ("-5", "The change is -5 degrees"),
        ("-5", "It lost -$5."),
        ("-5", "It lost $-5."),
        ("-5", "It fell to \u22125"),
        ("7", "10-3=7"),
        ("-3", "from 10 to -3"),
        ("50", "50%"),
        ("50", r"\boxed{50\%}"),
        ("18", r"so \boxed{18 \text{ dollars}} as asked"),
        ("18", r"\boxed{x = 18}"),
        ("18", "First #### 17\nno, wait\n#### 18 eggs, not 20"),
        ("18", r"\boxed{17} and then #### 18"),
        ("0.5", ".5"),
        ("18", r"\boxed{\frac{36}{2}}"),
        ("18", r"so $\boxed{36/2}$"),
        ("18", r"#### \dfrac{36}{2}"),
        ("18", "it is 36/2"),
        ("18", r"\boxed{2 \times 9}"),
        ("18", r"\boxed{\frac{2 \times 18}{2}}"),
        ("18", r"\boxed{2 \times 9 = 18}"),
        ("18", "\\boxed{36 \u00f7 2}"),
        ("18", "\\boxed{2 \u00d7 9}"),
        ("1205", r"\boxed{1,200 + 5}"),
        ("1.5", r"\boxed{1\frac{1}{2}}"),
        ("0.5", r"\boxed{\frac12}"),
        ("18", r"\boxed{18 \text{ km}^2}"),
        ("18", r"\boxed{18^\circ}"),
        ("18", r"\boxed{\textbf{18}}"),
        ("18", r"\boxed{\text{18 dollars}}"),
        ("18", "<think>#### 17</think>So 18."),
        ("18", "17, no\n</think>\n#### 18"),
        ("18", "#### 18\n<think>or #### 17?"),
        ("72", "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"),
        ("Natalia sold 24 clips.\n#### 72", "the answer is 72"),
    ],
)
def test_gsm8k_reads_a_number_however_it_is_dressed(answer: str, reply: str) -> None:
    assert score("gsm8k", answer, reply)["correct"] == 1.0


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        ("12", "120"),
        ("12", "12.5"),
        ("12", "-12"),
        ("12", "no number"),
        ("12", "12, or rather 13"),
        ("1200", "1,2000"),
        ("12", "9" * 5000),
        ("2", r"\boxed{\frac{36}{2}}"),
        ("2", r"\boxed{36/2}"),
        ("9", r"\boxed{2 \times 9}"),
        ("18", r"\boxed{17, 18}"),
        ("18", r"\boxed{17 \text{ or } 18}"),
        ("2", r"\boxed{3^2}"),
        ("0", r"\boxed{1/0}"),
        ("18", "<think>#### 18</think>"),
        ("18", "<think>#### 18</think>So 17."),
        ("18", "<think>so #### 18"),
        ("18", r"\boxed{18}</think>"),
    ],
)
def test_gsm8k_refuses_another_number(answer: str, reply: str) -> None:
    assert score("gsm8k", answer, reply)["correct"] == 0.0


SIGNS = {
    operator.add: ["+"],
    operator.sub: ["-", "\u2212"],
    operator.mul: ["*", r"\times", r"\cdot", "\u00d7"],
    operator.truediv: ["/", r"\div", "\u00f7"],
}


@st.composite
def join(draw: st.DrawFn, parts: st.SearchStrategy[tuple[str, Fraction]]) -> tuple[str, Fraction]:
    """Two calculations with a sign between them, or as a fraction."""
    (left, a), (right, b), apply = draw(parts), draw(parts), draw(st.sampled_from([*SIGNS]))
    assume(b or apply is not operator.truediv)
    if apply is operator.truediv and "{" not in left + right and draw(st.booleans()):
        return rf"\frac{{{left}}}{{{right}}}", a / b
    return f"({left}) {draw(st.sampled_from(SIGNS[apply]))} ({right})", apply(a, b)


NUMBERS = st.tuples(st.integers(0, 9_999), st.sampled_from(["", ",", ".2f"])).map(
    lambda drawn: (text := format(drawn[0], drawn[1]), Fraction(text.replace(",", "")))
)


@settings(max_examples=60)
@given(join(st.recursive(NUMBERS, join, max_leaves=4)))
def test_gsm8k_computes_what_a_box_holds(calculation: tuple[str, Fraction]) -> None:
    text, value = calculation
    assert gsm8k.find_answer(rf"So \boxed{{{text}}}.") == (value, True)


def test_gsm8k_format_is_a_mark_with_a_number() -> None:
    marked = [score("gsm8k", "3", reply)["format"] for reply in ("#### 3", r"\boxed{4}", "3", "####", r"\boxed{}")]
    assert marked == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_gsm8k_takes_the_whole_of_nested_braces() -> None:
    number, marked = gsm8k.find_answer(r"\boxed{\text{about } {12}} or 13")
    assert (str(number), marked) == ("12", True)


def test_an_answer_without_a_number_is_the_rows_fault() -> None:
    with pytest.raises(ValueError, match="the answer 'blue' of test/0 holds no number"):
        score("gsm8k", "blue", "3")


@pytest.mark.parametrize(
    ("answer", "reply", "correct"),
    [
        (r"\frac{1}{2}", r"Thus the answer is $\boxed{0.5}$.", 1.0),
        ("x^2+2x+1", r"We get $\boxed{(x+1)^2}$", 1.0),
        ("12", r"\boxed{13}", 0.0),
        ("12", "I do not know", 0.0),
        # the library is not symmetric: it takes a right-hand side for the number asked for, not for an equation
        ("$2x+3y=5$", r"\boxed{5}", 0.0),
        ("$5$", r"\boxed{2x+3y=5}", 1.0),
    ],
)
def test_math_verify_compares_as_mathematics(answer: str, reply: str, correct: float) -> None:
    assert score("math_verify", answer, reply) == {"correct": correct}


CHOICES = {"question_type": "multi_choice", "answer_type": "text", "choices": ["tokyo", "osaka", "B"]}
FLOAT = {"question_type": "free_form", "answer_type": "float", "precision": 1}


@pytest.mark.parametrize(
    ("extra", "answer", "reply", "correct"),
    [
        (CHOICES, "osaka", r"It is large. \boxed{\text{(B)}}", 1.0),
        (CHOICES, "osaka", r"It is large. \boxed{B}", 0.0),  # the text of the third choice
        (CHOICES, "osaka", "The answer is (B) osaka.", 1.0),
        (CHOICES, "osaka", "<think>The answer is A</think>\nosaka", 1.0),
        (CHOICES, "tokyo", r"\boxed{(A) osaka}", 0.0),
        (CHOICES, "osaka", r"\boxed{osako}", 0.0),  # the nearest choice is no answer
        (CHOICES, "tokyo", "A", 1.0),
        (CHOICES, "tokyo", "The answer is: A", 1.0),
        (CHOICES, "tokyo", "Answer: A", 1.0),
        (CHOICES, "tokyo", "The answer is: A\nThe answer isn't B", 1.0),
        (FLOAT, "1.2", r"\boxed{1.23 \text{ cm}}", 1.0),
        (FLOAT, "1.2", r"\boxed{1.3}", 0.0),
        ({"answer_type": "integer"}, "3", r"\boxed{3.0}", 1.0),
        ({"answer_type": "integer"}, "3", r"\boxed{3.9}", 0.0),
        ({"answer_type": "list"}, "[1, 2]", r"\boxed{[1, 2]}", 1.0),
        ({"answer_type": "list"}, "[1, 2]", r"\boxed{[2, 1]}", 0.0),
        ({"answer_type": "list"}, "[1, 2]", r"\boxed{[{{1}}]}", 0.0),  # Python has no such set
    ],
)
def test_mathvista_pays_the_answer_in_the_form_that_the_row_asks_for(extra, answer, reply, correct) -> None:
    prompt = Prompt(id="test/0", messages=[{"role": "user", "content": "?"}], answer=answer, extra=extra)
    rewarded = load_reward(resolve_reward("mathvista"), {})
    assert rewarded(prompt, [{"role": "assistant", "content": reply}]) == {"correct": correct}
    with pytest.raises(ValueError, match="answer_type None: make the rows by"):
        score("mathvista", answer, reply)
    for name in {"choices", "precision"} & extra.keys():
        with pytest.raises(ValueError, match=f"has no {name}: make the rows by"):
            rewarded(replace(prompt, extra={**extra, name: None}), [{"role": "assistant", "content": reply}])


def test_a_misspelt_reward_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"reward.name: there is no 'gsm8' in rewards/ \(did you mean 'gsm8k'\?\)"):
        resolve_reward("gsm8", key="reward.name")
    with pytest.raises(UserError, match="there is no 'pool'"):
        resolve_reward("pool")


def test_a_file_without_score_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def scores(prompt, messages): ...\n")
    with pytest.raises(UserError, match=r"mine.py has no function score\(prompt, messages\)"):
        load_reward(resolve_reward(str(file)), {})


WRECKER = """
import os, sys, time

def score(prompt, messages):
    said = messages[-1]["content"]
    if said == "raise":
        return {"correct": 1 / 0}
    if said == "loop":
        while True:
            pass
    if said == "regex":  # holds the interpreter's lock for ever
        import re
        re.match(r"(a+)+$", "a" * 60 + "b")
    if said == "exit":
        os._exit(3)
    if said == "sys.exit":
        sys.exit(4)
    if said == "crash":
        import ctypes
        ctypes.string_at(0)
    if said == "nan":
        return {"correct": float("nan")}
    if said == "text":
        return {"correct": "yes"}
    if said == "list":
        return [1.0]
    if said == "input":
        return {"correct": input()}
    if said == "number":
        return 0.5
    if said == "pid":
        return {"pid": os.getpid()}
    if said == "torch":
        return {"torch": float("torch" in sys.modules)}
    if said == "sleep":
        time.sleep(0.3)
    if said == "nap":
        time.sleep(0.3)
        return {"pid": os.getpid()}
    if said == "mark":
        prompt.extra["marks"] = 1 + prompt.extra.get("marks", 0)
        return {"marks": prompt.extra["marks"]}
    print("a reward may print")
    return {"correct": float(said == prompt.answer), "bonus": True}
"""


@contextmanager
def wrecker_pool(folder: Path, *, workers: int = 1, timeout_s: float = 20.0) -> Iterator[RewardPool]:
    file = folder / "wrecker.py"
    file.write_text(WRECKER)
    with closing(RewardPool(one_reward(resolve_reward(str(file)), {}), workers, timeout_s)) as pool:
        yield pool


def ask(pool: RewardPool, *replies: str) -> list[RewardResult]:
    prompt = Prompt(id="test/0", messages=[{"role": "user", "content": "?"}], answer="yes")

    async def all_of_them() -> list[RewardResult]:
        return await asyncio.gather(
            *[compute_one(pool, prompt, [{"role": "assistant", "content": r}]) for r in replies]
        )

    return asyncio.run(all_of_them())


def test_the_pool_returns_named_parts(tmp_path: Path) -> None:
    with wrecker_pool(tmp_path, workers=2) as pool:
        assert ask(pool, "yes", "no") == [
            RewardResult(reward_parts={"correct": 1.0, "bonus": 1.0}),
            RewardResult(reward_parts={"correct": 0.0, "bonus": 1.0}),
        ]
        assert ask(pool, "number") == [RewardResult(reward_parts={"correct": 0.5})]


def test_each_way_to_fail_costs_one_sample_and_says_why(tmp_path: Path) -> None:
    with wrecker_pool(tmp_path) as pool:
        good = RewardResult(reward_parts={"correct": 1.0, "bonus": 1.0})
        for reply, failure in {
            "raise": "ZeroDivisionError: division by zero (wrecker.py, line 7)",
            "exit": "the worker process exited with code 3",
            "sys.exit": "the worker process exited with code 4",
            "crash": "the worker process was killed by SIGSEGV",
            "nan": "score() must return numbers up to 1e+09 by name, it returned 'correct': nan",
            "text": "score() must return numbers up to 1e+09 by name, it returned 'correct': 'yes'",
            "list": "score() must return a dict of named numbers, it returned [1.0]",
        }.items():
            assert ask(pool, reply, "yes") == [RewardResult(failure=failure), good]


def test_a_reward_does_not_read_what_is_typed_for_the_run(tmp_path: Path) -> None:
    usual, (end, begin) = os.dup(0), os.pipe()  # the pipe stands for a terminal
    os.write(begin, b"typed\n")
    os.dup2(end, 0)
    try:
        with wrecker_pool(tmp_path) as pool:
            assert ask(pool, "input")[0].failure.startswith("EOFError: EOF when reading a line")
    finally:
        os.dup2(usual, 0)
        for handle in (usual, end, begin):
            os.close(handle)


@pytest.mark.parametrize("reply", ["loop", "regex"])
def test_a_reward_that_never_ends_is_killed_and_its_neighbours_live(tmp_path: Path, reply: str) -> None:
    with wrecker_pool(tmp_path, workers=2) as pool:
        ask(pool, "yes", "yes")
        pool.timeout_s = 1.0
        outcomes = ask(pool, "yes", reply, "yes", "yes")
    assert [o.failure for o in outcomes] == ["", "timeout after 1s", "", ""]


def test_a_late_reward_is_never_that_of_the_next_sample(tmp_path: Path) -> None:
    with wrecker_pool(tmp_path) as pool:
        ask(pool, "yes")
        pool.timeout_s = 0.1
        late = ask(pool, "nap")
        pool.timeout_s = 20.0
        after = ask(pool, "yes")
    assert late == [RewardResult(failure="timeout after 0.1s")]
    assert after == [RewardResult(reward_parts={"correct": 1.0, "bonus": 1.0})]


def make_fast(pool: RewardPool) -> None:
    """Score until the pool knows that its reward is fast, so that it sends many samples at once."""
    while pool._sample_s > rewards.pool.SECONDS_PER_SHARE / 8:
        ask(pool, "yes")


def test_samples_that_are_sent_together_fail_alone_and_share_nothing(tmp_path: Path) -> None:
    with wrecker_pool(tmp_path) as pool:
        make_fast(pool)
        pool.timeout_s = 1.0
        outcomes = ask(pool, "pid", "mark", "crash", "yes", "mark", "loop", "pid", "mark")
    assert [bool(o.failure) for o in outcomes] == [False, False, True, False, False, True, False, False]
    assert [o.reward_parts.get("marks") for o in outcomes] == [None, 1.0, None, None, 1.0, None, None, 1.0]
    assert outcomes[0].reward_parts["pid"] != outcomes[6].reward_parts["pid"]


@pytest.mark.timeout(30)
def test_a_row_that_no_process_can_be_sent_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    prompt = Prompt(id="test/0", messages=[], extra={"no": lambda: None})
    with wrecker_pool(tmp_path) as pool:
        with pytest.raises((AttributeError, pickle.PicklingError)):
            asyncio.run(asyncio.wait_for(compute_one(pool, prompt, []), 10))
        assert ask(pool, "yes")[0].failure == ""


def test_a_slow_reward_is_spread_over_the_workers(tmp_path: Path) -> None:
    with wrecker_pool(tmp_path, workers=2) as pool:
        make_fast(pool)
        assert len({o.reward_parts["pid"] for o in ask(pool, "nap", "nap")}) == 2
        assert pool._sample_s > rewards.pool.SECONDS_PER_SHARE
        assert len({o.reward_parts["pid"] for o in ask(pool, *["nap"] * 4)}) == 2


def test_waiting_in_line_does_not_count_against_the_time(tmp_path: Path) -> None:
    with wrecker_pool(tmp_path) as pool:
        ask(pool, "yes")
        pool.timeout_s = 0.7  # three samples of 0.3 seconds each, one worker
        assert [o.failure for o in ask(pool, *["sleep"] * 3)] == [""] * 3


def test_a_worker_outlives_a_raise_and_does_not_import_torch(tmp_path: Path) -> None:
    with wrecker_pool(tmp_path) as pool:
        before, _, after, torch = ask(pool, "pid", "raise", "pid", "torch")
    assert before == after
    assert torch.reward_parts == {"torch": 0.0}


def test_closing_leaves_no_process_behind(tmp_path: Path) -> None:
    with wrecker_pool(tmp_path) as pool:
        [outcome] = ask(pool, "pid")
    with pytest.raises(ProcessLookupError):
        os.kill(int(outcome.reward_parts["pid"]), 0)


@pytest.mark.timeout(60)
def test_closing_does_not_wait_for_a_process_that_has_only_just_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards.pool, "REWARD_EXIT_GRACE_S", 3600.0)
    begun, start = threading.Event(), rewards.pool.Worker.start

    def start_slowly(worker: rewards.pool.Worker) -> None:
        begun.set()
        time.sleep(0.2)  # the pool is closed meanwhile
        start(worker)

    monkeypatch.setattr(rewards.pool.Worker, "start", start_slowly)
    with wrecker_pool(tmp_path):
        begun.wait()


@pytest.mark.slow
def test_a_looping_reward_dies_with_a_run_that_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "note_and_loop.py"
    file.write_text(
        f"import os, pathlib\ndef score(prompt, messages):\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n    while True: pass\n"
    )
    code = (
        "import asyncio, sys; from core.types.samples import Prompt; from rewards import resolve_reward;"
        "from unit_tests.helpers.one_reward import compute_one, one_reward; from rewards.pool import RewardPool;"
        "pool = RewardPool(one_reward(resolve_reward(sys.argv[1])), 1, 600.0);"
        "asyncio.run(compute_one(pool, Prompt(id='0', messages=[]), []))"
    )
    run = subprocess.Popen([sys.executable, "-c", code, file], cwd=ROOT)
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text())
    run.kill()
    run.wait()
    wait_until(lambda: not is_running(int(pid.read_text())))


def test_a_worker_that_was_never_needed_ends_without_a_word() -> None:
    here, there = Pipe()
    command = [sys.executable, "-P", "-m", "rewards.worker", str(there.fileno())]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.Popen(
        command, pass_fds=[there.fileno()], stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    there.close()
    here.close()
    assert run.communicate()[1] == b"" and run.returncode == 0


def test_a_reward_that_changed_under_the_run_stops_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(WRECKER)
    spec = resolve_reward(str(file))
    file.write_text(WRECKER + "# edited\n")
    with (
        closing(RewardPool(one_reward(spec), 1, 5.0)) as pool,
        pytest.raises(UserError, match="not the file this run began with"),
    ):
        ask(pool, "yes")


def test_a_reward_that_ends_its_process_while_loading_stops_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os\nos._exit(5)\n")
    pool = RewardPool(one_reward(resolve_reward(str(file)), {}), 1, 5.0)
    with closing(pool), pytest.raises(UserError, match="exited with code 5 while it loaded the reward"):
        ask(pool, "yes")


def test_math_verify_works_in_the_pool() -> None:
    prompt = Prompt(id="test/0", messages=[], answer="12")
    with closing(RewardPool(one_reward(resolve_reward("math_verify"), {}), 1, 20.0)) as pool:
        reply = [{"role": "assistant", "content": r"\boxed{24/2}"}]
        assert asyncio.run(compute_one(pool, prompt, reply)) == RewardResult(reward_parts={"correct": 1.0})


SCALED = """
READY = []

def prepare(*, scale):
    READY.append(scale)

def score(prompt, messages, *, scale):
    return {"correct": scale * (READY == [scale])}
"""


def test_settings_reach_the_reward_and_what_it_prepares(tmp_path: Path) -> None:
    file = tmp_path / "scaled.py"
    file.write_text(SCALED)
    with closing(RewardPool(one_reward(resolve_reward(str(file)), {"scale": 0.5}), 1, 20.0)) as pool:
        assert asyncio.run(compute_one(pool, Prompt(id="0", messages=[]), [])) == RewardResult(
            reward_parts={"correct": 0.5}
        )


def test_settings_that_the_reward_does_not_take_are_refused() -> None:
    with pytest.raises(UserError, match=r"reward\.settings does not fit score\(\).*scale"):
        load_reward(resolve_reward("gsm8k"), {"scale": 2})


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("class Own:\n    async def __call__(self, prompt, messages): ...\nscore = Own()", "is `async def`"),
        (
            "import functools\nasync def own(n, prompt, messages): ...\nscore = functools.partial(own, 1)",
            "is `async def`",
        ),
        ("def score(prompt, messages): yield 1", r"is a generator \(`yield`\)"),
        ("async def score(prompt, messages): yield 1", r"is a generator \(`yield`\)"),
        ("def score(prompt, messages): ...\ndef score_group(prompt, conversations): ...", "both score and score_group"),
        ("from statistics import mean as score_group", r"score_group.* does not define it"),
        ("async def score_group(prompt): ...", r"the conversations: score_group\(prompt, conversations\)"),
        ("def score(prompt): ...", r"must take the prompt and the messages: score\(prompt, messages\)"),
        ("def score(prompt, messages, answer): ...", r"reward\.settings does not fit score\(\).*'answer'"),
    ],
)
def test_a_score_that_cannot_be_called_is_refused_before_the_start(tmp_path: Path, code: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(UserError, match=said):
        load_reward(resolve_reward(str(file)), {})


def read_golds() -> list[tuple[str, str, float]]:
    """Return (ground truth, reply, score) of unit_tests/data/golds.txt."""
    found: list[tuple[str, str, float]] = []
    for line in (ROOT / "unit_tests" / "data" / "golds.txt").read_text().splitlines():
        if " :: " in line:
            gold, *sides = line.split(" :: ")
            for is_right, replies in zip((1.0, 0.0), sides, strict=True):
                for reply in replies.split(" ;; "):
                    is_whole = "boxed" in reply or "nswer" in reply
                    found.append((gold, reply if is_whole else rf"\boxed{{{reply}}}", is_right))
    return found


@pytest.mark.one_core
@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_math_verify_pays_equal_answers_and_no_others(every: int) -> None:
    pairs = read_golds()
    assert [pair for pair in pairs[::every] if score("math_verify", *pair[:2])["correct"] != pair[2]] == []
    right, wrong = (sum(is_right == n for *_, is_right in pairs) for n in (1.0, 0.0))
    assert 150 <= right <= wrong


def test_math_verify_refuses_a_ground_truth_that_nothing_parses() -> None:
    """It would pay 0 to equal answers in another notation."""
    lines = (ROOT / "unit_tests" / "data" / "golds.txt").read_text().splitlines()
    refused = [line.split(" !! ") for line in lines if " !! " in line]
    assert len(refused) == 7
    for gold, why in refused:
        with pytest.raises(ValueError, match=rf"{why}.*\(row test/0\)"):
            score("math_verify", gold, rf"\boxed{{{gold}}}")
