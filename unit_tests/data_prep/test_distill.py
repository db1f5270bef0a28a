"""From a teacher to stored rows to a student that has learnt them, without the teacher."""

import json
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import main_sl
from core.cli import run_guarded
from core.errors import UserError
from core.types.images import EncodedImage
from core.types.samples import Prompt
from data_feeds.chat.tokenizer import ChatTokenizer
from data_prep import arithmetic, distill, tiny_model
from unit_tests.helpers.examples import sample_of


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("distilled")
    tiny_model.main(["--out", str(home / "student")])
    tiny_model.main(["--out", str(home / "teacher"), "--seed", "7"])
    arithmetic.main(["--out", str(home), "--max", "9", "--train", "5", "--eval", "5", "--sft", "20"])
    recipe = {
        "name": "distilled",
        "backend": "local",
        "steps": 30,
        "rows_per_step": 20,
        "model": {"path": str(home / "student"), "dtype": "float32"},
        "alg": {"name": "distill"},
        "data": {"train": str(home / "rows.parquet"), "max_tokens": 32},
        "trainer": {"lr": 1e-2},
        "run_dir": str(home / "runs"),
    }
    (home / "student.yaml").write_text(yaml.safe_dump(recipe))
    recipe["data"]["train"] = str(home / "sft.parquet")
    (home / "sft.yaml").write_text(yaml.safe_dump(recipe | {"alg": {"name": "sft"}}))
    return home


def test_rows_hold_the_teachers_likeliest_tokens_and_teach_a_student(home):
    files = ["--config", f"{home}/sft.yaml", "--model", f"{home}/teacher", "--out", f"{home}/rows.parquet"]
    distill.main([*files, "--top", "103"])  # all
    rows = pq.read_table(home / "rows.parquet").to_pylist()
    stored = json.loads(rows[0]["extra"])
    sums = [sum(torch.tensor(row).exp().tolist()) for row in stored["topk_logp"]]
    assert len(rows) == 20 and {len(ids) for ids in stored["topk_ids"]} == {103}
    assert len(stored["topk_tokens"]) == len(stored["topk_ids"]) and sums == pytest.approx([1.0] * len(sums), abs=1e-2)

    result = main_sl.run(str(home / "student.yaml"))
    student, start, teacher = (
        AutoModelForCausalLM.from_pretrained(path) for path in (result.model, home / "student", home / "teacher")
    )
    prompt = ChatTokenizer(str(home / "teacher"), "chat").render(rows[0]["messages"][:-1], [])
    ids = torch.tensor([[*prompt, *stored["topk_tokens"]]])
    before = slice(len(prompt) - 1, -1)  # the logits that predict the reply

    def distance(model) -> float:
        with torch.no_grad():
            own, other = (m(ids).logits[0, before].log_softmax(-1) for m in (model, teacher))
        return float((other.exp() * (other - own)).sum(-1).mean())

    assert distance(student) < 0.5 * distance(start), (distance(student), distance(start))


def test_stored_log_probabilities_are_the_teachers(home):
    files = ["--config", f"{home}/sft.yaml", "--model", f"{home}/teacher", "--out", f"{home}/few.jsonl"]
    distill.main([*files, "--top", "3"])
    row = json.loads((home / "few.jsonl").read_text().splitlines()[0])
    stored = row["extra"] if isinstance(row["extra"], dict) else json.loads(row["extra"])
    tokenizer = ChatTokenizer(str(home / "teacher"), "chat")
    prompt = tokenizer.render(row["messages"][:-1], [])
    ids = torch.tensor([[*prompt, *stored["topk_tokens"]]])
    model = AutoModelForCausalLM.from_pretrained(home / "teacher")
    with torch.no_grad():
        want, likeliest = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1).topk(3)
    assert likeliest.tolist() == stored["topk_ids"]
    torch.testing.assert_close(torch.tensor(stored["topk_logp"]), want, atol=1e-4, rtol=0)


WRONG = {
    "there is no such model": ("nobody", {}, "--model"),
    "a teacher with another tokenizer": ("other", {}, "whose vocabulary is not that of model.path"),
    "rows that are not all read": ("teacher", {"lazy": True}, "set lazy: false"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_would_store_other_distributions_is_refused(home, capsys, wrong):
    teacher, source, said = WRONG[wrong]
    tiny_model.main(["--out", str(home / "other"), "--tools"])
    tokenizer = AutoTokenizer.from_pretrained(home / "other")
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(home / "other")
    recipe = yaml.safe_load((home / "sft.yaml").read_text())
    recipe["data"]["train"] = [{"path": recipe["data"]["train"], **source}]
    (home / "wrong.yaml").write_text(yaml.safe_dump(recipe))

    def run() -> int:
        distill.main(["--config", f"{home}/wrong.yaml", "--model", f"{home}/{teacher}", "--out", f"{home}/x.parquet"])
        return 0

    assert run_guarded(run) == 2
    assert said in capsys.readouterr().err
    assert not (home / "x.parquet").exists()


def test_a_row_that_could_not_be_stored_whole_is_refused(home):
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows = [{"id": "a", "messages": talk, "day": None}, {"id": "b", "messages": talk, "day": date(2026, 1, 1)}]
    pq.write_table(pa.Table.from_pylist(rows), home / "dated.parquet")
    recipe = yaml.safe_load((home / "sft.yaml").read_text())
    recipe["data"]["train"] = f"{home}/dated.parquet"
    (home / "dated.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(UserError) as dated:
        distill.make(f"{home}/dated.yaml", f"{home}/teacher", home / "x.parquet")
    assert str(dated.value) == "the row b has a column that cannot be written as JSON, such as a date"
    image = EncodedImage(data=b"", width=4, height=4, hash="x")
    parts = [{"type": "image", "image": image}]
    seen = Prompt(id="c", messages=[{"role": "user", "content": "", "parts": parts}])
    with pytest.raises(UserError) as shown:
        distill.describe(sample_of([1, 2], [False, True], prompt=seen), torch.nn.Identity(), 1, 3)
    assert str(shown.value) == "the row c has images, and a teacher's distribution is stored for text only"
    assert not (home / "x.parquet").exists()
