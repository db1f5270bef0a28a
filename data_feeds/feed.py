"""Which prompt, or which rows to learn from, a ticket draws: from one data set or a mixture of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from configs.data_schema import DataConfig, SourceConfig
from core.errors import UserError
from core.types import Group, Prompt
from data_feeds.kinds import KNOWN, NEEDED, Reader, Rows
from data_feeds.mixture import Mixture, row_anew, row_of, whole_parts
from data_feeds.rows import Record, read_records
from data_feeds.tokenizer import ChatTokenizer
from data_feeds.unfit import Unfit, sift

Item = TypeVar("Item", Prompt, Group)
Which = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(Generic[Item]):
    """The rows of one data set that fit."""

    name: str
    items: list[Item]
    stream: str
    """Seeds the order of its rows."""
    replacement: bool = False
    unfit: Unfit = field(default_factory=Unfit)

    def draw(self, nth: int) -> Item:
        """Its nth draw: every row once per pass, or with replacement any row."""
        pick = row_anew if self.replacement else row_of
        return self.items[pick(self.stream, nth, len(self.items))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed(Generic[Item]):
    """Ticket -> Prompt or Group, for ever. A function of the ticket alone: nothing to save, and nothing to restore."""

    sources: list[Source[Item]]
    mixture: Mixture

    def draw(self, ticket: int) -> Item:
        source, nth = self.mixture.place(ticket)
        return self.sources[source].draw(nth)

    def all(self) -> list[Item]:
        """Every row once, one source after the other."""
        return [item for source in self.sources for item in source.items]

    @property
    def mixed(self) -> list[str]:
        """The names of the sources of a mixture; none for a single data set, which needs no telling apart."""
        return [source.name for source in self.sources] if len(self.sources) > 1 else []

    def progress(self, tickets: int) -> dict[str, float]:
        """Of a mixture, after so many tickets: the rows that each source gave, and its passes (epochs)."""
        if not self.mixed:
            return {}
        numbers: dict[str, float] = {}
        for source, rows in zip(self.sources, self.mixture.drawn(tickets), strict=True):
            numbers[f"data/{source.name}/rows"] = float(rows)
            numbers[f"data/{source.name}/epoch"] = rows / len(source.items)
        return numbers

    def told(self, key: str) -> tuple[list[str], dict[str, Any]]:
        """What was read and what was left out: sentences for the display, none where all fits; and all for
        summary.json."""
        sentences = [
            f"{key}: of {source.name}, {len(source.items)} rows are used and {source.unfit.rows} do not fit: "
            f"{source.unfit}"
            for source in self.sources
            if source.unfit.rows
        ]
        return sentences, {s.name: {"used": len(s.items), "unfit": s.unfit.facts()} for s in self.sources}


def load_prompts(data: DataConfig, which: Which, tokenizer: ChatTokenizer, *, seed: int) -> Feed[Prompt]:
    """Prompts for the policy to answer."""
    return _load(data, which, tokenizer, rows="prompts", seed=seed, make=Reader.prompt)


def load_groups(
    data: DataConfig,
    which: Which,
    tokenizer: ChatTokenizer,
    *,
    rows: Literal["conversations", "pairs", "labelled"],
    seed: int,
) -> Feed[Group]:
    """Rows to learn from: conversations and labelled ones are groups of one Sample, pairs are [chosen, rejected]."""
    make = {"conversations": Reader.conversation, "pairs": Reader.pair, "labelled": Reader.labelled}[rows]
    feed = _load(data, which, tokenizer, rows=rows, seed=seed, make=make)
    if rows == "conversations" and which == "train" and not isinstance(data.learn, str):
        spoken = {turn["role"] for group in feed.all() for turn in group[0].prompt.messages}
        if silent := [role for role in data.learn if role not in spoken]:
            raise UserError(
                f"data.learn names the role {silent[0]}, and no row of data.train has a turn of it; there are "
                f"turns of {', '.join(sorted(spoken))}"
            )
    return feed


def _load(
    data: DataConfig,
    which: Which,
    tokenizer: ChatTokenizer,
    *,
    rows: Rows,
    seed: int,
    make: Callable[[Reader, Record], Item],
) -> Feed[Item]:
    """Read and sift every source. Raises UserError for a source of which too few rows fit."""
    configs = data.sources(which)
    mixed = len(configs) > 1
    sources: list[Source[Item]] = []
    for i, config in enumerate(configs):
        key = f"data.{which}={config.path}" if not mixed else f"data.{which}[{i}]={config.path}"
        reader = Reader(
            tokenizer=tokenizer,
            source=config.called,
            prefix=f"{config.called}/" if mixed else "",
            max_tokens=data.max_prompt_tokens,
            learn=data.learn,
        )
        items, unfit = _sifted(
            config,
            key,
            rows=rows,
            make=lambda record, to=reader: make(to, record),
            data=data,
            limit=data.eval_rows if which == "eval" else None,
        )
        stream = f"{seed}/{config.called}" if mixed else str(seed)
        sources.append(
            Source(name=config.called, items=items, stream=stream, replacement=config.replacement, unfit=unfit)
        )
    return Feed(sources=sources, mixture=Mixture(whole_parts([c.ratio for c in configs], where=f"data.{which}")))


def _sifted(
    config: SourceConfig, key: str, *, rows: Rows, make: Callable[[Record], Item], data: DataConfig, limit: int | None
) -> tuple[list[Item], Unfit]:
    records = read_records(config, key=key, needed=NEEDED[rows], known=KNOWN[rows])
    items, unfit = sift(((record.id, record) for record in records), make, limit=limit)
    if not items:
        raise UserError(f"{key}: none of {unfit.looked_at} rows fits: {unfit}")
    if unfit.share > data.max_unfit_share:
        raise UserError(
            f"{key}: {unfit.rows} of {unfit.looked_at} rows do not fit, a larger share than "
            f"data.max_unfit_share={data.max_unfit_share:g}: {unfit}; mend them, or raise that"
        )
    return items, unfit
