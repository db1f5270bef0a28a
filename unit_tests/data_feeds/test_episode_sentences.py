"""Recorded episodes, whole: how they are read, and the sentence of each that cannot be replayed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.types.allowed_tokens import AllowedTokens
from core.types.samples import RecordedEpisode
from data_feeds.rows.episodes import Sampling, read_episodes
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.run_samples import list_sample_files, read_run
from unit_tests.helpers.chat_families import assistant, user
from unit_tests.helpers.sentences import tell

SAID, ASKED = assistant("2"), user("1+1=")


class Letters:
    """Tokenizer of ten letters."""

    vocabulary = 10

    def decode(self, ids: list[int]) -> str:
        return "".join("abcdefghij"[i] for i in ids)


FINE: dict[str, Any] = {"token_ids": [0, 1, 2], "logp": [None, -1.0, 0], "temperature": 1.0}
KEYS = "allowed_tokens, completion, logp, messages, min_p, stop, temperature, token_ids, top_k, top_p"
TEXT_AND_STOP = "an episode's completion is text, and its stop eos, length or turns, found "
POSSIBLE = "where a finite number up to 0 is possible"
SETS = "so the sets that its tokens were chosen from are unknown: an importance weight needs them"
EPISODES: list[tuple[dict[str, Any], str]] = [
    ({"zeal": 1, "mood": 2}, f"an episode has 'mood', and its keys are {KEYS}"),
    ({"completion": 3}, f"{TEXT_AND_STOP}3, eos"),
    ({"completion": "x", "stop": "end"}, f"{TEXT_AND_STOP}'x', end"),
    ({}, "an episode has neither completion, messages nor token_ids with a reply"),
    (
        {"token_ids": [0]},
        "an episode has token_ids and no logp: its importance weight is unknown, and 1 would point the gradient "
        "elsewhere; leave token_ids out to imitate the text",
    ),
    (
        {"logp": [0]},
        "an episode has logp and no token_ids: its text, encoded again, may be other tokens than those that were "
        "sampled; add token_ids, or leave logp out to imitate the text",
    ),
    (
        FINE | {"logp": [None, -1.0]},
        "an episode has 3 token_ids and 2 numbers of logp: give one per token of prompt and episode, and null for "
        "tokens that were not sampled; text that was encoded again has no log-probabilities",
    ),
    (FINE | {"token_ids": [0, 10, 2]}, "an episode has the token id 10, and this vocabulary has 10"),
    (FINE | {"token_ids": [0, -1, 2]}, "an episode has the token id -1, and this vocabulary has 10"),
    (FINE | {"logp": [None, 0.001, 0]}, f"an episode has the log-probability 0.001, {POSSIBLE}"),
    (FINE | {"logp": [None, True, 0]}, f"an episode has the log-probability True, {POSSIBLE}"),
    (FINE | {"logp": [None, float("-inf"), 0]}, f"an episode has the log-probability -inf, {POSSIBLE}"),
    *(
        (
            FINE | {"logp": logp},
            "an episode has a logp for none of its tokens, or for the first, which nothing predicts",
        )
        for logp in ([None] * 3, [-1.0, -1.0, 0])
    ),
    (
        {name: value for name, value in FINE.items() if name != "temperature"},
        "an episode has logp and no temperature: say at which temperature these log-probabilities are",
    ),
    (
        FINE | {"temperature": 0.5},
        "an episode was sampled at temperature 0.5, and rollout.temperature is 1: their log-probabilities cannot be "
        "compared; set rollout.temperature to it",
    ),
    (FINE | {"top_k": 3}, f"an episode was sampled with top_k, {SETS}"),
    (FINE | {"allowed_tokens": "a"}, "an episode's allowed_tokens must be a list of texts, found 'a'"),
    (
        FINE | {"allowed_tokens": ["a"]},
        "an episode was sampled from other allowed_tokens than rollout.allowed_tokens: set that to them",
    ),
    (FINE | {"token_ids": [0, 1, 3]}, "an episode has the token 3, which rollout.allowed_tokens excludes here"),
    (
        FINE | {"token_ids": [1, 1, 2]},
        "an episode begins with other tokens than its prompt has here (the first 1, and 1): it was recorded with "
        "another tokenizer, chat template or system prompt, so only its text can be used: leave token_ids and logp out",
    ),
    (
        FINE | {"completion": "xy"},
        "the token_ids of an episode are 'bc' in this vocabulary, and its completion is 'xy': they are of another "
        "tokenizer; leave token_ids and logp out to imitate the text",
    ),
]


def read_one(one: Any, *, longest: int = 3, **sampling: Any) -> tuple[RecordedEpisode, ...]:
    settings: dict[str, Any] = {"max_new_tokens": 9, "allowed": AllowedTokens(banned=(3,))} | sampling
    return read_episodes(one, [0], Letters(), Sampling(**settings), longest, fills_gaps=False)


@pytest.mark.parametrize(("one", "sentence"), EPISODES, ids=[sentence[:70] for _, sentence in EPISODES])
def test_an_episode_that_cannot_be_replayed_is_one_sentence(one, sentence):
    with pytest.raises(InvalidRow) as refused:
        read_one([one])
    assert (refused.value.reason, str(refused.value)) == ("bad_episode", sentence)


def test_episodes_are_read_as_they_were_sampled(tmp_path):
    [episode] = read_one(json.dumps([FINE | {"stop": "length", "completion": "bc", "top_p": 1, "min_p": None}]))
    assert (episode.token_ids, episode.logp, episode.stop) == ([0, 1, 2], [None, -1.0, 0.0], "length")
    assert (episode.completion, episode.messages) == ("bc", [assistant("bc")])
    [text] = read_one([{"completion": "zz"}])
    assert (text.token_ids, text.messages, text.stop) == ([], [assistant("zz")], "eos")
    assert tell(lambda: read_one([FINE], longest=2), InvalidRow) == (
        "3 tokens, more than data.max_prompt_tokens + rollout.max_new_tokens=2"
    )
    assert tell(lambda: read_one([FINE], is_truncated=True), InvalidRow) == (
        f"rollout has top_p, top_k or min_p, {SETS}"
    )
    assert tell(lambda: read_one([3]), InvalidRow) == "episodes must be a list of objects, found [3]"
    (folder := tmp_path / "samples").mkdir()
    (tmp_path / "config.yaml").touch()
    for name in ("step_00001.jsonl", "step_00000.jsonl", "other.jsonl"):
        (folder / name).touch()
    files = [folder / "step_00000.jsonl", folder / "step_00001.jsonl"]
    assert list_sample_files(str(tmp_path)) == files and list_sample_files(str(files[1])) == files[1:]
    assert list_sample_files(str(folder / "other.jsonl")) == list_sample_files(str(folder)) == []
    sample = {"group": 3, "id": "p", "prompt": [ASKED], "completion": "2", "turns": [SAID | {"tokens": 1, "reward": 0}]}
    failed = sample | {"failure": "x"}
    records = (sample, failed, failed | {"group": 4})
    files[0].write_text("".join(json.dumps(one) + "\n" for one in records))
    [row] = read_run(files, "k")
    assert row == {
        **{"id": "p/step_00000/3", "messages": [ASKED], "answer": "", "tools": None, "extra": None},
        "episodes": [{"completion": "2", "messages": [SAID]}],
    }
    where = "k, step_00000.jsonl has "
    for change, sentence in (
        ({"player": 1}, f"{where}samples of an agent's branches or of a game's players, which are no episodes alone: "
         "replay runs of one conversation per episode"),
        ({"prompt": [ASKED | {"parts": []}]}, f"{where}images, which sample files do not hold: replay runs of text"),
    ):  # fmt: skip
        files[0].write_text(json.dumps(sample | change))
        assert tell(lambda: read_run(files, "k")) == sentence
    files[0].write_text(json.dumps({"group": 1, "id": "p"}))
    assert tell(lambda: read_run(files, "k")) == f"{where}a sample without prompt: it is no sample file of a run"
