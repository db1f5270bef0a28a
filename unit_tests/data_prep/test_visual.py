"""The generated visual tasks, and the tiny model that sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from core.types.messages import find_images
from data_prep import drawings, tiny_vision_model, visual
from data_prep.drawings import COLOURS, COLUMNS, ROWS, TASKS

ALL = tuple(TASKS)
ROOT = Path(__file__).parents[2]


def rows_of(tasks=ALL, **sizes):
    return visual.make(**{"tasks": tasks, "train": 0, "held_out": 0} | sizes)


def image_of(row):
    [image] = find_images(row.messages)
    return image


def look(row) -> dict[str, np.ndarray]:
    """Where each colour is, for the colours that there are."""
    pixels = np.asarray(image_of(row).open())
    masks = {name: (pixels == colour).all(-1) for name, colour in COLOURS.items()}
    return {name: mask for name, mask in masks.items() if mask.any()}


def count_patches(mask: np.ndarray) -> int:
    """How many connected areas there are."""
    left = set(map(tuple, np.argwhere(mask)))
    found = 0
    while left:
        found, todo = found + 1, [left.pop()]
        while todo:
            y, x = todo.pop()
            near = {(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= near
            todo += near
    return found


def test_no_two_images_are_alike_and_eval_depends_on_the_seed_alone():
    rows = rows_of(train=100, held_out=50, sft=40, pairs=30)
    hashes = [image_of(row).hash for split in rows.values() for row in split]
    assert len(set(hashes)) == 220
    assert rows_of(held_out=50, train=3)["eval"] == rows["eval"] != rows_of(held_out=50, seed=1)["eval"]
    for row in rows["eval"] + rows["train"]:
        task = TASKS[json.loads(row.extra)["task"]]
        assert row.messages[0]["content"] == task.question and row.answer in task.answers


def test_where_there_are_not_so_many_images_it_is_said(monkeypatch):
    monkeypatch.setattr(drawings, "BARS_END", 4)  # four bars of four heights: 576 images
    assert len(rows_of(("bars",), train=12)["train"]) == 12
    with pytest.raises(ValueError, match="100 of bars are not new: ask for fewer"):
        rows_of(("bars",), train=577)


def test_the_shapes_are_as_many_and_as_coloured_as_the_answer_says():
    for row in rows_of(("count",), held_out=60)["eval"]:
        [(colour, mask)] = look(row).items()
        assert f"{count_patches(mask)} {colour}" == row.answer


def test_the_circle_has_the_colour_that_the_answer_says():
    for row in rows_of(("colour",), held_out=30)["eval"]:
        filled = {}
        for colour, mask in look(row).items():
            ys, xs = np.nonzero(mask)
            filled[colour] = mask.sum() / np.ptp(ys) / np.ptp(xs)
        by_share = sorted(filled, key=filled.__getitem__)
        assert len(by_share) == 3 and by_share[1] == row.answer, "a triangle fills less of its box, a square more"


def test_the_shape_is_where_the_answer_says():
    for row in rows_of(("position",), held_out=30)["eval"]:
        [mask] = look(row).values()
        y, x = np.argwhere(mask).mean(0) / len(mask) * 3
        assert f"{ROWS[int(y)]} {COLUMNS[int(x)]}" == row.answer


def test_the_highest_bar_has_the_colour_that_the_answer_says():
    for row in rows_of(("bars",), held_out=30)["eval"]:
        heights = {colour: mask[:-1].any(1).sum() for colour, mask in look(row).items()}
        assert len(heights) == 4 and max(heights, key=heights.__getitem__) == row.answer


def test_a_number_is_drawn_whole():
    for row in rows_of(("number",), held_out=30)["eval"]:
        ink = np.asarray(image_of(row).open().convert("L")) < 250
        assert ink.sum() > 60 and count_patches(ink) <= 2, "of two digits, each is one piece"


def test_shuffled_images_belong_to_other_rows():
    own, shuffled = rows_of(held_out=50), rows_of(held_out=50, images="shuffled")
    for a, b in zip(own["eval"], shuffled["eval"], strict=True):
        assert (a.answer, a.messages[0]["content"]) == (b.answer, b.messages[0]["content"])
        assert image_of(a) != image_of(b)
    assert {image_of(r).hash for r in own["eval"]} == {image_of(r).hash for r in shuffled["eval"]}
    texts = rows_of(held_out=50, images="none")["eval"]
    assert [r.answer for r in texts] == [r.answer for r in own["eval"]] and not find_images(texts[0].messages)


def test_shuffled_images_come_from_any_row_of_the_task():
    own, shuffled = rows_of(held_out=50), rows_of(held_out=50, images="shuffled")
    place = {image_of(row).hash: i for i, row in enumerate(own["eval"])}
    steps = Counter((place[image_of(row).hash] - i) % 50 for i, row in enumerate(shuffled["eval"]))
    assert {step % len(ALL) for step in steps} == {0}, "tasks alternate"
    assert len(steps) > 5 and 0 not in steps, "near ones and far ones, but never the own"


def test_shuffled_images_depend_on_the_seed_alone(tmp_path: Path):
    """And not on the order of a set of texts, which Python draws anew in every process."""
    command = [sys.executable, "-m", "data_prep.visual", "--jsonl", "--images", "shuffled", "--tasks", ",".join(ALL)]
    for seed in ("1", "2"):
        out = ["--out", str(tmp_path / seed), "--train", "20", "--eval", "0"]
        subprocess.run([*command, *out], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, check=True)
    assert (tmp_path / "1/train.jsonl").read_bytes() == (tmp_path / "2/train.jsonl").read_bytes()


def test_a_careless_teacher_and_what_is_rejected():
    rows = rows_of(("count",), sft=400, pairs=100, wrong_share=0.6)
    right = [row.messages[-1]["content"] == row.answer for row in rows["sft"]]
    assert 0.33 < sum(right) / len(right) < 0.47
    assert all(row.chosen == row.answer != row.rejected in TASKS["count"].answers for row in rows["pairs"])
    assert len(Counter(row.answer for row in rows["sft"])) == len(TASKS["count"].answers)


def test_parquet_and_jsonl_hold_the_same_images(tmp_path: Path):
    common = ["--out", str(tmp_path), "--tasks", "count,number", "--train", "4", "--eval", "0", "--sft", "2"]
    visual.main(common)
    visual.main([*common, "--jsonl"])
    for split in ("train", "sft"):
        packed = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        plain = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        for a, b in zip(packed, plain, strict=True):
            (image, text), (file, said) = a["messages"][0]["content"], b["messages"][0]["content"]
            assert image["image"]["bytes"] == (tmp_path / file["image"]).read_bytes()
            with Image.open(tmp_path / file["image"]) as opened:
                assert opened.format == "PNG" and opened.size == (56, 56)
            assert text["text"] == said["text"] and a["answer"] == b["answer"]
    assert a["messages"][1]["content"][0]["text"] == b["messages"][1]["content"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tasks", "count,chess"], "'chess' is none of count, colour, position, number, bars"),
        (["--wrong-share", "x"], "between 0 and 1, found 'x'"),
        (["--images", "mine"], "invalid choice"),
    ],
)
def test_a_bad_option_is_one_sentence(options, said, capsys):
    with pytest.raises(SystemExit) as ended:
        visual.main(["--out", "nowhere", *options])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_transformers_loads_the_tiny_model_and_its_processor(tmp_path: Path, capsys):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    tiny_vision_model.main(["--out", str(tmp_path / "a")])
    tiny_vision_model.main(["--out", str(tmp_path / "b")])
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    processor = AutoProcessor.from_pretrained(tmp_path / "a")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "a")
    assert len(processor.tokenizer) == model.config.text_config.vocab_size, "the processor adds no token"
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}]
    assert model.config.get_text_config().bos_token_id is None, "a text has no mark at its begin"
    text = processor.apply_chat_template(asked, add_generation_prompt=True)
    assert text == "<|user|><image>how many?<|assistant|>"
    assert processor.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|user|>hi"
    given = processor(text=[text], images=[[Image.new("RGB", (90, 30), "red")]], return_tensors="pt")
    assert (given["input_ids"] == processor.image_token_id).sum() == 4 and given["pixel_values"].shape[-2:] == (56, 56)
    with torch.no_grad():
        assert model(**given).logits.shape == (1, given["input_ids"].shape[1], len(processor.tokenizer))


@pytest.mark.parametrize(("option", "value"), [("--hidden-size", "48"), ("--side", "50")])
def test_a_tiny_model_of_a_shape_that_cannot_be_is_refused(option, value, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tiny_vision_model.main(["--out", str(tmp_path), option, value])
    assert "give a multiple of" in capsys.readouterr().err
