"""Plant device mistakes by rule, one at a time, and see whether the tests on the pretend CUDA device notice.

    python -m tools.device_mistakes                    all of the hot path
    python -m tools.device_mistakes --only modeling/   files whose path holds this text

No mistake is chosen by hand: every place of the files below that moves a tensor, or that makes one, gets the mistake of
its kind (RULES). Exit code 1 where one is not noticed and REASONS has no reason for it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tools.mutants import LIST, ROOT, Mutant, read_list, run_all

HOT_PATH = (
    *("algs/*.py", "core/types/batch.py", "core/types/allowed_tokens.py"),
    *("modeling/attention*.py", "modeling/forward.py", "modeling/head.py"),
    *("modeling/model_inputs.py", "modeling/segments.py"),
    *("modeling/media.py", "modeling/images/media.py", "modeling/images/vision*.py"),
    *("trainers/trainer.py", "trainers/local.py", "trainers/meter.py", "trainers/weight_sync/fingerprint.py"),
    *("rollouts/engines/hf.py", "rollouts/engines/hf_support/rows.py"),
)
"""Files whose code runs at every step of one process on a GPU."""
FACTORIES = ("tensor", "arange", "zeros", "ones", "full", "empty")
RULES = {
    "named": "device=... becomes device='cpu'",
    "passed": "a device that is passed on becomes 'cpu'",
    "moved": ".to(device) is dropped",
    "fetched": ".cpu() is dropped",
    "like": "a tensor beside another, as of new_zeros or ones_like, is made on the CPU",
    "made": "a tensor of the CPU is made on the GPU",
}
AGAIN = "pretend_cuda/test_once_more.py"
STEPS = (
    "pretend_cuda/test_steps.py",
    f"{AGAIN}::test_the_shadow_of_the_same_loss_equals_it",
    f"{AGAIN}::test_a_gradient_that_is_not_finite_is_not_applied",
)
ENGINE = ("pretend_cuda/test_engine.py",)
REASONS = {
    "find_storages(": "the pretend device has no storages",
    "t.flatten().float().cpu()": "flatten_weights is for tests",
    "every = torch.ones_like(batch.labels": "only the ranks of a sequence group read it",
    "at = (torch.zeros_like(columns)": "a sequence group has several processes",
    "batch.kept.select(mine.cpu())": "a sequence group has several processes",
    "lengths.cumsum(0)": "the kernel of flash-attn is not there",
    'inputs["attention_mask"] = ': "an empty mask is never read",
    "spans = [torch.arange(": "the same positions, in more launches",
    "grad.new_zeros(ctx.shape": "autograd checks it in C++, where both are on the CPU, and nothing reads it",
    "values.new_tensor(math.nan if": "a number of the CPU mixes with numbers of a GPU",
    "sizes = torch.zeros(ranks": "several ranks would notice, in the sum over them",
    "clamp(min=1e-30), torch.ones_like(w)": "a number of the CPU mixes with numbers of a GPU",
}
"""Part of a place -> why the mistake is not noticed."""

Edit = tuple[int, int, str]
"""Bytes from, to, and what they become."""


def find_mistakes(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line of each mistake in a file, its rule, and the file's text with it."""
    raw = source.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call):
            for rule, (begin, end, text) in edit_call(call, raw, span):
                yield call.lineno, rule, (raw[:begin] + text.encode() + raw[end:]).decode()


def edit_call(call: ast.Call, raw: bytes, span: Callable[[ast.expr], tuple[int, int]]) -> Iterator[tuple[str, Edit]]:
    """Yield the mistakes of one call, as rule and edit."""
    begin, end = span(call)
    func = call.func
    name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    owner = func.value.id if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) else ""
    named = [k.value for k in call.keywords if k.arg == "device"]
    passed = [a for a in call.args if says_device(a)]
    if name in ("to", "cpu") and isinstance(func, ast.Attribute):
        receiver = raw[begin : span(func)[1] - len(name)].decode().rstrip().removesuffix(".")
        if name == "cpu" or passed or named:
            yield ("fetched" if name == "cpu" else "moved"), (begin, end, receiver)
        return
    for value in named:
        if not (isinstance(value, ast.Constant) and value.value == "meta"):
            yield "named", (*span(value), "'cpu'")
    for value in passed:
        yield "passed", (*span(value), "'cpu'")
    is_new = name.startswith("new_") or (name.endswith("_like") and owner == "torch")
    if not named and (is_new or (owner == "torch" and name in FACTORIES)):
        comma = "" if raw[: end - 1].rstrip().endswith((b",", b"(")) else ", "
        on = "cpu" if is_new else "cuda"
        yield ("like" if is_new else "made"), (end - 1, end - 1, f"{comma}device='{on}'")


def says_device(value: ast.expr) -> bool:
    """Tell whether an argument is a device: a name or an attribute `device`, or the text "cpu"."""
    match value:
        case ast.Name(id="device") | ast.Attribute(attr="device") | ast.Constant(value="cpu"):
            return True
        case _:
            return False


def list_mutants(only: str) -> list[Mutant]:
    mutants: list[Mutant] = []
    for path in sorted({path for pattern in HOT_PATH for path in ROOT.glob(pattern)}):
        file = path.relative_to(ROOT).as_posix()
        source = path.read_text()
        tests = ENGINE if file.startswith("rollouts/") or "weight_sync" in file else STEPS
        for line, rule, text in find_mistakes(source) if only in file else ():
            place = source.splitlines()[line - 1].strip()
            # the whole text, because a mutant's old text occurs once
            mutant = Mutant(file=file, old=source, new=text, breaks=f"{line} ({rule}): {place}", tests=tests)
            mutants.append(mutant)
    return mutants


def find_reason(mutant: Mutant, reasons: Mapping[str, str] = REASONS) -> str:
    return next((why for part, why in reasons.items() if part in f"{mutant.file}:{mutant.breaks}"), "")


def plant_all(mutants: list[Mutant], reasons: Mapping[str, str]) -> bool:
    """Plant the mistakes, print the share that was noticed, and return whether each other one has a reason."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.dont_write_bytecode = True
    for module in read_list(LIST)[1]:
        importlib.import_module(module)
    noticed, unexplained = 0, 0
    with tempfile.TemporaryDirectory(prefix="mistakes_", ignore_cleanup_errors=True) as folder:
        for outcome in run_all(mutants, ROOT, Path(folder), jobs=1):
            reason = find_reason(outcome.mutant, reasons)
            noticed += outcome.killed
            unexplained += not outcome.killed and not reason
            told = "noticed " if outcome.killed else "SURVIVED"
            place = f"{outcome.mutant.file}:{outcome.mutant.breaks}"
            print(f"{told} {outcome.seconds:5.1f} s  {place}{reason and f'; reason: {reason}'}", flush=True)
    print(f"{noticed} of {len(mutants)} were noticed, {unexplained} were not and have no reason")
    return not unexplained


def choose(doc: str, name: str, list_mutants: Callable[[str], list[Mutant]], reasons: Mapping[str, str]) -> None:
    """Plant the mistakes that the command line chooses. doc and name: of the module that is run."""
    parser = argparse.ArgumentParser(prog=f"python -m tools.{name}", description=doc.split("\n")[0])
    parser.add_argument("--only", default="", help="text that the path of the file must hold")
    parser.add_argument("--list", action="store_true", help="print the mistakes and plant none")
    args = parser.parse_args()
    if not (mutants := list_mutants(args.only)):
        parser.error(f"--only {args.only}: no file of the list has this text in its path")
    if args.list:
        print(*(f"{m.file}:{m.breaks}" for m in mutants), f"{len(mutants)} mistakes", sep="\n")
        return
    sys.exit(not plant_all(mutants, reasons))


if __name__ == "__main__":
    choose(__doc__ or "", "device_mistakes", list_mutants, REASONS)
