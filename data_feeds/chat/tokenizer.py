"""Chat tokenizer: messages to token ids, and ids to text. Sampled tokens are never re-encoded."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from core.errors import UserError, first_line, name_error
from core.hub import describe_hub, prepare_hub
from core.loading import needs_part
from core.types.images import EncodedImage, ImageRefused, PlacedImage
from core.types.messages import ROLES, Message, ToolSpec, find_images
from data_feeds.chat.decoding import decode_exactly, list_special_tokens
from data_feeds.chat.encoding import Encoded as Encoded
from data_feeds.chat.encoding import encode_after, encode_pieces, find_added_ids
from data_feeds.chat.encoding import join_encoded as join_encoded
from data_feeds.chat.model_files import check_template, read_stop_ids, read_template, sees_images
from data_feeds.chat.template_append import write_answers
from data_feeds.chat.template_messages import count_characters, to_template_messages
from data_feeds.chat.turn_ends import STAND_IN, ImagesDoNotFit, TemplateRefuses, TurnEnd, Write, find_turn_end
from data_feeds.chat.turns import Piece, TrainOn, split_turns, write_begun_reply
from modeling.pretrained import load_pretrained, refuse_own_code

if TYPE_CHECKING:
    from modeling.images.processor import ImageProcessor

CHARS_PER_TOKEN = 8
"""Characters encoded per token when checking a length limit. Usual text has fewer per token."""


class ChatTokenizer:
    """Hugging Face tokenizer that renders conversations.

    chat: uses the tokenizer's chat template. plain: concatenates contents, and ends each assistant turn with the
    end-of-sequence token.
    """

    skip_special_tokens: bool = True
    """Whether the text of a reply lacks special tokens, as `rollout.skip_special_tokens` says."""

    def __init__(
        self,
        path: str,
        template: Literal["chat", "plain"],
        *,
        key: str = "model.path",
        trust_remote_code: bool = False,
        template_args: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        end_of_turn: str | None = None,
        images: Literal["auto", "off"] = "auto",
    ):
        """template_args: extra variables of the chat template; see template_args.py. chat_template: path or text."""
        from transformers import AutoTokenizer

        is_folder = os.path.isdir(path)
        if not is_folder:
            prepare_hub(f"{key}={path}")
        try:
            self.hf: Any = load_pretrained(AutoTokenizer, path, trust_remote_code=trust_remote_code)
        except Exception as error:  # a border: a broken file can make the library raise anything
            if refusal := refuse_own_code(error, key=key, path=path, trust_remote_code=trust_remote_code):
                raise UserError(refusal) from error
            more = "" if is_folder else f"; {describe_hub()}"
            raise UserError(f"{key}={path}: its tokenizer cannot be loaded: {name_error(error)}{more}") from error
        self.who, self.template, self.template_args = f"{key}={path}", template, dict(template_args or {})
        self.images: ImageProcessor | None = None
        """Processor of a vision model, or None for a language model."""
        if images == "auto" and sees_images(path, key, trust_remote_code):
            self._load_images(path, key, trust_remote_code)
        if chat_template is not None:
            self.hf.chat_template = read_template(chat_template)
        if template == "chat":
            check_template(self.hf.chat_template, self.who, sees=self.images is not None)
        if self.hf.eos_token_id is None:
            raise UserError(f"{key}={path}: its tokenizer has no end-of-sequence token")
        # chat models often end a turn with another token than the tokenizer's eos
        more_ends = read_stop_ids(path, key, trust_remote_code=trust_remote_code)
        self._stops_of_files: list[int] = list(dict.fromkeys([self.hf.eos_token_id, *more_ends]))
        self._named_end, self._has_own_template = end_of_turn, chat_template is not None
        self._end: tuple[Any, TurnEnd] | None = None

    def _load_images(self, path: str, key: str, trust_remote_code: bool) -> None:
        with needs_part(f"{key}={path}", otherwise="take a text model"):
            from modeling.images.processor import ImageProcessor

        self.images = ImageProcessor(path, key=key, trust_remote_code=trust_remote_code, tokenizer=self.hf)
        # a processor's chat template replaces the tokenizer's
        self.hf.chat_template = self.images.chat_template or self.hf.chat_template

    @property
    def written_ids(self) -> frozenset[int]:
        """Ids of tokens that appear in decoded text: all, or all except special tokens."""
        skipped = list_special_tokens(self.hf) if self.skip_special_tokens else ()
        return frozenset(self.hf.get_vocab().values()) - frozenset(skipped)

    @property
    def vocabulary(self) -> int:
        """Number of token ids, counted from 0."""
        # not len(): ids may have gaps, and added tokens may lie behind them
        return max(self.hf.get_vocab().values()) + 1

    @property
    def end(self) -> TurnEnd:
        """End of an assistant turn."""
        asked = (self.hf.chat_template, self.template_args)
        # found again if the template is another: tests and callers may set one
        if self._end is None or self._end[0] != asked:
            self._end = (asked, self._find_end())
        return self._end[1]

    def _find_end(self) -> TurnEnd:
        return find_turn_end(
            self._writer(),
            tokens=[token.content for token in self.hf.added_tokens_decoder.values()],
            stops=[text for i in self._stops_of_files if (text := decode_exactly(self.hf, [i], special=True))],
            named=self._named_end,
        )

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a reply: the model's, and the one that its template writes."""
        end = [self.hf.convert_tokens_to_ids(self.end.text)] if self.end.is_token else []
        return sorted({*self._stops_of_files, *end})

    @property
    def turn_end(self) -> list[int]:
        """Tokens that end an assistant turn, for replies that stopped without sampling them."""
        # letters are sampled, or completed by a stop string
        return encode_after(self.hf, STAND_IN, self.end.closing) if self.end.is_token else []

    @property
    def end_in_letters(self) -> str:
        """End of an assistant turn if it is not a token, else ""."""
        return "" if self.end.is_token else self.end.text

    @cached_property
    def reply_header(self) -> str:
        """Text before the first sampled token of a reply."""
        asked: list[Message] = [{"role": "user", "content": "."}]
        whole = self.render_text(asked, reply_next=True)
        return whole.removeprefix(self.render_text(asked, reply_next=False))

    def without_stop(self, ids: list[int]) -> list[int]:
        """Return the tokens of a reply without the stop token."""
        return ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids

    def render(self, messages: list[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Encode a conversation with the header of the next reply, or up to the end of a begun one."""
        return join_encoded(self.encode_pieces([(self.render_prompt(messages, tools), False)]))[0]

    def render_prompt(self, messages: list[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """Render the text that the policy continues."""
        if messages[-1]["role"] != "assistant":
            return self.render_text(messages, reply_next=True, tools=tools)
        return write_begun_reply(self._writer(tools), messages)

    def _writer(self, tools: Sequence[ToolSpec] = ()) -> Write:
        def write(messages: list[Message], reply_next: bool) -> str:
            return self.render_text(messages, reply_next=reply_next, tools=tools)

        return write

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.hf.get_vocab()))

    def bound_tokens(self, messages: list[Message], *, limit: int, tools: Sequence[ToolSpec] = ()) -> int | None:
        """Return a number above `limit` if a conversation has more tokens, without encoding all of it.

        The ids of a prefix equal those of the whole text, except near the cut. A prefix with twice the limit, plus the
        longest token, is therefore conclusive. None: the text may fit.
        """
        images = find_images(messages)
        if self.images is not None:
            with _refused_images():
                seen = sum(len(self.images.expand(image).ids) for image in images)
            if seen > limit:
                return seen
        surely = 2 * limit + 4 * self._longest_token
        size = CHARS_PER_TOKEN * surely
        if count_characters(messages, tools) + CHARS_PER_TOKEN * len(messages) <= size:
            return None
        text = self.render_text(messages, reply_next=False, tools=tools)
        # text with more characters per token needs a longer prefix
        while size < len(text):
            if len(self.encode(text[:size])) > surely:
                return limit + 1
            size *= 2
        return None

    def render_turns(self, reply: Message, answers: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Encode the answers to a finished reply, up to the header of the next reply.

        All answers are rendered together, since templates join the results of several calls. Raises TemplateRewrites if
        the template changes the text of the reply once answers follow.
        """

        follows = write_answers(self._writer(tools), self.end, reply, answers)
        # after the end of the reply: a tokenizer may write the first words of a text in another way
        return encode_after(
            self.hf, self.end.text if self.end.written == "after" and self.end.is_token else "", follows
        )

    def mask_turns(
        self, messages: list[Message], train_on: TrainOn = ("assistant",), tools: Sequence[ToolSpec] = ()
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation and the mask of trained tokens, up to the last trained turn.

        The ids are those of the whole text, for every `train_on`. The mask of a reply includes tool calls and the
        end-of-turn token, but not the header. Other roles are masked likewise if the template ends their turns with
        that token.
        """
        return join_encoded(self.encode_pieces(self.split_turns(messages, train_on, tools)))

    def split_turns(self, messages: list[Message], train_on: TrainOn, tools: Sequence[ToolSpec] = ()) -> list[Piece]:
        """Return the text that `mask_turns` encodes, as one piece."""
        return [split_turns(self._writer(tools), self.end, messages, train_on)]

    def encode_pieces(self, pieces: list[Piece]) -> list[Encoded]:
        """Encode whole texts, in few tokenizer calls."""
        encoded = encode_pieces(self.hf, pieces)
        before, after = self.added_ids
        if not before and not after:
            return encoded
        whole: list[Encoded] = []
        for (ids, mask), (_, learnt) in zip(encoded, pieces, strict=True):
            everything = learnt is True
            start = before if ids[: len(before)] != before else []
            # a text that is trained as a whole is a document, which also ends
            end = after if everything and ids[len(ids) - len(after) :] != after else []
            whole.append(([*start, *ids, *end], [everything] * len(start) + mask + [True] * len(end)))
        return whole

    @cached_property
    def added_ids(self) -> tuple[list[int], list[int]]:
        """Ids that the tokenizer itself puts around a text. A chat template writes its own."""
        return find_added_ids(self.hf) if self.template == "plain" else ([], [])

    def decode(self, ids: list[int]) -> str:
        # rewards and environments read what the policy said, without the marks of turns
        if self.skip_special_tokens:
            return decode_exactly(self.hf, ids, special=False)
        return decode_exactly(self.hf, self.without_stop(ids), special=True)

    def encode(self, text: str) -> list[int]:
        # the template writes special tokens itself, so the tokenizer must not add another set
        return self.hf.encode(text, add_special_tokens=False) if text else []

    def save(self, folder: Path) -> None:
        self.hf.save_pretrained(folder)
        if self.images is not None:
            self.images.save(folder)
        if self._has_own_template:  # a processor's files bring the model's
            (folder / "chat_template.jinja").write_text(self.hf.chat_template, encoding="utf-8")

    def place(self, ids: Sequence[int], images: Sequence[EncodedImage], begin: int = 0) -> tuple[PlacedImage, ...]:
        """Return the token range of each image, in order, from `begin` on.

        Raises ImagesDoNotFit if the ids contain more or fewer images.
        """
        if self.images is None:
            if images:
                raise self._refuse_images()
            return ()
        with _refused_images():
            return self.images.place_images(ids, images, begin)

    def _check_images(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[EncodedImage]:
        """Return the images of a conversation. Raises UserError if the model or template cannot process them."""
        images = find_images(messages)
        if self.images is None and images:
            raise self._refuse_images()
        if self.images is not None:
            if images and self.template == "plain":
                raise UserError("data.template=plain writes no images: set data.template=chat")
            with _refused_images():
                self.images.check_texts(messages, tools)
        return images

    def _refuse_images(self) -> UserError:
        return UserError(
            f"{self.who} is a language model, which sees no images, or is used as one (model.images), and a message "
            "holds one: take a model that sees, another rollout.engine, or rows without images"
        )

    @cached_property
    def _roles_in_parts(self) -> frozenset[str]:
        """Roles with text that the template of a vision model writes only if content is a list of parts."""
        if self.images is None:
            return frozenset()
        return frozenset(role for role in ROLES if self._drops_text_of(role))

    def _drops_text_of(self, role: str) -> bool:
        said: Message = {"role": role, "content": STAND_IN}
        asked: Message = {"role": "user", "content": "."}
        # templates may refuse a conversation that begins with an assistant or tool turn
        trial = {"user": [said], "assistant": [asked, said], "tool": [asked, said]}.get(role, [said, asked])
        # tried out, because a template does not declare which form of content it reads
        written = [self._try_template(trial, in_parts) for in_parts in ((), ROLES)]
        return STAND_IN not in written[0] and STAND_IN in written[1]

    def _try_template(self, messages: list[Message], in_parts: Collection[str]) -> str:
        try:
            return self._apply_template(messages, in_parts, reply_next=False, tools=())
        except TemplateRefuses:
            return ""

    def render_text(self, messages: list[Message], *, reply_next: bool, tools: Sequence[ToolSpec] = ()) -> str:
        """Render a conversation as text. reply_next: add the header of the next assistant turn."""
        images = self._check_images(messages, tools)
        if self.template == "plain":
            return "".join(m["content"] + (self.hf.eos_token if m["role"] == "assistant" else "") for m in messages)
        text = self._apply_template(messages, self._roles_in_parts, reply_next=reply_next, tools=tools)
        if self.images is None:
            return text
        with _refused_images():
            return self.images.insert_tokens(text, images)

    def _apply_template(
        self, messages: list[Message], in_parts: Collection[str], *, reply_next: bool, tools: Sequence[ToolSpec]
    ) -> str:
        given = list(tools) or None
        written = to_template_messages(messages, self.hf.get_chat_template(tools=given), in_parts)
        try:
            return self.hf.apply_chat_template(
                written,
                tools=given,
                tokenize=False,
                add_generation_prompt=reply_next,
                **self.template_args,
            )
        except Exception as error:  # a border: the model's template adds, sorts and calls whatever a message holds
            raise TemplateRefuses(first_line(error)) from error


@contextmanager
def _refused_images() -> Generator[None]:
    """Raise ImagesDoNotFit in place of ImageRefused: here the image or its template is wrong, and not its file."""
    try:
        yield
    except ImageRefused as refusal:
        raise ImagesDoNotFit(str(refusal)) from refusal
