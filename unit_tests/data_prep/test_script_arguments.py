"""What the words of a command line are to a script: defaults, what the hub is asked for, and how rows are made."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from core.errors import RunStopped, UserError
from data_feeds.rows.invalid_rows import InvalidRows
from data_prep import arithmetic, math_sets, regroup, script
from data_prep.rows import Row, write_rows

PARSE = argparse.ArgumentParser.parse_args
LAST_IN_A_BOX = "Let's think step by step and output the final answer within \\boxed{{}}."
OUT: Any = {"out": Path("x.jsonl")}
FOLDER: Any = {"out": Path("x")}
CONVERTED = OUT | {"limit": None}


def drawn(train: int, held_out: int, **more: Any) -> dict[str, Any]:
    return FOLDER | {"train": train, "held_out": held_out, "sft": 0, "seed": 0} | more


def form(question: str, more: str) -> str:
    return f"{{{question}}}\n{more}"


DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    # script: (the least that it wants, its options then)
    "add_tokens": ("--model m --out x", FOLDER | {"model": "m", "tokens": [], "special": []}),
    "arithmetic": (
        "--out x",
        drawn(1000, 200, jsonl=False, ops="+", max=99, padded=False, copies=1, pairs=0, wrong_share=0.0)
        | {"prompt_form": "{a}{op}{b}="},
    ),
    "boxed_tasks": ("--out x", FOLDER),
    "chartqa": (
        "--out x.jsonl",
        CONVERTED
        | {"split": "train", "files": [], "sft": False}
        | {"prompt_form": form("question", "Answer with a number or a few words.")},
    ),
    "chats": ("--out x.jsonl --hub a/b", CONVERTED | {"hub": "a/b", "source": None, "split": "train"}),
    "code_tasks": ("--out x", drawn(300, 100, jsonl=False, steps=2, copies=1, wrong_share=0.0)),
    "deepscaler": ("--out x.jsonl", CONVERTED | {"files": [], "prompt_form": math_sets.PROMPT_FORM}),
    "distill": ("--out x.jsonl --config c --model m", OUT | {"config": "c", "model": "m", "top": 16}),
    "dolci": ("--out x.jsonl", CONVERTED | {"files": [], "verifier": "math"}),
    "function_calls": ("--out x", drawn(400, 200, wrong_share=0.0)),
    "gsm8k": (
        "--out x.jsonl --split test",
        CONVERTED
        | {"split": "test", "source": None, "sft": False}
        | {"prompt_form": form("question", 'Think step by step, then give the final number after "####".')},
    ),
    "harbor": ("--out x.jsonl --tasks t", CONVERTED | {"tasks": Path("t"), "image": "", "network": False}),
    "healthbench": ("--out x.jsonl", CONVERTED | {"files": []}),
    "hh_rlhf": (
        "--out x.jsonl --split train",
        CONVERTED | {"split": "train", "subset": "harmless-base", "source": None},
    ),
    "math_sets": (
        "minerva --out x.jsonl",
        CONVERTED | {"name": "minerva", "files": []} | {"prompt_form": form("problem", LAST_IN_A_BOX)},
    ),
    "mathvista": (
        "--out x.jsonl",
        CONVERTED | {"files": [], "prompt_form": form("query", "Put the answer in \\boxed{{}}.")},
    ),
    "mm_math": (
        "--out x.jsonl --from f --images i",
        CONVERTED | {"source": Path("f"), "images": Path("i")} | {"prompt_form": math_sets.PROMPT_FORM},
    ),
    "rar": ("--out x.jsonl", CONVERTED | {"files": [], "subject": "Science", "prompt_form": "{question}"}),
    "reach": ("--out x", drawn(2000, 200, by_chance=0.0)),
    "regroup": ("a.parquet --out x", FOLDER | {"source": Path("a.parquet"), "rows": 1000}),
    "smollm2": ("--out x", FOLDER | {"tools": False}),
    "tiny_model": (
        "--out x",
        FOLDER | {"hidden_size": 64, "layers": 2, "heads": 2, "max_length": 256, "seed": 0, "tools": False},
    ),
    "tiny_vision_model": (
        "--out x",
        FOLDER
        | {"hidden_size": 64, "layers": 2, "vision_layers": 2, "side": 56, "patch": 14}
        | {"max_length": 256, "action_tokens": 0, "seed": 0},
    ),
    "treasure": ("--out x", drawn(60, 60, by_chance=0.6)),
    "verifiers": ("--out x.jsonl --env e --python p", CONVERTED | {"env": "e", "python": "p"}),
    "visual": (
        "--out x",
        drawn(1000, 200, jsonl=False, tasks=("count",), pairs=0, wrong_share=0.0, images="own", side=56),
    ),
    "xlam": ("--out x.jsonl", CONVERTED | {"source": None, "sft": False}),
}


class Told(Exception):
    """The options of a script, whose work is not to begin."""


def read_options(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def tell(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> None:
        raise Told(vars(PARSE(parser, argv)))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", tell)
    monkeypatch.setattr(sys, "argv", ["x", *words])
    with pytest.raises(Told) as told:
        importlib.import_module(f"data_prep.{name}").main()
    return told.value.args[0]


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_script_has_these_options_unless_it_is_told_others(name, monkeypatch):
    words, options = DEFAULTS[name]
    assert read_options(name, words.split(), monkeypatch) == options


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_a_script_cannot_do_without_is_asked_for(name, monkeypatch, capsys):
    words = DEFAULTS[name][0].split()
    for at in [i for i, word in enumerate(words) if word.startswith("--")]:
        with pytest.raises(SystemExit):
            read_options(name, words[:at] + words[at + 2 :], monkeypatch)
        said = capsys.readouterr().err.rpartition("error: ")[2]
        assert words[at] in said and "required" in said


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("arithmetic --max --pairs --train --eval --sft", "-1"),
        ("arithmetic --copies", "0"),
        ("code_tasks --steps --copies", "0"),
        ("distill --top", "0"),
        ("function_calls --train --eval --sft", "-1"),
        ("reach --train --eval", "0"),
        ("reasoning_gym --size --limit", "0"),
        ("regroup --rows", "0"),
        ("tiny_model --hidden-size --layers --heads --max-length", "0"),
        ("tiny_vision_model --hidden-size --layers --vision-layers --side --patch --max-length", "0"),
        ("tiny_vision_model --action-tokens", "-1"),
        ("treasure --train --eval", "0"),
        ("visual --pairs", "-1"),
    ],
)
def test_a_number_of_a_script_has_a_lowest_value(words, refused, monkeypatch, capsys):
    name, *options = words.split()
    least, _ = DEFAULTS.get(name, ("--out x.jsonl --set s", {}))
    for option in options:
        lowest = int(refused) + 1
        for text in (refused, "many", f"{lowest}.5"):
            with pytest.raises(SystemExit):
                read_options(name, [*least.split(), option, text], monkeypatch)
            assert f"argument {option}: give a whole number from {lowest} on, found" in capsys.readouterr().err
        found = read_options(name, [*least.split(), option, str(lowest)], monkeypatch)
        assert lowest in found.values()


FORM = "{question}!"
FROM_THE_HUB: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    # script: (its options, data set and split, other arguments, how the rows are made)
    "chartqa": (
        f"--split val --sft --prompt-form {FORM}",
        ("HuggingFaceM4/ChartQA", "val"),
        {},
        {"split": "val", "sft": True, "prompt_form": FORM},
    ),
    "chats": ("--hub a/b --split x", ("a/b", "x"), {}, {"name": "a/b", "fills_gaps": True}),
    "deepscaler": (
        "--prompt-form {problem}!",
        ("agentica-org/DeepScaleR-Preview-Dataset", "train"),
        {},
        {"prompt_form": "{problem}!"},
    ),
    "dolci": (
        "--verifier general-quality_ref",
        ("allenai/Dolci-Instruct-RL", "train"),
        {},
        {"verifier": "general-quality_ref"},
    ),
    "gsm8k": (
        f"--split test --sft --prompt-form {FORM}",
        ("openai/gsm8k", "test"),
        {"name": "main"},
        {"split": "test", "sft": True, "prompt_form": FORM},
    ),
    "healthbench": ("", ("openai/healthbench", "test"), {}, {}),
    "hh_rlhf": ("--split train --subset x", ("Anthropic/hh-rlhf", "train"), {"data_dir": "x"}, {"split": "train"}),
    "math_sets": (
        "olympiadbench --prompt-form {problem}!",
        ("Hothan/OlympiadBench", "train"),
        {"name": "OE_TO_maths_en_COMP"},
        {"prompt_form": "{problem}!"},
    ),
    "mathvista": ("--prompt-form {query}!", ("AI4Math/MathVista", "testmini"), {}, {"prompt_form": "{query}!"}),
    "rar": (
        f"--subject Medicine --prompt-form {FORM}",
        ("anisha2102/RaR-Medicine", "train"),
        {},
        {"subject": "Medicine", "prompt_form": FORM},
    ),
    "xlam": ("--sft", ("Salesforce/xlam-function-calling-60k", "train"), {}, {"sft": True}),
}


@pytest.mark.parametrize("name", FROM_THE_HUB)
def test_rows_of_the_hub_are_asked_for_and_made_as_the_options_say(name, tmp_path: Path, monkeypatch):
    words, asked, arguments, options = FROM_THE_HUB[name]
    module = importlib.import_module(f"data_prep.{name}")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def read_hub(*given: str, **more: Any) -> list[Any]:
        calls.append((given, more))
        return [{}]

    def make(records: Any, *given: Any, **more: Any) -> tuple[list[Row], InvalidRows]:
        calls.append((records, more))
        return [Row(id=one, messages=[{"role": "user", "content": "q"}], answer="1") for one in "abc"], InvalidRows()

    monkeypatch.setattr(module, "read_hub", read_hub)
    monkeypatch.setattr(module, "make", make)
    out = tmp_path / "x.jsonl"
    module.main([*words.split(), "--out", str(out), "--limit", "2"])
    records = {"preview": [{}]} if name == "deepscaler" else [{}]
    assert calls == [(asked, arguments), (records, options)] and len(out.read_text().splitlines()) == 2


def test_problem_sets_are_where_their_authors_put_them(monkeypatch):
    """Most are configurations without a name, of which a set has one."""
    asked: list[tuple[Any, ...]] = []

    def read_hub(*given: str, **more: Any) -> list[Any]:
        asked.append((*given, more))
        return []

    monkeypatch.setattr(math_sets, "read_hub", read_hub)
    for name in math_sets.SETS:
        math_sets.read(name, [])
    splits = {hub.rpartition("/")[2]: split for hub, split, _ in asked}
    tested = {"MATH-500", "amc23", "minervamath", "AMO-Bench"}
    assert {hub for hub, split in splits.items() if split == "test"} == tested
    assert {split for hub, split in splits.items() if hub not in tested} == {"train"}
    assert [more for *_, more in asked if more] == [{"name": "OE_TO_maths_en_COMP"}]
    assert all(hub.count("/") == 1 for hub, *_ in asked) and len(splits) == len(math_sets.SETS)


@pytest.mark.parametrize("ops", ["", "x", "+/", "++"])
def test_operations_of_arithmetic_are_of_three_each_once(ops, capsys):
    with pytest.raises(SystemExit):
        arithmetic.main(["--out", "nowhere", "--ops", ops])
    assert f"--ops {ops!r}: give some of + - *, each once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{a}{op}{b}", None),
        ("{a} is what?", None),
        ("{{a}}", "'{{a}}' has no place to fill: write {a} into it"),
        ("{a} {c}", "the places to fill are {a}, {op} and {b}, found '{a} {c}'"),
        ("{0}", "the places to fill are {a}, {op} and {b}, found '{0}'"),
        ("{a", "the places to fill are {a}, {op} and {b}, found '{a'"),
        ("{a.x}", "the places to fill are {a}, {op} and {b}, found '{a.x}'"),
        ("plain", "'plain' has no place to fill: write {a} into it"),
    ],
)
def test_the_form_of_a_prompt_has_its_places_alone(text, said):
    parse = script.form_of("a", "op", "b")
    if said is None:
        assert parse(text) == text
        return
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        parse(text)
    assert str(refused.value) == said


def test_rows_are_regrouped_into_another_file(tmp_path: Path, monkeypatch, capsys):
    source, out = tmp_path / "rows.parquet", tmp_path / "new" / "rows.parquet"
    write_rows(source, [Row(id=str(i), messages=[{"role": "user", "content": "q"}], answer="1") for i in range(5)])
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["x", str(source), "--out", str(out), "--rows", "2"])
    regroup.main()
    assert capsys.readouterr().out == f"{out}: 5 rows in groups of 2\n"
    assert pq.ParquetFile(out).metadata.num_row_groups == 3
    monkeypatch.setattr(sys, "argv", ["x", str(source), "--out", f"{tmp_path}/new/../rows.parquet"])
    with pytest.raises(UserError, match=r"^--out is the file that is read: name another$"):
        regroup.main()


def test_what_stops_a_script_is_one_sentence(capsys):
    def stop() -> None:
        raise RunStopped("the rows have no end")

    with pytest.raises(SystemExit) as ended:
        script.run_script(stop)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: the rows have no end\n"


def test_words_that_are_not_utf_8_are_refused_before_a_script_begins(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--tokens", "é", "a\udcff"])
    with pytest.raises(SystemExit) as ended:
        script.run_script(lambda: pytest.fail("it began"))
    assert ended.value.code == 2
    said = r"error: the command line holds bytes that are not UTF-8, in 'a\udcff': write it in UTF-8"
    assert capsys.readouterr().err == f"{said}\n"
