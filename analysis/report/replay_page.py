"""The page of a replay: its table, cosines per layer, the tokens that losses disagree on, and clip maps.

`python -m analysis.capture.replay SNAPSHOT --alg LOSS --page FILE` writes it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from analysis.capture.compare import ONE_SILENT, OPPOSITE
from analysis.capture.recompute import Replay
from analysis.capture.table import HEADER, MEANINGS, describe_reproduction
from analysis.capture.token_maps import Disagreement, LossTokens, TokenMaps, list_disagreements
from analysis.report.assemble import join_scripts, make_html, save_page
from analysis.report.captured import encode_column
from analysis.report.embed import data_element, pack

SCRIPTS = ("dom", "blocks", "tokens", "replay")
SAMPLES = 64
"""Samples that the page holds, if the update has more: those with most to see."""
WORST = 40
"""Tokens that are listed for each loss."""


def write_replay_page(found: Replay, out: Path) -> str:
    """Write the page of a replay with token maps; return a message for the user, in a sentence."""
    maps = found.maps
    assert maps is not None
    worst = {loss.name: list_disagreements(maps, loss, WORST) for loss in maps.losses[1:]}
    kept = choose_samples(maps, worst, SAMPLES)
    head = {
        "replay": found.to_json(),
        "verdict": describe_reproduction(found),
        "columns": HEADER,
        "meanings": [*MEANINGS[:-1], f"{MEANINGS[-1]} {found.kl_anchor}."],
        "disagreements": {
            loss.name: count_disagreements(loss) | {"worst": [asdict(one) for one in worst[loss.name]]}
            for loss in maps.losses[1:]
        },
        "samples": len(maps.samples),
    }
    blocks = [data_element("samples", pack(make_records(maps, kept)))]
    title = f"replay of step {found.step}, update {found.update}"
    return save_page(out, make_html(title=title, head=head, blocks=blocks, script=join_scripts(SCRIPTS)), key="--page")


def count_disagreements(loss: LossTokens) -> dict[str, int]:
    """Return the numbers of tokens on which a loss and the run's own disagree, and of tokens counted."""
    return {
        "counted": int(np.isfinite(loss.judged).sum()),
        "opposite": int((loss.judged == OPPOSITE).sum()),
        "one_silent": int((loss.judged == ONE_SILENT).sum()),
    }


def choose_samples(maps: TokenMaps, worst: dict[str, list[Disagreement]], limit: int) -> list[int]:
    """Return the numbers of at most `limit` samples: those with listed tokens first, then those with most marks."""
    listed = Counter(one.sample for found in worst.values() for one in found)
    columns = [column for loss in maps.losses for column in (loss.judged, loss.clipped) if column is not None]
    seen = [sum(int((column[span] > 0).sum()) for column in columns) for _, span in maps.spans()]
    # the last key makes the choice the same every time
    order = sorted(range(len(maps.samples)), key=lambda i: (-listed[i], -seen[i], i))
    return sorted(order[:limit])


def make_records(maps: TokenMaps, kept: list[int]) -> list[dict[str, Any]]:
    """Return samples with their texts, and the numbers of every loss."""
    places = list(maps.spans())
    return [
        {
            "number": i,
            "group": sample.group,
            "sample": sample.sample,
            "reward": sample.reward if np.isfinite(sample.reward) else None,
            "pieces": sample.pieces,
            "losses": {loss.name: encode_loss(loss, span) for loss in maps.losses},
        }
        for i, (sample, span) in ((i, places[i]) for i in kept)
    ]


def encode_loss(loss: LossTokens, span: slice) -> dict[str, str | None]:
    """Return the numbers of the tokens of a sample."""
    return {
        "slope": encode_column(loss.slope[span]),
        "clipped": None if loss.clipped is None else encode_column(loss.clipped[span]),
        "judged": encode_column(loss.judged[span]),
    }
