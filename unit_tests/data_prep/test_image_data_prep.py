"""The scripts for data sets with images, on rows of our own in the form of the originals."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, Features, Image, Sequence, Value

from configs.data_schema import PromptDataConfig, RowDataConfig
from core.types.messages import find_images
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups, load_prompts
from data_prep import chartqa, mathvista, mm_math
from data_prep.images import make_reader
from unit_tests.helpers.image_models import draw, draw_image, save_idefics, to_bytes


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> ChatTokenizer:
    return ChatTokenizer(save_idefics(tmp_path_factory.mktemp("idefics")), "chat")


def a_problem(**changes):
    return {
        "question": "As shown, AB = 3 and BC = 4. What are $AC$ and the angle $ABC$?",
        "file_name": "52872002.png",
        "solution": "By the theorem \\boxed{5}, and so \\boxed{90^{\\circ}}. Again \\boxed{5}.",
        "year": "nine",
        "difficult": "easy",
        "knowledge": ["Triangle", "Angle"],
    } | changes


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_mm_math_becomes_prompts_with_images(form, chat, tmp_path: Path, capsys):
    images, source, out = tmp_path / "Image", tmp_path / "MM_Math.jsonl", tmp_path / f"rows.{form}"
    images.mkdir()
    (images / "52872002.png").write_bytes(to_bytes(draw_image(40, 30)))
    source.write_text(json.dumps(a_problem()) + "\n", encoding="utf-8")
    mm_math.main(["--from", str(source), "--images", str(images), "--out", str(out)])
    data = PromptDataConfig(train=str(out), max_prompt_tokens=300, max_invalid_fraction=0)
    [prompt] = load_prompts(data, "train", chat, seed=0).all()
    assert (prompt.id, prompt.answer) == ("mm_math/0", "5, 90^{\\circ}")
    assert prompt.messages[0]["parts"][0] == {"type": "image", "image": draw(40, 30)}
    assert prompt.messages[0]["content"].startswith("As shown") and "\\boxed{}" in prompt.messages[0]["content"]
    assert prompt.extra == {"difficult": "easy", "year": "nine", "knowledge": ["Triangle", "Angle"]}
    assert f"{out}: 1 rows" in capsys.readouterr().out


def test_problems_that_cannot_be_used_are_counted_by_reason(tmp_path: Path):
    (tmp_path / "52872002.png").write_bytes(to_bytes(draw_image()))
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    records = [
        a_problem(),
        a_problem(question=" "),
        a_problem(solution="It is 5."),
        a_problem(file_name="other.png"),
        a_problem(file_name="broken.png"),
        a_problem(file_name=None),
    ]
    rows, invalid = mm_math.make(records, make_reader(tmp_path))
    assert [row.id for row in rows] == ["mm_math/0"]
    plain = a_problem(knowledge=["勾股定理"], year=None, solution="\\boxed{5} it is.")
    [row], _ = mm_math.make([plain], make_reader(tmp_path))
    assert (row.answer, row.extra) == ("5", '{"difficult": "easy", "knowledge": ["勾股定理"]}')
    assert {reason: case.rows for reason, case in invalid.cases.items()} == {
        "missing_column": 2,
        "bad_answer": 1,
        "bad_image": 2,
    }


def charts(path: Path) -> str:
    """Parquet as the hub has it: an Image column, and labels in lists."""
    features = Features(
        {
            "image": Image(),
            "query": Value("string"),
            "label": Sequence(Value("string")),
            "human_or_machine": Value("int64"),
        }
    )
    rows = {
        "image": [draw_image(40, 20, seed=1), draw_image(seed=2), draw_image(seed=3)],
        "query": ["How many bars?", "Which is highest?", "And?"],
        "label": [["14"], ["Italy"], ["1", "2"]],
        "human_or_machine": [0, 1, 0],
    }
    Dataset.from_dict(rows, features=features).to_parquet(path)
    return str(path)


def test_chartqa_becomes_prompts_and_rows_of_sft(chat, tmp_path: Path, capsys):
    source, out = charts(tmp_path / "test-00000-of-00001.parquet"), tmp_path / "rows.parquet"
    chartqa.main(["--from", source, "--split", "test", "--out", str(out)])
    assert "1 of 3 rows are invalid and excluded: 1 bad_answer" in capsys.readouterr().out
    data = PromptDataConfig(train=str(out), max_prompt_tokens=300, max_invalid_fraction=0)
    prompts = load_prompts(data, "train", chat, seed=0).all()
    assert [(p.id, p.answer, p.extra) for p in prompts] == [
        ("chartqa/test/0", "14", {"asked_by": "human"}),
        ("chartqa/test/1", "Italy", {"asked_by": "machine"}),
    ]
    seen = [find_images(p.messages)[0].open() for p in prompts]
    assert [image.tobytes() for image in seen] == [
        draw_image(40, 20, seed=1).tobytes(),
        draw_image(seed=2).tobytes(),
    ]
    chartqa.main(["--from", source, "--out", str(out), "--sft", "--limit", "1"])
    rows = RowDataConfig(train=str(out), max_tokens=300, max_invalid_fraction=0)
    [[sample]] = load_groups(rows, "train", chat, rows="conversations", seed=0).all()
    assert chat.decode(sample.token_ids[sample.action_mask].tolist()) == "14" and len(sample.images) == 1


def test_an_image_column_of_a_saved_data_set_is_read_as_it_is(chat, tmp_path: Path):
    """A folder of datasets.save_to_disk, without a script: the columns are named in the recipe."""
    Dataset.from_parquet(charts(tmp_path / "x.parquet")).select([0]).save_to_disk(tmp_path / "saved")
    columns = {"messages": "query"}
    data = PromptDataConfig(
        train=[{"path": str(tmp_path / "saved"), "columns": columns}], max_prompt_tokens=300, max_invalid_fraction=0
    )
    [prompt] = load_prompts(data, "train", chat, seed=0).all()
    assert [p.open().tobytes() for p in find_images(prompt.messages)] == [draw_image(40, 20, seed=1).tobytes()]


def a_question(**changes):
    """Record in the columns that the card of AI4Math/MathVista names."""
    return {
        "pid": "1",
        "question": "How long is it?",
        "image": "images/1.jpg",
        "decoded_image": {"bytes": to_bytes(draw_image(40, 30)), "path": None},
        "choices": None,
        "unit": "cm",
        "precision": 1.0,
        "answer": "1.2",
        "question_type": "free_form",
        "answer_type": "float",
        "metadata": {"task": "geometry problem solving", "category": "math-targeted-vqa", "grade": "high school"},
        "query": "Hint: one decimal place.\nQuestion: How long is it? (Unit: cm)",
    } | changes


def test_mathvista_keeps_what_its_reward_and_a_split_need():
    records = [
        a_question(),
        a_question(question_type="multi_choice", answer_type="text", choices=["3", "4"], answer="4"),
        a_question(question_type="multi_choice", answer_type="text", choices=["3", "4"], answer="5"),
        a_question(answer=""),
        a_question(precision=None),
        a_question(decoded_image=None),
    ]
    rows, invalid = mathvista.make(records, make_reader())
    assert [(row.id, row.answer) for row in rows] == [("mathvista/testmini/0", "1.2"), ("mathvista/testmini/1", "4")]
    number, choice = (json.loads(row.extra) for row in rows)
    assert (number["precision"], number["task"], choice["choices"]) == (1, "geometry problem solving", ["3", "4"])
    assert rows[0].messages[0]["content"].endswith("(Unit: cm)\nPut the answer in \\boxed{}.")
    assert {reason: case.rows for reason, case in invalid.cases.items()} == {"bad_answer": 2, "missing_column": 2}
