"""Runs the code blocks of a Markdown page. The rules (unit_tests/tools/test_docs.py applies them):

Every python, bash and yaml block has a marker, an HTML comment on the line above its fence:

    <!-- test: fast -->              run in every test run: Python in this process, commands too where they are Python
    <!-- test: slow -->              run by `make test-all`, commands in a shell
    <!-- test: verify -->            run by `make verify`, commands in a shell
    <!-- test: fast, exits 2 -->     the command must end with this code; without it with 0
    <!-- test: slow, serves -->      a server on port 8000, which the blocks after it use, up to the next one
    <!-- test: recipe -->            YAML: read as changes to configs/tiny.yaml, and validated; nothing runs
    <!-- test: supervised recipe --> the same with configs/tiny_sft.yaml
    <!-- test: skip: reason -->      cannot run on one machine without a GPU and a network
    <!-- file: my_loss.py -->        the block is written to this file, for the blocks after it

A page is one story: its blocks run in order, with one Python namespace, in a folder that looks like a checkout with
models/tiny and data/tiny. A test of a level runs the blocks of that level and of those below it. A text block right
after a block that ran shows its output: `...` alone on a line stands for any lines, within a line for any text, and
white space is not compared.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest
import yaml

from configs.load import merge_recipes, read_recipe
from configs.schema import RLConfig, SLConfig
from driver.load_recipe import load_recipe

ROOT = Path(__file__).parent.parent.parent
LEVELS = ("fast", "slow", "verify")
BLOCK = re.compile(
    r"(?:^<!-- *(?P<marker>[^\n]*?) *-->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    kind: str
    text: str
    marker: str
    line: int
    output: str | None
    """The text block that follows at once."""

    @property
    def level(self) -> str:
        """fast, slow or verify; "" for a block that is not run."""
        return next((x for x in LEVELS if re.match(rf"test: {x}(,|$)", self.marker)), "")

    @property
    def exit_code(self) -> int:
        found = re.search(r", exits (\d+)$", self.marker)
        return int(found[1]) if found else 0


def read_blocks(page: Path) -> list[Block]:
    """Return the python, bash and yaml blocks of a page."""
    text = page.read_text()
    found = list(BLOCK.finditer(text))
    blocks: list[Block] = []
    for one, after in zip_longest(found, found[1:]):
        follows = after is not None and after["kind"] == "text" and not text[one.end() : after.start()].strip()
        output = after["text"] if after is not None and follows else None
        line = text.count("\n", 0, one.start("kind")) + 1
        if one["kind"] != "text":
            blocks.append(Block(one["kind"], one["text"], one["marker"] or "", line, output))
    return blocks


def make_workspace(folder: Path, tiny_path: str, sums: Path) -> None:
    """Lay out a page's folder: the repository by links, with models/, data/ and runs/ of its own."""
    own = {"models", "data", "runs", "mlruns", "site", ".git", ".pytest_cache"}
    links = {path.name: path for path in ROOT.iterdir() if path.name not in own}
    links |= {"models/tiny": Path(tiny_path), "data/tiny": sums}
    for name, target in links.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(target)


def run_page(page: Path, level: str, folder: Path) -> None:
    """Run the blocks of a page up to `level`, in order, in `folder`."""
    names: dict[str, object] = {"__name__": "page"}
    with ExitStack() as server:
        for block in read_blocks(page):
            where = f"{page.relative_to(ROOT)}, line {block.line}"
            if found := re.fullmatch(r"file: (\S+)", block.marker):
                (folder / found[1]).write_text(block.text)
            elif block.marker in ("test: recipe", "test: supervised recipe"):
                check_recipe(block, folder)
            elif block.level and LEVELS.index(block.level) <= LEVELS.index(level):
                if block.marker.endswith(", serves"):
                    server.close()
                    server.enter_context(serving(block.text, folder, where))
                    continue
                said = run_python(block.text, names) if block.kind == "python" else run_commands(block, folder, where)
                assert block.output is None or matches(block.output, said), f"{where} printed:\n{said}"


@contextmanager
def serving(command: str, folder: Path, where: str) -> Generator[None]:
    """Run a server on port 8000 until the end of the context; it answers /health once it is ready."""
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=shell_environment(), stdout=out, stderr=out, start_new_session=True
        )
    try:
        while not is_healthy():
            assert server.poll() is None, f"{where} ended:\n{log.read_text()}"
            time.sleep(0.2)
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("HF_HUB_OFFLINE")  # the hub's client would refuse requests to this machine, too
            yield
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def is_healthy() -> bool:
    try:
        with urllib.request.urlopen("http://localhost:8000/health", timeout=5):
            return True
    except OSError:
        return False


def run_python(text: str, names: dict[str, object]) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(text, "page", "exec"), names)
    return out.getvalue()


def run_commands(block: Block, folder: Path, where: str) -> str:
    """Run each command; return what they printed together."""
    said = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if block.level == "fast" and line.startswith("python "):
            words = subprocess.check_output(["bash", "-c", f"printf '%s\\n' {line}"], cwd=folder, text=True)
            code, printed = run_here(words.splitlines()[1:])
        else:
            code, printed = run_shell(line, folder)
        said += printed
        assert code == block.exit_code, f"{where}: {line} ended with {code}:\n{said}"
    return said


def run_here(words: list[str]) -> tuple[int, str]:
    """Run `python WORDS` in this process, which has imported nearly everything already."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words[1:] if words[0] == "-m" else words)
        try:
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0), out.getvalue()
    return 0, out.getvalue()


def run_shell(line: str, folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=shell_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def shell_environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return {**own, "PATH": path, "PYTHONPATH": str(ROOT)}  # a reader's shell is not below `make verify`


def check_recipe(block: Block, folder: Path) -> None:
    """Validate a part of a recipe; the algorithm, reward and files that it names must exist."""
    supervised = block.marker.startswith("test: supervised")
    base = read_recipe(str(ROOT / "configs" / ("tiny_sft.yaml" if supervised else "tiny.yaml")))
    path = folder / "part.yaml"
    path.write_text(yaml.safe_dump(merge_recipes(base, yaml.safe_load(block.text))))
    load_recipe(SLConfig if supervised else RLConfig, str(path), [])


def matches(shown: str, said: str) -> bool:
    """Tell whether `said` is what a page shows.

    >>> matches("a\\n...\\nstep 1 took ... s\\n", "a\\nb\\nc\\nstep  1 took 0.3 s\\n")
    True
    """
    pattern = ""
    for line in shown.strip().splitlines():
        words = re.escape(" ".join(line.split())).replace(r"\.\.\.", r"[^\n]*")
        pattern += r"(?:[^\n]*\n)*?" if line.strip() == "..." else words + r"\n"
    said = "".join(" ".join(line.split()) + "\n" for line in said.strip().splitlines())
    return re.fullmatch(pattern, said) is not None
