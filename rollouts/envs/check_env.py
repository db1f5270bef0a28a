"""Validation of an environment's return values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.text.json_text import holds_lone_surrogate
from core.types.images import EncodedImage
from core.types.messages import ROLES, Message
from rewards.calls import call_user_code, last_line

FIELDS = {*Message.__required_keys__, *Message.__optional_keys__}


def check_answers(answers: Any, who: str) -> list[Message] | None:
    """Return the messages of an environment, or None. Raises TypeError for other values."""
    if answers is None:
        return None
    if isinstance(answers, dict) and "role" in answers:
        raise TypeError(f"{who} must return a list of messages, it returned one message alone: return [message]")
    if not isinstance(answers, list):
        raise TypeError(f"{who} must return None or a list of messages, it returned {answers!r:.80}")
    for answer in answers:
        _check_message(answer, who)
    return answers


def check_turn_scores(read: Callable[[], list[dict[str, float]]], replies: int) -> tuple[list[dict[str, float]], str]:
    """Return the scores of every reply, or the reason why they are invalid.

    The token budget may cut off the last reply of an episode. The environment has no score for it.
    """
    checked: list[dict[str, float]] = []
    try:
        given = read()
    except Exception as error:  # the border to the user's environment, whatever it raises
        return [], last_line(error)
    if given and len(given) == replies - 1:
        given = [*given, {}]
    if given and len(given) != replies:
        return [], f"Env.turn_scores() must be empty or have one dict per reply, it has {len(given)} for {replies}"
    for scores in given:
        # the same validation as for rewards
        parts, wrong = call_user_code(lambda scores=scores: scores, "Env.turn_scores()")
        if wrong:
            return [], wrong
        checked.append(parts)
    return checked, ""


def _check_message(answer: Any, who: str) -> None:
    if not isinstance(answer, dict) or not {"role", "content"} <= {*answer}:
        raise TypeError(f"{who} must return messages with role and content, it returned {answer!r:.80}")
    if strange := sorted(str(key) for key in {*answer} - FIELDS):
        raise TypeError(f"{who} returned a message with {strange[0]!r:.60}, which no message has: {answer!r:.80}")
    if not isinstance(answer["content"], str):
        raise TypeError(f"{who} must return messages whose content is text, it returned {answer!r:.80}")
    if holds_lone_surrogate(answer):
        raise TypeError(f'{who} returned a text that holds half of a character (such as "\\ud800"): {answer!r:.80}')
    if "parts" in answer:
        _check_parts(answer, who)
    if answer["role"] not in ROLES:
        raise TypeError(f"{who} answered as {answer['role']!r}, which is none of {', '.join(ROLES)}")


def _check_parts(answer: dict[str, Any], who: str) -> None:
    """Raise TypeError for invalid parts, or parts whose text differs from the content."""
    parts, texts = answer["parts"], list[str]()
    if not isinstance(parts, list):
        raise TypeError(f"{who} must return messages whose parts are a list, it returned {parts!r:.80}")
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind != "image" or not isinstance(part.get("image"), EncodedImage):
            raise TypeError(
                f"{who} returned the part {part!r:.80}: a part is {{type: text, text}} or {{type: image, image}} with "
                "an image of core.types.images.read_image"
            )
    if "".join(texts) != answer["content"]:
        raise TypeError(f"{who} returned a message whose content is not the text of its parts: {answer!r:.80}")
