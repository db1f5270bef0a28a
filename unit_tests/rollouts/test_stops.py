"""Where a reply ends: with the token that completes a stop string, or with a stop token, the same in every engine."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace

import pytest

from core.errors import RunStopped
from rollouts.engines.base import Completion
from rollouts.episode import run_episode
from rollouts.stops import Stops, StopStrings
from rollouts.turns import EpisodeRules
from unit_tests.helpers.engines import engine_config, engine_of
from unit_tests.helpers.episodes import PROMPT, Scripted, Tool, Words
from unit_tests.helpers.runs import OWN_ENGINE, file_of

PIECES = ["a", "b", "ab", "ba", "abc", "c", "é", "ab\n", "\n", "<", "/t", ">", " "]
BYTES = [bytes([n]) for n in (0xC3, 0xA9, 0xE2, 0x82, 0xAC)]
"""Tokens that are a part of a character, as a byte-level tokenizer has them."""
VOCABULARY = [piece.encode() for piece in PIECES] + BYTES
SILENT = len(VOCABULARY)
"""A token without text."""


def decode(ids: list[int]) -> str:
    return b"".join(VOCABULARY[i] for i in ids if i < SILENT).decode(errors="replace")


@pytest.mark.parametrize("seed", range(40))
def test_the_end_is_the_first_token_that_completes_a_stop_string(seed):
    rng = random.Random(seed)
    stops = [rng.choice(["abc", "b\n\n", "é", "€", "</t>", "aba", "c c"]) for _ in range(rng.randint(1, 3))]
    weights = [10] * len(PIECES) + [3] * len(BYTES) + [rng.choice([0, 40, 4000])]
    ids = rng.choices(range(SILENT + 1), weights, k=120)
    found = StopStrings(stops, decode, frozenset(range(SILENT)))
    ends = [n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in stops)]
    assert found.find_end(ids) == (ends[0] if ends else None)
    if ends:  # an engine asks token by token
        asked = [n for n in range(1, ends[0] + 1) if found.find_end(ids[:n], start=n - 1)]
        assert asked == [ends[0]]


def test_a_long_stop_string_is_found_where_a_token_is_a_byte():
    ids = [VOCABULARY.index(bytes([byte])) for byte in ("€" * 9).encode()]
    found = StopStrings(["€" * 8], decode, frozenset(range(SILENT)))
    assert found.find_end([0, *ids, 0]) == 1 + 8 * 3


class Reader:
    """Counts the tokens that are decoded."""

    def __init__(self):
        self.tokens = 0

    def __call__(self, ids):
        self.tokens += len(ids)
        return decode(ids)


def test_a_long_reply_is_not_decoded_again_for_every_token():
    reader = Reader()
    assert StopStrings(["</t>"], reader, frozenset(range(SILENT))).find_end([0] * 4000) is None
    assert reader.tokens < 20 * 4000


def character(i: int) -> str:
    return "" if i < 7 else chr(i)


def as_text(ids: list[int]) -> str:
    return "".join(character(i) for i in ids)


async def several(engine, seeds=range(30), n=40) -> list[Completion]:
    return await asyncio.gather(*(engine.generate([5, 20, 21], max_new_tokens=n, seed=s) for s in seeds))


def cut(done: Completion, strings: list[str]) -> Completion:
    """The completion as it would be with stop strings: by the plainest way."""
    for n in range(1, len(done.token_ids) + 1):
        if any(s in as_text(done.token_ids[:n]) for s in strings):
            return replace(
                done, token_ids=done.token_ids[:n], logp=done.logp[:n], versions=done.versions[:n], stop="eos"
            )
    return done


# of 103 tokens each of these two is sampled in about a third of the replies
STRINGS = [chr(40), chr(50)]


def test_the_hf_engine_samples_the_same_tokens_and_ends_at_the_stop_string(tiny_path):
    free = asyncio.run(several(engine_of(tiny_path, temperature=1.0)))
    strings = StopStrings(STRINGS, as_text, frozenset(range(7, 103)))
    stopped = asyncio.run(several(engine_of(tiny_path, temperature=1.0, stop_strings=strings)))
    wanted = [cut(done, STRINGS) for done in free]
    assert [(c.token_ids, c.stop) for c in stopped] == [(c.token_ids, c.stop) for c in wanted]
    for a, b in zip(stopped, wanted, strict=True):
        assert a.logp == pytest.approx(b.logp, abs=1e-5) and a.versions == b.versions
    assert sum(len(a.token_ids) < len(b.token_ids) for a, b in zip(stopped, free, strict=True)) > 5


class Closing(Words):
    """A tokenizer whose turns end in the token 2."""

    def __init__(self):
        self.stop_token_ids, self.turn_end, self.written_ids = [2], [2], frozenset(range(100))

    def encode(self, text):
        return [int(w) for w in text.split()]


def test_the_next_turn_is_as_the_template_writes_it_after_a_stop_string():
    """The end of the turn is given, and not trained on, where the model did not write it itself."""
    tokenizer = Closing()

    def play(first: list[int]):
        return asyncio.run(
            run_episode(
                Scripted(first, [5]),
                lambda prompt: Tool(),
                PROMPT,
                tokenizer,
                EpisodeRules(
                    seed_of_turn=lambda turn: turn,
                    max_new_tokens=20,
                    max_turns=2,
                    timeout_s=60.0,
                    stops=Stops(tokenizer, ["4"], []),
                ),
            )
        )

    [one] = play([3, 4])
    cut_short, said = one.sample, one.messages
    assert cut_short.token_ids.tolist() == [1, 2, 3, 4, 2, 9, 9, 5]
    assert cut_short.action_mask.tolist() == [False, False, True, True, False, False, False, True]
    assert said[0]["content"] == "3 4", "the reward sees the stop string"
    [whole] = play([3, 2])
    assert whole.sample.token_ids.tolist() == [1, 2, 3, 2, 9, 9, 5]


@pytest.mark.parametrize(("ids", "stop"), [([3, 4, 6], "eos"), ([3, 4], "length")])
def test_an_engine_that_misses_a_stop_string_stops_the_run(ids, stop):
    with pytest.raises(RunStopped, match="stop string"):
        Stops(Closing(), ["4"], []).check_completion(ids, stop)


REFUSED = {
    "a special token": ({"rollout.stop": ["<|end|>"]}, ["rollout.stop", "<|end|>", "rollout.stop_token_ids"]),
    "half a character": ({"rollout.stop": ["\ufffd"]}, ["rollout.stop", "unfinished character"]),
    "nothing": ({"rollout.stop": [""]}, ["rollout.stop"]),
    "no such token": ({"rollout.stop_token_ids": [103]}, ["rollout.stop_token_ids names 103", "0 to 102"]),
    "the model's own": ({"rollout.stop_token_ids": [1]}, ["rollout.stop_token_ids names 1", "anyway"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_stop_that_could_never_be_met_is_refused(name, refused):
    changes, words = REFUSED[name]
    refused(changes, *words)


def test_an_engine_without_stop_strings_is_refused(refused, tmp_path):
    mine = file_of(tmp_path / "mine.py", OWN_ENGINE)
    refused({"rollout.stop": ["a"], "rollout.engine": mine}, "does not look for stop strings")


def test_a_run_ends_its_replies_where_the_recipe_says(trained):
    """Digits and letters are about half of what the random model writes."""
    stops = {"rollout.stop": list("0123456789abcdefghijklm"), "rollout.stop_token_ids": [60, 61, 62, 63, 64]}
    folder = trained(stops | {"rollout.max_new_tokens": 16, "steps": 1})
    rows = [json.loads(line) for line in (folder / "samples" / "step_00000.jsonl").read_text().splitlines()]
    texts = [row["completion"] for row in rows]
    ended = [text for text in texts if text and text[-1] in stops["rollout.stop"]]
    assert len(ended) > len(texts) / 3
    assert not any(c in text[:-1] for text in texts for c in stops["rollout.stop"])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_vllm_ends_at_the_same_token(tiny_path):
    from rollouts.engines.vllm import VllmEngine

    strings = StopStrings(STRINGS, as_text, frozenset(range(7, 103)))
    engine = VllmEngine(engine_config(tiny_path, temperature=1.0, kv_cache_gib=0.25))
    try:
        free = asyncio.run(both(engine, strings))
    finally:
        asyncio.run(engine.close())
    plain, stopped = free
    wanted = [cut(done, STRINGS) for done in plain]
    assert [(c.token_ids, c.stop) for c in stopped] == [(c.token_ids, c.stop) for c in wanted]
    for a, b in zip(stopped, wanted, strict=True):
        assert a.logp == pytest.approx(b.logp, abs=1e-4) and a.versions == b.versions
    assert sum(len(a.token_ids) < len(b.token_ids) for a, b in zip(stopped, plain, strict=True)) > 2


async def both(engine, strings) -> tuple[list[Completion], list[Completion]]:
    """What an engine samples without and with stop strings."""
    plain = await several(engine, range(12))
    engine.prepare_requests(replace(engine.config, stop_strings=strings))
    return plain, await several(engine, range(12))


@pytest.mark.slow
def test_a_stop_string_may_lie_on_both_sides_of_a_weight_sync(tiny_path):
    """The update cuts the request off in the middle of the string; the rest comes from the next one, and too much."""
    from unit_tests.helpers.vllm_lab import Scripted

    engine = Scripted(tiny_path, "abort", ([50, 40], None), ([41, 42], "stop"))
    strings = StopStrings(["40 41"], lambda ids: " ".join(map(str, ids)), range(100))
    engine.prepare_requests(replace(engine.config, stop_strings=strings))
    done = asyncio.run(engine.generate([7], max_new_tokens=9, seed=0))
    assert done.token_ids == [50, 40, 41] and done.versions == [1, 1, 2] and done.stop == "eos"
    assert done.logp == [-5.0, -4.0, -4.1]
