"""A system turn and template arguments reach prompts, held-out rows and supervised rows alike, or are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from configs.data_schema import PromptDataConfig, RowDataConfig, TemplateConfig
from configs.trainer_schema import ModelConfig
from core.errors import UserError
from data_feeds.chat.template_args import (
    check_template_args,
    list_arguments,
    make_clock,
    make_tokenizer,
    pin_date,
    writes_date,
)
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups, load_prompts
from unit_tests.helpers.sentences import tell

THINKING = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '(no thinking)' }}{% endif %}{% endif %}"
)
WITHOUT_SYSTEM = THINKING.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
ROWS = [
    {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"},
    {"messages": [{"role": "system", "content": "mine"}, {"role": "user", "content": "1+2="}], "answer": "3"},
]
TALKS = [{"messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]} for row in ROWS]
PAIR = {"messages": ROWS[0]["messages"], "chosen": "2", "rejected": "3"}


@pytest.fixture
def thinking(tiny_path, tmp_path) -> str:
    """The tiny model, with a template that reads an argument."""
    return with_template(tiny_path, tmp_path / "thinking", THINKING)


def with_template(model: str, folder: Path, template: str) -> str:
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts_of(model: str, train: str, **settings) -> list[str]:
    """What the policy is asked, as text."""
    data = PromptDataConfig(train=train, eval=train, **settings)
    tokenizer = make_tokenizer(ModelConfig(path=model), data)
    check_template_args(tokenizer, data)
    texts = [
        [tokenizer.hf.decode(tokenizer.render(p.messages)) for p in load_prompts(data, w, tokenizer, seed=0).all()]
        for w in ("train", "eval")
    ]
    assert texts[0] == texts[1]
    return texts[0]


def test_prompts_and_held_out_prompts_get_the_system_turn_and_arguments(thinking, tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    assert prompts_of(thinking, file)[0] == "<|user|>1+1=<|assistant|>"
    texts = prompts_of(thinking, file, system_prompt="be brief", template_args={"enable_thinking": False})
    assert texts == [
        "<|system|>be brief<|user|>1+1=<|assistant|>(no thinking)",
        "<|system|>mine<|user|>1+2=<|assistant|>(no thinking)",
    ], "a row's own system turn stays"


@pytest.mark.parametrize(("kind", "rows"), [("conversations", TALKS), ("pairs", [PAIR])])
def test_supervised_rows_get_the_system_turn_too(kind, rows, thinking, tmp_path):
    data = RowDataConfig(train=jsonl(tmp_path / "rows.jsonl", rows), system_prompt="be brief")
    tokenizer = make_tokenizer(ModelConfig(path=thinking), data)
    for sample in load_groups(data, "train", tokenizer, rows=kind, seed=0).all()[0]:
        text = tokenizer.hf.decode(sample.token_ids.tolist())
        assert text.startswith("<|system|>be brief<|user|>1+1=<|assistant|>")


def test_an_argument_that_changes_nothing_is_said(thinking, tmp_path, capsys):
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    prompts_of(thinking, file, template_args={"enable_thinking": True})
    assert "enable_thinking=True: the chat template writes the same text without it" in capsys.readouterr().err


def test_what_the_template_ignores_is_refused(thinking, tiny_path, tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(
        UserError, match=r"template_args\.enable_thinkin: .* does not read it; it reads enable_thinking"
    ):
        prompts_of(thinking, file, template_args={"enable_thinkin": False})
    with pytest.raises(UserError, match="does not read it; it reads none"):
        prompts_of(tiny_path, file, template_args={"enable_thinking": False})
    with pytest.raises(UserError, match="is set by FeynRL"):
        prompts_of(thinking, file, template_args={"tokenize": True})
    deaf = with_template(tiny_path, tmp_path / "deaf", WITHOUT_SYSTEM)
    with pytest.raises(UserError, match="does not write the system turn"):
        prompts_of(deaf, file, system_prompt="be brief")
    with pytest.raises(UserError, match=r"every row of data\.train has a system turn of its own"):
        prompts_of(thinking, jsonl(tmp_path / "own.jsonl", ROWS[1:]), system_prompt="be brief")


def test_a_plain_template_has_no_arguments(refused):
    changes = {"data.template": "plain", "data.template_args": {"enable_thinking": False}}
    refused(changes, "template_args is for a chat template")


def test_a_plain_run_has_a_system_prompt_too(tiny_path, tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    assert prompts_of(tiny_path, file, template="plain", system_prompt="brief ")[0] == "brief 1+1="


READS = "{{ eos_token }}{{ strftime_now('%Y') if b }}{{ raise_exception('x') if z }}{% set c = 1 %}{{ c }}"
TURNS = "{% for m in messages %}{{ m.role + m.content + (tools or '') | string }}{% endfor %}"
HEADER = "{% if add_generation_prompt %}>{% endif %}"


def tokenizer_of(tiny_path, template: str, **settings) -> tuple[ChatTokenizer, TemplateConfig]:
    data = TemplateConfig(chat_template=TURNS + HEADER + template, **settings)
    return make_tokenizer(ModelConfig(path=tiny_path), data), data


def test_arguments_of_a_template_are_those_that_nothing_else_sets(tiny_path):
    tokenizer, _ = tokenizer_of(tiny_path, READS)
    assert list_arguments(tokenizer) == {"b", "z"}
    for name, sentence in (
        ("c", "the chat template of this model does not read it; it reads b, z"),
        ("messages", "the chat template of this model does not read it; it reads b, z"),
        ("strftime_now", "the chat template of this model does not read it; it reads b, z"),
        ("tools", "is set by FeynRL: leave it out"),
        ("add_generation_prompt", "is set by FeynRL: leave it out"),
    ):
        wrong, data = tokenizer_of(tiny_path, READS, template_args={name: 1})
        colon = " " if sentence.startswith("is") else ": "
        assert tell(lambda given=(wrong, data): check_template_args(*given)) == (
            f"data.template_args.{name}{colon}{sentence}"
        )


@pytest.mark.parametrize(
    ("effect", "has_effect"),
    [
        ("{{ x }}", True),
        ("{{ x if messages | length == 1 }}", True),
        ("{{ x if messages | length == 2 }}", True),
        ("{{ x if messages | length == 3 }}", True),
        ("{{ x if add_generation_prompt }}", True),
        ("{{ x if not add_generation_prompt }}", True),
        ("{{ raise_exception('no') if x and messages | length == 2 }}", True),
        ("{{ x if messages | length == 4 }}", False),
        ("{{ '' if x }}", False),
    ],
)
def test_an_argument_without_effect_alone_is_said(tiny_path, capsys, effect, has_effect):
    tokenizer, data = tokenizer_of(tiny_path, effect + "{{ y }}", template_args={"x": 7, "y": 3})
    check_template_args(tokenizer, data)
    said = capsys.readouterr().err
    assert ("data.template_args.x=7: the chat template writes the same text without it" in said) != has_effect
    assert "template_args.y" not in said
    assert tokenizer.template_args == {"x": 7, "y": 3}, "the trials leave them as they were"


def test_a_system_prompt_that_is_not_written_is_one_sentence(tiny_path):
    def check(template: str, prompt: str = "brief") -> None:
        check_template_args(*tokenizer_of(tiny_path, template, system_prompt=prompt))

    check("", " brief\n")
    check("{{ raise_exception('no') if not add_generation_prompt }}")
    assert tell(lambda: check("{{ raise_exception('no system') if messages[0].role == 'system' }}")) == (
        "data.system_prompt: the chat template refuses a system turn: no system"
    )
    data = TemplateConfig(chat_template=WITHOUT_SYSTEM, system_prompt="brief")
    assert tell(lambda: check_template_args(make_tokenizer(ModelConfig(path=tiny_path), data), data)) == (
        "data.system_prompt: the chat template does not write the system turn: leave it out"
    )


def test_a_date_is_written_at_the_template_and_nowhere_else(tiny_path):
    tokenizer, data = tokenizer_of(tiny_path, READS, template_date="2026-11-25T01:02:03")
    assert writes_date(tokenizer) and pin_date(tokenizer, data, "2020-02-03") is data
    assert make_clock(None) == {}
    assert make_clock("2026-11-25T01:02:03")["strftime_now"]("%d %H:%M:%S") == "25 01:02:03"
    unpinned, data = tokenizer_of(tiny_path, READS)
    now = pin_date(unpinned, data, None).template_date
    assert now is not None and len(now) == len("2026-11-25T01:02:03")
    plain = ChatTokenizer(tiny_path, "plain")
    plain.hf.chat_template = READS
    assert not writes_date(plain) and not writes_date(tokenizer_of(tiny_path, "")[0])


def test_a_tokenizer_has_what_the_recipe_says_of_it(tiny_path):
    tokenizer, _ = tokenizer_of(tiny_path, "", end_of_turn="<|user|>")
    assert tokenizer.end.text == "<|user|>" and tokenizer.skip_special_tokens
    [user] = tokenizer.hf.convert_tokens_to_ids(["<|user|>"])
    assert user in tokenizer.stop_token_ids
    kept = make_tokenizer(ModelConfig(path=tiny_path), TemplateConfig(template="plain"), skip_special_tokens=False)
    assert not kept.skip_special_tokens and kept.template == "plain"
    assert kept.render_text([{"role": "user", "content": "a"}], reply_next=True) == "a"
