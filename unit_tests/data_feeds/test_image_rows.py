"""Images in rows: from every form in which data sets hold them, into prompts, samples and files; and broken ones."""

import asyncio
import base64
import json
import os
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import main_sl
from analysis.capture.batch_file import read_batch, write_batch
from configs.data_schema import PromptDataConfig, RowDataConfig
from core.errors import UserError
from core.types.images import LARGEST_SIDE
from core.types.messages import describe_messages, find_images
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups, load_prompts
from data_feeds.images.read_images import ImageReader
from data_feeds.rows.invalid_rows import InvalidRow
from data_prep import tiny_vision_model
from driver.evaluation.suites.generations import describe_group
from driver.records.sample_files import make_sample_record
from driver.records.sample_text import write_message
from driver.run_inputs import hash_row
from rewards import resolve_reward
from rewards.rewarder import Rewarder
from rollouts.agents.processes import write_task
from rollouts.agents.task import Task
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.image_models import draw, draw_image, save_idefics, say, to_bytes
from unit_tests.helpers.one_reward import one_reward

TEXT = {"type": "text", "text": "How many?"}
HOLE = {"type": "image"}


@pytest.fixture(scope="module")
def seeing_path(tmp_path_factory) -> str:
    return save_idefics(tmp_path_factory.mktemp("idefics"))


@pytest.fixture(scope="module")
def chat(seeing_path) -> ChatTokenizer:
    return ChatTokenizer(seeing_path, "chat")


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def prompts(chat: ChatTokenizer, path: Any, **settings: Any):
    data = {"max_prompt_tokens": 200, "max_invalid_fraction": 0} | settings
    return load_prompts(PromptDataConfig(train=path, **data), "train", chat, seed=0)


def groups(chat: ChatTokenizer, path: str, kind: Any, **settings: Any):
    data = RowDataConfig(train=path, max_invalid_fraction=0, **settings)
    return load_groups(data, "train", chat, rows=kind, seed=0).all()


ONE = to_bytes(draw_image())
URI = "data:image/png;base64," + base64.b64encode(ONE).decode()
FORMS: dict[str, dict[str, Any]] = {
    "a path": {"image": "one.png"},
    "a path under path": {"path": "sub/../one.png"},
    "a url of a file": {"url": "file://FOLDER/one.png"},
    "a data URI": {"image": URI},
    "a data URI under url": {"url": URI},
    "Hugging Face's Image": {"image": {"bytes": None, "path": "one.png"}},
    "OpenAI's form": {"type": "image_url", "image_url": {"url": URI}},
    "OpenAI's form, a text": {"type": "image_url", "image_url": URI},
    "bytes (Parquet)": {"bytes": ONE},
    "Hugging Face's Image (Parquet)": {"image": {"bytes": ONE, "path": "elsewhere.png"}},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_image_is_read_in_every_form(form, chat, tmp_path):
    (tmp_path / "one.png").write_bytes(ONE)
    (tmp_path / "sub").mkdir()
    given = (
        json.loads(json.dumps(FORMS[form]).replace("FOLDER", str(tmp_path))) if "Parquet" not in form else FORMS[form]
    )
    path = tmp_path / ("rows.parquet" if "Parquet" in form else "rows.jsonl")
    [prompt] = prompts(chat, write(path, [{"messages": user(HOLE | given, TEXT)}])).all()
    assert prompt.messages == [say("user", draw(), "How many?")]
    ids = chat.render(prompt.messages)
    [place] = chat.place(ids, find_images(prompt.messages))
    assert chat.hf.convert_ids_to_tokens(ids[place.begin : place.end]) == [
        *("<fake_token_around_image>", "<global-img>", "<image>", "<fake_token_around_image>")
    ]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_column_of_images_fills_the_places_in_order(form, chat, tmp_path):
    files = [tmp_path / f"{n}.png" for n in range(3)]
    for n, file in enumerate(files):
        file.write_bytes(to_bytes(draw_image(seed=n)))
    seen = [draw(seed=n) for n in range(3)]
    values = [{"bytes": f.read_bytes(), "path": None} for f in files] if form == "parquet" else [f.name for f in files]
    rows = [
        {"id": "a", "messages": user(HOLE, TEXT, HOLE), "pics": values[:2]},
        {"id": "b", "messages": user(TEXT), "pics": []},
        {"id": "c", "messages": user(HOLE), "pics": values[2:]},
    ]
    source = [{"path": write(tmp_path / f"rows.{form}", rows), "columns": {"images": "pics"}}]
    feed = prompts(chat, source)
    a, b, c = sorted(feed.all(), key=lambda p: p.id)
    assert a.messages == [say("user", seen[0], "How many?", seen[1])]
    assert b.messages == [{"role": "user", "content": "How many?"}]
    assert c.messages == [say("user", seen[2])] and "pics" not in c.extra


def test_plain_text_comes_after_the_images_of_its_row(chat, tmp_path):
    rows = [{"query": "What is it?", "image": {"bytes": ONE, "path": "x.png"}, "label": "a bar"}]
    columns = {"messages": "query", "answer": "label"}
    [prompt] = prompts(chat, [{"path": write(tmp_path / "x.parquet", rows), "columns": columns}]).all()
    assert prompt.messages == [say("user", draw(), "What is it?")] and prompt.answer == "a bar"


def test_equal_images_of_several_rows_are_one_object(chat, tmp_path):
    rows = [{"messages": user(HOLE, TEXT), "image": {"bytes": ONE, "path": None}} for _ in range(2)]
    one, two = prompts(chat, write(tmp_path / "x.parquet", rows)).all()
    assert find_images(one.messages)[0] is find_images(two.messages)[0]


def test_images_of_rows_that_are_gone_are_let_go(tmp_path):
    """A lazy source has one reader for a million rows."""
    draw_image().save(tmp_path / "a.png")
    reader = ImageReader(folder=tmp_path, max_pixels=LARGEST_SIDE**2, max_pixels_key="data.max_image_pixels")
    first, same = reader.read("a.png", "image"), reader.read((tmp_path / "a.png").read_bytes(), "image")
    assert first is same and len(reader.files) == len(reader.kept) == 1
    del first, same
    assert not reader.files and not reader.kept


def test_supervised_rows_carry_images_and_never_train_on_their_tokens(chat, tmp_path):
    reply = {"role": "assistant", "content": "3"}
    more = [{"role": "user", "content": [HOLE]}, {"role": "assistant", "content": "4"}]
    late = {"role": "user", "content": [TEXT, HOLE]}
    images = [URI, "data:image/png;base64," + base64.b64encode(to_bytes(draw_image(seed=1))).decode(), URI]
    row = {"messages": [*user(HOLE, TEXT), reply, *more, late], "images": images}
    path = write(tmp_path / "x.jsonl", [row])
    for train_on, written, learnt in (
        (["assistant"], 2, "3<|end|>4<|end|>"),
        ("last_reply", 2, "4<|end|>"),
        (["user"], 3, "How many?How many?"),
    ):
        [[sample]] = groups(chat, path, "conversations", train_on=train_on)
        assert [p.image for p in sample.images] == [draw(), draw(seed=1), draw()][:written]
        assert chat.hf.decode(sample.token_ids[sample.action_mask]) == learnt
    [[sample]] = groups(chat, path, "conversations", train_on="everything")
    spans = [i for p in sample.images for i in range(p.begin, p.end)]
    assert len(spans) == 12 and [i for i, m in enumerate(sample.action_mask) if not m] == spans


CHOSEN, REJECTED = ([{"role": "assistant", "content": said}] for said in "34")
PAIRS = {
    "replies": {"messages": user(HOLE, TEXT), "chosen": "3", "rejected": "4"},
    "conversations": {"chosen": user(HOLE, TEXT) + CHOSEN, "rejected": user(HOLE, TEXT) + REJECTED},
    "text before replies": {"messages": "How many?", "chosen": "3", "rejected": "4"},
}


@pytest.mark.parametrize("form", PAIRS)
def test_both_replies_of_a_pair_follow_the_same_images(form, chat, tmp_path):
    [[chosen, rejected]] = groups(chat, write(tmp_path / "x.jsonl", [PAIRS[form] | {"image": URI}]), "pairs")
    assert chosen.images == rejected.images and [p.image for p in chosen.images] == [draw()]
    assert chosen.prompt.messages == [say("user", draw(), "How many?")]
    late = [*CHOSEN, *user(HOLE), *CHOSEN]
    row = {"messages": "How many?", "chosen": late, "rejected": late[:-1] + REJECTED, "images": [URI, URI]}
    with pytest.raises(UserError, match="images has 2 images, and its messages have 1 places"):
        groups(chat, write(tmp_path / "left.jsonl", [row]), "pairs")
    labelled = [{"messages": user(HOLE) + CHOSEN, "image": URI, "label": label} for label in (1, 0)]
    for [sample] in groups(chat, write(tmp_path / "u.jsonl", labelled), "unpaired"):
        assert [p.image for p in sample.images] == [draw()] and sample.n_trained == 2


def a_row(image: Any, **others: Any) -> dict[str, Any]:
    return {"messages": user(HOLE, TEXT), "image": image} | others


def uri(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "missing file": (a_row("nowhere.png"), "image: there is no file .*nowhere.png"),
    "truncated JPEG": (a_row(uri(to_bytes(draw_image(90, 90), "JPEG")[:900])), "the image is damaged .*truncated"),
    "20,000 pixels wide": (
        a_row(uri(to_bytes(Image.new("RGB", (20_000, 2))))),
        f"the image has 20000 x 2 pixels, over {LARGEST_SIDE}",
    ),
    "20,000 pixels square": (a_row(uri(to_bytes(Image.new("1", (20_000, 20_000))))), "the image has too many pixels"),
    "more pixels than the recipe allows": (
        a_row(uri(to_bytes(Image.new("L", (101, 100))))),
        r"has 101 x 100 pixels, more than data\.max_image_pixels=10000",
    ),
    "CMYK": (a_row(uri(to_bytes(draw_image().convert("CMYK"), "JPEG"))), "the colour mode CMYK: convert it to RGB"),
    "a GIF that moves": (
        a_row(uri(to_bytes(draw_image(), "GIF", save_all=True, append_images=[draw_image(seed=1)]))),
        "the image has 2 frames, and one is expected",
    ),
    "no image at all": (a_row(uri(b"<html>404</html>")), "the image is in no known format"),
    "an empty file": (a_row(uri(b"")), "the image is in no known format"),
    "more placeholders than images": (
        a_row(URI, messages=user(HOLE, HOLE)),
        r"more places for images than image has \(1\)",
    ),
    "fewer placeholders": (a_row(None, images=[URI, URI]), "images has 2 images, and its messages have 1 places"),
    "none for an image": (a_row(URI, messages=user(TEXT)), "image has 1 images, and its messages have 0 places"),
    "a place without a column": (a_row(None), r"more places for images than images has \(0\)"),
    "two columns": (a_row(URI, images=[URI]), "it has image and images: keep one"),
    "an address": (a_row("https://example.org/a.png"), "is an address, which is not fetched: download it"),
    "an address in OpenAI's form": (
        {"messages": user({"type": "image_url", "image_url": {"url": "http://example.org/a.png"}})},
        "a part of a message: http://example.org/a.png is an address",
    ),
    "a number": (a_row(7), "image: an image must be bytes, a path, a data URI or {bytes, path}, found 7"),
    "neither bytes nor path": (
        a_row({"path": 3}),
        "image: an image must be bytes, a path, a data URI or {bytes, path}, found {'path': 3}",
    ),
    "damaged base64": (a_row("data:image/png;base64,a$"), "the base64 text of a data URI is damaged"),
    "a data URI without data": (a_row("data:image/png"), "a data URI must be data:image/png;base64"),
    "a folder": (a_row("."), "there is no file"),
    "a name that is too long": (a_row("x" * 5000), "there is no file"),
    "the placeholder as text": (
        {"messages": "<image> How many?"},
        "a text holds '<image>', which stands for an image",
    ),
    "two images in one part": (
        {"messages": user({"type": "image", "image": URI, "path": "x.png"})},
        "a part has several images: image, path",
    ),
    "an image in a reply": (
        a_row(None, messages=[*user(TEXT), {"role": "assistant", "content": [HOLE | {"image": URI}]}, *user(TEXT)]),
        "a turn of assistant holds an image",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_row_whose_image_cannot_be_used_is_counted_and_shown(case, chat, tmp_path):
    row, why = BROKEN[case]
    path = write(tmp_path / "x.jsonl", [a_row(URI, id="good"), row | {"id": "bad"}])
    feed = prompts(chat, path, max_invalid_fraction=0.5, max_image_pixels=10_000)
    [source] = feed.sources
    assert [p.id for p in feed.all()] == ["good"]
    [(reason, found)] = source.invalid.cases.items()
    assert (reason, found.rows, found.example) == ("bad_image", 1, "bad")
    assert re.search(why, found.why) and "\n" not in found.why
    with pytest.raises(
        UserError, match=r"1 of 2 rows are invalid, a larger fraction than .*: 1 bad_image \(such as row bad: "
    ):
        prompts(chat, path, max_image_pixels=10_000)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "another kind of part": ({"messages": user({"type": "video", "video": "x"})}, {}, "a part of the type video"),
    "a setting of an image": (
        {"messages": user(HOLE | {"image": URI, "max_pixels": 3})},
        {},
        "an image holds 'max_pixels', which is not read: remove it",
    ),
    "a wrong column": (a_row(URI), {"images": "photo"}, "has no column photo; it has .*name the one meant in columns"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_in_every_row_ends_the_program(case, chat, tmp_path):
    row, columns, why = REFUSED[case]
    with pytest.raises(UserError, match=why):
        prompts(chat, [{"path": write(tmp_path / "x.jsonl", [row]), "columns": columns}])


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_path) -> dict[str, Path]:
    """Whole models: one that sees, the same without its chat template, and a language model."""
    folder = tmp_path_factory.mktemp("models")
    small = {"hidden_size": 32, "layers": 1, "vision_layers": 1, "side": 28}
    tiny_vision_model.make(folder / "sees", **small)
    shutil.copytree(folder / "sees", folder / "silent")
    (folder / "silent" / "chat_template.jinja").unlink()
    return {"sees": folder / "sees", "silent": folder / "silent", "text": Path(tiny_path)}


ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "sees": BROKEN["truncated JPEG"],
    "silent": (a_row(URI), "silent has no chat template: add one to its processor"),
    "text": (a_row(URI), "is a language model, which sees no images"),
}


@pytest.mark.parametrize("which", ENDS)
def test_a_broken_input_ends_the_program_with_one_sentence(which, models, tmp_path, recipe):
    row, why = ENDS[which]
    taught = row | {"messages": [*row["messages"], {"role": "assistant", "content": "3"}]}
    data = {"train": write(tmp_path / "x.jsonl", [taught]), "max_tokens": 64}
    code, err = run_here(main_sl, "--config", recipe({"model.path": str(models[which]), "data": data}, kind="sl"))
    assert code == 2 and "Traceback" not in err
    [line] = [line for line in err.splitlines() if not line.startswith("[transformers]")]
    assert re.match(f"error: .*{why}", line)


def test_files_get_the_hash_and_an_agent_the_bytes(chat, tmp_path):
    path = write(
        tmp_path / "x.jsonl", [a_row(URI, messages=[*user(HOLE, TEXT), {"role": "assistant", "content": "3"}])]
    )
    [[sample]] = groups(chat, path, "conversations")
    image = draw()
    named = {"type": "image", "sha256": image.hash, "width": 28, "height": 28}
    described = describe_messages(sample.prompt.messages)
    assert described[0] == {"role": "user", "content": "How many?", "parts": [named, TEXT]}
    answer = say("tool", image, "Seen.")
    played = replace(sample, transcript=[{"role": "assistant", "content": "3"}, answer])
    record = make_sample_record(played, 0)
    assert json.loads(json.dumps(record))["prompt"] == described and record["turns"][1]["parts"] == [
        named,
        TEXT | {"text": "Seen."},
    ]
    assert write_message(record["turns"][1]) == f"tool: [image 28 x 28, {image.hash[:8]}] Seen."
    [written] = describe_group([sample], sample.prompt, of_set="x", index=0)
    assert json.loads(written.prompt) == described and written.row == hash_row(sample.prompt)
    task = Task(base_url="", api_key="", model="", messages=sample.prompt.messages)
    [asked, answered] = json.loads(write_task(task))["messages"]
    assert asked["content"] == [{"type": "image_url", "image_url": {"url": URI}}, TEXT] and answered == described[1]
    write_batch(tmp_path, [[played, replace(sample, images=())]])
    assert read_batch(tmp_path) == [[played, replace(sample, images=())]]
    assert [file.name for file in (tmp_path / "images").iterdir()] == [image.hash]
    (tmp_path / "images" / image.hash).write_bytes(to_bytes(draw_image(seed=1)))
    with pytest.raises(ValueError, match="holds another image"):
        read_batch(tmp_path)


def test_a_reward_in_another_process_sees_the_image(chat, tmp_path):
    file = tmp_path / "looks.py"
    file.write_text(
        "def score(prompt, messages):\n"
        "    image = prompt.messages[0]['parts'][0]['image']\n"
        "    return {'width': float(image.open().size[0])}\n"
    )
    [prompt] = prompts(chat, write(tmp_path / "x.jsonl", [a_row(uri(to_bytes(draw_image(30, 20))))])).all()
    with closing(Rewarder(one_reward(resolve_reward(str(file)), {}), 1, 30.0)) as pool:
        result = asyncio.run(pool.compute_reward(prompt, [{"role": "assistant", "content": "3"}]))
    assert (result.reward_parts, result.failure) == ({"width": 30.0}, "")


def test_a_file_that_cannot_be_read_is_told_with_the_reason(tmp_path):
    reader = ImageReader(folder=tmp_path, max_pixels=LARGEST_SIDE**2, max_pixels_key="data.max_image_pixels")
    # a file that even root cannot read from its start, where no memory is
    for name, said in (("/proc/self/mem", "cannot be read (Input/output error)"), ("no.png", "there is no file ")):
        with pytest.raises(InvalidRow) as refused:
            reader.read(name, "images")
        assert said in str(refused.value) and refused.value.reason == "bad_image"


def test_a_file_of_an_image_has_at_most_128_mib(tmp_path, monkeypatch):
    reader = ImageReader(folder=tmp_path, max_pixels=LARGEST_SIDE**2, max_pixels_key="data.max_image_pixels")
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", 2**27 + 1)  # sparse: it takes no room
    with pytest.raises(InvalidRow, match=r"large\.png has over 128 MiB$"):
        reader.read("large.png", "images")
    data = to_bytes(draw_image(8, 8))
    (tmp_path / "x.png").write_bytes(data)
    monkeypatch.setattr("data_feeds.images.read_images.MOST_BYTES", len(data))
    assert reader.read("x.png", "images").width == 8


def test_a_data_set_without_a_folder_brings_the_bytes_of_its_images():
    reader = ImageReader(folder=None, max_pixels=LARGEST_SIDE**2, max_pixels_key="data.max_image_pixels")
    with pytest.raises(InvalidRow) as refused:
        reader.read("x.png", "images")
    assert str(refused.value) == "images: x.png is a path, and a data set of the hub must bring the bytes"
    assert reader.read({"bytes": to_bytes(draw_image(8, 8)), "path": "x.png"}, "images").width == 8
