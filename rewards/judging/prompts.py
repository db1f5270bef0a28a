"""Prompts of a judge: a template with places, and the policy's text between tags that it cannot name.

The tags hold a hash of the text between them. So the text cannot close them, and it cannot contain the tag in which the
judge must write the verdict. An equal text has an equal prompt, which the cache needs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rewards.judging.settings import JudgeSettings
from rewards.replies import cut_reasoning
from rewards.scored import Failed

if TYPE_CHECKING:
    from core.types.messages import Message

FOLDER = Path(__file__).parent / "prompts"
PLACE = re.compile(r"\{(question|reply|answer|criteria|verdict)\}")
DIGEST_SIZES = (4, 8, 16)
"""Bytes of a tag's hash; the next size is used for a text that contains the hash by chance."""


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Replace the places in one pass, so that no value can fill a place of another.

    >>> fill_template("{question} {reply}", {"question": "{reply}", "reply": "yes"})
    '{reply} yes'
    """
    return PLACE.sub(lambda found: values.get(found[1], found[0]), template)


def hash_text(text: str) -> str:
    """Return the hash that names the tags of a text, which does not contain it."""
    hashes = (hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=n).hexdigest() for n in DIGEST_SIZES)
    return next(found for found in hashes if found not in text)


def enclose(text: str, key: str) -> str:
    """Return the policy's text between tags."""
    return f"<reply-{key}>\n{text}\n</reply-{key}>"


def show_reply(messages: Sequence[Message], settings: JudgeSettings) -> str:
    """Return the policy's text for the judge; "" for an empty reply. Raises Failed for an image."""
    shown = messages[-1:] if settings.view == "last" else messages
    _refuse_images(shown, "a message of the episode", "set reward.settings.view to last")
    texts = [_show_message(message, settings) for message in shown]
    if not any(text.strip() for text, message in zip(texts, shown, strict=True) if message["role"] == "assistant"):
        return ""
    if len(shown) == 1:
        return texts[0].strip()
    return "\n\n".join(f"{message['role']}: {text}" for text, message in zip(texts, shown, strict=True))


def show_question(messages: Sequence[Message]) -> str:
    """Return the prompt as text; the roles are named if there are several messages. Raises Failed for an image."""
    _refuse_images(messages, "the prompt", "leave {question} out of a reward.settings.prompt_file")
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def ask_for_verdict(settings: JudgeSettings, key: str) -> str:
    """Return the instruction how to write the verdict."""
    low, high = (f"{bound:g}" for bound in settings.scale)
    match settings.verdict:
        case "number":
            what = f"a number from {low} to {high}"
        case "letter":
            what = f"one of {', '.join(settings.labels)}"
        case "json":
            return (
                f'End with a JSON object of this form: {{"reason": "...", "verdict_{key}": n}}, in which n is a number '
                f"from {low} to {high}."
            )
        case "probability":
            return f"Answer with one word, {settings.words[0]} or {settings.words[1]}."
    return f"End with the verdict, {what}, between <verdict-{key}> and </verdict-{key}>."


def _refuse_images(messages: Sequence[Message], where: str, fix: str) -> None:
    # not by find_images, whose module imports numpy in every reward process
    if any(part["type"] == "image" for message in messages for part in message.get("parts", ())):
        raise Failed(f"the judge reads text only, and {where} has an image: {fix}, or use another reward")


def _show_message(message: Message, settings: JudgeSettings) -> str:
    text = message["content"]
    if message["role"] == "assistant" and not settings.show_reasoning:
        text = cut_reasoning(text)
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls", ())]
    return "\n".join([text, *calls]) if calls else text
