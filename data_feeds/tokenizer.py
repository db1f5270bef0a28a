"""Messages to token ids, once; token ids to text, for others to read. Nothing sampled is ever encoded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from core.errors import UserError
from core.types import Message

STAND_IN = "\u2402"
"""A reply whose end can be found again in a rendered conversation."""


class ChatTokenizer:
    """A Hugging Face tokenizer, and how a conversation is written for it.

    chat: by the tokenizer's chat template. plain: the contents as they stand, one after another, the
    policy's turns ended by the end-of-sequence token.
    """

    def __init__(self, path: str, template: Literal["chat", "plain"]):
        from transformers import AutoTokenizer

        try:
            self.hf: Any = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise UserError(
                f"model.path={path}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}"
            ) from error
        self.template = template
        if template == "chat" and not self.hf.chat_template:
            raise UserError(
                f"model.path={path} has no chat template: set data.template=plain, or add one to its tokenizer"
            )
        if self.hf.eos_token_id is None:
            raise UserError(f"model.path={path}: its tokenizer has no end-of-sequence token")
        self.stop_token_ids = sorted({self.hf.eos_token_id, *_eos_of_generation_config(path)})

    def render(self, messages: list[Message]) -> list[int]:
        """The ids of a conversation, up to the point where the policy speaks."""
        return self.encode(self._text(messages, reply_next=True))

    def render_turn(self, message: Message) -> list[int]:
        """The ids that follow a finished reply of the policy: the other party's turn, up to the next reply."""
        if self.template == "plain":
            return self.encode(message["content"])
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": STAND_IN}]
        text = self._text([*before, message], reply_next=True)
        rest = text[text.rindex(STAND_IN) + len(STAND_IN) :]
        return self.encode(rest.removeprefix(self.hf.eos_token))

    def learnt_turns(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation and where the assistant speaks, its end-of-turn token included.

        Every turn is encoded by itself, as it will be when the policy speaks: what is learnt is what is sampled.
        """
        ids: list[int] = []
        mask: list[bool] = []
        done = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self._text(messages[:i], reply_next=True)
            whole = self._text(messages[: i + 1], reply_next=False)
            if not asked.startswith(done) or not whole.startswith(asked):
                raise UserError(
                    "the chat template rewrites earlier turns (a conversation's beginning is not the beginning of its "
                    "continuation), so turns cannot be learnt one by one: use a template that only appends"
                )
            reply = whole[len(asked) :]
            end = reply.find(self.hf.eos_token)
            if end < 0:
                raise UserError(
                    f"the chat template does not end a turn with the tokenizer's end-of-sequence token "
                    f"{self.hf.eos_token!r}, where the policy would stop: make eos_token the one the template writes"
                )
            spoken, after = _cut(reply, end + len(self.hf.eos_token))
            for text, learnt in ((asked[len(done) :], False), (spoken, True), (after, False)):
                piece = self.encode(text)
                ids += piece
                mask += [learnt] * len(piece)
            done = whole
        return ids, mask

    def decode(self, ids: list[int]) -> str:
        return self.hf.decode(ids, skip_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self.hf.encode(text, add_special_tokens=False) if text else []

    def save(self, folder: Path) -> None:
        self.hf.save_pretrained(folder)

    def _text(self, messages: list[Message], *, reply_next: bool) -> str:
        if self.template == "chat":
            return self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply_next)
        return "".join(m["content"] + (self.hf.eos_token if m["role"] == "assistant" else "") for m in messages)


def _cut(text: str, at: int) -> tuple[str, str]:
    return text[:at], text[at:]


def _eos_of_generation_config(path: str) -> list[int]:
    """The stop tokens a model names beside its tokenizer's; a chat model may have several."""
    from transformers import GenerationConfig

    if Path(path).is_dir() and not (Path(path) / "generation_config.json").is_file():
        return []
    try:
        found = GenerationConfig.from_pretrained(path).eos_token_id
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path={path}: its generation_config.json cannot be read, and says where to stop"
        ) from error
    return found if isinstance(found, list) else [] if found is None else [found]
