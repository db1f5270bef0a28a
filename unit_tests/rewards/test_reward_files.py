"""Files of reward functions: the kind of each, and the sentence for one that cannot be called."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import UserError
from core.loading import load_module
from core.types.samples import Prompt
from rewards import (
    RewardRun,
    check_reward,
    load_reward,
    prepare_reward,
    resolve_reward,
    takes_run,
)
from rewards.kinds import Kind, find_kind


def prompt_of(**more: Any) -> Prompt:
    return Prompt(id="row/7", messages=[], **more)


def reply(text: str, **more: Any) -> Any:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("def score(prompt, messages): ...", Kind(), None),
        ("async def score(prompt, messages): ...", Kind(is_async=True), None),
        ("def score_group(prompt, conversations): ...", Kind(is_group=True), None),
        ("async def score_group(prompt, conversations): ...", Kind(True, True), None),
        ("def score(prompt, messages, *, run, n=1): ...", Kind(), None),
        ("score = lambda prompt, messages: 1", Kind(), None),
        (
            "x = 1",
            Kind(),
            "{} has no function score(prompt, messages) -> dict[str, float], and no score_group(prompt, conversations)",
        ),
        (
            "score_group = lambda a, b: 1",
            Kind(),
            "{} has score_group, and does not define it: define it by `def` at the top level",
        ),
        (
            "def score(prompt): ...",
            Kind(),
            "score() of {} must take the prompt and the messages: score(prompt, messages)",
        ),
        (
            "def score_group(prompt): ...",
            Kind(is_group=True),
            "score_group() of {} must take the prompt and the conversations: score_group(prompt, conversations)",
        ),
        (
            "def score(prompt, messages, *, m): ...",
            Kind(),
            "reward.settings does not fit score() of {}: missing a required argument: 'm'",
        ),
        (
            "def score(prompt, messages): yield 1",
            Kind(),
            "score() of {} is a generator (`yield`), which would not run: define it by `def` or "
            "`async def`, and return the parts",
        ),
        (
            "class Own:\n    async def __call__(self, prompt, messages): ...\nscore = Own()",
            Kind(),
            "score() of {} is `async def` by way of another object: define `async def score` at the top level of the "
            "file, and call the object there",
        ),
    ],
)
def test_a_file_is_a_reward_of_a_kind_or_one_sentence(text, kind, says, tmp_path):
    (file := tmp_path / "mine.py").write_text(text)
    spec = resolve_reward(str(file))
    assert find_kind(spec) == kind and kind.name == ("score_group" if kind.is_group else "score")
    if says is None:
        load_reward(spec, {})
        assert takes_run(spec) is ("run" in text)
        return
    with pytest.raises(UserError) as raised:
        load_reward(spec, {})
    assert str(raised.value) == says.format(file)


def test_two_functions_in_a_file_are_refused_and_broken_python_is_left(tmp_path):
    (file := tmp_path / "mine.py").write_text("def score(a, b): ...\nasync def score_group(a, b): ...")
    with pytest.raises(UserError) as raised:
        find_kind(resolve_reward(str(file)))
    assert str(raised.value) == f"{file} defines both score and score_group: keep one of them"
    file.write_text("def score(")
    assert find_kind(resolve_reward(str(file))) == Kind()
    assert [*map(str, sorted([Kind(True, True), Kind(), Kind(True), Kind(False, True)]))] == [
        *map(str, (Kind(), Kind(False, True), Kind(True), Kind(True, True)))
    ]


def test_the_run_reaches_each_function_that_asks_for_it(tmp_path):
    (file := tmp_path / "mine.py").write_text(
        "SEEN = []\n"
        "def score(prompt, messages, *, run, n=1): return {'engines': run.engines, 'n': n}\n"
        "def prepare(*, run, n=1): SEEN.append(('prepare', run.engines, n))\n"
        "def check(deadline_s, *, n=1): SEEN.append(('check', deadline_s, n))\n"
    )
    spec, run = resolve_reward(str(file)), RewardRun(engines=3)
    assert load_reward(spec, {"n": 4}, run)(None, None) == {"engines": 3, "n": 4}
    assert load_reward(spec, {})(None, None) == {"engines": 1, "n": 1}
    prepare_reward(spec, {"n": 2}, run)
    check_reward(spec, {}, 7.0, run)
    assert load_module(spec).SEEN == [("prepare", 3, 2), ("check", 7.0, 1)]
    prepare_reward(resolve_reward("gsm8k"), {})
    check_reward(resolve_reward("gsm8k"), {}, 1.0)
