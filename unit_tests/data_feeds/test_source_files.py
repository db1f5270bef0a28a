"""Kinds of files that rows are read from, and images in the rows of other forms."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from configs.data_schema import PromptDataConfig, RowDataConfig, SourceConfig
from core.errors import UserError
from data_feeds.chat.demonstrations import make_demonstration
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups, load_prompts
from data_feeds.rows.episodes import Sampling
from data_feeds.rows.read_files import read_rows
from unit_tests.helpers.image_models import draw, draw_image, save_idefics, say, to_bytes

ROWS = [{"question": f"{n}+1=", "answer": n + 1} for n in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
ONE = to_bytes(draw_image())
ASKED = "How many?"


def write_arrow(path: Path, rows: list[dict[str, Any]], *, stream: bool) -> None:
    table = pa.Table.from_pylist(rows)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a list.json", json.dumps(ROWS)),
        ("splits.json", json.dumps({"train": ROWS, "test": []}, indent=1)),
        ("lines.json", LINES),
        ("file.arrow", None),
        ("file.feather", None),
        ("stream.arrow", None),
    ],
)
def test_a_file_of_another_kind_holds_the_same_rows(name, text, tmp_path):
    path = tmp_path / name
    if text is None:
        write_arrow(path, ROWS, stream=name == "stream.arrow")
    else:
        path.write_text(text)
    assert read_rows(SourceConfig(path=str(path)), "data.train") == ROWS


BROKEN = {
    "object.json": ('{"a": 1}', "holds an object with the keys a: set split to one with a list of rows"),
    "number.json": ("3", "must hold a list of rows, found 3"),
    "list.json": ("[{}, 3]", "row 1 is not a JSON object, found 3"),
    "x.arrow": ("words", "cannot be read as Arrow"),
    "x.txt": ("words", r"must end in .parquet, .jsonl or .csv, .json or .arrow"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_not_of_its_kind_gets_one_sentence(name, tmp_path):
    text, words = BROKEN[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        read_rows(SourceConfig(path=str(tmp_path / name)), f"data.train={name}")


def test_a_column_of_text_in_arrow_that_is_not_utf_8_is_told(tmp_path):
    data = pa.array([b"a", b"\xff"], pa.binary()).buffers()
    table = pa.table({"question": pa.Array.from_buffers(pa.string(), 2, data)})
    with pa.ipc.new_file(f"{tmp_path}/x.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UserError) as refused:
        read_rows(SourceConfig(path=f"{tmp_path}/x.arrow"), "k")
    assert str(refused.value) == "k: a column of text holds bytes that are not UTF-8: write the file again"


def test_a_file_of_parquet_that_cannot_be_read_is_told_with_the_reason(tmp_path):
    # a file that even root cannot read from its start, where no memory is
    (tmp_path / "x.parquet").symlink_to("/proc/self/mem")
    with pytest.raises(UserError) as refused:
        read_rows(SourceConfig(path=f"{tmp_path}/x.parquet"), "k")
    assert str(refused.value) == "k cannot be read: [Errno 5] Input/output error"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> ChatTokenizer:
    return ChatTokenizer(save_idefics(tmp_path_factory.mktemp("idefics")), "chat")


LLAVA = [{"from": "human", "value": f"<image>\n{ASKED}"}, {"from": "gpt", "value": "3"}]
PARTS = [{"type": "image", "index": 0, "text": None}, {"type": "text", "index": None, "text": ASKED}]
SHOWN = {"bytes": ONE, "path": None}
SEEN: dict[str, tuple[str, dict[str, Any], str]] = {
    # name: (kind of row, a row, the form)
    "LLaVA, a path": ("conversations", {"image": "one.png", "conversations": LLAVA}, "sharegpt"),
    "LLaMA-Factory": (
        "conversations",
        {"messages": [{"role": "user", "content": f"<image>{ASKED}"}, {"role": "assistant", "content": "3"}],
         "images": ["one.png"]},
        "ours",
    ),
    "vsft": (
        "conversations",
        {"messages": [{"role": "user", "content": PARTS},
                      {"role": "assistant", "content": [{"type": "text", "index": None, "text": "3"}]}],
         "images": [SHOWN]},
        "ours",
    ),
    "The Cauldron": ("conversations", {"images": [SHOWN], "texts": [{"user": ASKED, "assistant": "3"}]}, "turn_pairs"),
    "TRL": ("conversations", {"images": [SHOWN], "prompt": ASKED, "completion": "3"}, "prompt_completion"),
    "verl": (
        "prompts",
        {"prompt": [{"role": "user", "content": f"<image>{ASKED}"}], "images": [SHOWN],
         "reward_model": {"ground_truth": "3"}},
        "verl",
    ),
    "problem": ("prompts", {"images": [SHOWN], "problem": f"<image>{ASKED}", "answer": "3"}, "question_answer"),
    "a data URI": (
        "prompts",
        {"image": "data:image/png;base64," + base64.b64encode(ONE).decode(), "question": ASKED, "answer": "3"},
        "question_answer",
    ),
}  # fmt: skip


def load(chat: ChatTokenizer, path: Path, kind: Any) -> Any:
    if kind == "prompts":
        data = PromptDataConfig(train=str(path), max_prompt_tokens=300, max_invalid_fraction=0)
        return load_prompts(data, "train", chat, seed=0)
    return load_groups(RowDataConfig(train=str(path), max_invalid_fraction=0), "train", chat, rows=kind, seed=0)


@pytest.mark.parametrize("name", SEEN)
def test_images_of_other_forms_are_where_their_marks_are(name, seeing, tmp_path):
    kind, row, form = SEEN[name]
    (tmp_path / "one.png").write_bytes(ONE)
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    feed = load(seeing, path, kind)
    [item] = feed.all()
    prompt = item if kind == "prompts" else item[0].prompt
    assert feed.sources[0].form == form
    text = f"\n{ASKED}" if name.startswith("LLaVA") else ASKED
    assert prompt.messages[0] == say("user", draw(), text)
    if kind == "prompts":
        assert prompt.answer == "3"


def test_images_of_pil_are_those_that_datasets_saved(seeing, tmp_path):
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    features = Features({"images": List(ImageFeature()), "question": Value("string"), "answer": Value("string")})
    image = Image.open(BytesIO(ONE))
    rows = [{"images": [image], "question": ASKED, "answer": "3"}]
    Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    [prompt] = load(seeing, tmp_path / "saved", "prompts").all()
    [part, _] = prompt.messages[0]["parts"]
    assert part["image"].width == image.width and prompt.answer == "3"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"images": [SHOWN], "question": f"<image><image>{ASKED}"}, "2 marks <image> in messages: write one for each"),
        ({"images": [SHOWN, SHOWN], "messages": [{"role": "user", "content": [PARTS[0] | {"index": 1}, PARTS[1]]}]},
         r"parts of messages are of the images \[1\]: write them in order"),
    ],
    ids=["marks", "order"],
)  # fmt: skip
def test_marks_that_do_not_fit_the_images_are_invalid(row, words, seeing, tmp_path):
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=words):
        load(seeing, tmp_path / "x.parquet", "prompts")


def test_a_prompt_with_an_image_has_demonstrations_but_no_episodes(seeing, tmp_path):
    asked = [{"role": "user", "content": PARTS}]
    rows = [
        {"messages": asked, "images": [SHOWN], "demonstration": "3", "episodes": None},
        {"messages": asked, "images": [SHOWN], "demonstration": None, "episodes": [{"completion": "3"}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    data = PromptDataConfig(train=f"{tmp_path}/x.parquet", max_prompt_tokens=300, max_invalid_fraction=1.0)
    feed = load_prompts(data, "train", seeing, seed=0, sampling=Sampling(max_new_tokens=20))
    [prompt] = feed.all()
    assert {reason: case.why for reason, case in feed.sources[0].invalid.cases.items()} == {
        "bad_episode": "it has images, and recorded episodes are read of text alone"
    }
    made = make_demonstration(seeing, prompt)
    [place] = made.images
    assert place.begin > 0 and [part["type"] for part in prompt.messages[0]["parts"]] == ["image", "text"]
    assert seeing.hf.decode(made.token_ids[made.action_mask]) == "3<|end|>"
