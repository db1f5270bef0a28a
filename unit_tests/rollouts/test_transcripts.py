"""Transcripts of drawn episodes against the chat template's text of the whole conversation."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.types.samples import Prompt
from rollouts.engines.base import Completion
from rollouts.envs.base import Env
from rollouts.stops import Stops
from unit_tests.helpers.episodes import play_all
from unit_tests.helpers.scripted_policy import spell

TEXTS = st.text("ab 7\n<", min_size=1, max_size=5).filter(lambda text: text == text.strip())
TURNS = st.lists(
    st.tuples(TEXTS, st.sampled_from(["ends", "ends", "stop string"]), TEXTS, st.integers(0, 1)), min_size=1, max_size=6
)
"""Turns: what is said, how it ends, the answer, and who is answered."""


class Speaker:
    """Engine that says its lines, letter by letter, and ends some by a stop string instead of the turn's end."""

    def __init__(self, chat, turns):
        self.chat, self.lines = chat, [(said, ends) for said, ends, _, _ in turns]

    async def generate(self, token_ids, *, max_new_tokens, seed):
        said, ends = self.lines.pop(0)
        ids = spell(self.chat, f"{said}!..." if ends == "stop string" else said)
        return Completion(token_ids=ids, logp=[-1.0] * len(ids), versions=[0] * len(ids), stop="eos")


class Script(Env):
    """Answers with its lines, and lets the players speak in any order."""

    def __init__(self, turns):
        self.answers = [(answer, player) for _, _, answer, player in turns[:-1]]

    async def step(self, reply):
        if not self.answers:
            return None
        answer, self.player = self.answers.pop(0)
        return [{"role": "user", "content": answer}]


@pytest.mark.parametrize("family", ["qwen2.5", "hermes", "llama3", "smollm2"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS)
def test_a_transcript_is_the_text_of_the_whole_conversation(families, family, turns):
    chat = families[family]
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "Which?"}])
    rules = {"max_new_tokens": 5000, "max_turns": 9, "stops": Stops(chat, ["!"], [])}
    played = play_all(Speaker(chat, turns), env=Script(turns), prompt=prompt, tokenizer=chat, **rules)
    assert [sample.failure for sample, _ in played] == [""] * len(played)
    assert sum(len(sample.spans) for sample, _ in played) == len(turns), "every reply is trained on by its player"
    for sample, messages in played:
        text = chat.hf.decode(sample.token_ids)
        whole = chat.render_text([*sample.prompt.messages, *messages], reply_next=False)
        # the last turn is not closed where a stop string ended it, and nothing follows it
        assert whole.startswith(text) and len(whole) - len(text) <= len("<|im_end|>\n")
        replies = [message["content"] for message in messages if message["role"] == "assistant"]
        assert [chat.decode(sample.token_ids[slice(*span)].tolist()) for span in sample.spans] == replies
        sampled = [i for span in sample.spans for i in range(*span)]
        assert [i for i, was_sampled in enumerate(sample.action_mask) if was_sampled] == sampled
