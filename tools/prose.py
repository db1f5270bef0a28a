"""Count the words that make docstrings vague, and the words of the documentation: python -m tools.prose

The counts are per 1,000 words of docstrings, beside those of ten code bases that the field holds up as models:
nanochat, prime-rl, TRL, tinker-cookbook, equinox, rlax, torchtitan, optax, OLMo-core and Molt. `--draw N` prints N
docstrings drawn at random, to be read by somebody who looks for the noun.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.layers import ROOT, parse_file, product_files

WORDS = {"what": r"what", "where": r"where", "one, ones": r"ones?", "its": r"its"}
ANCHORS = {"what": (0.0, 0.5), "where": (0.3, 2.4), "one, ones": (1.2, 7.5), "its": (0.3, 3.5)}
"""Lowest and highest count of the ten code bases, per 1,000 words of docstrings."""
GOALS = {"what": 0.8, "where": 3.6, "one, ones": 11.0, "its": 5.0}
"""Half again the highest of the ten."""
GENERATED = ("docs/reference/", "docs/changelog")
DOC_WORDS = 44_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Docstring:
    """Docstring of a module, class, function, or of the field above it."""

    place: str
    text: str


def main() -> None:
    """Print the counts, or some docstrings."""
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draw", type=int, metavar="N", help="print N docstrings drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    files = product_files(ROOT)
    found = [docstring for file in files for docstring in list_docstrings(ROOT, file)]
    if args.draw:
        for docstring in random.Random(args.seed).sample(found, args.draw):
            print(f"{docstring.place}: {docstring.text}\n")
        return
    print(f"{len(found)} docstrings of {sum(count_words(d.text) for d in found):,} words, in {len(files)} files")
    for word, rate in count_vague_words(found).items():
        low, high = ANCHORS[word]
        print(f"{word:<10} {rate:5.1f} per 1,000 words (ten code bases {low} to {high}, goal at most {GOALS[word]})")
    print(f"whole-line comments: {comment_share(ROOT, files):.1%} of all lines (ten code bases 4 to 18 %)")
    print(
        f"words of docs/ and README.md, without generated pages: {count_doc_words(ROOT):,} (goal at most {DOC_WORDS:,})"
    )


def list_docstrings(root: Path, file: str) -> Iterator[Docstring]:
    """Yield every bare string of a file: docstrings, and the texts below fields and constants."""
    for node in ast.walk(parse_file(root / file)):
        # ast.get_docstring would miss the texts below fields and constants
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Docstring(place=f"{file}:{node.lineno}", text=node.value.value.strip())


def count_words(text: str) -> int:
    return len(re.findall(r"[A-Za-z][\w'-]*", text))


def count_vague_words(docstrings: list[Docstring]) -> dict[str, float]:
    """Return the occurrences of each word per 1,000 words.

    >>> count_vague_words([Docstring(place="", text="Return what it was, its name and where it is.")])["what"]
    100.0
    """
    text = "\n".join(docstring.text for docstring in docstrings)
    total = count_words(text)
    return {
        word: 1000 * len(re.findall(rf"\b{pattern}\b", text, re.IGNORECASE)) / total for word, pattern in WORDS.items()
    }


def comment_share(root: Path, files: list[str]) -> float:
    """Return the share of lines that are a comment and nothing else."""
    lines = [line.strip() for file in files for line in (root / file).read_text(encoding="utf-8").splitlines()]
    return sum(line.startswith("#") for line in lines) / len(lines)


def count_doc_words(root: Path) -> int:
    """Count the words of README.md and docs/, code blocks included, without generated pages and the changelog."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    # generated pages repeat the code's own sentences
    own = [page for page in pages if not str(page.relative_to(root)).startswith(GENERATED)]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in own)


if __name__ == "__main__":
    main()
