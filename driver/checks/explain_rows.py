"""Rows of data.train as the model will see them, for --explain."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from configs.eval_schema import EvalConfig
from configs.schema import RLConfig, RunConfig
from core.errors import UserError
from core.stores import is_remote
from core.text.plain_text import escape_controls, shorten_middle
from core.types.images import PlacedImage
from core.types.messages import find_images
from core.types.samples import Prompt, Sample
from data_feeds.chat.decoding import decode_exactly
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import Feed, load_examples
from data_feeds.rows.eval_sets import load_sets
from data_feeds.rows.forms import RowKind
from data_feeds.rows.read_files import HUB

SHOWN = 3
"""Rows that are shown."""
LONGEST = 2000
"""Characters of a row that are shown."""


def find_rows(cfg: RunConfig, tokenizer: ChatTokenizer | str, kind: RowKind) -> Feed[Any] | str:
    """Return the first rows of data.train, or the reason why they are unknown.

    Data sets of the hub and of stores are not read, since that may download them.
    """
    if isinstance(tokenizer, str):
        return tokenizer
    if any(is_elsewhere(source.path) for source in cfg.data.list_sources("train")):
        return "data.train is on the hub or in a store, which would have to send all of it"
    try:
        return load_examples(cfg.data, tokenizer, kind, rows=SHOWN)
    except UserError as error:  # a recipe may name rows that are made later
        return str(error)


def is_elsewhere(path: str) -> bool:
    """Tell whether a data set would have to be downloaded."""
    return path.startswith(HUB) or is_remote(path)


def show_rows(cfg: RunConfig, feed: Feed[Any] | str, tokenizer: ChatTokenizer | str, kind: RowKind) -> list[str]:
    """Return the lines that show the first rows, with {+...+} around what is trained on, and the form they have."""
    if isinstance(feed, str) or isinstance(tokenizer, str):
        return [_plain(f"# the rows of data.train are unknown: {feed}")]
    # in RL, the tools of an environment are known to the environment alone
    without = ", without tools of rollout.env" if isinstance(cfg, RLConfig) and cfg.rollout.env != "single_turn" else ""
    marked = "; the policy continues them" if kind == "prompts" else "; {+...+} is trained on"
    lines = [f"# rows of data.train as the model will see them{without}{marked}"]
    lines += [_plain(note) for source in feed.sources for note in source.notes]
    for n in range(min(SHOWN, len(feed.all()))):
        source, nth = feed.mixture.place_ticket(n)
        items = feed.sources[source].items
        lines += _show_item(items[nth % len(items)], tokenizer, kind)
    return lines


def show_set_rows(cfg: EvalConfig, tokenizer: ChatTokenizer | str) -> list[str]:
    """Return the lines that show the first rows of the first data set of an evaluation."""
    first = cfg.data.sets[0].model_copy(update={"rows": SHOWN})
    # without data.by: the first rows may lack a column
    few = cfg.data.model_copy(update={"sets": [first], "max_invalid_fraction": 1.0, "by": []})
    try:
        if isinstance(tokenizer, str) or is_elsewhere(first.path):
            raise UserError(tokenizer if isinstance(tokenizer, str) else "they are on the hub or in a store")
        [one] = load_sets(cfg.model_copy(update={"data": few}), tokenizer)
    except UserError as error:  # a recipe may name rows that are made later
        return [_plain(f"# the rows of data.sets are unknown: {error}")]
    shown = [line for prompt in one.prompts for line in _show_item(prompt, tokenizer, "prompts")]
    return [
        f"# rows of {one.name} as the model will see them; the policy continues them",
        *map(_plain, one.notes),
        *shown,
    ]


def _show_item(item: Any, tokenizer: ChatTokenizer, kind: RowKind) -> Iterator[str]:
    if isinstance(item, Prompt):
        ids = tokenizer.render(item.messages, item.tools)
        places = tokenizer.place(ids, find_images(item.messages))
        yield _plain(f"row {item.id}: {len(ids)} tokens, answer {shorten_middle(item.answer, 200)!r}")
        yield _indent(_write(tokenizer, ids, [False] * len(ids), places))
        return
    samples: list[Sample] = item
    names = ("chosen, ", "rejected, ") if kind == "pairs" else ("",) * len(samples)
    for name, sample in zip(names, samples, strict=True):
        label = f", label {bool(sample.reward)}" if kind == "unpaired" else ""
        label = f", reward {sample.reward:g}" if kind == "scored" else label
        size = f"{len(sample.token_ids)} tokens, {sample.n_trained} trained on"
        yield _plain(f"row {sample.prompt.id}: {name}{size}{label}")
        yield _indent(_write(tokenizer, sample.token_ids.tolist(), sample.loss_mask.tolist(), sample.images))


def _write(tokenizer: ChatTokenizer, ids: list[int], trained: list[bool], places: tuple[PlacedImage, ...]) -> str:
    """Return the text of a sequence. The tokens of an image are their number."""
    of_image = {at: place.begin for place in places for at in range(place.begin, place.end)}
    kinds = [(of_image.get(at), trained[at]) for at in range(len(ids))]
    text, at = "", 0
    for (image, is_trained), run in groupby(kinds):
        n = len(list(run))
        written = (
            f"[image of {n} tokens]"
            if image is not None
            else decode_exactly(tokenizer.hf, ids[at : at + n], special=True)
        )
        text += f"{{+{written}+}}" if is_trained else written
        at += n
    return shorten_middle(text, LONGEST)


def _plain(line: str) -> str:
    return escape_controls(line, keep="")


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))
