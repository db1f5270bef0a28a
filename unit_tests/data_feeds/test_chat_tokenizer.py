"""The chat tokenizer at its edges: what is loaded, where replies end, and how long a conversation may be."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from core.hub import describe_hub
from core.types.images import EncodedImage
from core.types.samples import Prompt, RecordedEpisode
from data_feeds.chat.decoding import decode_exactly, list_special_tokens
from data_feeds.chat.demonstrations import make_demonstration, make_recorded, mark_replies
from data_feeds.chat.model_files import find_variables, read_stop_ids, read_template, sees_images
from data_feeds.chat.tokenizer import ChatTokenizer
from unit_tests.helpers.chat_families import WEATHER, assistant, user
from unit_tests.helpers.sentences import tell


@pytest.fixture(scope="module")
def chat(tiny_path: str) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


def copy(tiny_path: str, folder: Path, **files: str | None) -> str:
    """Copy the tiny model's tokenizer, and write or remove files by their names without a suffix."""
    names = {"generation": "generation_config.json", "config": "config.json", "template": "chat_template.jinja"}
    shutil.copytree(tiny_path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, text in files.items():
        (folder / names[name]).unlink(missing_ok=True)
        if text is not None:
            (folder / names[name]).write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("generation", "stops"),
    [(None, []), ("{}", []), ('{"eos_token_id": 7}', [7]), ('{"eos_token_id": [9, 3]}', [9, 3])],
)
def test_stops_of_the_models_files_are_the_engines(tiny_path, tmp_path, generation, stops):
    path = copy(tiny_path, tmp_path / "m", generation=generation)
    assert read_stop_ids(path, "k", trust_remote_code=False) == stops
    chat = ChatTokenizer(path, "chat")
    assert chat.stop_token_ids == sorted({chat.hf.eos_token_id, *stops})


def test_a_folder_that_cannot_be_used_is_one_sentence(tiny_path, tmp_path):
    broken = copy(tiny_path, tmp_path / "broken", generation="{")
    assert tell(lambda: ChatTokenizer(broken, "chat", key="a.b")).startswith(
        f"a.b={broken}: its generation_config.json cannot be read, but it names the stop tokens: "
    )
    (tmp_path / "empty").mkdir()
    said = tell(lambda: ChatTokenizer(str(tmp_path / "empty"), "chat"))
    assert said.startswith(f"model.path={tmp_path / 'empty'}: its tokenizer cannot be loaded: ")
    assert not said.endswith(describe_hub())
    bare = copy(tiny_path, tmp_path / "bare", template=None)
    assert tell(lambda: ChatTokenizer(bare, "chat")) == (
        f"model.path={bare} has no chat template: set data.template=plain, or data.chat_template"
    )
    (Path(bare) / "additional_chat_templates").mkdir()
    (Path(bare) / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    assert tell(lambda: ChatTokenizer(bare, "chat")) == (
        f"model.path={bare} has no default chat template, only tool_use: name the file of one in data.chat_template"
    )
    assert ChatTokenizer(bare, "chat", chat_template="{{ messages }}").hf.chat_template == "{{ messages }}"
    endless = Path(copy(tiny_path, tmp_path / "endless"))
    config = json.loads((endless / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (endless / "tokenizer_config.json").write_text(json.dumps(config))
    (endless / "special_tokens_map.json").unlink(missing_ok=True)
    assert tell(lambda: ChatTokenizer(str(endless), "chat")) == (
        f"model.path={endless}: its tokenizer has no end-of-sequence token"
    )


def test_a_name_that_the_hub_does_not_give_tells_where_it_was_looked_for(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = tell(lambda: ChatTokenizer("nobody/none", "chat"))
    assert said.startswith("model.path=nobody/none: its tokenizer cannot be loaded: ")
    assert said.endswith(f"; {describe_hub()}")


def test_a_clone_without_the_part_for_images_takes_a_text_model(tiny_path, tmp_path, monkeypatch):
    vision = copy(tiny_path, tmp_path / "vision", config=json.dumps({"model_type": "qwen2_vl"}))
    monkeypatch.setitem(sys.modules, "modeling.images.processor", None)
    assert tell(lambda: ChatTokenizer(vision, "chat")) == (
        f"model.path={vision} needs modeling/images/processor, which this clone lacks: restore it, or take a text model"
    )


def test_a_tokenizer_alone_sees_no_images(tiny_path, tmp_path):
    assert not sees_images(copy(tiny_path, tmp_path / "m", config=None), "k", False)
    assert not sees_images(tiny_path, "k", False)


def test_a_template_is_a_path_or_its_text(tmp_path):
    (path := tmp_path / "mine.jinja").write_text("{{ a }}{% for b in c %}{% break %}{% endfor %}")
    assert read_template(str(path)) == path.read_text() and find_variables(path.read_text(), "k") == {"a", "c"}
    for text in ("{{ x }}", "{% if x %}y{% endif %}"):
        assert read_template(text) == text
    marked = "{%- generation %}{{ m }}{% endgeneration -%}{% generation %}{%endgeneration%}"
    assert find_variables(marked, "k") == {"m"}
    assert tell(lambda: find_variables("{% for %}", "k")).startswith("k: the chat template cannot be read: ")
    (path := tmp_path / "bad.jinja").write_text("{{ a")
    assert tell(lambda: read_template(str(path))).startswith(f"data.chat_template={path}: the chat template cannot be")
    assert tell(lambda: read_template("{{ a")).startswith("data.chat_template: the chat template cannot be read: ")


def test_a_reply_ends_at_its_last_stop_alone(chat):
    end, two = chat.hf.eos_token_id, chat.encode("2")
    table = [([], []), ([end], []), ([*two, end], two), ([end, *two], [end, *two]), ([*two, end, end], [*two, end])]
    for ids, without in table:
        assert chat.without_stop(ids) == without
    assert (chat.turn_end, chat.end_in_letters, chat.reply_header) == ([end], "", "<|assistant|>")
    assert chat.vocabulary == max(chat.hf.get_vocab().values()) + 1 == len(chat.hf.get_vocab())
    assert chat.encode("") == [] and chat.decode([*two, end]) == "2"


def test_special_tokens_are_told_by_their_ids(chat):
    special = list_special_tokens(chat.hf)
    assert special[chat.hf.eos_token_id] == "<|end|>" and "a" not in special.values()
    [user_id] = chat.hf.convert_tokens_to_ids(["<|user|>"])
    assert special[user_id] == "<|user|>"
    ids = [user_id, *chat.encode("a .")]
    assert [decode_exactly(chat.hf, ids, special=flag) for flag in (True, False)] == ["<|user|>a .", "a ."]


def test_a_conversation_is_too_long_where_its_characters_tell(chat):
    """Below the bound only characters are counted: two times the limit, and four times the longest token."""
    longest = max(map(len, chat.hf.get_vocab()))
    size = 8 * (2 * 10 + 4 * longest)
    # a turn counts for eight characters
    assert chat.bound_tokens([user("x" * (size - 8))], limit=10) is None
    assert chat.bound_tokens([user("x" * (size - 7))], limit=10) == 11
    half = [user("x" * (size // 2)), assistant("x" * (size - size // 2 - 16))]
    assert chat.bound_tokens([*half], limit=10) is None
    assert chat.bound_tokens([half[0], user("x" * (size - size // 2 - 15))], limit=10) == 11
    # tokens of eight characters and more may fit, whatever the characters are
    assert chat.bound_tokens([user("<|user|>" * 200)], limit=60) is None
    # of twice as many characters as hold no answer, those after the long tokens tell
    long = "<|assistant|>" * (size // 13 + 1)
    assert chat.bound_tokens([user(long + "x" * (5 * size // 2 - len(long)))], limit=10) == 11
    assert chat.bound_tokens([user(long + "x" * (size // 2))], limit=10) is None
    # a text that ends where a prefix would is encoded as a whole anyway, and its tokens are counted
    assert chat.bound_tokens([user(long + "x" * (2 * size - 8 - len(long)))], limit=10) is None
    assert chat.bound_tokens([user(long + "x" * (2 * size - 7 - len(long)))], limit=10) == 11


IMAGE = EncodedImage(data=b"", width=3, height=2, hash="h")


def test_a_language_model_takes_no_images(chat, tiny_path):
    seen: Any = {**user("a"), "parts": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "a"}]}
    blind = (
        f"model.path={tiny_path} is a language model, which sees no images, or is used as one (model.images), and a "
        "message holds one: take a model that sees, another rollout.engine, or rows without images"
    )
    assert tell(lambda: chat.render([seen])) == tell(lambda: chat.place([1], [IMAGE])) == blind
    assert chat.place([1, 2], []) == ()


def test_a_begun_reply_is_rendered_to_its_last_character(chat):
    assert chat.render_prompt([user("a")]) == "<|user|>a<|assistant|>"
    assert chat.render_prompt([user("a"), assistant("b")]) == "<|user|>a<|assistant|>b"
    assert chat.render_text([user("a"), assistant("b")], reply_next=False) == "<|user|>a<|assistant|>b<|end|>"
    assert chat.hf.decode(chat.render_turns(assistant("b"), [user("c")])) == "<|user|>c<|assistant|>"
    assert chat.mask_turns([user("a"), assistant("b")], "everything")[1] == [True] * 5


def test_a_template_of_ones_own_is_saved_and_no_other(tiny_path, tmp_path):
    own = ChatTokenizer(tiny_path, "chat", chat_template="{{ messages }}")
    own.save(tmp_path / "own")
    assert (tmp_path / "own/chat_template.jinja").read_text() == "{{ messages }}"


def test_replies_after_a_prompt_are_those_that_are_trained_on():
    asked: list[Any] = [user("a"), assistant("b") | {"train": True}]
    marked = mark_replies(asked, [assistant("c"), user("d"), assistant("e")])
    assert [message.get("train") for message in marked] == [False, False, True, False, True]
    assert [message["content"] for message in marked] == ["a", "b", "c", "d", "e"] and asked[1]["train"]


def test_a_demonstration_and_a_recorded_episode_are_samples(chat):
    asked, one = [user("1+1=")], [assistant("2")]
    several = [assistant("2"), user("so?"), assistant("3")]
    shown = make_demonstration(chat, Prompt(id="p", messages=asked, demonstration=one))
    assert (shown.completion, shown.transcript, shown.reward, shown.stop) == ("2", [], None, "eos")
    more = make_demonstration(chat, Prompt(id="p", messages=asked, demonstration=several))
    assert (more.completion, more.transcript) == ("23", several)
    assert {*more.versions.tolist()} == {-1} and not more.rollout_logp.any()
    prompt = Prompt(id="p", messages=asked)
    recorded = RecordedEpisode(
        messages=one, completion="2", token_ids=[4, 5, 6, 7], logp=[None, -0.5, None, 0.0], stop="length"
    )
    made = make_recorded(chat, prompt, recorded)
    assert made.action_mask.tolist() == [False, True, False, True]
    assert made.rollout_logp.tolist() == [0.0, -0.5, 0.0, 0.0] and made.versions.tolist() == [-1] * 4
    assert (made.origin, made.stop, made.completion, made.transcript) == ("other", "length", "2", [])
    long = make_recorded(
        chat,
        prompt,
        RecordedEpisode(messages=several, completion="23", token_ids=[4, 5], logp=[None, -1.0], stop="eos"),
    )
    assert long.transcript == several
    text = make_recorded(chat, prompt, RecordedEpisode(messages=one, completion="2", stop="eos"))
    assert text.origin == "demonstration" and text.prompt == prompt
    assert text.token_ids.tolist() == shown.token_ids.tolist()


def test_tools_count_for_the_length_of_a_conversation(families):
    long = {**WEATHER, "function": {**WEATHER["function"], "description": "x" * 10_000}}
    chat = families["qwen2.5"]
    assert chat.bound_tokens([user("a")], limit=10) is None
    assert chat.bound_tokens([user("a")], limit=10, tools=[WEATHER, long]) == 11
