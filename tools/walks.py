"""Trace the walks through the code that a reader must follow: python -m tools.walks [WALK ...] [--all]

Each walk is a real run of one step, in this process, with the smallest recipe that takes it. A walk has events:
functions that a step calls in this order. A file is on the walk if it is on the call stack at one of them: control
passes through it from the first event to the last. A file of more than 350 lines counts twice. `--all` lists the
other files too in which a function ran meanwhile: types, timers, checks, and what the walk's files call. `--keys`
measures the walk of a configuration key instead: the files of the product that mention its name.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tools.docs import count_lines
from tools.layers import LINES_OF_FILE, ROOT, layer_of, parse_file, product_files

Event = tuple[str, str]
"""File and qualified name of a function."""


CALLING_ENGINE = """
from data_feeds.chat.tokenizer import ChatTokenizer
from rollouts.engines.base import Completion
from rollouts.engines.hf import HfEngine

CALL = '@add{"a":1,"b":2};'


class CallsATool(HfEngine):
    async def generate(self, token_ids, **request):
        sampled = await super().generate(token_ids, **request)
        tokenizer = ChatTokenizer("model", "chat")
        if CALL in tokenizer.decode(token_ids):
            return sampled
        ids = tokenizer.encode(CALL + "<|end|>")
        return Completion(token_ids=ids, logp=[-1.0] * len(ids), versions=[sampled.versions[0]] * len(ids), stop="eos")
"""
"""Engine of a policy that calls a tool: a random model writes no calls."""


ARITHMETIC = (
    "data_prep.tiny_model --out model",
    "data_prep.arithmetic --out data --max 9 --train 30 --eval 10 --sft 15",
)
HERE = ("model.path=model", "run_dir=runs", "steps=1", "display=quiet", "trainer={lr: 1.0e-3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Way through the code: a run, and the functions that it passes."""

    title: str
    events: tuple[Event, ...]
    recipe: str = "configs/tiny.yaml"
    overrides: tuple[str, ...] = (*HERE, "data.train=data/train.parquet")
    prepare: tuple[str, ...] = ARITHMETIC
    """Commands that make model and data, as arguments of python -m."""


PAGE = ROOT / "docs" / "concepts" / "one_step.md"
BEGIN, END = "<!-- walks: begin -->", "<!-- walks: end -->"
ENDS = (("main_rl.py", "train"), ("driver/rl/setup.py", "prepare"))
"""Functions below which a stack is cut: the start of the program is no part of a walk."""
NAMED = ("attr", "arg", "id")
"""Where a node of a syntax tree has the name of an attribute, of an argument or keyword, of a variable."""
FILES_OF_KEY = 4
"""Most files that should mention a configuration key."""
WALKS = {
    "reward": Walk(
        title="rewards of a step to the optimizer's update",
        events=(
            ("driver/rl/run.py", "Run.compute_columns"),
            ("algs/credit.py", "group_advantages"),
            ("data_feeds/packing/batches.py", "token_weights"),
            ("modeling/forward.py", "forward"),
            ("algs/grpo.py", "GRPO.loss"),
            ("trainers/local.py", "TorchLearner.update"),
        ),
    ),
    "weights": Walk(
        title="weights from the trainer to the engine",
        events=(
            ("modeling/export.py", "ExportedTensor.compute"),
            ("rollouts/engines/hf.py", "HfEngine.load_weights"),
            ("trainers/weight_sync/fingerprint.py", "verify_sync"),
        ),
    ),
    "sample": Walk(
        title="a prompt to a rewarded sample",
        events=(
            ("rollouts/worker.py", "RolloutWorker.generate_group"),
            ("rollouts/engines/hf.py", "HfEngine.generate"),
            ("rollouts/transcript.py", "Conversation.make_sample"),
            ("rewards/pool.py", "RewardPool.compute_each"),
        ),
    ),
    "tools": Walk(
        title="a tool episode to trained tokens",
        events=(
            ("rollouts/engines/hf.py", "HfEngine.generate"),
            ("rollouts/tools/calls.py", "_call_tool"),
            ("rollouts/transcript.py", "Transcript.append_given"),
            ("rollouts/transcript.py", "Conversation.make_sample"),
            ("data_feeds/packing/batches.py", "pack"),
        ),
        recipe="configs/tools_quickstart.yaml",
        overrides=(
            *HERE,
            "data={train: data/train.jsonl, max_prompt_tokens: 48}",
            "groups_per_step=8",
            "rollout.engine=calls_a_tool.py",
        ),
        prepare=(
            "data_prep.tiny_model --out model --tools",
            "data_prep.function_calls --out data --train 16 --eval 4",
        ),
    ),
    "image": Walk(
        title="an image of a row to the forward pass",
        events=(
            ("data_feeds/images/read_images.py", "ImageReader.read"),
            ("modeling/images/processor.py", "ImageProcessor.expand"),
            ("modeling/images/processor.py", "ImageProcessor.place_images"),
            ("trainers/trainer.py", "Trainer.step"),
            ("modeling/media.py", "MediaLoader.load"),
            ("modeling/forward.py", "forward"),
        ),
        recipe="configs/vision_quickstart.yaml",
        overrides=(
            *HERE,
            "data={train: data/train.parquet, max_prompt_tokens: 24}",
            "groups_per_step=4",
            "group_size=4",
        ),
        prepare=("data_prep.tiny_vision_model --out model", "data_prep.visual --out data --train 16 --eval 4"),
    ),
}


def main() -> None:
    """Print the walks that are named, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m tools.walks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("walk", nargs="*", help=f"of {', '.join(WALKS)}; default: all")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/concepts/one_step.md")
    parser.add_argument("--all", action="store_true", help="list every file in which a function ran meanwhile")
    parser.add_argument("--keys", action="store_true", help="print the files that mention each configuration key")
    parser.add_argument("--traced", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.traced:
        [name] = args.walk
        Path(args.traced).write_text(json.dumps(trace(WALKS[name])))
        return
    if args.keys:
        print(describe_keys(find_key_files()))
        return
    if args.write:
        page = PAGE.read_text(encoding="utf-8")
        tables = "\n\n".join(write_table(WALKS[name], *run_walk(name)) for name in WALKS)
        before, _, rest = page.partition(BEGIN)
        text = f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.partition(END)[2]}"
        PAGE.write_text(count_lines(text), encoding="utf-8")
        return
    for name in args.walk or WALKS:
        print(describe(WALKS[name], *run_walk(name), everything=args.all), end="\n\n")


def run_walk(name: str) -> tuple[list[str], list[str]]:
    """Take a walk in a process of its own; return its files in the order of the walk, and the others that ran."""
    walk = WALKS[name]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        (Path(folder) / "calls_a_tool.py").write_text(CALLING_ENGINE)
        for command in walk.prepare:
            run([sys.executable, "-m", *command.split()], folder, environment)
        file = Path(folder) / "walk.json"
        run([sys.executable, "-m", "tools.walks", name, "--traced", str(file)], folder, environment)
        return tuple(json.loads(file.read_text()))  # type: ignore[return-value]


def run(command: Sequence[str], folder: str, environment: dict[str, str]) -> None:
    """Run a command; end with what it said if it fails."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"this failed with exit code {done.returncode}: {' '.join(command)}\n{done.stdout}{done.stderr}")


def trace(walk: Walk) -> tuple[list[str], list[str]]:
    """Return the files on the stack at every event of a step, and those of every call in between."""
    import main_rl

    root, names = f"{ROOT}{os.sep}", dict[CodeType, str]()
    on_walk, ran, passed = dict[str, None](), dict[str, None](), list[Event]()

    # cached by code object: it is asked for every call of the run
    def file_of(code: CodeType) -> str:
        """Return the path from the root of a file of ours, "" for other code and for what runs at import."""
        found = names.get(code)
        if found is None:
            path = code.co_filename
            ours = path.startswith(root) and "site-packages" not in path and code.co_name != "<module>"
            found = names[code] = path.removeprefix(root) if ours else ""
        return "" if found == "tools/walks.py" else found

    def note_call(frame: FrameType, event: str, _: Any) -> None:
        file = file_of(frame.f_code)
        if not file:
            return
        this = (file, frame.f_code.co_qualname)
        # after the last event the walk is over, whatever the run does then
        if len(passed) == len(walk.events):
            return
        if this == walk.events[len(passed)]:
            passed.append(this)
            on_walk.update(dict.fromkeys(reversed(files_of_stack(frame))))
        if passed:
            ran[file] = None

    def files_of_stack(frame: FrameType) -> list[str]:
        """Return our files on the stack, innermost first, up to ENDS or the task's event loop."""
        stack, at = list[str](), frame
        # below the event loop a stack belongs to whoever started the loop, and not to this task
        while at is not None and not at.f_code.co_filename.endswith("asyncio/events.py"):
            stack += [name for name in [file_of(at.f_code)] if name]
            at = at.f_back if (file_of(at.f_code), at.f_code.co_name) not in ENDS else None
        return stack

    sys.settrace(note_call)
    # sys.settrace is for this thread only, and rewards and engines may run in others
    threading.settrace(note_call)
    try:
        main_rl.run(str(ROOT / walk.recipe), walk.overrides)
    finally:
        sys.settrace(None)
    if missing := [f"{file}: {name}" for file, name in walk.events[len(passed) :]]:
        sys.exit(f"the run did not pass {missing[0]}, so the walk in tools/walks.py is out of date")
    return [*on_walk], sorted(ran.keys() - on_walk.keys())


def write_table(walk: Walk, files: list[str], others: list[str]) -> str:
    """Return a walk as Markdown; tools/docs.py fills in the lines and the summaries."""
    rows = [f"| [`{file}`](../../{file}) | 0 | |" for file in files]
    listed = ", ".join(f"`{file}`" for file in others)
    return "\n".join(
        [
            f"### {walk.title[0].upper()}{walk.title[1:]}",
            "",
            *("| file | lines | what it holds |", "|---|---|---|", *rows, "| together | 0 | |", ""),
            f"Functions of {len(others)} other files run meanwhile (`{walk.recipe}`):",
            *(textwrap.wrap(f"{listed}.", 128, break_long_words=False, break_on_hyphens=False)),
        ]
    )


def describe(walk: Walk, files: list[str], others: list[str], *, everything: bool) -> str:
    """Return the table of a walk."""
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in [*files, *others]}
    count = sum(2 if lines[file] > LINES_OF_FILE else 1 for file in files)
    rows = [f"{walk.title}: {count} files, {sum(lines[f] for f in files):,} lines ({walk.recipe})"]
    rows += [f"  {lines[file]:>4} {file}" for file in files]
    rows += [f"  and {len(others)} other files ran meanwhile, {sum(lines[f] for f in others):,} lines"]
    return "\n".join([*rows, *(f"       {lines[file]:>4} {file}" for file in others if everything)])


def find_key_files() -> dict[str, list[str]]:
    """Return the files, without analysis/, that mention each configuration key: attributes, arguments and variables.

    Left out are names that mean more than the key: fields of several classes, Python's own names, those of two letters.
    """
    trees = {file: parse_file(ROOT / file) for file in product_files(ROOT) if layer_of(file) != "analysis"}
    fields = [(file, name) for file, tree in trees.items() for name in list_fields(tree)]
    times = Counter(name for _, name in fields)
    keys = [name for file, name in fields if layer_of(file) == "configs" and times[name] == 1]
    # by syntax and not by text: a key in a comment or a sentence is no use of it
    names = {file: {getattr(node, a, "") for node in ast.walk(tree) for a in NAMED} for file, tree in trees.items()}
    own = [key for key in keys if len(key) > 2 and not hasattr(builtins, key)]
    return {key: [file for file in trees if key in names[file]] for key in own}


def list_fields(tree: ast.Module) -> list[str]:
    """List the annotated fields of all classes of a file."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return [ast.unparse(part.target) for one in classes for part in one.body if isinstance(part, ast.AnnAssign)]


def describe_keys(files: dict[str, list[str]]) -> str:
    """Return the median and the distribution of the files of a key, and the keys with more than FILES_OF_KEY."""
    counts = Counter(map(len, files.values()))
    rows = [f"{len(files)} keys; the median is mentioned in {statistics.median(map(len, files.values())):g} files"]
    rows += [f"  {keys:>4} keys in {n} files" for n, keys in sorted(counts.items())]
    longest_first = sorted(files.items(), key=lambda found: (-len(found[1]), found[0]))
    rows += [f"  {len(f):>4} files mention {k}: {', '.join(f)}" for k, f in longest_first if len(f) > FILES_OF_KEY]
    return "\n".join(rows)


if __name__ == "__main__":
    main()
