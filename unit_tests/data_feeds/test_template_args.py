"""A system turn and template arguments reach prompts, held-out rows and supervised rows alike, or are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from configs.data_schema import PromptDataConfig, RowDataConfig
from configs.trainer_schema import ModelConfig
from core.errors import UserError
from data_feeds.chat.template_args import check_template_args, make_tokenizer
from data_feeds.feed import load_groups, load_prompts

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
