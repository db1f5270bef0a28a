"""Table of the forms of rows that data sets come in, and their conversion to our columns.

An entry names the columns that identify a form, and the columns that each of ours is made of. find_form.py recognises a
form, and convert_form.py converts its rows.

A column is written as a dotted path (`reward_model.ground_truth`), or as alternatives (`completion|response`), of which
a data set may have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from configs.data_schema import OURS
from core.types.samples import Rows

RowKind = Rows | Literal["prompts"]
"""Kind of row that a program needs: see ROW_TYPES in row_types.py."""
Shape = Literal[
    "any", "own_turns", "own_reply", "turns", "text", "talk", "pairs_of_turns", "segments", "ids", "list", "hh"
]
"""Content of a column in every row that has it: see SHAPES in find_form.py."""
ANSWERS = "answer|solution|ground_truth|target|label|expected_answer|reference_answer"
"""Columns with the ground truth of a prompt."""
ASKS = "question|problem|query"
REPLIES = "answer|solution|response|completion|output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Columns that a conversation is put together from, in this order. A column that a row lacks is left out."""

    system: str = ""
    history: str = ""
    """Earlier turns, as a list of [question, reply]."""
    whole: str = ""
    """Conversation of several turns."""
    user: tuple[str, ...] = ()
    """Texts joined by line ends, or turns."""
    assistant: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are set, in the order of the turns."""
        return tuple(filter(None, (self.system, self.history, self.whole, *self.user, self.assistant)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Form of the rows of a data set, for one kind of row."""

    name: str
    """Value of `form` in a recipe. Several kinds of row may have forms of one name."""
    kind: RowKind
    needs: Mapping[str, Shape]
    """Columns that identify the form, with their content."""
    fields: Mapping[str, str | Turns] = field(default_factory=dict[str, "str | Turns"])
    """Our columns, each with a column of the data set, or with those that its turns are made of."""
    excludes: tuple[str, ...] = ()
    """Columns of another form."""
    copies: Mapping[str, str] = field(default_factory=dict[str, str])
    """Columns that are not read, each with the column that it must equal in every row."""
    differs: Mapping[str, str] = field(default_factory=dict[str, str])
    """Columns, each with one that it must not equal in every row."""
    is_last: bool = False
    """Considered only if no other form fits."""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Keys of `data` that the rows need, with their values."""
    refusal: str = ""
    """Reason why rows of the form cannot be used, with the fix."""


_ASKED = Turns(system="system", history="history", user=(ASKS,))
_INSTRUCTION = ("instruction", "input|context")
_CHATS = "conversations|conversation|dialogue"
_CHOSEN: dict[str, str | Turns] = {"chosen": Turns(assistant="chosen"), "rejected": Turns(assistant="rejected")}
_PAIR: dict[str, Shape] = {"chosen": "own_reply", "rejected": "own_reply"}
_PLAIN = {"data.template": "plain"}

FORMS: tuple[Form, ...] = (
    # conversations of supervised learning
    Form(name=OURS, kind="conversations", needs={"messages": "own_turns"}, excludes=("system",)),
    Form(
        name="messages_system",
        kind="conversations",
        needs={"messages": "talk", "system": "text"},
        fields={"messages": Turns(system="system", whole="messages")},
    ),
    Form(
        name="prompt_completion",
        kind="conversations",
        needs={"prompt": "talk", "completion|response": "talk"},
        fields={"messages": Turns(system="system", user=("prompt",), assistant="completion|response")},
    ),
    Form(
        name="openrlhf",
        kind="conversations",
        needs={"input": "talk", "output|response": "talk"},
        fields={"messages": Turns(system="system", user=("input",), assistant="output|response")},
        excludes=("instruction",),
    ),
    Form(
        name="question_answer",
        kind="conversations",
        needs={ASKS: "text", REPLIES: "text"},
        fields={"messages": Turns(system="system", history="history", user=(ASKS,), assistant=REPLIES)},
    ),
    Form(
        name="alpaca",
        kind="conversations",
        needs={"instruction": "text", "output|response": "text"},
        fields={
            "messages": Turns(system="system", history="history", user=_INSTRUCTION, assistant="output|response"),
        },
    ),
    Form(
        name="sharegpt",
        kind="conversations",
        needs={f"{_CHATS}|messages": "turns"},
        fields={"messages": Turns(system="system", whole=f"{_CHATS}|messages")},
    ),
    Form(
        name="turn_pairs",
        kind="conversations",
        needs={f"{_CHATS}|texts": "pairs_of_turns"},
        fields={"messages": Turns(system="system", whole=f"{_CHATS}|texts")},
    ),
    Form(
        name="segments",
        kind="conversations",
        needs={"segments": "segments"},
        fields={"messages": Turns(whole="segments")},
        settings=_PLAIN,
    ),
    Form(
        name="text",
        kind="conversations",
        needs={"text": "text"},
        fields={"messages": "text"},
        is_last=True,
        settings=_PLAIN | {"data.train_on": "everything"},
    ),
    Form(
        name="tokens",
        kind="conversations",
        needs={"input_ids": "ids"},
        is_last=True,
        refusal="its rows are token ids, which are not read, since another tokenizer may have made them: give the text "
        "or the turns, in columns (text: ..., or messages: ...)",
    ),
    Form(
        name="stepwise",
        kind="conversations",
        needs={"prompt": "any", "completions": "list", "labels": "list"},
        refusal="its rows label single steps, for process reward models, which are not trained here: join the steps of "
        "the good replies to a column completion, beside prompt",
    ),
    # pairs
    Form(
        name=OURS,
        kind="pairs",
        needs=_PAIR,
        excludes=("messages", "prompt", "instruction", "input", _CHATS, ASKS),
    ),
    Form(name=OURS, kind="pairs", needs={"messages": "own_turns", **_PAIR}, differs={"messages": "chosen"}),
    Form(
        name="preference",
        kind="pairs",
        needs={"prompt": "talk", **_PAIR},
        fields={"messages": Turns(system="system", user=("prompt",)), **_CHOSEN},
        copies={"messages": "chosen"},
    ),
    Form(
        name="openai_dpo",
        kind="pairs",
        needs={"input.messages": "any", "preferred_output": "any", "non_preferred_output": "any"},
        fields={
            "messages": "input.messages",
            "tools": "input.tools",
            "chosen": Turns(assistant="preferred_output"),
            "rejected": Turns(assistant="non_preferred_output"),
        },
    ),
    Form(
        name="question_answer",
        kind="pairs",
        needs={f"{ASKS}|input": "text", **_PAIR},
        fields={"messages": Turns(system="system", history="history", user=(f"{ASKS}|input",)), **_CHOSEN},
        excludes=("instruction", "prompt"),
    ),
    Form(
        name="alpaca",
        kind="pairs",
        needs={"instruction": "text", **_PAIR},
        fields={"messages": Turns(system="system", history="history", user=_INSTRUCTION), **_CHOSEN},
    ),
    Form(
        name="sharegpt",
        kind="pairs",
        needs={f"{_CHATS}|messages": "turns", **_PAIR},
        fields={"messages": Turns(system="system", whole=f"{_CHATS}|messages"), **_CHOSEN},
    ),
    Form(
        name="hh_rlhf",
        kind="pairs",
        needs={"chosen": "hh", "rejected": "hh"},
        refusal="its rows are texts of HH-RLHF, whose turns begin with Human: and Assistant: run python -m "
        "data_prep.hh_rlhf --from FILE --out OUT, and give OUT",
    ),
    # replies with a label
    Form(name=OURS, kind="unpaired", needs={"messages": "own_turns", "label": "any"}, excludes=("kto_tag",)),
    Form(
        name="prompt_completion",
        kind="unpaired",
        needs={"prompt": "talk", "completion|response": "talk", "label": "any"},
        fields={
            "messages": Turns(system="system", user=("prompt",), assistant="completion|response"),
            "label": "label",
        },
    ),
    Form(
        name="openrlhf",
        kind="unpaired",
        needs={"input": "talk", "output|response": "talk", "label": "any"},
        fields={"messages": Turns(system="system", user=("input",), assistant="output|response"), "label": "label"},
        excludes=("instruction",),
    ),
    Form(
        name="alpaca",
        kind="unpaired",
        needs={"instruction": "text", "output|response": "text", "label|kto_tag": "any"},
        fields={
            "messages": Turns(system="system", history="history", user=_INSTRUCTION, assistant="output|response"),
            "label": "label|kto_tag",
        },
    ),
    Form(
        name="kto_tag",
        kind="unpaired",
        needs={"messages": "own_turns", "kto_tag": "any"},
        fields={"label": "kto_tag"},
    ),
    Form(
        name="sharegpt",
        kind="unpaired",
        needs={f"{_CHATS}|messages": "turns", "label|kto_tag": "any"},
        fields={"messages": Turns(system="system", whole=f"{_CHATS}|messages"), "label": "label|kto_tag"},
    ),
    # replies with rewards
    Form(name=OURS, kind="scored", needs={"messages": "own_turns", "completions": "list", "rewards": "list"}),
    # prompts of reinforcement learning
    Form(name=OURS, kind="prompts", needs={"messages": "own_turns"}, excludes=("system",)),
    Form(
        name="messages_system",
        kind="prompts",
        needs={"messages": "talk", "system": "text"},
        fields={"messages": Turns(system="system", whole="messages"), "answer": "answer"},
    ),
    Form(
        name="verl",
        kind="prompts",
        needs={"prompt": "talk", "reward_model.ground_truth": "any"},
        fields={"messages": Turns(user=("prompt",)), "answer": "reward_model.ground_truth"},
    ),
    Form(
        name="skyrl",
        kind="prompts",
        needs={"prompt": "talk", "reward_spec.ground_truth": "any"},
        fields={"messages": Turns(user=("prompt",)), "answer": "reward_spec.ground_truth"},
    ),
    Form(
        name="prompt_only",
        kind="prompts",
        needs={"prompt": "talk"},
        fields={"messages": Turns(system="system", user=("prompt",)), "answer": ANSWERS},
        excludes=("reward_model.ground_truth", "reward_spec.ground_truth", "chosen"),
    ),
    Form(
        name="openrlhf",
        kind="prompts",
        needs={"input": "talk"},
        fields={"messages": Turns(system="system", user=("input",)), "answer": ANSWERS},
        excludes=("instruction", "prompt", "chosen", ASKS),
    ),
    Form(
        name="question_answer",
        kind="prompts",
        needs={ASKS: "text"},
        fields={"messages": _ASKED, "answer": ANSWERS},
        excludes=("chosen",),
    ),
    Form(
        name="alpaca",
        kind="prompts",
        needs={"instruction": "text"},
        fields={"messages": Turns(system="system", history="history", user=_INSTRUCTION), "answer": ANSWERS},
        excludes=("chosen",),
    ),
    Form(
        name="sharegpt",
        kind="prompts",
        needs={f"{_CHATS}|messages": "turns"},
        fields={"messages": Turns(system="system", whole=f"{_CHATS}|messages"), "answer": ANSWERS},
        excludes=("chosen",),
    ),
)
"""Forms that are recognised. A data set must fit exactly one form of its kind of row."""


ORIGINS = {
    OURS: "OpenAI, TRL, axolotl, LLaMA-Factory",
    "messages_system": "Anthropic's API",
    "prompt_completion": "TRL, OpenAI",
    "preference": "TRL, UltraFeedback, OpenRLHF",
    "prompt_only": "TRL, slime",
    "openai_dpo": "OpenAI",
    "verl": "verl",
    "skyrl": "SkyRL",
    "openrlhf": "OpenRLHF, Nemotron",
    "question_answer": "GSM8K, NuminaMath, Orca, ms-swift, verifiers",
    "alpaca": "Alpaca, Dolly, LLaMA-Factory",
    "sharegpt": "ShareGPT, LLaVA, axolotl, LLaMA-Factory",
    "kto_tag": "LLaMA-Factory",
    "turn_pairs": "The Cauldron, Capybara",
    "segments": "axolotl (template-free)",
    "text": "plain text",
    "tokens": "axolotl (tokenised)",
    "stepwise": "TRL",
    "hh_rlhf": "HH-RLHF",
}
"""Libraries and data sets that have rows of a form, for the documentation."""


def list_names(kind: RowKind | None = None) -> list[str]:
    """Return the names of the forms, in the order of the table; of one kind of row, if it is given."""
    return list(dict.fromkeys(form.name for form in FORMS if kind in (None, form.kind)))
