"""The commands at the head of a recipe are run before it, each once."""

import sys

import pytest

from core.errors import UserError
from tools import recipe


@pytest.fixture
def ran(monkeypatch) -> list[list[str]]:
    """Commands that would run, in their order."""
    commands: list[list[str]] = []
    monkeypatch.setattr(recipe, "run", commands.append)
    return commands


def test_every_recipe_with_commands_names_what_they_make():
    for path in sorted((recipe.ROOT / "configs").glob("*.yaml")):
        for command in recipe.list_commands(path):
            assert recipe.output_of(command), (path, command)


def test_commands_of_the_recipes_that_a_head_names_come_first(ran, monkeypatch, tmp_path):
    monkeypatch.setattr(recipe, "ROOT", tmp_path)
    (tmp_path / "first.yaml").write_text("# One\n# python -m make_data --out data\nrows_per_step: 1\nsave_to: model\n")
    second = tmp_path / "second.yaml"
    second.write_text(
        "# Two\n# python main_sl.py --config first.yaml comes first: it makes the model\ngroups_per_step: 2\n"
    )
    monkeypatch.setattr(sys, "argv", ["recipe", str(second), "steps=1"])
    assert recipe.main() == 0
    assert [" ".join(command[1:]) for command in ran] == [
        "-m make_data --out data",
        "main_sl.py --config first.yaml",
        f"main_rl.py --config {second} steps=1",
    ]


def test_commands_of_a_base_come_before_those_of_its_recipe():
    commands = recipe.list_commands(recipe.ROOT / "configs" / "eval_gsm8k_qwen2.5_1.5b.yaml")
    made = list(map(recipe.output_of, commands))
    assert made[0] == "data/math/math500.parquet" and made[-1] == "models/gsm8k_qwen2.5_1.5b"
    # the training's own data, before the training
    assert "data/gsm8k/train.parquet" in made


def test_what_is_there_is_not_made_again(ran, monkeypatch, tmp_path):
    monkeypatch.setattr(recipe, "ROOT", tmp_path)
    path = tmp_path / "own.yaml"
    path.write_text("# python -m make_data --out data\n# python -m make_model --out model\ngroups_per_step: 2\n")
    (tmp_path / "model").mkdir()
    assert [command[-1] for command in recipe.list_commands(path)] == ["data"]


def test_a_command_that_fails_ends_the_program():
    with pytest.raises(UserError, match="exit code 3"):
        recipe.run(["python", "-c", "raise SystemExit(3)"])


@pytest.mark.parametrize(
    ("name", "program"),
    [("tiny", "main_rl.py"), ("dapo", "main_rl.py"), ("tiny_sft", "main_sl.py"), ("eval_math", "main_eval.py")],
)
def test_the_program_is_that_of_the_recipes_kind(name, program):
    assert recipe.program_of(recipe.ROOT / "configs" / f"{name}.yaml") == program
