"""Convert rows to Prompts, or to Samples for training. Unusable rows raise InvalidRow.

The methods of RowConverter are generators. They yield texts and are sent their ids, so that the texts of many rows can
be encoded in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from configs.data_schema import SourceConfig
from core.errors import UserError
from core.types.messages import Message, ToolSpec, find_images, name_of_tool
from core.types.samples import Group, Prompt, Sample
from data_feeds.chat.demonstrations import mark_replies
from data_feeds.chat.template_append import ImagesDoNotFit, TemplateRefuses, TemplateRewrites
from data_feeds.chat.template_coverage import TemplateCoverage
from data_feeds.chat.tokenizer import ChatTokenizer, Encoded, join_encoded
from data_feeds.chat.turns import Piece, TrainOn, count_written, find_turns
from data_feeds.rows.check_replies import check_ends_in_reply, check_replies, normalize_message, read_scored
from data_feeds.rows.convert_form import IMAGES
from data_feeds.rows.episodes import Sampling, read_episodes
from data_feeds.rows.forms import RowKind
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.row_images import open_images
from data_feeds.rows.sources import COMPLETION, Record

if TYPE_CHECKING:
    from data_feeds.images.read_images import ImageReader

Made = TypeVar("Made")
Written = TypeVar("Written")
EncodeRequest = Generator[list[Piece], list[Encoded], Made]


@dataclass(frozen=True, kw_only=True)
class RowConverter:
    """Converter of the records of one source."""

    row_type: RowType
    tokenizer: ChatTokenizer
    source: SourceConfig
    key: str
    """Recipe key and path of the source, for error messages."""
    prefix: str = ""
    """Prefix of every id, so that ids are unique in a mixture."""
    max_tokens: int
    max_image_pixels: int
    train_on: TrainOn = ()
    system_prompt: str | None = None
    """System turn for rows that have none."""
    continue_final_message: bool = False
    """Accept prompts that end with the beginning of a reply."""
    sampling: Sampling | None = None
    """How the policy samples, for demonstrations and recorded episodes; None: neither is read."""
    env_tools: Sequence[ToolSpec] = ()
    """Tools of the environment, shown in prompts besides those of the row."""

    @cached_property
    def template_coverage(self) -> TemplateCoverage:
        """Check for dropped fields, shared by all rows of the source."""
        return TemplateCoverage(self.tokenizer)

    @cached_property
    def images(self) -> ImageReader:
        """Image loader, shared by all rows of the source."""
        return open_images(self.key, self.source.path, self.max_image_pixels)

    def convert(self, record: Record) -> EncodeRequest[Any]:
        """Convert a record to a Prompt or Group. The first step raises InvalidRow if the record has a flaw."""
        if record.flaw is not None:
            raise record.flaw
        return (yield from self.row_type.make(self, record))

    def make_prompt(self, record: Record) -> EncodeRequest[Prompt]:
        """Convert a row to a prompt for sampling."""
        messages = self._read_messages(record, "messages")
        if messages[-1]["role"] == "assistant" and not self.continue_final_message:
            raise InvalidRow(
                "ends_in_reply",
                "it ends with an assistant turn, so its answer would be in the prompt: remove that turn, or set "
                "data.continue_final_message if the policy is to continue it",
            )
        # an image without text is a valid prompt
        if not any(m["content"].strip() or "parts" in m for m in messages):
            raise InvalidRow("empty", "all its messages are empty")
        prompt = self._build_prompt(record, self._with_system(messages))
        tools = [*prompt.tools, *self.env_tools]
        # before rendering all of it: a prompt of megabytes takes minutes
        self._check_size(record, prompt.messages, tools, self.max_tokens)
        text = self._apply_template(record, lambda: self.tokenizer.render_prompt(prompt.messages, tools))
        self._check_written(record, prompt.messages, tools, text)
        [(ids, _)] = yield [(text, False)]
        self._check_length(len(ids), self.max_tokens)
        self._apply_template(record, lambda: self.tokenizer.place(ids, find_images(prompt.messages)))
        prompt = yield from self._with_demonstration(record, prompt)
        return (yield from self._with_episodes(record, prompt, ids))

    def _with_demonstration(self, record: Record, prompt: Prompt) -> EncodeRequest[Prompt]:
        """Return the prompt with the row's demonstration, whose length and template are checked here."""
        if self.sampling is None or "demonstration" not in record.columns:
            return prompt
        whole = self._join_reply(record, "demonstration", prompt.messages)
        answered = whole[len(prompt.messages) :]
        yield from self._check_text(record, prompt, answered, self.max_tokens + self.sampling.max_new_tokens)
        return replace(prompt, demonstration=answered)

    def _with_episodes(self, record: Record, prompt: Prompt, ids: list[int]) -> EncodeRequest[Prompt]:
        """Return the prompt with the row's recorded episodes. ids: tokens of the prompt in this run."""
        if self.sampling is None or "episodes" not in record.columns:
            return prompt
        if find_images(prompt.messages):
            raise InvalidRow("bad_episode", "it has images, and recorded episodes are read of text alone")
        longest = self.max_tokens + self.sampling.max_new_tokens
        given, gaps = record.columns["episodes"], record.fills_gaps
        recorded = read_episodes(given, ids, self.tokenizer, self.sampling, longest, fills_gaps=gaps)
        for episode in recorded:
            if not episode.token_ids:
                yield from self._check_text(record, prompt, episode.messages, longest)
        return replace(prompt, recorded=recorded)

    def _check_text(self, record: Record, prompt: Prompt, answer: list[Message], longest: int) -> EncodeRequest[Sample]:
        shown, marked = replace(prompt, tools=[*prompt.tools, *self.env_tools]), mark_replies(prompt.messages, answer)
        return (yield from self._build_sample(record, shown, marked, (), longest=longest))

    def make_conversation(self, record: Record) -> EncodeRequest[Group]:
        """Convert a row to a Group of one Sample, trained on the turns that `train_on` names."""
        messages = self._with_system(check_replies(self._read_messages(record, "messages", may_train=True)))
        prompt = self._build_prompt(record, messages)
        sample = yield from self._build_sample(record, prompt, messages, self.train_on)
        if not sample.n_trained:
            any_turn = isinstance(self.train_on, str) or any("train" in message for message in messages)
            named = "turn to train on" if any_turn else f"turn of {' or '.join(self.train_on)}"
            raise InvalidRow("no_reply", f"it has no {named}")
        return [sample]

    def make_pair(self, record: Record) -> EncodeRequest[Group]:
        """Convert a pair to [chosen, rejected] with rewards 1 and 0, trained on the last replies."""
        asked = self._read_messages(record, "messages") if "messages" in record.columns else None
        chosen, rejected = (self._with_system(self._join_reply(record, c, asked)) for c in ("chosen", "rejected"))
        if chosen[:-1] != rejected[:-1]:
            raise InvalidRow("not_one_prompt", "chosen and rejected differ before their last reply")
        if normalize_message(chosen[-1]) == normalize_message(rejected[-1]):
            raise InvalidRow("same_reply", "chosen and rejected are the same")
        prompt = self._build_prompt(record, chosen[:-1])
        group = [
            (yield from self._build_sample(record, prompt, chosen, "last_reply", 1.0)),
            (yield from self._build_sample(record, prompt, rejected, "last_reply", 0.0)),
        ]
        # Equal messages do not imply equal tokens: a template may render the prompt according to the reply.
        before = [s.token_ids[: np.argmax(s.action_mask)] for s in group]
        if not np.array_equal(before[0], before[1]):
            raise UserError(
                f"{record.where}: the chat template writes the prompt differently before the two replies, so they "
                "cannot be compared: use a template that only appends"
            )
        return group

    def make_unpaired(self, record: Record) -> EncodeRequest[Group]:
        """Convert a row to a Group of one Sample with reward 1 or 0, trained on the last reply."""
        messages = self._with_system(check_ends_in_reply(self._read_messages(record, "messages"), "messages"))
        label = record.get_column("label")
        if not isinstance(label, bool | int | float) or label not in (0, 1):
            raise InvalidRow("bad_label", f"label must be true, false, 1 or 0, found {label!r:.60}")
        prompt = self._build_prompt(record, messages[:-1])
        return [(yield from self._build_sample(record, prompt, messages, "last_reply", float(label)))]

    def make_scored(self, record: Record) -> EncodeRequest[Group]:
        """Convert a prompt with several completions to a Group with their rewards, trained on the completions."""
        prompt = self._build_prompt(record, self._with_system(self._read_messages(record, "messages")))
        group: Group = []
        for text, reward in read_scored(prompt.messages, record.columns):
            whole: list[Message] = [*prompt.messages, {"role": "assistant", "content": text}]
            group.append((yield from self._build_sample(record, prompt, whole, "last_reply", reward)))
        return group

    def _read_messages(
        self, record: Record, column: str, *, text_is: str = "user", is_reply: bool = False, may_train: bool = False
    ) -> list[Message]:
        """Return the messages of a column, with their images.

        is_reply: see ImageReader.load. may_train: turns may say whether to train on them.
        """
        messages = record.get_messages(column, text_is=text_is)
        if not may_train and any("train" in message for message in messages):
            raise InvalidRow(
                "bad_messages", "a message holds train or weight, which only supervised conversations read: remove it"
            )
        images_column, images = record.list_images()
        if not images and not any("parts" in message for message in messages):
            return messages
        return self.images.load(messages, images_column, images, is_reply=is_reply)

    def _join_reply(self, record: Record, column: str, asked: list[Message] | None) -> list[Message]:
        """Return the conversation that ends in the chosen or rejected reply.

        The column contains the reply as text, the turns after `asked`, or all turns, beginning with `asked`.
        """
        turns = self._read_messages(record, column, text_is="assistant", is_reply=asked is not None)
        begins_with_asked = asked is None or (len(turns) > len(asked) and turns[: len(asked)] == asked)
        if not begins_with_asked and turns[0]["role"] != "assistant":
            raise InvalidRow(
                "not_one_prompt", f"{column} is neither the reply to messages nor a conversation that begins with them"
            )
        whole = check_ends_in_reply(turns if begins_with_asked else [*(asked or []), *turns], column)
        if len(whole) < 2:
            raise InvalidRow("missing_column", f"it has no messages, and {column} is a reply alone")
        if whole[-2]["role"] == "assistant":
            raise InvalidRow("ends_in_reply", f"the reply of {column} follows another assistant turn")
        return whole

    def _with_system(self, messages: list[Message]) -> list[Message]:
        """Prepend the recipe's system turn, unless the row has one."""
        if self.system_prompt is None or any(m["role"] == "system" for m in messages):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _build_prompt(self, record: Record, messages: list[Message]) -> Prompt:
        return Prompt(
            id=self.prefix + record.id,
            messages=messages,
            answer=record.get_answer(),
            extra=record.extra,
            source=self.source.log_name,
            tools=record.get_tools(),
        )

    def _build_sample(
        self,
        record: Record,
        prompt: Prompt,
        messages: list[Message],
        train_on: TrainOn,
        reward: float | None = None,
        longest: int | None = None,
    ) -> EncodeRequest[Sample]:
        tools, longest = prompt.tools, longest or self.max_tokens
        self._check_size(record, messages, tools, longest)
        # images after the last written message have no tokens
        seen = find_images(messages[: count_written(messages, train_on)])
        pieces = self._apply_template(record, lambda: self.tokenizer.split_turns(messages, train_on, tools))
        trained = find_turns(messages, train_on)
        self._check_written(
            record, messages, tools, pieces[0][0], n_written=count_written(messages, train_on), trained=trained
        )
        ids, mask = join_encoded((yield pieces))
        self._check_length(len(ids), longest)
        places = self._apply_template(record, lambda: self.tokenizer.place(ids, seen))
        chosen = np.array(mask, dtype=np.bool_)
        for place in places:
            chosen[place.begin : place.end] = False  # image tokens are not sampled, so never trained on
        return Sample(
            prompt=prompt,
            # Not sampled: no rollout log-probabilities, and version -1.
            token_ids=np.array(ids, dtype=np.int32),
            action_mask=chosen,
            images=places,
            rollout_logp=np.zeros(len(ids), dtype=np.float32),
            versions=np.full(len(ids), -1, dtype=np.int32),
            reward=reward,
        )

    def _check_written(
        self,
        record: Record,
        messages: list[Message],
        tools: list[ToolSpec],
        text: str,
        *,
        n_written: int | None = None,
        trained: Collection[int] = (),
    ) -> None:
        """Raise InvalidRow for a call of an unknown tool, and UserError if the template drops a field or some content.

        text: what is encoded of the first `n_written` messages. trained: indices of the turns to train on.
        """
        names = {name_of_tool(tool) for tool in tools}
        called = [call["function"]["name"] for message in messages for call in message.get("tool_calls", [])]
        if unknown := [name for name in called if tools and name not in names]:
            raise InvalidRow("bad_messages", f"it calls {unknown[0]:.60}, which is none of its tools")
        coverage, where = self.template_coverage, record.where
        self._apply_template(record, lambda: coverage.check(messages, tools, where))
        self._apply_template(record, lambda: coverage.check_content(messages[:n_written], tools, text, trained, where))

    def _apply_template(self, record: Record, write: Callable[[], Written]) -> Written:
        try:
            return write()
        except ImagesDoNotFit as misfit:
            raise InvalidRow("bad_image", str(misfit)) from misfit
        except TemplateRefuses as refusal:
            raise InvalidRow("bad_messages", f"the chat template refuses it: {refusal}") from refusal
        except TemplateRewrites as rewrites:
            raise UserError(f"{record.where}: {rewrites}") from rewrites

    def _check_size(self, record: Record, messages: list[Message], tools: list[ToolSpec], longest: int) -> None:
        """Raise InvalidRow for a conversation of megabytes without tokenizing all of it, since that takes minutes."""
        at_least = self._apply_template(
            record, lambda: self.tokenizer.bound_tokens(messages, limit=longest, tools=tools)
        )
        if at_least is not None:
            raise InvalidRow("too_long", f"{at_least} tokens and more, over {self._describe_limit(longest)}")

    def _check_length(self, tokens: int, longest: int) -> None:
        if tokens > longest:
            raise InvalidRow("too_long", f"{tokens} tokens, more than {self._describe_limit(longest)}")

    def _describe_limit(self, longest: int) -> str:
        key = self.row_type.max_tokens_key
        return f"{key}={longest}" if longest == self.max_tokens else f"{key} + rollout.max_new_tokens={longest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowType:
    """Kind of row. To add a kind, add an entry to ROW_TYPES and a method to RowConverter."""

    kind: RowKind
    needed: tuple[str, ...]
    """Columns that at least one row must have."""
    optional: tuple[str, ...] = ()
    """Columns that are read if they are there."""
    make: Callable[[RowConverter, Record], EncodeRequest[Any]]
    """Method that converts a row to a Prompt, or to a Group for training."""
    max_tokens_key: str = "data.max_tokens"
    """Recipe key of the maximum length, for error messages."""

    @property
    def known(self) -> tuple[str, ...]:
        """Columns read under our names. Other columns become the prompt's `extra`."""
        return tuple(dict.fromkeys(("id", "messages", "tools", "answer", *IMAGES, *self.needed, *self.optional)))


_ROW_TYPES = (
    RowType(
        kind="prompts",
        needed=("messages",),
        optional=("demonstration", "episodes"),
        make=RowConverter.make_prompt,
        max_tokens_key="data.max_prompt_tokens",
    ),
    RowType(kind="conversations", needed=("messages",), optional=(COMPLETION,), make=RowConverter.make_conversation),
    RowType(kind="pairs", needed=("chosen", "rejected"), make=RowConverter.make_pair),
    RowType(kind="unpaired", needed=("messages", "label"), optional=(COMPLETION,), make=RowConverter.make_unpaired),
    RowType(kind="scored", needed=("messages", "completions", "rewards"), make=RowConverter.make_scored),
)
ROW_TYPES: dict[RowKind, RowType] = {row_type.kind: row_type for row_type in _ROW_TYPES}
