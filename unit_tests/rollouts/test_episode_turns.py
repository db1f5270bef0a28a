"""Turns of an episode: which reply an answer follows, the ids of calls, and images that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from data_feeds.chat.template_append import ImagesDoNotFit
from unit_tests.helpers.episodes import PROMPT, Scripted, Tool, Words, calls_of, play

LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def test_an_answer_follows_the_reply_before_it():
    class Noting(Words):
        asked: list[Any]

        def render_turns(self, reply, answers, tools=()):
            self.asked.append((reply["content"], [answer["content"] for answer in answers]))
            return super().render_turns(reply, answers, tools)

    words = Noting()
    words.asked = []
    play(Scripted([3, 1], [3, 2], [5]), tokenizer=words)
    assert words.asked == [("3 1", ["9 9"]), ("3 2", ["9 9"])]


class Caller:
    """Parser that reads the same call in every reply."""

    def parse(self, ids, text, tools):
        return calls_of(("look", {}))


class Looks(Tool):
    """Notes the ids of the calls that it is shown."""

    tools = (LOOK,)

    def __init__(self):
        super().__init__()
        self.shown: list[str] = []

    async def step(self, reply):
        self.shown += [call["id"] for call in reply.message["tool_calls"]]
        return [{"role": "tool", "content": "9"}]


@pytest.mark.parametrize("begins_with_a_call", [False, True])
def test_every_call_of_a_conversation_has_an_id_of_its_own(begins_with_a_call):
    """A tool's result would match two calls otherwise."""
    call: Any = calls_of(("look", {})).message
    prompt = replace(PROMPT, messages=[*PROMPT.messages, call, {"role": "tool", "content": "8"}])
    env = Looks()
    prompt = prompt if begins_with_a_call else PROMPT
    sample, messages = play(Scripted([5], [5]), env=env, prompt=prompt, parser=Caller(), max_turns=2)
    ids = [call["id"] for message in [*prompt.messages, *messages] for call in message.get("tool_calls", [])]
    assert not sample.failure and len(ids) == len({*ids}) == 2 + begins_with_a_call
    assert env.shown == ids[-2:]


def test_an_answer_whose_images_do_not_fit_fails_the_sample():
    class Blind(Words):
        images: Any = object()

        def place(self, ids, images, begin=0):
            if begin:
                raise ImagesDoNotFit("a text holds <image>, which stands for an image")
            return ()

    sample, messages = play(Scripted([3]), tokenizer=Blind())
    assert sample.failure == "a text holds <image>, which stands for an image"
    assert sample.n_sampled == 1 and [message["role"] for message in messages] == ["assistant", "tool"]
