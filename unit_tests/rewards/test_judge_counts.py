"""Verdicts of a judge: counts, notes, cache, anchors and rubrics, in exact numbers and sentences."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import UserError, quote
from core.types.samples import Prompt
from rewards import Failed, RewardRun, RunJudge, Scored, rubric
from rewards.judging.anchors import Anchor, Anchors, read_anchors
from rewards.judging.cache import VerdictCache, hash_request
from rewards.judging.judge import Judge
from rewards.judging.settings import JudgeSettings
from tools.benchmarks.judge_server import Asked, JudgeServer
from unit_tests.helpers.judged import PROMPT, score_at

AT = {"base_url": "http://h/v1", "model": "j"}


def settings_of(**given: Any) -> JudgeSettings:
    return JudgeSettings(**AT | given)


def test_a_judge_of_the_run_has_its_model_words_and_attempts(tmp_path):
    run = RewardRun(
        engines=5, folder=str(tmp_path), judge=RunJudge(model="m", words=("ja", "nein"), urls=("http://a/v1",))
    )
    made = Judge(JudgeSettings(max_concurrency=32), "{reply}", run)
    assert (made.settings.model, made.settings.temperature, made.settings.words) == ("m", None, ("ja", "nein"))
    assert made._attempts == 3 and made._client._gate._value == 32 // 5
    assert Judge(JudgeSettings(max_concurrency=3), "", run)._client._gate._value == 1
    greedy = replace(run, judge=replace(run.judge, is_greedy=True, words=()))
    made = Judge(JudgeSettings(), "", greedy)
    assert made._attempts == 1 and made.settings.words == ("yes", "no")
    assert Judge(settings_of(parse_retries=5), "", greedy)._attempts == 6, "a server of its own"


def test_counts_and_notes_are_those_of_all_answers(tmp_path):
    """Two votes. One cannot be read at first, nor when it is asked again; what could be read is in the cache."""
    answers = iter(["?", "<verdict-{}>4</verdict-{}>", "<verdict-{}>6</verdict-{}>", "?"])
    server = JudgeServer(judge=lambda asked: next(answers).replace("{}", asked.key), headers={"Retry-After": "0"})
    server.statuses.append(500)
    run = RewardRun(folder=str(tmp_path))
    with server.running() as url:
        given: dict[str, Any] = {"votes": 2, "temperature": 1.0, "max_concurrency": 1, "parse_retries": 1, "run": run}
        [first] = score_at(url, "77", **given)
        [again] = score_at(url, "77", **given)
    assert first.parts == again.parts == {"score": 5.0}
    assert first.counts == {
        **{"judge/calls": 3, "judge/unreadable": 1, "judge/retries": 1, "judge/votes": 2, "judge/agreed": 1},
        **{"judge/tokens_in": 300, "judge/tokens_out": first.counts["judge/tokens_out"]},
    }
    assert sorted(str(note["reading"]) for note in first.notes) == ["4.0", "6.0", "None"]
    assert all(note["by"] == "j" and not note["cached"] and note["seconds"] > 0 for note in first.notes)
    assert again.counts["judge/cached"] == 2 and again.counts["judge/votes"] == 2 and again.counts["judge/calls"] == 1
    assert [note["seconds"] for note in again.notes if note["cached"]] == [0.0, 0.0]


@pytest.mark.parametrize(
    "answer", [{"choices": []}, {"choices": None}, {}, {"choices": [3]}, {"usage": {"prompt_tokens": 5}}]
)
def test_an_answer_without_choices_used_no_tokens_that_it_does_not_state(answer, monkeypatch):
    from tools.benchmarks import judge_server

    monkeypatch.setattr(judge_server, "describe", lambda _: answer)
    with JudgeServer().running() as url:
        [failed] = score_at(url, "77", parse_retries=0)
    assert str(failed) == "the judge's verdict cannot be read: the server's answer has no choices"
    used = 5 if "usage" in answer else 0
    want = {"judge/calls": 1, "judge/unreadable": 1, "judge/retries": 0, "judge/tokens_in": used, "judge/tokens_out": 0}
    assert failed.counts == want and failed.notes[0]["text"] == "the server's answer has no choices"


def test_a_verdict_is_asked_once_kept_if_readable_and_read_again(tmp_path):
    asked: list[str] = []

    def ask_for(key: str, value: float | None):
        async def ask() -> dict[str, Any]:
            asked.append(key)
            await asyncio.sleep(0)
            return {"value": value, "text": key}

        return ask

    async def go(cache: VerdictCache) -> list[Any]:
        together = await asyncio.gather(*(cache.get("a", ask_for("a", 1.0)) for _ in range(3)))
        return [
            *together,
            *[await cache.get(key, ask_for(key, value)) for key, value in (("a", 2.0), ("b", None), ("b", 3.0))],
        ]

    found = asyncio.run(go(VerdictCache(tmp_path / "one")))
    a, b, later = ({"value": value, "text": text} for value, text in ((1.0, "a"), (None, "b"), (3.0, "b")))
    assert found == [(a, False), (a, True), (a, True), (a, True), (b, False), (later, False)]
    assert asked == ["a", "b", "b"]
    [file] = (tmp_path / "one" / "judge_cache").glob("*.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"key": "a", **a}, {"key": "b", **later}]
    file.write_text(file.read_text() + "{}\n{")
    asked.clear()
    assert asyncio.run(go(VerdictCache(tmp_path / "two", tmp_path / "one")))[0] == (a, True) and asked == []
    assert not (tmp_path / "two").exists()
    assert asyncio.run(go(VerdictCache(None)))[0] == (a, False)
    assert (
        hash_request("a", {"x": 1, "y": 2})
        == hash_request("a", {"y": 2, "x": 1})
        != hash_request("a", {"x": 2, "y": 1})
    )
    (tmp_path / "full").write_text("")
    with pytest.raises(
        Exception, match=r"full/judge_cache/.* cannot be written: .*; verdicts of the judge are kept there$"
    ):
        asyncio.run(VerdictCache(tmp_path / "full").get("c", ask_for("c", 1.0)))


def test_an_error_that_nobody_waits_for_any_more_is_not_printed():
    """A sample's deadline has passed, and then the judge fails, or the run ends while it is asked."""
    said: list[dict[str, Any]] = []

    async def go(is_asked: bool) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        go_on, cache = asyncio.Event(), VerdictCache(None)

        async def fail() -> dict[str, Any]:
            await go_on.wait()
            raise ValueError("no answer")

        waits = asyncio.ensure_future(cache.get("a", fail))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        call = next(iter(cache._asked.values()))
        if is_asked:
            go_on.set()
        else:
            call.cancel()
        await asyncio.wait([call])
        await asyncio.sleep(0)

    for is_asked in (True, False):
        asyncio.run(go(is_asked))
    assert said == []


def test_anchors_are_due_at_the_first_verdict_and_every_few_more():
    class Taste:
        async def ask(self, prompt: Any, reply: str, *, is_fresh: bool) -> Any:
            assert is_fresh and prompt == "q"
            if reply == "fails":
                raise Failed("no verdict", counts={"judge/calls": 4})
            return SimpleNamespace(value=3.0, counts={"judge/calls": 1})

    rows = [Anchor("q", "a", 5.0), Anchor("q", "fails", 1.0), Anchor("q", "b", 2.0)]
    anchors = Anchors(rows, 3, 4.0)

    async def go() -> list[dict[str, float]]:
        return [await anchors.measure(Taste()) for _ in range(7)]

    due = {"judge/calls": 6, "judge/anchors": 2, "judge/anchor_errors": 2 / 4 + 1 / 4}
    assert asyncio.run(go()) == [due, {}, {}, due, {}, {}, due]
    assert asyncio.run(Anchors([], 1, 1.0).measure(Taste())) == {}

    class Broken(Taste):
        async def ask(self, prompt: Any, reply: str, *, is_fresh: bool) -> Any:
            raise UserError("wrong key")

    with pytest.raises(UserError, match=r"^wrong key$"):
        asyncio.run(Anchors(rows, 1, 1.0).measure(Broken()))


def test_a_file_of_anchors_is_read_or_its_line_named(tmp_path):
    file = tmp_path / "anchors.jsonl"
    row = {"prompt": "a", "reply": "b", "score": 3, "answer": "c"}

    def read(text: str) -> list[Anchor]:
        file.write_text(text)
        return read_anchors(str(file), (1.0, 10.0))

    assert read_anchors(None, (0, 1)) == []
    [one, other] = read(json.dumps(row) + "\n\n" + json.dumps(row | {"answer": "", "score": 1}))
    assert (one.reply, one.score, one.prompt.answer, other.prompt.answer) == ("b", 3.0, "c", "")
    assert one.prompt.messages == [{"role": "user", "content": "a"}] and type(one.score) is float
    key = f"reward.settings.anchors: {file}"
    cases: list[tuple[Any, str]] = [
        ("\n", f"{key} has no rows: write one, or leave the setting out"),
        *(
            (text, f"{key}, line 2 is no JSON object with prompt, reply and score: correct it")
            for text in ("\n[]", "\n{", "\n3", "\n" + "[" * 5000, '\n{"prompt": "a"}')
        ),
        *(
            (row | {"score": score}, f"{key}, line 1: score must be a number, found {said}")
            for score, said in ((True, "True"), ("3", "3"), (float("nan"), "nan"), (10**400, quote(10**400)))
        ),
        *(
            (row | more, f"{key}, line 1: prompt and reply must be texts, and score from 1 to 10")
            for more in ({"score": 0.5}, {"score": 10.5}, {"prompt": 1}, {"reply": ""}, {"reply": 1}, {"answer": 1})
        ),
    ]
    for given, said in cases:
        with pytest.raises(UserError) as raised:
            read(given if isinstance(given, str) else json.dumps(given))
        assert str(raised.value) == said


def test_a_rubric_asks_for_each_criterion_and_names_the_one_that_fails():
    rows = [{"criterion": name, "points": points} for name, points in (("a", 3), ("b", 1), ("c", -2))]
    prompt = Prompt(id="p", messages=PROMPT.messages, extra={"rubric": rows})

    def verdicts(**met: str):
        def answer(asked: Asked) -> str:
            name = asked.body["messages"][0]["content"].split("Criterion:\n")[1][0]
            return f"<verdict-{asked.key}>{met[name]}</verdict-{asked.key}>"

        return JudgeServer(judge=answer)

    with verdicts(a="yes", b="no", c="Yes").running() as url:
        [found] = score_at(url, "77", reward=rubric, prompt=prompt)
    assert isinstance(found, Scored) and found.parts == {"score": 0.25} and found.counts["judge/calls"] == 3
    assert Counter(note["reading"] for note in found.notes) == {1.0: 2, 0.0: 1}
    with verdicts(a="yes", b="?", c="?").running() as url:
        [failed] = score_at(url, "77", reward=rubric, prompt=prompt, parse_retries=0)
    assert str(failed) == (
        "criterion 'b': the judge's verdict cannot be read: the verdict '?' is not of the form asked for"
    )
    assert failed.counts["judge/calls"] == 3 and len(failed.notes) == 3
    number = {"verdict": "number"}
    for given in (number | {"scale": (0, 2)}, number | {"scale": (-0.5, 1)}, {"labels": {"yes": 1.5, "no": 0}}):
        with pytest.raises(UserError) as raised:
            rubric.prepare(run=RewardRun(), **AT, **given)
        said = "reward.settings: a criterion is met or not: scale and labels must be from 0 to 1"
        assert str(raised.value) == said
    rubric.check(180.0, run=RewardRun(), **AT)
