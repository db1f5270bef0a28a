"""Parts of a judge in exact requests and sentences: client, prompts and settings."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import pytest

from core.errors import UserError
from rewards import Failed, RunJudge, judge
from rewards.judging import client
from rewards.judging.client import JudgeClient, Server, find_server, read_wait
from rewards.judging.prompts import ask_for_verdict, enclose, hash_text, show_question, show_reply
from rewards.judging.settings import JudgeSettings, read_settings, read_template
from tools.benchmarks.judge_server import JudgeServer
from unit_tests.helpers.judged import score_at

AT = {"base_url": "http://h/v1", "model": "j"}


def settings_of(**given: Any) -> JudgeSettings:
    return JudgeSettings(**AT | given)


# The client ---------------------------------------------------------------------------------------------------


def test_waits_grow_twofold_to_half_a_minute_and_a_servers_own_wait_counts(monkeypatch):
    waits, real = list[float](), asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    monkeypatch.setattr(client.random, "random", lambda: 1.0)
    server = JudgeServer(statuses=deque([500, 0, 502, 503, 408, 409, 425, 429, 500]), headers={})
    with server.running() as url:
        monkeypatch.setattr(asyncio, "sleep", note)
        ask = JudgeClient(
            settings_of(base_url=url, outage_s=60.0), 1, Server(name="n", urls=(url + "/chat/completions",), key=None)
        )
        body = {"model": "j", "messages": [{"role": "user", "content": enclose("7", hash_text("7"))}]}

        async def go() -> tuple[Any, int]:
            try:
                return await ask.ask(body)
            finally:
                await ask.close()
                assert ask._http is not None and ask._http.is_closed

        found, retries = asyncio.run(go())
    assert retries == 9 and found["choices"] and [w for w in waits if w] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


NOW = datetime(2015, 10, 21, 7, 28, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "now", "seconds"),
    [
        (None, None, None),
        ("0", None, 0.0),
        ("2.5", format_datetime(NOW), 2.5),
        ("-3", None, 0.0),
        ("soon", None, None),
        (format_datetime(NOW), format_datetime(NOW.replace(second=0, minute=27)), 60.0),
        (format_datetime(NOW), format_datetime(NOW.replace(minute=29)), 0.0),
        (format_datetime(NOW), None, None),
        (format_datetime(NOW), "yesterday", None),
    ],
)
def test_a_wait_is_a_number_or_a_date_by_the_servers_clock(header, now, seconds):
    assert read_wait(header, now=now) == seconds


def test_the_least_busy_address_is_asked_and_another_after_a_failure():
    """Three engines; the second is gone, and each fourth of the requests goes to the third."""
    seen: list[str] = []

    class Noted(JudgeClient):
        async def _post(self, url: str, body: dict[str, Any]) -> Any:
            seen.append(url)
            await asyncio.sleep(0.01)
            return ("gone", 0.0) if url == "b" else {"from": url}

    async def go() -> list[Any]:
        ask = Noted(settings_of(), 3, Server(name="n", urls=("a", "b", "c"), key=None))
        found = await asyncio.gather(*(ask.ask({}) for _ in range(3)))
        assert set(ask._in_flight.values()) == {0}
        await ask.close()  # it has no connection
        return found

    found = asyncio.run(go())
    assert sorted(seen[:3]) == ["a", "b", "c"] and len(seen) == 4 and seen[3] != "b"
    assert sorted(retries for _, retries in found) == [0, 0, 1]


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (
            401,
            UserError,
            "{} answered 401: the server does not accept the key: correct the variable of reward.settings.api_key_env: "
            "{}",
        ),
        (
            403,
            UserError,
            "{} answered 403: the key may not use this model: correct the variable of reward.settings.api_key_env: {}",
        ),
        (
            404,
            UserError,
            "{} answered 404: the server knows no such address or model: correct reward.settings.base_url or model: {}",
        ),
        (400, Failed, "the judge refused the request with status 400: {1}"),
        (422, Failed, "the judge refused the request with status 422: {1}"),
        (500, Failed, "the judge took no request for outage_s=0.01: status 500: {1}"),
        (429, Failed, "the judge took no request for outage_s=0.01: status 429: {1}"),
    ],
)
def test_a_status_is_a_mistake_a_refusal_or_an_outage(status, kind, says):
    server = JudgeServer(statuses=deque([status] * 2), headers={"Retry-After": "1"})
    with server.running() as url:
        [found] = score_at(url, "77", outage_s=0.01)
    said = '{"error": {"message": "scripted"}}'
    assert type(found) is kind
    assert str(found) == says.format(f"the judge at {url}/chat/completions", said)


def test_the_server_is_that_of_the_address_or_of_the_run(monkeypatch):
    monkeypatch.setenv("KEY_OF_MINE", " secret \n")
    found = find_server(settings_of(base_url="http://h/v1/", api_key_env="KEY_OF_MINE"), None)
    url = "http://h/v1/chat/completions"
    assert (found.name, found.urls, found.key, found.who) == (url, (url,), "secret", "the judge")
    assert "secret" not in repr(found)
    own = RunJudge(model="m", urls=("http://a/v1", "http://b/v1"), key="k")
    found = find_server(JudgeSettings(), own)
    assert found.name == "judge.model=m" and found.key == "k"
    assert found.urls == ("http://a/v1/chat/completions", "http://b/v1/chat/completions")
    assert find_server(JudgeSettings(), replace(own, key="")).key is None
    with pytest.raises(UserError) as raised:
        find_server(JudgeSettings(), None)
    assert str(raised.value) == (
        "reward.settings.base_url is missing: set it and model, or set judge.model for a judge that the run serves"
    )
    monkeypatch.delenv("KEY_OF_MINE")
    with pytest.raises(UserError) as raised:
        settings_of(api_key_env="KEY_OF_MINE").read_key()
    assert str(raised.value) == (
        "reward.settings.api_key_env: the environment variable KEY_OF_MINE is not set on this machine: export it "
        "before the run, or leave the setting out for a server without keys"
    )


# Prompts and settings -----------------------------------------------------------------------------------------


def message(role: str, content: str, **more: Any) -> Any:
    return {"role": role, "content": content, **more}


CALL = {"function": {"name": "look", "arguments": {"at": 7}}}


@pytest.mark.parametrize(
    ("messages", "settings", "shown"),
    [
        ([message("assistant", " a ")], {}, "a"),
        ([message("assistant", "a"), message("user", "b"), message("assistant", "c")], {}, "c"),
        ([message("assistant", "<think>x</think> ")], {}, ""),
        ([message("assistant", "<think>x</think>")], {"show_reasoning": True}, "<think>x</think>"),
        (
            [message("user", "<think>x</think>y"), message("assistant", "z")],
            {"view": "whole"},
            "user: <think>x</think>y\n\nassistant: z",
        ),
        ([message("assistant", ""), message("user", "b")], {"view": "whole"}, ""),
        ([message("assistant", "a", tool_calls=[CALL, CALL])], {}, "a\nlook({'at': 7})\nlook({'at': 7})"),
        ([message("user", "only")], {}, ""),
    ],
)
def test_a_judge_sees_the_text_of_the_policy(messages, settings, shown):
    assert show_reply(messages, settings_of(**settings)) == shown


def test_a_question_has_its_roles_if_there_are_several_and_no_image():
    assert show_question([message("user", "a")]) == "a"
    assert show_question([message("system", "s"), message("user", "a")]) == "system: s\n\nuser: a"
    seen = message("user", "a", parts=[{"type": "text"}, {"type": "image"}])
    text = "the judge reads text only, and {} has an image: {}, or use another reward"
    for call, said in (
        (lambda: show_question([seen]), ("the prompt", "leave {question} out of a reward.settings.prompt_file")),
        (
            lambda: show_reply([seen, message("assistant", "b")], settings_of(view="whole")),
            ("a message of the episode", "set reward.settings.view to last"),
        ),
    ):
        with pytest.raises(Failed) as raised:
            call()
        assert str(raised.value) == text.format(*said)
    assert show_reply([seen, message("assistant", "b")], settings_of()) == "b"


def test_the_instruction_asks_for_the_form_that_is_read():
    end = "End with the verdict, {}, between <verdict-k> and </verdict-k>."
    for given, said in (
        ({}, end.format("a number from 1 to 10")),
        ({"scale": (-0.5, 2)}, end.format("a number from -0.5 to 2")),
        ({"verdict": "letter", "labels": {"A": 1, "B": 0, "C": 2}}, end.format("one of A, B, C")),
        ({"verdict": "probability", "words": ("ja", "nein")}, "Answer with one word, ja or nein."),
        (
            {"verdict": "json"},
            'End with a JSON object of this form: {"reason": "...", "verdict_k": n}, in which n is a number from 1 to '
            "10.",
        ),
    ):
        assert ask_for_verdict(settings_of(**given), "k") == said
    assert enclose("a", "k") == "<reply-k>\na\n</reply-k>"
    four, eight = (hashlib.blake2b(b"a", digest_size=n).hexdigest() for n in (4, 8))
    assert hash_text("a") == four and len(four) == 8 and len(eight) == 16
    assert len(hash_text("\ud800")) == 8, "half of a pair, as a model may write it"


ADVICE = "set api_key_env to the name of an environment variable that holds the key"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"api_key": "x"}, f"reward.settings.api_key: a key does not belong in a recipe: {ADVICE}"),
        (
            {"base_url": "http://me:x@h/v1"},
            f"reward.settings.base_url contains a password or key: leave it out, and {ADVICE}",
        ),
        ({"vote": 3}, "reward.settings.vote: there is no such setting"),
        ({"votes": 0}, "reward.settings.votes: Input should be greater than or equal to 1"),
        ({"votes": 100, "temperature": 1}, "reward.settings.votes: Input should be less than or equal to 99"),
        *(
            (
                {"base_url": None, "model": None, name: value},
                f"reward.settings: {said} is of a server: set base_url too, or leave it out for the judge of the run "
                "(`judge` of the recipe)",
            )
            for name, value, said in (("temperature", 1.0, "model"), ("api_key_env", "K", "api_key_env"))
        ),
        (
            {"model": None},
            "reward.settings: model is missing: set the name under which the server of base_url knows it",
        ),
        (
            {"base_url": "host"},
            "reward.settings: base_url must be an address like http://host:8000/v1, found host",
        ),
        (
            {"anchors_every": 3},
            "reward.settings: anchors_every is set, and anchors is not: set it, or leave anchors_every out",
        ),
        *(({"scale": scale}, "reward.settings: scale must be [lowest, highest]") for scale in ([3, 3], [3, 2])),
        *(
            (
                {"labels": labels},
                "reward.settings: labels must have two or more entries that differ in more than case",
            )
            for labels in ({"A": 1}, {"A": 1, "a": 0})
        ),
        (
            {"votes": 2, "verdict": "probability", "temperature": 1.0},
            "reward.settings: votes would all be equal with verdict: probability: set votes to 1",
        ),
        (
            {"votes": 2},
            "reward.settings: votes would all be equal with temperature 0: raise temperature, or set votes to 1",
        ),
    ],
)
def test_settings_of_a_judge_are_refused_in_one_sentence(given, says):
    with pytest.raises(UserError) as raised:
        read_settings(JudgeSettings, AT | given)
    assert str(raised.value) == says
    assert read_settings(JudgeSettings, {"votes": 2}).votes == 2, "of the run's judge, whose temperature is elsewhere"


def test_a_verdict_has_bounds_and_a_template_its_places(tmp_path):
    for given, bounds in (
        ({"scale": (2, 3)}, (2.0, 3.0)),
        ({"verdict": "json", "scale": (2, 3)}, (2.0, 3.0)),
        ({"verdict": "letter", "labels": {"A": 0.5, "B": -1, "C": 4}}, (-1.0, 4.0)),
        ({"verdict": "probability"}, (0.0, 1.0)),
    ):
        assert settings_of(**given).bounds == bounds
    (default := tmp_path / "default").write_text("{reply} {verdict}")
    assert read_template(settings_of(), default) == "{reply} {verdict}"
    for text, place in (("{verdict}", "{reply}"), ("{reply}", "{verdict}"), ("", "{reply}")):
        (file := tmp_path / "mine").write_text(text)
        with pytest.raises(UserError) as raised:
            read_template(settings_of(prompt_file=str(file)), default)
        assert str(raised.value) == f"reward.settings.prompt_file: {file} has no {place}: write it in its place"


@pytest.mark.parametrize(
    ("given", "own", "says"),
    [
        (
            {**AT, "outage_s": 100.5, "timeout_s": 60},
            None,
            "reward.timeout_s=160 must be at least reward.settings.outage_s=100.5 + timeout_s=60, or a slow judge "
            "fails the sample before it is asked again: raise reward.timeout_s, or lower the settings",
        ),
        ({**AT, "outage_s": 100}, None, None),
        ({**AT, "outage_s": 100, "verdict": "probability"}, RunJudge(model="m"), None),
        ({"outage_s": 1}, RunJudge(model="m"), None),
        (
            {"outage_s": 1, "verdict": "probability"},
            RunJudge(model="m"),
            "reward.settings.verdict is probability, and the judge may write any token: set judge.allowed_tokens to "
            "[yes, no] and judge.temperature to 0",
        ),
        ({"outage_s": 1, "verdict": "probability"}, RunJudge(model="m", words=("y", "n")), None),
        (
            {"outage_s": 1, "verdict": "json"},
            RunJudge(model="m", words=("y", "n")),
            "reward.settings.verdict is json, and judge.allowed_tokens leaves two tokens: set verdict to probability, "
            "or leave judge.allowed_tokens out",
        ),
        (
            {"outage_s": 1, "votes": 2},
            RunJudge(model="m", is_greedy=True),
            "reward.settings.votes would all be equal with judge.temperature=0: raise it, or set votes to 1",
        ),
        ({"outage_s": 1, "votes": 2}, RunJudge(model="m"), None),
    ],
)
def test_a_judge_that_cannot_do_what_is_asked_is_refused(given, own, says):
    call = lambda: judge.check_settings(read_settings(JudgeSettings, given), 160.0, own)  # noqa: E731
    if says is None:
        call()
        return
    with pytest.raises(UserError) as raised:
        call()
    assert str(raised.value) == says
