"""Hashes of a run's rows, template and files of the user, so that a resume notices a change."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.eval_schema import EvalConfig
from configs.load import flatten_settings
from configs.schema import RunConfig
from core.loading import FileSpec, hash_file
from core.types.messages import Message, ToolSpec, describe_messages
from core.types.samples import Group, Prompt
from data_feeds.chat.template_append import TemplateRefuses
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import Feed
from driver.imported_files import list_imported_files
from driver.load_recipe import Loaded

TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
PROBES: list[tuple[list[Message], list[ToolSpec]]] = [
    ([{"role": "user", "content": " Was ist 1 + 1?\n"}], []),
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "A?"},
            {"role": "assistant", "content": "B.", "reasoning": "Because."},
            {"role": "user", "content": "C?"},
        ],
        [],
    ),
    (
        [
            {"role": "user", "content": "Look it up."},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "call00000",
                        "type": "function",
                        "function": {"name": "look_up", "arguments": {"word": "\u00e9"}},
                    }
                ],
            },
            {"role": "tool", "content": "It is a letter.", "tool_call_id": "call00000", "name": "look_up"},
        ],
        [TOOL],
    ),
]
"""Conversations whose text and tokens tell whether template and tokenizer are the same."""


def hash_inputs(
    loaded: Loaded[Any], code: Mapping[str, FileSpec | None], tokenizer: ChatTokenizer, train: Feed[Any]
) -> dict[str, str]:
    """Return hashes of the run's inputs, by name. code: files of plug-ins, which are loaded already."""
    hashes = hash_template(tokenizer)
    for i, source in enumerate(train.sources):
        key = f"data.train[{i}]" if train.mixed else "data.train"
        hashes[f"what the rows of {key} hold"] = source.digest or hash_rows(source.items)
    return hashes | hash_files(loaded.cfg, [loaded.alg_spec, *filter(None, code.values())])


def hash_template(tokenizer: ChatTokenizer) -> dict[str, str]:
    """Return hashes of the chat template, and of the text and tokens that it and the tokenizer write."""
    template = json.dumps(tokenizer.hf.chat_template) if tokenizer.template == "chat" else ""
    return {
        "the chat template of model.path": _hash(template.encode()),
        "what the chat template and the tokenizer of model.path write": hash_probes(tokenizer),
    }


def hash_files(cfg: RunConfig | EvalConfig, code: Iterable[FileSpec]) -> dict[str, str]:
    """Return hashes of the files that plug-ins import, and of those that reward.settings names."""
    hashes = {f"the file {path.name} beside your code": hash_file(path) for path in list_imported_files(code)}
    for key, value in flatten_settings(cfg.model_dump(mode="json")).items():
        # such as a rubric; a folder, such as a model, is compared by name
        if key.startswith("reward.settings.") and isinstance(value, str) and os.path.isfile(value):
            hashes[f"the file of {key}"] = hash_file(Path(value))
    return hashes


def hash_rows(items: Iterable[Prompt | Group]) -> str:
    """Hash everything of the rows that training reads: messages, images, tokens, masks, labels and other columns."""
    found = hashlib.sha256()
    for item in items:
        group = [] if isinstance(item, Prompt) else item
        for sample in group:
            found.update(sample.token_ids.tobytes() + sample.action_mask.tobytes() + str(sample.reward).encode())
        prompt = item if isinstance(item, Prompt) else item[0].prompt
        found.update(json.dumps([prompt.id, hash_row(prompt)]).encode())
    return found.hexdigest()


def hash_row(prompt: Prompt) -> str:
    """Hash everything in a row that affects samples and rewards: messages, tools, answer and other columns."""
    row = [describe_messages(prompt.messages), prompt.tools, prompt.answer, prompt.extra]
    if prompt.demonstration:
        row.append(describe_messages(prompt.demonstration))
    row += [[describe_messages(one.messages), one.token_ids, one.logp] for one in prompt.recorded]
    return _hash(json.dumps(row, default=str).encode())


def hash_probes(tokenizer: ChatTokenizer) -> str:
    """Hash the text and tokens of fixed conversations, under the run's template arguments and date."""
    return _hash(json.dumps([*_write_probes(tokenizer)]).encode())


def _write_probes(tokenizer: ChatTokenizer) -> Iterator[list[Any]]:
    for messages, tools in PROBES:
        for reply_next in (False, True):
            try:
                text = tokenizer.render_text(messages, reply_next=reply_next, tools=tools)
                yield [text, tokenizer.encode(text)]
            except TemplateRefuses as refusal:
                yield [str(refusal)]
            except Exception as error:  # a border: a template is code of its makers, which may know no tools
                yield [type(error).__name__]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
