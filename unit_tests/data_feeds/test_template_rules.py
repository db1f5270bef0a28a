"""Rules of chat templates: ends of turns, BOS and EOS, what is left out, and templates of one's own.

The families are those of test_template_families.py.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import BatchEncoding

from configs.data_schema import PromptDataConfig, RowDataConfig, TemplateConfig
from configs.trainer_schema import ModelConfig
from core.errors import UserError
from data_feeds.chat.encoding import encode_pieces, mask_by_offsets
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups, load_prompts
from driver.checks.explain_texts import describe_texts, find_tokenizer
from rollouts.stops import Stops, check_stops, join_turn
from unit_tests.helpers.chat_families import assistant, result, user
from unit_tests.helpers.template_families import FAMILIES

ASKED, SAID = user("What is 2 + 2 ?"), assistant("The answer is 4 .")
LETTERS = "chatml in plain letters"


def show(chat: ChatTokenizer, ids: list[int]) -> list[str]:
    return chat.hf.convert_ids_to_tokens(ids)


def load_rows(chat: ChatTokenizer, row: dict[str, Any], folder: Path, **settings: Any) -> Any:
    (folder / "rows.jsonl").write_text(json.dumps(row))
    data = RowDataConfig(train=str(folder / "rows.jsonl"), **settings)
    return load_groups(data, "train", chat, rows="conversations", seed=0)


def load_asked(chat: ChatTokenizer, messages: list[Any], folder: Path, **settings: Any) -> Any:
    (folder / "rows.jsonl").write_text(json.dumps({"messages": messages}))
    data = PromptDataConfig(train=str(folder / "rows.jsonl"), **settings)
    return load_prompts(data, "train", chat, seed=0)


def test_the_engine_stops_where_rows_are_trained_to_stop(tokenizers):
    """The last trained token of a reply is one of the engine's stops, in every family."""
    for name, chat in tokenizers.items():
        ids, mask = chat.mask_turns([ASKED, SAID])
        last = max(i for i, learnt in enumerate(mask) if learnt)
        stops = Stops(chat, ["<|im_end|>"] if name == LETTERS else [], [])
        is_stop = stops.strings.find_end(ids) if stops.strings else ids[last] in stops.token_ids
        assert is_stop, f"{name}: {show(chat, ids[last:])}"
        assert ids[last - 1] not in stops.token_ids, f"{name} is trained past its first end"


def test_a_reply_that_was_cut_off_is_ended_as_the_template_ends_it(tokenizers):
    """The tokens of a cut reply, its closing and the next turn are those of the whole text."""
    for name in tokenizers.keys() - {LETTERS, "falcon", "r1-distill", "deepseek 3.1", "qwen3 without thinking"}:
        chat, following = tokenizers[name], [user("And then?")]
        whole = chat.encode(chat.render_text([ASKED, SAID, *following], reply_next=True))
        text = chat.render_text([ASKED, SAID, *following], reply_next=True)
        body = len(chat.encode(text[: text.index(SAID["content"]) + len(SAID["content"])]))
        asked = len(chat.render([ASKED]))
        reply = whole[asked:body]
        closing = Stops(chat, [], []).close_turn(reply)
        played = whole[:body] + join_turn(reply, closing, chat.render_turns(SAID, following))
        assert played == whole, f"{name}: {show(chat, played[body - 1 :])}, not {show(chat, whole[body - 1 :])}"


def test_a_reply_that_holds_the_text_of_its_end_is_trained_to_its_end(tokenizers):
    for name, chat in tokenizers.items():
        end = chat.end.text
        for said in (f"Write {end} and go on.", f"It ends in {end}"):
            ids, mask = chat.mask_turns([ASKED, assistant(said), ASKED, SAID])
            learnt = chat.hf.decode([i for i, is_learnt in zip(ids, mask, strict=True) if is_learnt])
            assert learnt.count(end) == 3 - (name in ("falcon", "gpt-oss")), f"{name}: {learnt!r}"


def test_a_header_that_swallows_the_space_of_a_reply_is_not_trained(tokenizers):
    """Phi-3's header takes the white space after it, and a reply may begin with some."""
    chat = tokenizers["phi-3"]
    ids, mask = chat.mask_turns([ASKED, assistant(" 4")])
    learnt = show(chat, [i for i, is_learnt in zip(ids, mask, strict=True) if is_learnt])
    assert learnt[-1] == "<|end|>" and "<|assistant|>" not in learnt


def test_a_token_of_the_headers_space_and_a_replys_first_word_is_trained(tmp_path):
    """A header that ends in a space, of a tokenizer that joins spaces with words."""
    template = (
        FAMILIES["vicuna"].template.replace("'ASSISTANT:'", "'ASSISTANT: '").replace('"ASSISTANT:"', '"ASSISTANT: "')
    )
    chat = FAMILIES["vicuna"].load(tmp_path, chat_template=template)
    assert chat.reply_header == "ASSISTANT: "
    ids, mask = chat.mask_turns([ASKED, SAID])
    assert ids == chat.encode(chat.render_text([ASKED, SAID], reply_next=False))
    assert show(chat, ids)[mask.index(True)] == "\u2581The"


def test_a_prompt_that_ends_in_a_begun_reply_is_the_beginning_of_the_whole(tokenizers, tmp_path):
    begun = [ASKED, assistant("The answer is")]
    for name, chat in tokenizers.items():
        [prompt] = load_asked(chat, begun, tmp_path, continue_final_message=True).all()
        ids, (whole, _) = chat.render(prompt.messages), chat.mask_turns([ASKED, SAID])
        assert whole[: len(ids)] == ids, f"{name}: {show(chat, ids)}, not {show(chat, whole)}"
        assert chat.hf.decode(ids).endswith("The answer is"), name
    with pytest.raises(UserError, match=r"ends with an assistant turn.*or set data\.continue_final_message"):
        load_asked(chat, begun, tmp_path)


def test_a_thought_that_a_header_has_opened_is_not_opened_twice(tokenizers):
    for name, opens in (("r1-distill", "<think>\n"), ("deepseek 3.1", "<think>")):
        chat = tokenizers[name]
        text = chat.render_prompt([ASKED, assistant(opens + "hm")])
        assert text == chat.render_prompt([ASKED]) + "hm" and text.endswith(opens + "hm")
    chat = tokenizers["qwen3"]  # whose header opens none
    assert chat.render_prompt([ASKED, assistant("<think>\nhm")]) == chat.render_prompt([ASKED]) + "<think>\nhm"


@pytest.mark.parametrize("adds_eos", [False, True])
def test_plain_texts_begin_and_end_as_the_tokenizer_says(adds_eos, tmp_path):
    from unit_tests.helpers.made_tokenizers import make_hf

    hf = make_hf("legacy", ["<s>", "</s>"], eos="</s>", bos="<s>", adds_bos=True, adds_eos=adds_eos)
    hf.save_pretrained(tmp_path)
    plain = ChatTokenizer(str(tmp_path), "plain")
    assert plain.render([user("It is")]) == hf.encode("It is")[: 3 if adds_eos else None]
    document, mask = plain.mask_turns([user("It is cold")], "everything")
    assert document == hf.encode("It is cold") and all(mask)
    ids, mask = plain.mask_turns([user("It is"), assistant(" cold")], ["assistant"])
    assert (
        show(plain, ids) == ["<s>", "\u2581It", "\u2581is", "\u2581cold", "</s>"] and mask == [False] * 3 + [True] * 2
    )
    assert plain.mask_turns([user("It is"), assistant(" cold")], "everything")[0] == ids, "one EOS is enough"
    following = plain.render_turns(assistant(" cold"), [user("It")])
    assert following[:1] != [hf.bos_token_id], "BOS begins an episode, and no later turn"


def test_a_chat_template_writes_its_own_bos_and_no_other_is_added(tokenizers):
    for name in ("llama2", "gemma 2", "internlm 2"):
        chat = tokenizers[name]
        for ids in (chat.render([ASKED]), chat.mask_turns([ASKED, SAID], "everything")[0]):
            assert ids.count(chat.hf.bos_token_id) == 1 and ids[0] == chat.hf.bos_token_id
    phi = tokenizers["qwen2.5 base"]
    assert phi.hf.decode(phi.mask_turns([ASKED, SAID], "everything")[0]) == phi.render_text(
        [ASKED, SAID], reply_next=False
    )


def with_template(chat: ChatTokenizer, template: str) -> ChatTokenizer:
    chat.hf.chat_template = template
    return chat


CUTS = (
    "{% for m in messages %}{% if m.role != 'ROLE' %}{{ m.role + ': ' + m.content }}{% endif %}{{ '<|im_end|>' }}"
    "{% endfor %}"
)
SHORTENS = (
    "{% for m in messages %}{{ m.role + ': ' + (m.content[:12] if m.role == 'ROLE' else m.content) + '<|im_end|>' }}"
    "{% endfor %}"
)
TALK = [
    {"role": "system", "content": "Be brief, and be kind."},
    user("What is the answer?"),
    assistant("The answer is 4 ."),
]


@pytest.mark.parametrize("template", [CUTS, SHORTENS], ids=["leaves out", "shortens"])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_that_a_template_leaves_out_is_refused_for_every_role(tmp_path, role, template):
    header = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    written = template.replace("ROLE", role) + header
    chat = with_template(FAMILIES["qwen2.5"].load(tmp_path), written)
    talk = [*TALK, user("hm hm hm hm hm hm"), assistant("It is cold, and it is 4 .")]
    if role == "tool":
        talk[3:3] = [result("It is 21 degrees in Rome."), assistant("It is so.")]
        del talk[3]["tool_call_id"]
    with pytest.raises(UserError, match=f"leaves out .* turn of {role}|leaves out or changes a part of a reply"):
        load_rows(chat, {"messages": talk}, tmp_path, train_on=["assistant"])
    if role != "assistant":
        with pytest.raises(UserError, match=f"leaves out .* turn of {role}"):
            load_asked(chat, talk[:-1], tmp_path)


def test_thoughts_that_a_template_deletes_from_replies_are_refused(tokenizers, tmp_path):
    """An earlier reply that is not trained may lose its thoughts, as the model's makers mean it."""
    chat, thought = tokenizers["r1-distill"], assistant("<think>\nhm hm\n</think>\n\n4")
    row = {"messages": [ASKED, thought, ASKED, thought]}
    with pytest.raises(UserError, match=r"leaves out or changes a part of a reply .* last_reply"):
        load_rows(chat, row, tmp_path)
    with pytest.raises(UserError, match=r"leaves out a part of what a turn of assistant holds \('<think>"):
        load_rows(chat, row, tmp_path, train_on="everything")
    [[sample]] = load_rows(chat, row, tmp_path, train_on="last_reply").all()
    text = chat.hf.decode(sample.token_ids)
    assert text.count("hm hm") == 1 and text.endswith("<think>\nhm hm\n</think>\n\n4" + chat.hf.eos_token)
    assert load_asked(chat, [ASKED, thought, ASKED], tmp_path).all()


def test_a_template_of_ones_own_is_a_path_or_a_text(tmp_path):
    family = FAMILIES["qwen2.5 base"]
    mine = (
        "{% for m in messages %}{{ m.role + '>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant>' }}{% endif %}"
    )
    (tmp_path / "mine.jinja").write_text(mine)
    for given in (mine, str(tmp_path / "mine.jinja")):
        chat = family.load(tmp_path, chat_template=given)
        assert chat.hf.decode(chat.render([ASKED])) == "user>What is 2 + 2 ?<|im_end|>assistant>"
    chat.save(tmp_path / "saved")
    assert ChatTokenizer(str(tmp_path / "saved"), "chat").hf.chat_template == mine, "a saved model has it"
    with pytest.raises(UserError, match=r"data\.chat_template=no\.jinja cannot be read"):
        family.load(tmp_path, chat_template="no.jinja")
    with pytest.raises(UserError, match=r"data\.chat_template: the chat template cannot be read"):
        family.load(tmp_path, chat_template="{% for m in messages %}")


def test_a_recipe_may_name_the_end_of_a_turn(tmp_path):
    chat = FAMILIES["gpt-oss"].load(tmp_path, end_of_turn="<|end|>")
    ids, mask = chat.mask_turns([ASKED, SAID, ASKED, SAID])
    learnt = [i for i, is_learnt in zip(ids, mask, strict=True) if is_learnt]
    assert show(chat, learnt).count("<|end|>") == 1 and chat.hf.convert_tokens_to_ids("<|end|>") in chat.stop_token_ids
    with pytest.raises(UserError, match=r"data\.end_of_turn=<\|stop\|> is not a token of this model's tokenizer"):
        FAMILIES["gpt-oss"].load(tmp_path, end_of_turn="<|stop|>").render_turns(SAID, [ASKED])


def test_an_end_in_letters_is_refused_by_the_engine_unless_it_is_a_stop(tokenizers):
    chat = tokenizers[LETTERS]
    with pytest.raises(UserError, match="is no token of this model's tokenizer"):
        check_stops(chat, [], [], chat.vocabulary)
    check_stops(chat, ["<|im_end|>"], [], chat.vocabulary)


class WithoutOffsets:
    """A tokenizer of the library's, as one in Python would be: without offsets."""

    def __init__(self, hf: Any):
        self.hf = hf

    def __call__(self, texts: list[str], **settings: bool) -> Any:
        # of the fast tokenizers alone, the answer holds what the library found
        return BatchEncoding(dict(self.hf(texts, **settings)))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.hf.encode(text, add_special_tokens=add_special_tokens)


def test_a_tokenizer_without_offsets_gives_the_same_masks(tokenizers):
    for name, chat in tokenizers.items():
        if name in ("phi-3", LETTERS):  # a token of these holds more than one turn's text
            continue
        pieces = chat.split_turns([ASKED, SAID, ASKED, SAID], ["assistant"])
        assert encode_pieces(WithoutOffsets(chat.hf), pieces) == chat.encode_pieces(pieces), name


def test_explain_says_where_a_reply_ends_and_what_stands_around_a_text(tmp_path):
    def explained(name: str, **settings: Any) -> dict[str, str]:
        folder = tmp_path / name
        folder.mkdir()
        FAMILIES[name].load(folder)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        data = TemplateConfig(**({"template_args": FAMILIES[name].args} | settings))
        return dict(describe_texts(find_tokenizer(ModelConfig(path=str(folder)), data), data))

    base, glm, plain = explained("qwen2.5 base"), explained("glm-4"), explained("llama2", template="plain")
    assert base["a reply"].startswith(
        "ends with <|im_end|>, which the chat template writes after it; the engine stops at"
    )
    assert "<|endoftext|> too" in base["a reply"] and base["a text"] == "no BOS: the tokenizer has none"
    assert "<|user|>, with which the chat template begins the next turn" in glm["a reply"]
    assert plain["a text"].startswith("<s> before it, and nothing after a document")
    assert explained("gemma 2")["a text"] == "begins with <bos>, as the chat template writes it"
    named = explained("vicuna", end_of_turn="<|no|>")
    assert list(named) == ["a reply"] and named["a reply"].startswith(
        "unknown: data.end_of_turn=<|no|> is not a token of this model's tokenizer"
    )


def test_a_mask_by_offsets_is_that_of_every_token_alone():
    rng = random.Random(0)
    for _ in range(300):
        # tokens with gaps between them, tokens of one character together, and tokens without any
        places: list[tuple[int, int]] = []
        while len(places) < 30:
            begin = (places[-1][1] if places else 0) + rng.choice((0, 0, 1))
            places += [(begin, begin + rng.choice((0, 1, 1, 2, 3)))] * rng.choice((1, 1, 2))
        cuts = sorted(rng.sample(range(places[-1][1] + 4), 6))
        spans = [range(*cuts[i : i + 2]) for i in (0, 2, 4)]
        rng.shuffle(spans)
        ids = [rng.randrange(4) for _ in places]
        expected = []
        for (begin, end), token in zip(places, ids, strict=True):
            # the first span that does not end before the token
            span = min((s for s in spans if s.stop > begin), key=lambda s: s.start, default=None)
            holds = span is not None and (begin >= span.start or (end > span.start and token != 3))
            expected.append(holds)
        assert mask_by_offsets(ids, places.__getitem__, spans, {3}) == expected
