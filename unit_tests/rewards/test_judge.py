"""The rewards judge and rubric against a scripted server: each way to fail, retries, votes, cache, key and limits."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from configs.judge_schema import JudgeBudgetConfig
from configs.rollout_schema import RewardConfig
from core.errors import UserError
from core.types.images import EncodedImage
from core.types.samples import Prompt
from driver.checks.terms import check_judged
from driver.records.judge_metrics import measure_judges
from rewards import Failed, RewardRun, judge, rubric
from rewards.judging.prompts import hash_text, show_reply
from rewards.judging.settings import JudgeSettings
from rewards.weights import plan_rewards
from rollouts.scheduling.judge_spend import JudgeSpend
from tools.benchmarks import judge_server
from tools.benchmarks.judge_server import Asked, JudgeServer, count_sevens, describe
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.judged import PROMPT, score_at

SECRET = "sk-do-not-tell-0123456789"


def say(value: object, *, quote: str = "") -> Callable[[Asked], str]:
    """Return a judge that always states this verdict."""
    return lambda asked: f"{quote} <verdict-{asked.key}>{value}</verdict-{asked.key}>"


def ask(server: JudgeServer, *replies: str, **how: Any) -> list[Any]:
    """Score replies together against the server."""
    with server.running() as url:
        return score_at(url, *replies, **how)


def test_the_judge_s_own_verdict_is_the_score():
    server = JudgeServer()
    [seven, half] = ask(server, "77777777", "7777abcd")
    assert (seven.parts, half.parts) == ({"score": 10.0}, {"score": 5.5})
    assert half.notes[0]["by"] == "j" and half.notes[0]["reading"] == 5.5 and "I count them" in half.notes[0]["text"]
    assert half.counts["judge/calls"] == 1 and half.counts["judge/tokens_in"] == 100
    assert not {"judge/votes", "judge/agreed"} & {*half.counts}, "one vote agrees with itself"
    assert "Write sevens." in server.bodies[0]["messages"][0]["content"]


@pytest.mark.parametrize("usage", [None, "many", {"prompt_tokens": 7}])
def test_a_server_that_counts_no_tokens_ends_a_run_with_a_budget_of_tokens(usage, monkeypatch):
    monkeypatch.setattr(judge_server, "describe", lambda answer: describe(answer) | {"usage": usage})
    [scored] = ask(JudgeServer(), "77")
    assert scored.counts["judge/calls"] == 1 and not [name for name in scored.counts if "tokens" in name]
    sample = replace(some_groups()[0][0], counts=dict(scored.counts))
    spend = JudgeSpend(JudgeBudgetConfig(tokens=1000))
    spend.count([sample])
    assert "the server of the judge reports no usage" in spend.describe_excess()
    assert not [name for name in {**measure_judges([sample]), **spend.measure()} if "tokens" in name]
    (other := JudgeSpend(JudgeBudgetConfig(calls=2))).count([sample])
    assert other.describe_excess() == ""


UNREADABLE = {
    "nothing": (lambda _: "", "wrote nothing"),
    "prose": (lambda _: "I give it 3 reasons. 7/10", "no verdict in the form asked for"),
    "a tag of another text": (lambda _: "<verdict-00000000>9</verdict-00000000>", "no verdict"),
    "outside": (say(11), "the verdict 11 is outside of scale"),
    "a fraction": (say("7/10"), "'7/10' is not of the form"),
    "two that differ": (lambda a: say(3)(a) + say(4)(a), "several verdicts that differ"),
    "a draft": (lambda a: f"<think>{say(3)(a)}", "no verdict"),
    "cut off": (
        lambda a: {"message": {"content": say(3)(a)}, "finish_reason": "length"},
        "was cut off by max_tokens",
    ),
    "refusal": (lambda _: {"message": {"content": None, "refusal": "no"}, "finish_reason": "stop"}, "wrote nothing"),
    "odd": (lambda _: {"message": "?"}, "wrote nothing"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_verdict_that_cannot_be_read_fails_the_sample(name):
    answer, why = UNREADABLE[name]
    server = JudgeServer(judge=answer)
    [failed] = ask(server, "77", parse_retries=1)
    assert isinstance(failed, Failed) and why in str(failed)
    assert server.answered == 2 and failed.counts["judge/unreadable"] == 2 and len(failed.notes) == 2
    first, second = server.bodies
    assert first["temperature"] == 0 and second["temperature"] == 0.7 and first["seed"] != second["seed"]


def test_no_sample_fails_that_the_server_judges_on_a_retry():
    """64 samples in flight; every tenth answer is unreadable, and more than 32 in flight are refused."""
    server = JudgeServer(unreadable_every=10, at_once=32, seconds=0.02)
    results = ask(server, *(f"7{i}" for i in range(64)), max_concurrency=64, outage_s=60.0, parse_retries=3)
    assert [scored.parts["score"] for scored in results] == [1 + 9 * f"7{i}".count("7") / 8 for i in range(64)]
    assert server.refused and sum(scored.counts["judge/unreadable"] for scored in results) == 7


def test_an_empty_reply_gets_the_lowest_value_without_a_call():
    server = JudgeServer()
    scores = [scored.parts for scored in ask(server, " \n", "<think>77777777", "<think>77</think>")]
    assert scores == [{"score": 1.0}] * 3 and not server.answered


FORMATS = {
    "letter": ({"verdict": "letter", "labels": {"good": 2.0, "bad": -1.0}}, say(" Good "), 2.0),
    "json": (
        {"verdict": "json"},
        lambda a: f'{{"verdict": 9}} ```{{"reason": "{{", "verdict_{a.key}": 4}}```',
        4.0,
    ),
    "probability": (
        {"verdict": "probability"},
        lambda _: {
            "message": {"content": "Yes"},
            "finish_reason": "length",
            "logprobs": {
                "content": [
                    {"top_logprobs": [{"token": t, "logprob": math.log(p)} for t, p in ((" Yes", 0.6), ("no", 0.2))]}
                ]
            },
        },
        0.75,
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_form_of_a_verdict_is_read(name):
    settings, answer, value = FORMATS[name]
    server = JudgeServer(judge=answer)
    [scored] = ask(server, "77", **settings)
    assert scored.parts["score"] == pytest.approx(value)
    if name == "probability":
        assert server.bodies[0]["max_tokens"] == 1 and server.bodies[0]["logprobs"]


@pytest.mark.parametrize(
    "answer",
    [
        lambda a: f'{{"verdict_{a.key}": true}}',
        lambda a: f'{{"verdict_{a.key}": NaN}}',
        lambda a: f'{{"verdict_{a.key}": 3, "verdict_{a.key}": 4}}',
        lambda a: f'{{"reason": "half, "verdict_{a.key}": 4',
        lambda a: '{"a":' * 3000 + f'{{"verdict_{a.key}": ',
    ],
)
def test_json_that_states_no_single_number_is_unreadable(answer):
    [failed] = ask(JudgeServer(judge=answer), "77", verdict="json", parse_retries=0)
    assert isinstance(failed, Failed)


def test_votes_are_joined_and_their_agreement_is_counted():
    votes = iter([4, 4, 1])
    [scored] = ask(JudgeServer(judge=lambda a: say(next(votes))(a)), "77", votes=3, temperature=1.0)
    assert scored.parts["score"] == 3.0
    assert scored.counts["judge/votes"] == 3 and scored.counts["judge/agreed"] == 2
    labels = iter(["A", "B", "A"])
    more = {"votes": 3, "temperature": 1.0, "verdict": "letter"}
    [scored] = ask(JudgeServer(judge=lambda a: say(next(labels))(a)), "77", **more)
    assert scored.parts["score"] == 1.0
    tied = iter(["A", "B"])
    [scored] = ask(JudgeServer(judge=lambda a: say(next(tied))(a)), "77", **more | {"votes": 2})
    assert scored.parts["score"] == 0.5 and scored.counts["judge/agreed"] == 1
    few = iter([2, "?", "?"])
    [failed] = ask(JudgeServer(judge=lambda a: say(next(few))(a)), "77", votes=3, temperature=1.0, parse_retries=0)
    assert isinstance(failed, Failed), "one of three votes is no majority"


def test_passing_problems_are_retried_and_an_outage_fails_the_sample():
    server = JudgeServer(statuses=deque([500, 429, 0, 408]))
    [scored] = ask(server, "77777777", outage_s=10.0)
    assert scored.parts["score"] == 10.0 and scored.counts["judge/retries"] == 4
    [late] = ask(JudgeServer(seconds=0.5), "77", timeout_s=0.05, outage_s=0.1)
    assert "no answer within timeout_s=0.05" in str(late) and late.counts["judge/unanswered"] == 1
    [failed] = ask(JudgeServer(statuses=deque([503] * 99)), "77", outage_s=0.1)
    assert isinstance(failed, Failed) and "took no request for outage_s=0.1: status 503" in str(failed)
    [failed] = ask(JudgeServer(statuses=deque([400])), "77")
    assert isinstance(failed, Failed) and "refused the request with status 400" in str(failed)


def test_a_server_whose_clock_is_ahead_is_waited_for_by_its_own_clock():
    ahead = "Wed, 21 Oct 2065 07:28:00 GMT"
    server = JudgeServer(statuses=deque([429]), headers={"Date": ahead, "Retry-After": ahead})
    [scored] = ask(server, "77777777", outage_s=10.0)
    assert scored.parts["score"] == 10.0 and scored.counts["judge/retries"] == 1


def test_the_server_is_sent_what_the_settings_say():
    given: dict[str, Any] = {"model": "m", "temperature": 0.25, "max_tokens": 77}
    ask(server := JudgeServer(), "77", **given, extra={"top_k": 5})
    assert server.bodies[0].items() >= {**given, "top_k": 5}.items()


@pytest.mark.parametrize("reward", [judge, rubric])
@pytest.mark.parametrize(("status", "word"), [(401, "api_key_env"), (403, "api_key_env"), (404, "base_url or model")])
def test_a_wrong_key_address_or_model_stops_the_run(status, word, reward):
    prompt = Prompt(id="p", messages=PROMPT.messages, answer="77", extra={"rubric": RUBRIC})
    [stopped] = ask(JudgeServer(statuses=deque([status])), "77", reward=reward, prompt=prompt)
    assert isinstance(stopped, UserError) and word in str(stopped) and str(status) in str(stopped)


def test_a_key_is_sent_and_never_told(monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", SECRET)
    [scored] = ask(JudgeServer(key=SECRET, judge=say(3, quote=SECRET)), "77", api_key_env="MY_JUDGE_KEY")
    assert scored.parts["score"] == 3.0 and SECRET not in str(scored.notes)
    [stopped] = ask(JudgeServer(key="another"), "77", api_key_env="MY_JUDGE_KEY")
    assert isinstance(stopped, UserError) and SECRET not in str(stopped) and "***" in str(stopped)


def test_equal_requests_cost_one_call_also_after_a_resume(tmp_path):
    first, server = RewardRun(folder=str(tmp_path / "a")), JudgeServer(seconds=0.05)
    resumed = RewardRun(folder=str(tmp_path / "b"), earlier_folder=str(tmp_path / "a"))
    with server.running() as url:
        results = score_at(url, "77", "77", "77", "7", run=first)
        assert server.answered == 2 and [r.counts.get("judge/cached", 0) for r in results] == [0, 1, 1, 0]
        [file] = (tmp_path / "a" / "judge_cache").glob("*.jsonl")
        file.write_text(file.read_text() + '{"key": "what a killed process was wri')
        again = score_at(url, "77", "7", run=resumed)
        assert server.answered == 2 and [r.parts["score"] for r in again] == [3.25, 2.125]
        score_at(url, "77", run=resumed, max_concurrency=1, parse_retries=0)
        assert server.answered == 2, "what changes no verdict changes no request"
        score_at(url, "77", run=resumed, scale=[1, 5])
        score_at(url, "77", run=resumed, cache=False)
        assert server.answered == 4, "another reading is another request"


def test_unreadable_verdicts_are_not_kept(tmp_path):
    server = JudgeServer(judge=say("?"))
    [failed] = ask(server, "77", run=RewardRun(folder=str(tmp_path)), parse_retries=0)
    assert isinstance(failed, Failed) and not (tmp_path / "judge_cache").exists()


def test_limits_hold():
    server = JudgeServer(seconds=0.02)
    ask(server, *map(str, range(40)), max_concurrency=8, run=RewardRun(engines=2))
    assert server.most_in_flight == 4


RUBRIC = [
    {"criterion": "sevens", "points": 3},
    {"description": "short", "weight": 1},
    {"criterion": "rude", "points": -2},
]


def check_items(**met: str) -> Callable[[Asked], str]:
    def judge_item(asked: Asked) -> str:
        criterion = asked.body["messages"][0]["content"].split("Criterion:\n")[1].split("\n")[0]
        return say(met[criterion])(asked)

    return judge_item


@pytest.mark.parametrize("as_json", [False, True])
def test_a_rubric_adds_up_points_and_is_not_clipped(as_json):
    prompt = Prompt(id="p", messages=PROMPT.messages, extra={"rubric": json.dumps(RUBRIC) if as_json else RUBRIC})
    answers = check_items(sevens="yes", short="no", rude="yes"), check_items(sevens="no", short="no", rude="yes")
    scores = [ask(JudgeServer(judge=a), "77", reward=rubric, prompt=prompt)[0].parts["score"] for a in answers]
    assert scores == [0.25, -0.5]
    server = JudgeServer()
    [empty] = ask(server, "", reward=rubric, prompt=prompt)
    assert empty.parts["score"] == -0.5 and not server.answered


def test_a_rubric_with_an_unreadable_criterion_fails_the_sample():
    """An outage must not turn a criterion into one that is not met: a mistake would go unpunished."""
    prompt = Prompt(id="p", messages=PROMPT.messages, extra={"rubric": RUBRIC})
    answer = check_items(sevens="yes", short="yes", rude="perhaps")
    [failed] = ask(JudgeServer(judge=answer), "77", reward=rubric, prompt=prompt, parse_retries=0)
    assert isinstance(failed, Failed) and str(failed).startswith("criterion 'rude'")
    assert failed.counts["judge/calls"] == 3 and len(failed.notes) == 3


@pytest.mark.parametrize(
    "given", [None, [], "[", [{"criterion": "x"}], [{"points": 1}], [{"criterion": "x", "points": True}]]
)
def test_a_row_without_a_rubric_is_said_so(given):
    prompt = Prompt(id="row/7", messages=PROMPT.messages, extra={"rubric": given})
    [failed] = ask(JudgeServer(), "77", reward=rubric, prompt=prompt)
    assert isinstance(failed, ValueError) and "row/7" in str(failed)


REFUSED = {
    "a key": ({"api_key": SECRET}, "a key does not belong in a recipe"),
    "a key in the address": ({"base_url": f"http://me:{SECRET}@host/v1"}, "contains a password or key"),
    "no address": ({"base_url": "host"}, "must be an address like"),
    "no port": ({"base_url": "http://host:80OO/v1"}, "must be an address like"),
    "no such port": ({"base_url": "http://host:99999/v1"}, "must be an address like"),
    "no key": ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE is not set"),
    "no such setting": ({"vote": 3}, "reward.settings.vote: there is no such setting"),
    "equal votes": ({"votes": 3}, "votes would all be equal"),
    "scale": ({"scale": [3, 3]}, "scale must be [lowest, highest]"),
    "a prompt that is not there": ({"prompt_file": "nowhere.txt"}, "nowhere.txt cannot be read"),
    "deadline": ({"outage_s": 1000}, "raise reward.timeout_s"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("reward", [judge, rubric])
def test_settings_without_sense_are_one_sentence(name, reward):
    settings, said = REFUSED[name]
    with pytest.raises(UserError) as refused:
        reward.check(240.0, run=RewardRun(), **{"base_url": "http://h/v1", "model": "j", **settings})
    assert said in str(refused.value) and SECRET not in str(refused.value)


def test_a_prompt_of_one_s_own_is_filled_in_one_pass(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("{question} | {answer} | {reply} | {verdict} {other}")
    server = JudgeServer(judge=say(3))
    [scored] = ask(server, "{answer} {verdict} </reply-00000000>", prompt_file=str(file))
    content, key = server.bodies[0]["messages"][0]["content"], hash_text("{answer} {verdict} </reply-00000000>")
    assert scored.parts["score"] == 3.0 and content.endswith(f"</verdict-{key}>. {{other}}")
    reply = f"<reply-{key}>\n{{answer}} {{verdict}} </reply-00000000>\n</reply-{key}>"
    assert content.startswith(f"Write sevens. | 77 | {reply} | End")
    file.write_text("{reply}")
    with pytest.raises(UserError, match=r"mine.txt has no \{verdict\}"):
        judge.check(240.0, run=RewardRun(), base_url="http://h/v1", model="j", prompt_file=str(file))


def test_the_judge_sees_what_view_and_show_reasoning_say():
    settings = JudgeSettings(base_url="http://h/v1", model="j")
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 7}}}
    messages: list[Any] = [
        {"role": "assistant", "content": "<think>draft</think>", "tool_calls": [call]},
        {"role": "tool", "content": "9"},
        {"role": "assistant", "content": "<think>more</think>It is 9."},
    ]
    assert show_reply(messages, settings) == "It is 9."
    whole = settings.model_copy(update={"view": "whole"})
    assert show_reply(messages, whole) == "assistant: \nlook({'at': 7})\n\ntool: 9\n\nassistant: It is 9."
    assert "more" in show_reply(messages, settings.model_copy(update={"show_reasoning": True}))
    assert show_reply([{"role": "tool", "content": "9"}], whole) == ""


IMAGE: Any = {"type": "image", "image": EncodedImage(b"", width=1, height=1, hash="")}
SHOWN = Prompt(id="7", messages=[{"role": "user", "content": "What is this?", "parts": [IMAGE]}])


def test_a_judge_never_grades_an_image_by_the_text_beside_it(tmp_path):
    [failed] = ask(server := JudgeServer(), "A cat.", prompt=SHOWN)
    assert isinstance(failed, Failed) and "the judge reads text only, and the prompt has an image" in str(failed)
    assert not server.answered
    (file := tmp_path / "mine.txt").write_text("{answer} {reply} {verdict}")
    assert ask(server, "77", prompt=SHOWN, prompt_file=str(file))[0].parts, "this one shows no question"
    whole = JudgeSettings(base_url="http://h/v1", model="j", view="whole")
    with pytest.raises(Failed, match=r"has an image: set reward.settings.view to last"):
        show_reply([*SHOWN.messages, {"role": "assistant", "content": "A cat."}], whole)


def test_rows_with_images_for_a_judge_are_refused_at_the_start():
    plan = plan_rewards(RewardConfig(function="gsm8k", by_source={"seen": {"rubric": 1.0}}))
    check_judged([SHOWN], "data.train", plan, None)
    with pytest.raises(UserError, match=r"data.train has images \(as in 7\), and the judge of rubric reads text only"):
        check_judged([replace(SHOWN, source="seen")], "data.train", plan)


def test_anchors_are_graded_again_without_the_cache(tmp_path):
    """One anchor is right, and one is 4.5 of 9 off. They are due at the first and the fourth verdict."""
    rows = [{"prompt": "a", "reply": "7777", "score": 5.5}, {"prompt": "a", "reply": "none", "score": 5.5}]
    (file := tmp_path / "anchors.jsonl").write_text("\n".join(map(json.dumps, rows)))
    server, run = JudgeServer(), RewardRun(folder=str(tmp_path))
    given = {"anchors": str(file), "anchors_every": 3, "max_concurrency": 1}
    found = ask(server, "7", "77", "777", "7777", "77777", run=run, **given)
    counted = [(one.counts.get("judge/anchors", 0), one.counts.get("judge/anchor_errors", 0)) for one in found]
    assert sorted(counted) == [(0, 0)] * 3 + [(2, 0.5)] * 2 and server.answered == 5 + 2 * 2
    scores = [one.parts["score"] for one in found]
    assert scores == pytest.approx([2.125, 3.25, 4.375, 5.5, 6.625]), "anchors change no reward"
    server.judge = lambda asked: "no verdict" if asked.reply == "none" else count_sevens(asked)
    [scored] = ask(server, "7", run=RewardRun(), parse_retries=0, **given)
    assert scored.parts == {"score": 2.125} and scored.counts["judge/anchors"] == 1, "an anchor that fails is left out"
    server.judge = lambda asked: "no verdict"
    assert all(isinstance(one, Failed) for one in ask(server, "7", run=RewardRun(), parse_retries=0, anchors=str(file)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ("{}", "line 1 is no JSON object with prompt, reply and score"),
        (
            '{"prompt": "a", "reply": "b", "score": 11}',
            "must be texts, and score from 1 to 10",
        ),
        ('{"prompt": "a", "reply": "b", "score": "7"}', "line 1: score must be a number, found 7"),
    ],
)
def test_a_file_of_anchors_that_is_wrong_is_refused(tmp_path, text, said):
    (file := tmp_path / "anchors.jsonl").write_text(text)
    given = {"base_url": "http://h/v1", "model": "j", "anchors": str(file)}
    with pytest.raises(UserError, match=said):
        judge.check(240.0, run=RewardRun(), **given)
    with pytest.raises(UserError, match="this is rubric"):
        rubric.check(240.0, run=RewardRun(), **given)
