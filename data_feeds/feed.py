"""Feed of prompts or training rows by ticket, from one data set or a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal

from configs.data_schema import DataConfig, PromptDataConfig, RowDataConfig, SourceConfig
from core.errors import UserError
from core.metrics import DATA_EPOCH, DATA_ROWS
from core.types.messages import ToolSpec
from core.types.samples import Group, Prompt, Rows
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.chat.turns import TrainOn
from data_feeds.disk_source import open_lazy
from data_feeds.rows.episodes import Sampling
from data_feeds.rows.form_settings import read_checked
from data_feeds.rows.forms import RowKind
from data_feeds.rows.hold_out import choose_held_out
from data_feeds.rows.mixture import Curriculum, Mixture, whole_parts
from data_feeds.rows.read_source import SourceRows, read_source
from data_feeds.rows.remote_files import fetch_source
from data_feeds.rows.row_types import ROW_TYPES, RowConverter, RowType
from data_feeds.source import Item
from data_feeds.source import Source as Source

Which = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed(Generic[Item]):
    """Endless, stateless mapping from tickets to Prompts or Groups. A resumed run needs only the ticket."""

    sources: list[Source[Item]]
    mixture: Mixture | Curriculum

    def draw(self, ticket: int) -> Item:
        """Return the item of a ticket. It is the same in every process."""
        source, nth = self.mixture.place_ticket(ticket)
        return self.sources[source].draw(nth)

    @property
    def rows(self) -> int:
        """Number of rows of all sources."""
        return sum(source.rows for source in self.sources)

    def prepare(self, tickets: Sequence[int]) -> None:
        """Convert the rows of these tickets in the background, if they are on disk."""
        for n, source in enumerate(self.sources):
            if source.is_lazy:
                places = map(self.mixture.place_ticket, tickets)
                source.prepare([nth for which, nth in places if which == n])

    def all(self) -> list[Item]:
        """Return all rows, source by source; of a lazy source the first that are drawn."""
        return [item for source in self.sources for item in source.items]

    @property
    def mixed(self) -> list[str]:
        """Names of the sources of a mixture, or [] for a single data set."""
        return [source.name for source in self.sources] if len(self.sources) > 1 else []

    def count_draws(self, tickets: int) -> dict[str, float]:
        """Return metrics of a mixture after `tickets` draws: rows and epochs of each source."""
        if not self.mixed:
            return {}
        numbers: dict[str, float] = {}
        for source, rows in zip(self.sources, self.mixture.count_drawn(tickets), strict=True):
            numbers[DATA_ROWS.format(source.name)] = float(rows)
            numbers[DATA_EPOCH.format(source.name)] = rows / source.rows
        return numbers

    def summary(self, key: str) -> tuple[list[str], dict[str, Any]]:
        """Return the sentences on forms and invalid rows of the sources, and the counts for summary.json."""
        sentences = [note for source in self.sources for note in source.notes]
        sentences += [
            f"{key}: of {source.name}, {len(source.items)} rows are used and {source.invalid.rows} are invalid: "
            f"{source.invalid}"
            for source in self.sources
            if source.invalid.rows and not source.is_lazy
        ]
        sentences += [
            f"{key}: of {source.name}, {source.invalid.describe_repeats()}"
            for source in self.sources
            if source.invalid.repeated_ids
        ]
        return sentences, {s.name: {"form": s.form, "used": s.rows} | s.invalid.as_facts() for s in self.sources}


def load_prompts(
    data: PromptDataConfig,
    which: Which,
    tokenizer: ChatTokenizer,
    *,
    seed: int,
    env_tools: Sequence[ToolSpec] = (),
    sampling: Sampling | None = None,
) -> Feed[Prompt]:
    """Load and validate prompts. Raises UserError for a source with too few valid rows.

    env_tools: tools of the environment. Their tokens count towards the length of every prompt. sampling: that of the
    policy; None: demonstrations and recorded episodes are not read.
    """
    return _load_feed(
        data,
        which,
        tokenizer,
        ROW_TYPES["prompts"],
        seed=seed,
        max_tokens=data.max_prompt_tokens,
        sampling=sampling,
        env_tools=env_tools,
    )


def load_examples(data: DataConfig, tokenizer: ChatTokenizer, kind: RowKind, *, rows: int) -> Feed[Any]:
    """Load the first valid rows of every source of data.train, at most `rows` of each."""
    assert isinstance(data, PromptDataConfig | RowDataConfig)
    # the first rows may be the invalid ones
    lenient = data.model_copy(update={"max_invalid_fraction": 1.0})
    if isinstance(data, PromptDataConfig):
        tokens, train_on = data.max_prompt_tokens, ()
    else:
        tokens, train_on = data.max_tokens, data.train_on
    return _load_feed(
        lenient, "train", tokenizer, ROW_TYPES[kind], seed=0, max_tokens=tokens, train_on=train_on, most=rows
    )


def load_groups(
    data: RowDataConfig,
    which: Which,
    tokenizer: ChatTokenizer,
    *,
    rows: Rows,
    seed: int,
) -> Feed[Group]:
    """Load and validate training rows.

    Each Group has one Sample. A pair is a Group of two, [chosen, rejected]. Raises UserError for a source with too few
    valid rows, and if labels or trained roles never occur.
    """
    feed: Feed[Group] = _load_feed(
        data,
        which,
        tokenizer,
        ROW_TYPES[rows],
        seed=seed,
        max_tokens=data.max_tokens,
        train_on=data.train_on,
    )
    if rows == "unpaired" and which == "train":
        _check_both_labels(feed)
    if rows == "conversations" and which == "train" and not isinstance(data.train_on, str):
        turns = [turn for group in feed.all() for turn in group[0].prompt.messages]
        spoken = {turn["role"] for turn in turns}
        # a role that never occurs would silently train nothing, unless every turn says itself if it is trained on
        silent = [role for role in data.train_on if role not in spoken]
        if silent and any("train" not in turn for turn in turns):
            raise UserError(
                f"data.train_on names the role {silent[0]}, and no row of data.train has a turn of it; there are "
                f"turns of {', '.join(sorted(spoken))}"
            )
    return feed


def _check_both_labels(feed: Feed[Group]) -> None:
    """Raise UserError if all rows have the same label, since the loss contrasts both."""
    labels = {group[0].reward for group in feed.all()}
    if len(labels) < 2:
        only = "true" if labels == {1.0} else "false"
        raise UserError(f"data.train: every row's label is {only}: give rows of both labels, true and false")


def _load_feed(
    data: DataConfig,
    which: Which,
    tokenizer: ChatTokenizer,
    row_type: RowType,
    *,
    seed: int,
    max_tokens: int,
    sampling: Sampling | None = None,
    train_on: TrainOn = (),
    env_tools: Sequence[ToolSpec] = (),
    most: int | None = None,
) -> Feed[Any]:
    """Load and filter every source. Raises UserError for a source with too few valid rows.

    most: number of valid rows of each source after which no more are read.
    """
    configs = data.list_sources(which)
    mixed = len(configs) > 1
    of = "train" if data.held_out_rows else which
    converters = [
        RowConverter(
            row_type=row_type,
            tokenizer=tokenizer,
            source=fetch_source(config, key := f"data.{of}{f'[{i}]' if mixed else ''}={config.path}"),
            key=key,
            prefix=f"{config.log_name}/" if mixed else "",
            max_tokens=max_tokens,
            sampling=sampling,
            max_image_pixels=data.max_image_pixels,
            train_on=train_on,
            system_prompt=data.system_prompt,
            continue_final_message=isinstance(data, PromptDataConfig) and data.continue_final_message,
            env_tools=env_tools,
        )
        for i, config in enumerate(configs)
    ]
    held_out = [_hold_out(converter, data.held_out_rows) for converter in converters] if data.held_out_rows else None
    sources: list[Source[Any]] = []
    for i, converter in enumerate(converters):
        # Seeded by name: sources are shuffled independently, and their places in the recipe do not matter.
        stream = f"{seed}/{converter.source.log_name}" if mixed else str(seed)
        if which == "train" and (lazy := open_lazy(data, converter, stream, most=most)) is not None:
            sources.append(lazy)
            continue
        if held_out is None:
            limit = data.eval_rows if which == "eval" else most
            read = read_source(converter, max_invalid_fraction=data.max_invalid_fraction, limit=limit)
        elif which == "train":
            # a row that is held out of one source is trained on in none
            held = set[str]().union(*held_out)
            read = read_source(converter, max_invalid_fraction=data.max_invalid_fraction, limit=most, without=held)
        else:
            only = {*held_out[i].values()}
            read = read_source(converter, max_invalid_fraction=data.max_invalid_fraction, limit=None, only=only)
            read = replace(read, notes=[f"data.eval: {len(only)} rows of {converter.key} are held out of training"])
        sources.append(_make_source(converter.source, read, stream))
    if which == "train" and data.system_prompt is not None and most is None and not any(s.is_lazy for s in sources):
        _check_system_prompt_is_used(data.system_prompt, [item for source in sources for item in source.items])
    return Feed(sources=sources, mixture=_make_mixture(data, which, configs))


def _make_mixture(data: DataConfig, which: Which, configs: list[SourceConfig]) -> Mixture | Curriculum:
    last = Mixture(whole_parts([config.ratio for config in configs], where=f"data.{which}"))
    if which == "eval" or not data.curriculum:
        return last
    phases = [
        (phase.rows, Mixture(whole_parts([phase.ratios[c.log_name] for c in configs], where="data.curriculum")))
        for phase in data.curriculum
    ]
    return Curriculum(tuple(phases), last)


def _make_source(config: SourceConfig, read: SourceRows[Any], stream: str) -> Source[Any]:
    return Source(
        name=config.log_name,
        items=read.items,
        stream=stream,
        replacement=config.replacement,
        invalid=read.invalid,
        form=read.form,
        notes=read.notes,
    )


def _check_system_prompt_is_used(given: str, items: list[Any]) -> None:
    prompts: list[Prompt] = [item if isinstance(item, Prompt) else item[0].prompt for item in items]
    # a row's own system turn takes precedence, so a prompt that no row shows has no effect
    if not any({"role": "system", "content": given} in prompt.messages for prompt in prompts):
        raise UserError("data.system_prompt: every row of data.train has a system turn of its own: leave it out")


def _hold_out(converter: RowConverter, rows: int) -> dict[str, str]:
    """Return the hashes of the held-out rows of a source, each with the id of the row that is evaluated."""
    chosen = choose_held_out(read_checked(converter).items, rows, key=converter.key)
    return {found: record.id for found, record in chosen.items()}
