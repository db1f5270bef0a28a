"""Ends of turns, BOS and EOS of a run's texts, for --explain."""

from __future__ import annotations

from configs.data_schema import TemplateConfig
from configs.trainer_schema import ModelConfig
from core.errors import UserError
from data_feeds.chat.decoding import decode_exactly
from data_feeds.chat.template_args import make_tokenizer
from data_feeds.chat.tokenizer import ChatTokenizer
from modeling.hf_config import check_model_folder

WRITTEN = {
    "after": "which the chat template writes after it",
    "next": "with which the chat template begins the next turn",
    "never": "which the chat template does not write",
}


def find_tokenizer(model: ModelConfig, data: TemplateConfig) -> ChatTokenizer | str:
    """Return the tokenizer of a run, or the reason why there is none: a recipe may name a model that is made later."""
    try:
        check_model_folder(model.path, trust_remote_code=model.trust_remote_code)
        return make_tokenizer(model, data)
    except UserError as error:
        return str(error)


def describe_texts(tokenizer: ChatTokenizer | str, data: TemplateConfig) -> list[tuple[str, str]]:
    """Describe the end of a reply, and the tokens around a text."""
    if isinstance(tokenizer, str):
        return [("a reply", f"unknown: {tokenizer}")]
    try:
        return [("a reply", _describe_end(tokenizer, data)), ("a text", _describe_around(tokenizer))]
    except UserError as error:
        return [("a reply", f"unknown: {error}")]


def _describe_end(tokenizer: ChatTokenizer, data: TemplateConfig) -> str:
    end = tokenizer.end
    if not end.is_token:
        return f"ends with the text {end.text!r}, which is no token of this tokenizer: name it in rollout.stop"
    why = WRITTEN[end.written] if tokenizer.template == "chat" else "which data.template=plain writes after it"
    named = " (data.end_of_turn)" if data.end_of_turn is not None else ""
    others = [text for text in end.ends if text != end.text]
    more = f"; the engine stops at {', '.join(others)} too" if others else ""
    return f"ends with {end.text}{named}, {why}{more}"


def _describe_around(tokenizer: ChatTokenizer) -> str:
    hf = tokenizer.hf
    if tokenizer.template == "plain":
        before, after = (decode_exactly(hf, ids, special=True) or "nothing" for ids in tokenizer.added_ids)
        return f"{before} before it, and {after} after a document (train_on: everything): the tokenizer's own default"
    text = tokenizer.render_text([{"role": "user", "content": "."}], reply_next=True)
    if hf.bos_token is None:
        return "no BOS: the tokenizer has none"
    written = "begins with" if text.startswith(hf.bos_token) else "does not begin with"
    return f"{written} {hf.bos_token}, as the chat template writes it"
