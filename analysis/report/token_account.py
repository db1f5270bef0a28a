"""Token account of a step, from metrics.jsonl and the samples."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.report.run_files import Row
from core import metrics as names

PARTS = {
    "contributing": "trained on, with an advantage, and not clipped",
    "clipped": "trained on, but the clip or mask removed the gradient (the log's fraction times the trained tokens)",
    "no_signal": "trained on with an advantage of 0: all samples of the group had the same reward",
    "not_trained": "kept, but not trained on: excluded by the algorithm",
    "rejected": "in groups that the algorithm rejected, or in samples without a reward",
}
"""Parts that add up to all generated tokens, in the order of the page."""


def account_tokens(line: dict[str, float], rows: Sequence[Row]) -> dict[str, float]:
    """Split the generated tokens of a step into PARTS; empty if the log lacks the numbers.

    Fractions in the log are weighted by token, so `clipped` is exact only if all tokens weigh the same.
    """
    if names.ROLLOUT_TOKENS not in line or names.TRAIN_TOKENS not in line:
        return {}
    failed = sum(row.get("new_tokens") or 0 for row in rows if row.get("failure"))
    # the log counts failed samples among a step's tokens, although nothing is learnt from them
    kept = line[names.ROLLOUT_TOKENS] - failed
    wasted = line.get(names.ROLLOUT_WASTED, 0.0)
    # the log has the wasted tokens only as a share of all generated ones
    generated = kept / (1 - wasted) if wasted < 1 else line[names.ROLLOUT_TOKENS]
    trained = min(line[names.TRAIN_TOKENS], kept)
    silent = sum(row.get("new_tokens") or 0 for row in rows if row.get("advantage") == 0 and not row.get("failure"))
    no_signal = min(float(silent), trained)
    # the share is approximate, and the parts must add up
    clipped = min(trained * sum(line.get(name, 0.0) for name in names.SILENCED), trained - no_signal)
    return {
        "contributing": trained - no_signal - clipped,
        "clipped": clipped,
        "no_signal": no_signal,
        "not_trained": kept - trained,
        "rejected": generated - kept,
    }
