"""Records that no script can use: why each is refused, in a sentence."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data_feeds.rows.invalid_rows import InvalidRows
from data_prep import (
    chartqa,
    chats,
    deepscaler,
    dolci,
    gsm8k,
    healthbench,
    hh_rlhf,
    math_sets,
    mathvista,
    mm_math,
    rar,
    xlam,
)
from data_prep.images import make_reader
from data_prep.rows import Row, read_records
from unit_tests.helpers.image_models import draw_image, to_bytes
from unit_tests.helpers.sentences import tell

Make = Callable[[list[dict[str, Any]]], tuple[list[Row], InvalidRows]]
HUMAN, ASSISTANT = "\n\nHuman: Hi", "\n\nAssistant:"
WHOLE = {"chosen": f"{HUMAN}{ASSISTANT} A", "rejected": f"{HUMAN}{ASSISTANT} B"}
USER, REPLY = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
PROMPT = {"dataset": ["math"], "ground_truth": ["5"], "prompt": "user: A?"}
CHART = {"query": "q", "image": {"bytes": to_bytes(draw_image(8, 8))}, "label": ["1"]}
QUESTION = {"query": "q", "decoded_image": CHART["image"], "answer": "1.5", "answer_type": "float", "precision": 1.0}
TRIANGLE = {"question": "q", "solution": "\\boxed{1}", "file_name": "x.png"}
CALLED = {"query": "q", "tools": "[]", "answers": "[]"}
TURNS = "its source_prompt ends with no turn of the user's, or one is empty"
SEEN = {"prompt": [USER], "chosen": "a", "rejected": "b"}
ASKED_AGAIN = [REPLY, {"role": "user", "content": [{"type": "image", "image": CHART["image"]}]}, REPLY]
TO_THE_PROMPT = "which belongs to the prompt"
UNKNOWN = "it has no answer, or an unknown answer_type {!r}: use the rows of testmini"

SCRIPTS: dict[str, Make] = {
    "hh_rlhf": partial(hh_rlhf.make, split="t"),
    "dolci": partial(dolci.make, verifier="math"),
    "chats": partial(chats.make, name="t"),
    "chartqa": lambda records: chartqa.make(records, make_reader(), split="t"),
    "mathvista": lambda records: mathvista.make(records, make_reader()),
    "mm_math": lambda records: mm_math.make(records, make_reader()),
    "xlam": xlam.make,
    "healthbench": healthbench.make,
    "rar": rar.make,
    "gsm8k": partial(gsm8k.make, split="t"),
    "deepscaler": lambda records: deepscaler.make({"t": records}),
    "amo_bench": partial(math_sets.make, name="amo_bench"),
}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("hh_rlhf", {"chosen": f"{ASSISTANT} A", "rejected": f"{ASSISTANT} B"}, "empty", "nothing comes before the reply"),
    (
        "hh_rlhf",
        WHOLE | {"chosen": f"x{HUMAN}{ASSISTANT} A"},
        "bad_messages",
        f"chosen does not begin with a turn of Human or Assistant: {f'x{HUMAN}{ASSISTANT} A'!r}",
    ),
    ("hh_rlhf", WHOLE | {"rejected": HUMAN}, "no_reply", "rejected does not end in a turn of Assistant"),
    ("hh_rlhf", WHOLE | {"rejected": HUMAN + ASSISTANT}, "empty", "the last reply of rejected is empty"),
    (
        "hh_rlhf",
        WHOLE | {"rejected": f"\n\nHuman: Ho{ASSISTANT} A"},
        "not_one_prompt",
        "the two conversations part before their last turn",
    ),
    ("hh_rlhf", WHOLE | {"rejected": WHOLE["chosen"] + " "}, "same_reply", "chosen and rejected are the same"),
    ("hh_rlhf", {"chosen": WHOLE["chosen"], "rejected": 3}, "missing_column", "it has no rejected"),
    *(
        ("dolci", PROMPT | {"source_prompt": turns}, "bad_messages", TURNS)
        for turns in (
            [USER, REPLY],
            [USER | {"role": "tool"}, USER],
            [USER, USER | {"content": ""}],
            [REPLY | {"content": ""}, USER],
        )
    ),
    ("dolci", PROMPT | {"source_prompt": "x"}, "bad_messages", "its source_prompt is not a list of turns"),
    ("dolci", PROMPT | {"source_prompt": [USER, "x"]}, "bad_messages", "its source_prompt is not a list of turns"),
    ("dolci", PROMPT | {"prompt": "user: "}, "missing_column", "it has neither prompt nor source_prompt"),
    ("dolci", PROMPT | {"prompt": None}, "missing_column", "it has neither prompt nor source_prompt"),
    (
        "dolci",
        PROMPT | {"prompt": "user: A?\nassistant: B"},
        "bad_messages",
        "its prompt has several turns, and no source_prompt",
    ),
    *(
        ("dolci", PROMPT | {"ground_truth": given}, "bad_answer", f"ground_truth must hold one text, found {given!r}")
        for given in (None, [], [" "], [5], ["5", "6"])
    ),
    ("chats", {"a": 1, "b": 2}, "missing_column", "no form fits the columns a, b"),
    (
        "chats",
        {"prompt": [USER], "chosen": [USER | {"content": "z"}, REPLY], "rejected": [USER | {"content": "z"}, USER]},
        "not_one_prompt",
        "chosen is neither a reply nor a conversation that begins with the prompt",
    ),
    *(
        ("chats", SEEN | {column: ASKED_AGAIN}, "bad_image", f"{column} holds an image of its own, {TO_THE_PROMPT}")
        for column in ("chosen", "rejected")
    ),
    (
        "chats",
        {"prompt": "q", "completion": "a", "day": date(2026, 1, 1)},
        "bad_extra",
        "another column cannot be written as JSON: Object of type date is not JSON serializable",
    ),
    ("chartqa", CHART | {"query": " "}, "missing_column", "it has no query"),
    ("chartqa", CHART | {"image": None}, "missing_column", "it has no image"),
    *(
        ("chartqa", CHART | {"label": given}, "bad_answer", f"label must hold one answer, found {given!r}")
        for given in (None, [], [" "], ["a", "b"])
    ),
    ("mathvista", QUESTION | {"query": " "}, "missing_column", "it has no query"),
    ("mathvista", QUESTION | {"decoded_image": None}, "missing_column", "it has no decoded_image"),
    ("mathvista", QUESTION | {"answer": None}, "bad_answer", UNKNOWN.format("float")),
    ("mathvista", QUESTION | {"answer_type": "x"}, "bad_answer", UNKNOWN.format("x")),
    *(
        (
            "mathvista",
            QUESTION | {"question_type": "multi_choice", "choices": given},
            "bad_answer",
            "its answer '1.5' is none of its choices",
        )
        for given in (None, [], ["1"])
    ),
    (
        "mathvista",
        QUESTION | {"precision": None},
        "missing_column",
        "its answer_type is float, and it has no precision",
    ),
    ("mm_math", TRIANGLE | {"question": " "}, "missing_column", "it has no question"),
    ("mm_math", TRIANGLE | {"solution": None}, "missing_column", "it has no solution"),
    ("mm_math", TRIANGLE | {"file_name": ""}, "missing_column", "it has no file_name"),
    ("mm_math", TRIANGLE | {"solution": "\\boxed{ }"}, "bad_answer", "its solution has no \\boxed{} with an answer"),
    ("xlam", CALLED | {"query": " "}, "missing_column", "it has no query"),
    ("xlam", CALLED | {"tools": [3]}, "bad_tools", "a tool must be {name, description, parameters}, found 3"),
    (
        "xlam",
        CALLED | {"tools": [{"name": "f", "parameters": {"a": 3}}]},
        "bad_tools",
        "a parameter must be {type, description}, found 3",
    ),
    *(
        ("xlam", CALLED | {"answers": [given]}, "bad_answer", f"an answer must be {{name, arguments}}, found {given!r}")
        for given in (3, {"name": "f"}, {"arguments": {}}, {"name": "f", "arguments": []})
    ),
    ("healthbench", {"prompt": []}, "missing_column", 'it must have "prompt", a list of messages'),
    *(
        (
            "healthbench",
            {"prompt": [given]},
            "bad_messages",
            f"a message must have the texts role and content, found {given!r}",
        )
        for given in ("?", {"role": "user"})
    ),
    ("rar", {"question": " "}, "missing_column", "it has no question"),
    ("gsm8k", {"question": "q"}, "missing_column", 'it must have the texts "question" and "answer"'),
    ("gsm8k", {"answer": "#### 1"}, "missing_column", 'it must have the texts "question" and "answer"'),
    ("gsm8k", {"question": "q", "answer": "3"}, "bad_answer", "the answer '3' has no \"####\" before its number"),
    ("deepscaler", {"answer": "1"}, "missing_column", "it has no problem"),
    ("deepscaler", {"problem": "p"}, "missing_column", "it has no answer"),
    ("amo_bench", {"prompt": " "}, "missing_column", "it has no prompt"),
    ("amo_bench", {"prompt": "p", "answer": []}, "missing_column", "it has no answer"),
    (
        "amo_bench",
        {"prompt": "p", "answer": "all", "answer_type": "description"},
        "bad_answer",
        "its answer is prose (answer_type description), which only a judge can compare",
    ),
]


@pytest.mark.parametrize(
    ("script", "record", "reason", "why"), REFUSED, ids=[f"{one[0]}: {one[3][:50]}" for one in REFUSED]
)
def test_a_record_that_a_script_cannot_use_is_refused_with_the_reason(script, record, reason, why):
    rows, invalid = SCRIPTS[script]([record])
    found = {name: (case.rows, case.why) for name, case in invalid.cases.items()}
    assert (rows, found) == ([], {reason: (1, why)})


def test_a_reply_of_several_turns_is_written_as_json_with_its_calls():
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "é"},
    ]
    [row], _ = chats.make([{"prompt": [USER], "chosen": [USER, *turns], "rejected": [USER, REPLY]}], name="t")
    assert row.rejected == "y"
    assert row.chosen == (
        '[{"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", '
        '"function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]}, '
        '{"role": "tool", "content": "3", "tool_call_id": "call00000"}, {"role": "assistant", "content": "é"}]'
    )


def test_a_file_that_is_no_whole_gzip_is_refused(tmp_path: Path):
    file, whole = tmp_path / "x.jsonl.gz", gzip.compress(b'{"a": 1}\n')
    file.write_bytes(whole)
    assert read_records(file) == [{"a": 1}]
    # not compressed, cut off, and with a byte that no compressed block begins with
    for content in (b'{"a": 1}\n', whole[:-9], whole[:10] + b"\xff" + whole[11:]):
        file.write_bytes(content)
        said = tell(lambda: read_records(file))
        assert said.startswith(f"--from {file} is no whole gzip file: ") and said.endswith("; download it again")
