"""The model card of a run: base, data, algorithm, recipe, curve and the base's licence."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from configs.schema import SLConfig
from driver.load_recipe import load_recipe
from driver.records.model_card import write_card

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_saved_model_says_where_it_comes_from(trained, tiny_path, sums):
    folder = trained({"steps": 3})
    card = ModelCard.load(folder / "model" / "README.md")
    assert card.data.library_name == "transformers" and card.data.tags == ["feynrl", "grpo"]
    saved = (folder / "model" / "recipe.yaml").read_bytes()
    assert saved == (folder / "config.yaml").read_bytes()
    for fact in (tiny_path, str(sums / "train.parquet"), "grpo", "arithmetic", "3 of 3", folder.name):
        assert fact in card.text
    assert hashlib.sha256(saved).hexdigest() in card.text
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = re.findall(r"^\| (\d+) \| ([\d.]+)", card.text, re.MULTILINE)
    assert curve == [(f"{row['step']:.0f}", f"{row['reward/mean']:.4g}") for row in rows]


def test_models_beside_the_policy_have_a_card_that_says_what_they_are(trained):
    folder = trained({"alg": {"name": "ppo"}, "trainer.ema": 0.5, "steps": 1}) / "value_model"
    card = ModelCard.load(folder / "README.md")
    assert card.data.tags == ["feynrl", "ppo", "value-model"] and card.data.library_name == "transformers"
    assert "| model | value model" in card.text
    assert (folder / "recipe.yaml").read_bytes() == (folder.parent / "config.yaml").read_bytes()
    average = ModelCard.load(folder.parent / "model_ema" / "README.md")
    assert "| model | exponential moving average of the policy's weights (`trainer.ema=0.5`) |" in average.text


LICENCES = {
    "stated": ({"README.md": "---\nlicense: llama3.1\n---\n# Base"}, {"license": "llama3.1"}),
    "other": (
        {"README.md": "---\nlicense: other\nlicense_name: qwen\nlicense_link: https://x.y\n---\n"},
        {"license": "other", "license_name": "qwen", "license_link": "https://x.y"},
    ),
    "a file": ({"LICENSE": "Do good."}, {"license": "other", "license_link": "LICENSE"}),
    "none": ({"README.md": "# Base"}, {"license": None}),
    "a broken card": ({"README.md": "---\nlicense: [\n---\n"}, {"license": None}),
    "no utf-8": ({"README.md": b"---\nlicense: \xff\n---\n"}, {"license": None}),
}


@pytest.mark.parametrize("case", LICENCES)
def test_the_licence_of_the_base_is_that_of_the_model(case, recipe, tiny_path, tmp_path):
    files, wanted = LICENCES[case]
    base = Path(shutil.copytree(tiny_path, tmp_path / "base"))
    for name, text in files.items():
        (base / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    path = recipe({"model.path": str(base), "model.lora": {"r": 2}}, kind="sl")
    shutil.copyfile(path, tmp_path / "config.yaml")
    write_card(tmp_path / "out", load_recipe(SLConfig, path, []).cfg, run=tmp_path, steps=1)
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert {key: getattr(data, key, None) for key in wanted} == wanted
    assert (tmp_path / "out" / "LICENSE").is_file() == ("LICENSE" in files)
    assert data.library_name == "peft" and data.tags == ["feynrl", "sft", "lora"]


def test_a_card_says_that_the_base_was_quantised(recipe, tmp_path):
    path = recipe({"model.quantization": "nf4", "model.lora": {"merge_on_save": True}}, kind="sl")
    shutil.copyfile(path, tmp_path / "config.yaml")
    write_card(tmp_path / "out", load_recipe(SLConfig, path, []).cfg, run=tmp_path, steps=1)
    assert ", quantised to nf4, with a LoRA adapter merged in |" in (tmp_path / "out" / "README.md").read_text()


def test_a_base_and_data_of_the_hub_are_linked_and_a_long_curve_is_cut(recipe, tmp_path):
    path = recipe({"model.path": "owner/base", "data.train": "hub:owner/rows/main"}, kind="sl")
    shutil.copyfile(path, tmp_path / "config.yaml")
    losses = [{"step": i, "train/loss": i / 8} for i in range(1000)]
    held_out = [{"step": 77, "eval/loss": 1.5}, {"step": 1000, "eval/loss": 1.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*losses, *held_out)))
    write_card(tmp_path / "out", load_recipe(SLConfig, path, []).cfg, run=tmp_path, steps=1000)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model == "owner/base" and card.data.datasets == ["owner/rows"]
    steps = [int(step) for step in re.findall(r"^\| (\d+) \|", card.text, re.MULTILINE)]
    assert len(steps) == 21 and steps[0] == 0 and steps[-1] == 1000
    assert "| 77 | 9.625 | 1.5 |" in card.text and "| 1000 |  | 1.25 |" in card.text
