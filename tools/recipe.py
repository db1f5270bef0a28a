"""Run a recipe with everything that it needs: python -m tools.recipe configs/tools_smollm2.yaml [key=value ...]

The comments at the head of a recipe name the commands that make its model and data. They run first, in their order,
after those of its base, and so do those of a recipe that a command names. A command whose output is there already is
skipped.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from core.cli import run_guarded
from core.errors import UserError
from core.text.text_files import read_text

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    recipe, *overrides = sys.argv[1:]
    for command in list_commands(Path(recipe)):
        run(command)
    run(["python", program_of(Path(recipe)), "--config", recipe, *overrides])
    return 0


def list_commands(recipe: Path) -> Iterator[list[str]]:
    """Yield the commands of a recipe's head that are still to be run, each as words."""
    text = read_text(recipe, str(recipe))
    if base := yaml.safe_load(text).get("base"):
        yield from list_commands(recipe.parent / base)
    for line in text.splitlines():
        # the commands stand in the comments at the head only
        if not line.startswith("#"):
            return
        if found := re.match(r"# ((?:python|make) .*?)(?: comes? first\b.*)?$", line):
            command = shlex.split(found[1])
            output = output_of(command)
            # without a named output nobody could tell whether the command has run, so it is not run by itself
            if output is None or (ROOT / output).exists():
                continue
            # a recipe that makes the model needs its own model and data first
            if "--config" in command:
                yield from list_commands(ROOT / command[command.index("--config") + 1])
            yield command


def output_of(command: list[str]) -> str | None:
    """Return the file or folder that a command makes; None if the command does not say."""
    if command[0] == "make":
        return f"models/{command[1]}"
    if "--out" in command:
        return command[command.index("--out") + 1]
    if "--config" in command:
        config = ROOT / command[command.index("--config") + 1]
        return yaml.safe_load(read_text(config, str(config))).get("save_to")
    return None


def program_of(recipe: Path) -> str:
    """Return the program of a recipe, by the keys that only one kind has."""
    keys = yaml.safe_load(read_text(recipe, str(recipe)))
    if "base" in keys and not {"reward", "rows_per_step"} & keys.keys():
        return program_of(recipe.parent / keys["base"])
    if "rows_per_step" in keys:
        return "main_sl.py"
    return "main_rl.py" if "groups_per_step" in keys else "main_eval.py"


def run(command: list[str]) -> None:
    """Show a command and run it; raise UserError if it fails."""
    print(f"$ {shlex.join(command)}", flush=True)
    program = [sys.executable] if command[0] == "python" else [command[0]]
    code = subprocess.run([*program, *command[1:]], cwd=ROOT).returncode
    if code:
        raise UserError(f"this failed with exit code {code}: {shlex.join(command)}")


if __name__ == "__main__":
    sys.exit(run_guarded(main))
