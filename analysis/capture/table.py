"""A replay as text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.capture.compare import Comparison
from analysis.capture.recompute import OWN, Replay

WORST = 3
"""Layers that are named for each loss."""
HEADER = ("loss of", "loss", "grad norm", "cosine", "opposite", "one silent", "silent", "clipped", "KL change")
MEANINGS = (
    "cosine: of its gradient with that of the run's loss. opposite: tokens that one of the two makes likelier and",
    "the other less likely. one silent: tokens where one of the two has no gradient; silent: where it has none itself.",
    "clipped: tokens that it says it clipped. KL change: to the first order, per unit of a step's length, of the KL to",
)


def describe_replay(found: Replay) -> str:
    """Return the replay report: reproduction of the run, table of losses, and the layers that differ most."""
    lines = [
        f"step {found.step}, update {found.update}, trained by {found.algorithm}; kept because of {found.reason}",
        f"weights: {found.weights}, by their checksums",
        *([f"note: {found.algorithm} of algs/ has changed since the run"] if found.code_changed else []),
        describe_reproduction(found),
        "",
        *align([HEADER, *(format_row(row) for row in found.losses)]),
        "",
    ]
    for row in found.losses:
        worst = list(row.layers.items())[:WORST]
        # the run's own loss has a cosine of 1 with itself in every layer
        if row.name != OWN and worst:
            lines.append(f"{row.name}: lowest cosine in {', '.join(f'{layer} {cos:.4f}' for layer, cos in worst)}")
    return "\n".join([*lines, *MEANINGS[:-1], f"{MEANINGS[-1]} {found.kl_anchor}."])


def describe_reproduction(found: Replay) -> str:
    """Return a line that compares recorded and recomputed numbers."""
    recorded, again = found.recorded, found.recomputed
    if found.difference is None:
        return f"the run skipped this update, because it was not finite; recomputed: gradient norm {again['grad_norm']}"
    verdict = "reproduced" if found.is_reproduced else "NOT REPRODUCED"
    return (
        f"{verdict}: loss {again['loss']:.9g} (recorded {recorded['loss']:.9g}), gradient norm "
        f"{again['grad_norm']:.9g} (recorded {recorded['grad_norm']:.9g}); they differ by {found.difference:.1e}, and "
        f"{found.tolerance:.0e} is allowed"
    )


def format_row(row: Comparison) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.loss:.6g}",
        f"{row.grad_norm:.6g}",
        "-" if row.cosine is None else f"{row.cosine:.6f}",
        f"{row.opposite:.1%}",
        f"{row.one_silent:.1%}",
        f"{row.silent:.1%}",
        "-" if row.clipped is None else f"{row.clipped:.1%}",
        f"{row.kl_change:+.3g}",
    )


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows with their cells under each other, the first to the left.

    >>> align([("a", "1"), ("bb", "20")])
    ['a    1', 'bb  20']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
