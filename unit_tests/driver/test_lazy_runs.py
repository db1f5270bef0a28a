"""Runs whose rows are read from disk when they are drawn."""

import json

import pytest

import main_sl
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import folder_of, metrics_of


@pytest.mark.verify
def test_a_lazy_run_equals_one_that_read_all_and_resumes_to_the_bit(recipe, tmp_path, one_thread):
    rows = [
        {"messages": [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(40)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))

    def run(name: str, *, lazy: bool, **others: object) -> tuple[int, str]:
        data = {"data.train": [{"path": str(file), "lazy": lazy}], "steps": 6, "checkpoint.every": 2}
        return run_here(main_sl, "--config", recipe(data | {"checkpoint.keep": 9} | others, kind="sl"), f"name={name}")

    def losses(name: str) -> list[float]:
        return [line["train/loss"] for line in metrics_of(folder_of(tmp_path, name))]

    assert run("lazy", lazy=True) == run("eager", lazy=False) == (0, "")
    assert losses("lazy") == losses("eager") and len(losses("lazy")) == 6
    at = str(folder_of(tmp_path, "lazy") / "checkpoints/step_00002")
    assert run("resumed", lazy=True, resume=at) == (0, "")
    assert losses("resumed") == losses("lazy")[2:]
    model = "model/model.safetensors"
    assert len({(folder_of(tmp_path, name) / model).read_bytes() for name in ("lazy", "eager", "resumed")}) == 1
    code, err = run("other", lazy=False, resume=at)
    assert code == 2 and "data.train is" in err and "when the checkpoint was made" in err
    with file.open("a") as opened:
        opened.write("\n" + json.dumps(rows[0]))
    code, err = run("changed", lazy=True, resume=at)
    assert code == 2 and "what the rows of data.train hold changed since the checkpoint was made" in err
