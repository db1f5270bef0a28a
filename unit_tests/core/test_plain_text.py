"""Text that is not ours, on its way to a terminal or a file: nothing of it commands, and nothing looks like ours."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import main_rl
from configs.load import flatten_settings
from configs.schema import RLConfig
from core.errors import RunStopped, first_line
from core.types.samples import Prompt, make_sample
from driver.load_recipe import load_recipe
from driver.records.console import Console
from driver.records.run_result import name_end
from tools import layers
from unit_tests.helpers.examples import run_here

ROOT = Path(__file__).parent.parent.parent
HOSTILE = "a\x1b[31m\x1b]0;t\x07\x9b2J\u202e\0\u2028b\nstopped: all is well\r\x08"
OWN_PRINTS = ("core/text/plain_text.py", "rewards/sandbox/inside/", "rollouts/agents/launcher.py")
"""The one place, and processes whose output another process reads, bounded and escaped."""


def is_plain(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


def test_what_is_printed_is_a_constant_or_goes_through_one_function():
    def is_safe(call: ast.Call) -> bool:
        [text, *more] = call.args
        is_json = isinstance(text, ast.Call) and ast.unparse(text.func) == "json.dumps"
        return not more and (isinstance(text, ast.Constant) or is_json)

    prints = [
        f"{file}:{node.lineno}"
        for file in layers.product_files(ROOT)
        if not file.startswith(OWN_PRINTS)
        for node in ast.walk(layers.parse_file(ROOT / file))
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id == "print" and not is_safe(node))
            or (isinstance(node.func, ast.Attribute) and node.func.attr == "ArgumentParser" and file != "feynrl.py")
        )
    ]
    assert prints == [], "use core.text.plain_text.print_line, or core.cli.Parser"


def test_no_value_of_a_recipe_commands_the_terminal(recipe, capsys):
    """Every key that may hold text, one at a time: what is accepted is explained, the rest refused."""
    defaults = load_recipe(RLConfig, recipe(), []).cfg.model_dump()
    keys = [key for key, value in flatten_settings(defaults).items() if isinstance(value, str | None | list)]
    assert len(keys) > 40
    accepted = []
    for key in keys:
        value = HOSTILE.replace("\0", "")
        value = f"/no/{value}" if "path" in key else value  # not the name of a model on a hub
        code, err = run_here(main_rl, "--explain", "--config", recipe({key: value}))
        out = capsys.readouterr().out
        assert code in (0, 2) and is_plain(err + out) and "\nstopped" not in err + out, (key, err, out)
        assert [line[:7] for line in err.splitlines()] == ["error: "] * (code == 2), (key, err)
        accepted += [key] * (code == 0)
    assert accepted, "some key takes any text"


@pytest.mark.parametrize("argv", [["--config", HOSTILE], ["--config", "x.yaml", f"--{HOSTILE}"], ["--confi"]])
def test_no_argument_commands_the_terminal(argv, capsys):
    try:
        code, err = run_here(main_rl, *argv)
    except SystemExit as stop:
        code, err = stop.code, capsys.readouterr().err
    assert code == 2 and is_plain(err) and "\nstopped" not in err


def test_failures_are_kept_as_one_plain_line(capsys):
    sample = make_sample(
        prompt=Prompt(id="p", messages=[]),
        token_ids=np.arange(3),
        action_mask=[False, True, True],
        rollout_logp=[0.0, -1.0, -1.0],
        versions=[-1, 0, 0],
        failure=HOSTILE,
    )
    kept = [sample.failure, name_end(RunStopped(HOSTILE)), name_end(ValueError(HOSTILE)), first_line(OSError(HOSTILE))]
    assert all(text.isprintable() and r"a\x1b[31m\x1b]0;t\x07\x9b2J\u202e\x00" in text for text in kept), kept
    console = Console(1, clock=None, live=False)  # type: ignore[arg-type]
    console.say(HOSTILE)
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1 and is_plain(shown), shown
