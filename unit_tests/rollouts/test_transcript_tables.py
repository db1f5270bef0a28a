"""Transcript of a player in tables: the columns of two turns, the sample made of them, and impossible completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core.errors import RunStopped
from core.types.drafts import Drafts
from core.types.kept_sets import KeptSets
from core.types.samples import LOGP_ROUNDING, Prompt
from rollouts.engines.base import Completion, make_completion
from rollouts.transcript import LARGEST_ID, Conversation, SharedPrompt, Transcript, check_completion
from unit_tests.helpers.episodes import PROMPT, Words
from unit_tests.helpers.sentences import tell

FIRST = Completion(
    token_ids=[3, 4],
    logp=[-0.5, -1.0],
    versions=[7, 8],
    stop="eos",
    kept=KeptSets.of_lists([[3, 5], [4]]),
    routes=np.array([[[0]], [[1]], [[2]], [[255]]], dtype=np.uint8),
    drafts=Drafts(drafted=4, accepted=1),
)
SECOND = replace(
    FIRST,
    token_ids=[5],
    logp=[-2.0],
    versions=[9],
    kept=KeptSets.of_lists([[5, 6, 7]]),
    routes=np.array([[[9]], [[9]], [[9]], [[3]], [[4]], [[255]]], dtype=np.uint8),
    drafts=Drafts(drafted=2, accepted=2),
)


def talk() -> Transcript:
    """Two prompt tokens, a reply of two, an answer of one token, a reply of one, and two tokens at the end."""
    script = Transcript(prompt=PROMPT, tokens_left=10)
    script.append_given(Words(), [1, 2], PROMPT.messages)
    script.append_sampled(FIRST)
    assert (script.last_ids, script.tokens_left, script.completion_ids) == ([3, 4], 8, [3, 4])
    script.append_context([9])
    script.append_sampled(SECOND)
    script.append_context([8, 8])
    return script


def test_every_token_of_a_conversation_has_its_columns():
    sample = talk().make_sample(PROMPT, counts={"turns": 2.0}, player=1)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 9, 5, 8, 8]
    assert sample.action_mask.tolist() == [False, False, True, True, False, True, False, False]
    assert sample.rollout_logp.tolist() == [0.0, 0.0, -0.5, -1.0, 0.0, -2.0, 0.0, 0.0]
    assert sample.versions.tolist() == [-1, -1, 7, 8, -1, 9, -1, -1]
    assert sample.kept == KeptSets.of_lists([[], [], [3, 5], [4], [], [5, 6, 7], [], []])
    assert sample.routes is not None
    # the second request computes the first tokens anew: what is known of them stays
    assert sample.routes[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 255, 255, 255]
    assert sample.counts == {"turns": 2.0, "drafts/drafted": 6.0, "drafts/accepted": 3.0}
    assert (sample.player, sample.stop, sample.prompt) == (1, "eos", PROMPT)
    bare = Conversation()
    assert bare.completion_ids == [] and bare.make_sample(PROMPT).kept is None
    assert bare.make_sample(PROMPT).routes is None and bare.make_sample(PROMPT).counts == {}


def test_a_sample_shows_the_text_from_the_first_sampled_token_on():
    said: Any = {"role": "assistant", "content": "3 4"}
    script = talk()
    script.messages = [said, {"role": "tool", "content": "9"}, {"role": "assistant", "content": "5"}]
    script.last_text = "five"
    sample = script.make_player_sample(Words(), 2, {"won": 1.0}, {"turns": 2.0}, "")
    assert (sample.completion, sample.turns) == ("3 4 9 5 8 8", ((2, 4), (5, 6)))
    assert (sample.transcript, sample.player, sample.reward_parts) == (script.messages, 2, {"won": 1.0})
    assert sample.counts == {"turns": 2.0, "drafts/drafted": 6.0, "drafts/accepted": 3.0} and sample.failure == ""

    single = Transcript(prompt=PROMPT, tokens_left=10)
    single.append_given(Words(), [1, 2], PROMPT.messages)
    single.append_sampled(FIRST)
    single.last_text, single.messages = "as the engine wrote it", [said]
    sample = single.make_player_sample(Words(), 0, {}, {}, "broken")
    assert (sample.completion, sample.turns, sample.transcript) == ("as the engine wrote it", (), [])
    assert sample.failure == "broken" and single.is_one_text
    for messages, is_one in (
        ([], True),
        ([said, said], False),
        ([said | {"tool_calls": []}], False),
        ([{"role": "assistant"}], False),
    ):
        single.messages = messages
        assert single.is_one_text == is_one


def test_a_copy_grows_by_itself():
    script = Transcript(prompt=PROMPT, tokens_left=10)
    script.append_context([1, 2])
    before, again = script.copy(), script.copy()
    again.append_sampled(FIRST)
    again.messages.append({"role": "assistant", "content": "3 4"})
    assert script == before and (script.tokens_left, again.tokens_left) == (10, 8) and script.messages == []
    last = again.copy()
    last.append_sampled(SECOND)
    assert again.turns == [(2, 4)] and len(again.kept) == 1 and last.turns == [(2, 4), (4, 5)]
    assert (again.ids, again.action_mask) == ([1, 2, 3, 4], [False, False, True, True])
    assert (again.logp, again.versions) == ([0.0, 0.0, -0.5, -1.0], [-1, -1, 7, 8])


def test_tokens_are_spent_until_none_is_left():
    script = Transcript(prompt=PROMPT, tokens_left=5)
    assert [(script.spend(n), script.tokens_left, script.stop) for n in (2, 2, 1, 4)] == [
        (True, 3, "eos"),
        (True, 1, "eos"),
        (False, 0, "length"),
        (False, -4, "length"),
    ]


def test_messages_that_are_too_long_end_the_episode_unencoded():
    asked: list[Any] = []

    class Bounding(Words):
        fits = True

        def bound_tokens(self, messages, *, limit, tools=()):
            asked.append((messages, limit, tools))
            return None if self.fits else limit + 1

    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    script = Transcript(prompt=replace(PROMPT, tools=tools), tokens_left=5)
    script.append_context([1, 2])
    mine, given = {"role": "assistant", "content": "3"}, {"role": "tool", "content": "9"}
    script.messages = [mine]  # type: ignore[list-item]
    tokenizer = Bounding()
    assert script.may_fit(tokenizer, [given]) and script.stop == "eos"  # type: ignore[list-item]
    tokenizer.fits = False
    assert not script.may_fit(tokenizer, [given]) and script.stop == "length"  # type: ignore[list-item]
    assert asked == [([*PROMPT.messages, mine, given], 7, tools)] * 2


def test_a_group_renders_its_prompt_anew_for_other_messages_or_tools():
    class Rendering(Words):
        n = 0

        def render(self, messages, tools=()):
            self.n += 1
            return [*super().render(messages), len(tools)]

    words = Rendering()
    shared = SharedPrompt(words)
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}
    tools = [tool]
    for messages, given, ids, rendered in (
        (PROMPT.messages, (), [1, 2, 0], 1),
        ([*PROMPT.messages], (), [1, 2, 0], 1),
        (PROMPT.messages, tools, [1, 2, 1], 2),
        (PROMPT.messages, [tool], [1, 2, 1], 2),
        (PROMPT.messages * 2, [tool], [1, 2, 1, 2, 1], 3),
    ):
        assert (shared.render(messages, given), words.n) == (ids, rendered)
    assert (shared.decode([1, 2]), shared.images, shared.tokenizer) == ("1 2", None, words)
    assert shared.render_turns({"role": "assistant", "content": ""}, [{"role": "user", "content": "4"}]) == [4, 0]


class Placing(Words):
    """A vision model's tokenizer: notes what it is asked to place."""

    images: Any = object()

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def place(self, ids, images, begin=0):
        self.asked.append((ids, images, begin))
        return (f"place {begin}",)


def test_images_are_looked_for_in_what_is_appended():
    tokenizer = Placing()
    script = Transcript(prompt=PROMPT, tokens_left=5)
    script.append_given(tokenizer, [1, 2], PROMPT.messages)
    script.append_given(tokenizer, [3], [{"role": "user", "content": "3"}])
    assert tokenizer.asked == [([1, 2], [], 0), ([1, 2, 3], [], 2)] and script.images == ("place 0", "place 2")
    seen: Any = [object()]
    assert SharedPrompt(tokenizer).place([7], seen, 3) == ("place 3",) and tokenizer.asked[2] == ([7], seen, 3)
    blind = Transcript(prompt=PROMPT, tokens_left=5)
    blind.append_given(Words(), [1], PROMPT.messages)
    assert blind.images == ()


GOOD = Completion(token_ids=[3, 4], logp=[-0.5, 0.00009], versions=[1, 1], stop="length")
ROUTES = np.zeros((5, 2, 1), dtype=np.uint16)
SETS = KeptSets.of_lists([[3, 5], [4]])
NOT_SET = "kept sets, and none of rollout.top_p, top_k and min_p is set"


@pytest.mark.parametrize(
    ("changes", "how", "wrong"),
    [
        ({}, {}, ""),
        ({"token_ids": [0, LARGEST_ID]}, {}, ""),
        ({"stop": "eos"}, {}, ""),
        ({}, {"max_new_tokens": 1}, "2 tokens where 1 to 1 were asked for"),
        ({"logp": [-1.0]}, {}, "2 tokens with 1 log-probabilities and 2 versions"),
        ({"versions": [1, 1, 1]}, {}, "2 tokens with 2 log-probabilities and 3 versions"),
        ({"token_ids": [], "logp": [], "versions": []}, {}, "0 tokens where 1 to 2 were asked for"),
        (
            {"logp": [-0.5, 0.0002]},
            {},
            "the log-probability 0.0002, where a finite number up to 0 is possible",
        ),
        ({"logp": [LOGP_ROUNDING, -0.5]}, {}, ""),
        (
            {"logp": [LOGP_ROUNDING, 0.0002]},
            {},
            "the log-probability 0.0002, where a finite number up to 0 is possible",
        ),
        (
            {"logp": [float("-inf"), 0.5]},
            {},
            "the log-probability -inf, where a finite number up to 0 is possible",
        ),
        (
            {"logp": [0.0, float("nan")]},
            {},
            "the log-probability nan, where a finite number up to 0 is possible",
        ),
        (
            {"token_ids": [3, LARGEST_ID + 1]},
            {},
            "the token ids [3, 2147483648], where integers from 0 to 2147483647 are possible",
        ),
        ({"token_ids": [-1, 3]}, {}, "the token ids [-1, 3], where integers from 0 to 2147483647 are possible"),
        ({"token_ids": [3.0, 3]}, {}, "the token ids [3.0, 3], where integers from 0 to 2147483647 are possible"),
        ({"stop": "tired"}, {}, "the stop reason 'tired', where eos or length is possible"),
        ({"kept": SETS}, {"is_truncated": True}, ""),
        ({}, {"is_truncated": True}, "no kept sets, and rollout.top_p, top_k or min_p is set"),
        ({"kept": SETS}, {}, NOT_SET),
        ({"kept": KeptSets.of_lists([[3]])}, {"is_truncated": True}, "2 tokens with 1 kept sets"),
        (
            {"kept": KeptSets.of_lists([[3], [3, 5]])},
            {"is_truncated": True},
            "the token 4, which is not in its own kept set",
        ),
        (
            {"kept": KeptSets.of_lists([[4], [3]])},
            {"is_truncated": True},
            "the token 3, which is not in its own kept set",
        ),
        ({"routes": ROUTES}, {"routed": 3}, ""),
        ({"routes": ROUTES.astype(np.uint8)}, {"routed": 3}, ""),
        ({"routes": ROUTES}, {}, ""),
        ({}, {"routed": 0}, "no routes, and rollout.router_replay is set"),
        ({"routes": ROUTES}, {"routed": 4}, "routes [5, 2, 1] in uint16 for 6 tokens of prompt and reply"),
        ({"routes": ROUTES[0]}, {"routed": 0}, "routes [2, 1] in uint16 for 2 tokens of prompt and reply"),
        (
            {"routes": ROUTES.astype(np.int32)},
            {"routed": 3},
            "routes [5, 2, 1] in int32 for 5 tokens of prompt and reply",
        ),
        ({"kept": SETS, "routes": ROUTES}, {"routed": 3}, NOT_SET),
    ],
)
def test_an_impossible_completion_is_told_in_one_sentence(changes, how, wrong):
    def check() -> None:
        check_completion(replace(GOOD, **changes), **{"max_new_tokens": 2} | how)

    if not wrong:
        return check()
    assert tell(check, RunStopped) == f"the engine (rollout.engine) returned {wrong}: correct its generate()"


def test_a_completion_is_cut_to_its_first_tokens():
    kept = [np.array([3, 5], "i4"), np.array([4], "i4")]
    made = make_completion([3, 4], [-0.5, -1.0], [7, 8], kept, stop="length", routes=ROUTES, drafts=FIRST.drafts)
    assert (made.kept, made.stop, made.routes is ROUTES, made.drafts) == (SETS, "length", True, FIRST.drafts)
    cut = made.cut(1)
    assert (cut.token_ids, cut.logp, cut.versions, cut.stop) == ([3], [-0.5], [7], "eos")
    assert cut.kept == KeptSets.of_lists([[3, 5]]) and cut.drafts == FIRST.drafts
    assert cut.routes is not None and cut.routes.shape == (4, 2, 1), "three of the prompt, and one"
    plain = make_completion([3, 4], [-0.5, -1.0], [7, 8], [], stop="eos")
    assert plain.kept is None and plain.cut(1).kept is None and plain.cut(1).routes is None


def test_a_prompt_of_another_episode_is_not_changed_by_a_reply():
    script = Transcript(prompt=Prompt(id="p", messages=[]), tokens_left=3)
    asked = script.ids
    script.append_context([1])
    held = script.ids
    script.append_sampled(SECOND)
    assert (asked, held, script.ids) == ([], [1], [1, 5]), "an engine may still hold what it was given"
