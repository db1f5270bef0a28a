"""The text of replies is what was sampled: every space stays, and special tokens where they are asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from analysis.capture.pieces import PieceDecoder
from analysis.doctor.rescoring import encode_again
from configs.schema import RLConfig
from core.types.samples import Prompt
from data_feeds.chat.template_parsing import TemplateParser, load_form
from data_feeds.chat.tokenizer import ChatTokenizer
from data_prep.tiny_model import RESPONSE_TEMPLATE
from driver.load_recipe import load_recipe
from driver.start.rollouts import build_engine, plan_rollouts
from rollouts.envs.base import Env
from rollouts.stops import StopStrings
from tools.layers import ROOT, product_files
from unit_tests.helpers.episodes import Scripted, play_all
from unit_tests.helpers.runs import file_of

TEXT = "print(' .')\nit 's so , is n't it ? I do not , we 've !  é\n"
CALL = '@look{"at": " . "};'


def make_bytes() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT] * 9, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    return made


def make_metaspace(prepend: Any) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    made.decoder = decoders.Metaspace(prepend_scheme=prepend)
    made.train_from_iterator(
        [TEXT] * 9, trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return made


def make_byte_fallback() -> Tokenizer:
    letters = [*dict.fromkeys(TEXT.replace("é", "").replace(" ", "▁"))]
    pieces = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), *letters]
    made = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def make_characters() -> Tokenizer:
    made = Tokenizer(models.WordLevel({c: i for i, c in enumerate(dict.fromkeys(TEXT + CALL))}, unk_token=" "))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    made.decoder = decoders.Fuse()
    return made


MADE = {
    "bytes": make_bytes,
    "metaspace always": lambda: make_metaspace("always"),
    "metaspace first": lambda: make_metaspace("first"),
    "metaspace never": lambda: make_metaspace("never"),
    "byte fallback": make_byte_fallback,
    "characters": make_characters,
}


def load(folder: Path, name: str, *, cleans: bool = True) -> ChatTokenizer:
    """Return a tokenizer with <end> and the special tokens <a> and <b>; only <a> has a name in its file."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=MADE[name](),
        eos_token="<end>",
        additional_special_tokens=["<a>"],
        clean_up_tokenization_spaces=cleans,
        # transformers does not clean up after byte pairs otherwise, from some version on
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )
    made.add_tokens([AddedToken("<b>", special=True, normalized=False)], special_tokens=True)
    made.save_pretrained(folder)
    return ChatTokenizer(str(folder), "plain")


@pytest.mark.parametrize("cleans", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_decoding_keeps_every_space(name: str, cleans: bool, tmp_path: Path) -> None:
    chat = load(tmp_path, name, cleans=cleans)
    ids = [*chat.encode(TEXT), *chat.stop_token_ids]
    assert (chat.hf.decode(ids, skip_special_tokens=True) != TEXT) == cleans, "the library's own decoding"
    assert chat.decode(ids) == TEXT
    # a piece shows the space that SentencePiece puts before the first word
    assert "".join(PieceDecoder(chat.hf).decode(ids)).removeprefix(" ") == TEXT + "<end>"
    bench: Any = SimpleNamespace(tokenizer=chat)
    assert encode_again(bench, ids) == ids


def test_the_arguments_of_a_call_keep_every_space(tmp_path: Path) -> None:
    chat = load(tmp_path, "characters")
    parser = TemplateParser(chat, load_form(RESPONSE_TEMPLATE, key="rollout.tool_parser"))
    ids = [*chat.encode(CALL), *chat.stop_token_ids]
    [call] = parser.parse(ids, chat.decode(ids), []).message["tool_calls"]
    assert call["function"]["arguments"] == {"at": " . "}


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_special_tokens_are_in_the_text_where_asked(name: str, skips: bool, tmp_path: Path) -> None:
    chat = load(tmp_path, name)
    chat.skip_special_tokens = skips
    a, b, [end] = *chat.hf.convert_tokens_to_ids(["<a>", "<b>"]), chat.stop_token_ids
    inside = chat.encode("is")
    ids = [a, *inside, *[b] * 60, *inside]
    expected = "isis" if skips else f"<a>is{'<b>' * 60}is"
    # SentencePiece's decoders write the space that a word of its own begins with
    assert chat.decode([*ids, end]).replace(" ", "") == expected
    assert {a, b, end}.isdisjoint(chat.written_ids) == skips
    assert StopStrings(["s"], chat.decode, chat.written_ids).find_end(ids[-60:]) == 60


class Asks(Env):
    """Keeps what it is told, and asks once more."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.told: list[str] = []

    async def step(self, reply: Any) -> Any:
        self.told.append(reply.message["content"])
        return [{"role": "user", "content": "s"}] if len(self.told) == 1 else None


@pytest.mark.parametrize(("skips", "said"), [(True, ["is", "s"]), (False, ["<b>is", "<a>s"])])
def test_environments_rewards_and_samples_see_them_alike(skips: bool, said: list[str], tmp_path: Path) -> None:
    chat = load(tmp_path, "characters")
    chat.skip_special_tokens = skips
    replies = [[*chat.hf.encode(text), *chat.stop_token_ids] for text in ("<b>is", "<a>s")]
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "I"}])
    env = Asks(prompt)
    [(sample, messages)] = play_all(Scripted(*replies), env=env, prompt=prompt, tokenizer=chat)
    assert env.told == said
    assert [m["content"] for m in messages if m["role"] == "assistant"] == said
    assert [m["content"] for m in sample.transcript if m["role"] == "assistant"] == said
    assert sample.completion == (said[0] + ("" if skips else "<end>") + "s" + said[1])


REWARD = """
def score(prompt, messages):
    return {"correct": float("<|user|>" in messages[-1]["content"])}
"""


def test_the_engine_of_a_recipe_has_the_tokenizer_that_it_asks_for(recipe: Any) -> None:
    for skips in (True, False):
        plan = plan_rollouts(load_recipe(RLConfig, recipe({"rollout.skip_special_tokens": skips}), []).cfg)
        assert build_engine(plan, plan.engine)[1].skip_special_tokens == skips


def test_a_special_token_that_may_be_sampled_reaches_the_reward(trained: Any, tmp_path: Path) -> None:
    changes = {
        "rollout.allowed_tokens": ["<|user|>"],
        "rollout.skip_special_tokens": False,
        "reward.function": file_of(tmp_path / "sees.py", REWARD),
        "steps": 1,
    }
    folder = trained(changes)
    rows = [json.loads(line) for line in (folder / "samples/step_00000.jsonl").read_text().splitlines()]
    assert any(row["completion"].startswith("<|user|>") for row in rows)
    assert all(row["reward_parts"]["correct"] == float("<|user|>" in row["completion"]) for row in rows)


def test_a_special_token_that_no_reward_would_see_is_refused(refused: Any) -> None:
    refused({"rollout.allowed_tokens": ["7", "<|user|>"]}, "names <|user|>", "set rollout.skip_special_tokens to false")


def test_no_file_decodes_by_itself() -> None:
    """A decoding that does not say how it treats spaces and special tokens changes what was sampled."""
    own = re.compile(r"\bhf\.decode\(|batch_decode\(|clean_up_tokenization|convert_tokens_to_string|ids_to_tokens")
    found = [path for path in product_files(ROOT) if own.search((ROOT / path).read_text())]
    assert found == ["data_feeds/chat/decoding.py"]
