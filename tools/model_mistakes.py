"""Plant mistakes of models by rule, one at a time, and see whether the fast tests notice.

    python -m tools.model_mistakes                       all of them
    python -m tools.model_mistakes --only routes         those of files whose path holds this text

No mistake is chosen by hand. In the export plans every rename, transpose and concatenation is dropped or swapped, in
the kernel of packed rows every cap, sink, window and border, in the routes every index. Exit code 1 where one is not
noticed and REASONS has no reason for it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.device_mistakes import choose
from tools.drawn_mutants.__main__ import describe, is_python
from tools.drawn_mutants.rules import Edit, Places, find_edits
from tools.mutants import ROOT, Mutant

SHAPING = frozenset(
    {
        *("replace", "removeprefix", "rpartition", "contiguous"),
        *("transpose", "movedim", "flatten", "unflatten", "expand", "split", "flip", "repeat_interleave"),
        *("tril", "triu", "masked_fill", "cummin", "index_select", "gather"),
    }
)
"""Methods that rename, turn, cut, join or mask. tools/device_mistakes.py drops those that move."""
SCORES = frozenset({"cap", "softcap", "sinks", "s_aux", "window", "sliding_window", "leading", "image_ends", "scaling"})
"""Names of what changes a score."""
NAMES = ("dropped call", "dropped element", "operator")
SCORING = ("dropped call", "dropped score", "operator")
KERNEL = (*SCORING, "swapped operands")
BORDERS = ("dropped call", "off by one", "operator")
PLANS = (*NAMES, "swapped elements")
EXPERTS = ("dropped call", "off by one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """File, the rules of its mistakes, and the fast tests that are asked about them."""

    file: str
    rules: tuple[str, ...]
    tests: tuple[str, ...]


PACKED = ("modeling/test_attention_scores.py", "modeling/test_shared_prefixes.py")
HEADS = (
    "modeling/test_sequence_parallel.py::test_heads_that_divide_are_shared_and_keys_that_are_fewer_are_copied",
    "modeling/test_sequence_parallel.py::test_heads_that_do_not_divide_are_refused",
)
PADDING = "modeling/test_sequence_parallel.py::test_padding_of_slices_follows_no_sequence"
PATHS = "modeling/test_layout_probe.py::test_the_path_of_a_segment_begins_at_its_root"
IMAGES = "modeling/test_layout_probe.py::test_attention_that_is_causal_within_an_image_is_noticed"
PARTS = (
    Part(file="modeling/attention.py", rules=SCORING, tests=(*PACKED, IMAGES, *HEADS)),
    Part(file="modeling/attention_scores.py", rules=KERNEL, tests=PACKED),
    Part(file="modeling/segments.py", rules=(*KERNEL, "off by one"), tests=(PATHS, PADDING, *PACKED, IMAGES)),
    Part(file="modeling/image_blocks.py", rules=BORDERS, tests=(IMAGES, "modeling/test_text_use.py")),
    Part(file="modeling/routes.py", rules=BORDERS, tests=("modeling/test_routes.py",)),
    Part(
        file="modeling/experts.py",
        rules=EXPERTS,
        tests=(
            "tools/test_layers.py::test_the_examples_in_docstrings_hold[modeling.experts]",
            *("modeling/test_routes.py", "modeling/test_lora.py"),
        ),
    ),
    Part(
        file="modeling/export.py",
        rules=PLANS,
        tests=("modeling/test_file_names.py", "modeling/test_lora.py", "modeling/test_nf4.py"),
    ),
    Part(
        file="modeling/file_names.py",
        rules=NAMES,
        tests=("modeling/test_file_names.py", "tools/test_zoo.py::test_a_model_of_the_zoo_passes"),
    ),
)
REASONS: dict[str, str] = {
    "'1' -> '2', in: lengths, parents = [*lengths, padding], [*parents, -1]": "each number below 0 is no parent",
    "'0' -> '1', in: number = getattr(experts": "experts of unknown number are refused, for they make no choice",
    "swapped elements: '[*base.named_parameters()": "receivers find a tensor by name, in whatever order",
    '\'["whole", "adapter"]\' -> ': "each scope is saved in a folder of its own",
    "export(2**28, scope)": "the size of buckets changes no tensor",
    "'[int, ExportScope]' -> ": "an annotation",
    "in: batch = make_batch([draw_segments(model)[0]])": "each short sequence shows how the blocks choose",
}
"""Part of a place -> why the mistake is not noticed."""


def find_mistakes(source: str, rules: Sequence[str]) -> Iterator[Edit]:
    """Yield the mistakes of a file, in the order of its places."""
    at = Places(source)
    found = {*find_edits(source)}
    for node in ast.walk(ast.parse(source)):
        found |= {*drop_shaping(node, at), *drop_scores(node, at), *swap_joined(node, at)}
    for edit in sorted(found, key=lambda e: (e.begin, e.end, e.rule, e.text)):
        if edit.rule in rules and is_python(edit.apply(source)):
            yield edit


def drop_shaping(node: ast.AST, at: Places) -> Iterator[Edit]:
    """Yield x in place of x.transpose(...)."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SHAPING:
        yield at.replace("dropped call", node, at.text(node.func.value))


def drop_scores(node: ast.AST, at: Places) -> Iterator[Edit]:
    """Yield None in place of a cap, sink, window or border that is passed on."""
    if isinstance(node, ast.Call):
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            last = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
            if last in SCORES:
                yield at.replace("dropped score", value, "None")


def swap_joined(node: ast.AST, at: Places) -> Iterator[Edit]:
    """Yield a list of two with its elements swapped, as in a concatenation."""
    if isinstance(node, ast.List) and len(node.elts) == 2 and isinstance(node.ctx, ast.Load):
        yield at.replace("swapped elements", node, f"[{at.text(node.elts[1])}, {at.text(node.elts[0])}]")


def list_mutants(only: str) -> list[Mutant]:
    mutants: list[Mutant] = []
    for part in PARTS:
        source = (ROOT / part.file).read_text()
        for edit in find_mistakes(source, part.rules) if only in part.file else ():
            breaks = f"{edit.line} {describe(edit, source)}, in: {source.splitlines()[edit.line - 1].strip()}"
            # the whole text, because a mutant's old text occurs once
            mutants.append(Mutant(file=part.file, old=source, new=edit.apply(source), breaks=breaks, tests=part.tests))
    return mutants


if __name__ == "__main__":
    choose(__doc__ or "", "model_mistakes", list_mutants, REASONS)
