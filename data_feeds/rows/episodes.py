"""Recorded episodes of a row: read, and checked against the tokens and the distribution of this run.

An importance weight is exact only for the tokens that were sampled, under the log-probabilities that they were sampled
with. So ids and log-probabilities come together, and nothing is encoded again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, get_args

from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.messages import Message
from core.types.samples import LOGP_ROUNDING, RecordedEpisode, Stop
from data_feeds.rows.check_replies import LARGEST, check_ends_in_reply
from data_feeds.rows.invalid_rows import InvalidRow
from data_feeds.rows.read_messages import read_messages
from data_feeds.rows.values import parse_list

FIELDS = {"completion", "messages", "token_ids", "logp", "temperature", "allowed_tokens", "stop"}
"""Keys of an episode."""
TRUNCATION = {"top_p": 1, "top_k": 0, "min_p": 0}
"""Keys of an episode that tell of truncated sampling, with the values that truncate nothing."""


class Decoder(Protocol):
    """Tokenizer methods to check recorded tokens; see data_feeds/chat/tokenizer.py."""

    @property
    def vocabulary(self) -> int: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling of the policy of the run."""

    max_new_tokens: int
    """Most tokens after the prompt."""
    temperature: float = 1.0
    allowed: AllowedTokens = EVERY_TOKEN
    allowed_texts: tuple[str, ...] = ()
    """The same as texts, as rollout.allowed_tokens lists them."""
    is_truncated: bool = False
    """True with top_p, top_k or min_p."""


def read_episodes(
    given: Any, prompt_ids: list[int], tokenizer: Decoder, sampling: Sampling, longest: int, *, fills_gaps: bool
) -> tuple[RecordedEpisode, ...]:
    """Read the episodes of a row: a list of objects, or JSON text of it. Raises InvalidRow for one that is wrong.

    prompt_ids: tokens of the row's prompt in this run. longest: maximum tokens of prompt and episode. fills_gaps: the
    file format writes null for keys that another row's object has.
    """
    fills_gaps = fills_gaps and not isinstance(given, str)  # in JSON text a null was written
    listed = parse_list(given) if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise _refuse(f"episodes must be a list of objects, found {given!r:.60}")
    there = [{name: value for name, value in one.items() if value is not None} for one in listed]
    return tuple(_read_episode(one, prompt_ids, tokenizer, sampling, longest, fills_gaps) for one in there)


def _read_episode(
    one: dict[str, Any], prompt_ids: list[int], tokenizer: Decoder, sampling: Sampling, longest: int, fills_gaps: bool
) -> RecordedEpisode:
    """Read an episode, as `read_episodes` says. With neither token_ids nor logp it is a text, of any tokenizer."""
    if unknown := sorted(one.keys() - FIELDS - TRUNCATION.keys()):
        raise _refuse(f"an episode has {unknown[0]!r}, and its keys are {', '.join(sorted(FIELDS | {*TRUNCATION}))}")
    text, stop = one.get("completion"), one.get("stop", "eos")
    if not isinstance(text, str | None) or stop not in get_args(Stop):
        raise _refuse(f"an episode's completion is text, and its stop eos, length or turns, found {text!r:.40}, {stop}")
    if "token_ids" not in one and "logp" not in one:
        return RecordedEpisode(messages=_read_turns(one, text, fills_gaps), completion=text or "", stop=stop)
    ids, logp = _read_tokens(one, tokenizer, sampling)
    if len(ids) > longest:
        raise InvalidRow(
            "too_long", f"{len(ids)} tokens, more than data.max_prompt_tokens + rollout.max_new_tokens={longest}"
        )
    begin = next(i for i, number in enumerate(logp) if number is not None)
    if ids[:begin] != prompt_ids:
        raise _refuse(
            f"an episode begins with other tokens than its prompt has here (the first {begin}, and {len(prompt_ids)}): "
            "it was recorded with another tokenizer, chat template or system prompt, so only its text can be used: "
            "leave token_ids and logp out"
        )
    written = tokenizer.decode(ids[begin:])
    if text is not None and written != text:
        raise _refuse(
            f"the token_ids of an episode are {written!r:.40} in this vocabulary, and its completion is {text!r:.40}: "
            "they are of another tokenizer; leave token_ids and logp out to imitate the text"
        )
    messages = _read_turns(one, written, fills_gaps)
    return RecordedEpisode(messages=messages, completion=written, token_ids=ids, logp=logp, stop=stop)


def _read_turns(one: dict[str, Any], text: str | None, fills_gaps: bool) -> list[Message]:
    """Return the messages of an episode, or the text as the only reply: "" where the policy ended at once."""
    if "messages" in one:
        return check_ends_in_reply(read_messages(one["messages"], "episodes", fills_gaps=fills_gaps), "episodes")
    if text is None:
        raise _refuse("an episode has neither completion, messages nor token_ids with a reply")
    return [{"role": "assistant", "content": text}]


def _read_tokens(one: dict[str, Any], tokenizer: Decoder, sampling: Sampling) -> tuple[list[int], list[float | None]]:
    """Return ids and log-probabilities, [L] each. Raises InvalidRow unless an importance weight of them is exact."""
    ids, logp = one.get("token_ids"), one.get("logp")
    if not isinstance(logp, list):
        raise _refuse(
            "an episode has token_ids and no logp: its importance weight is unknown, and 1 would point the gradient "
            "elsewhere; leave token_ids out to imitate the text"
        )
    if not isinstance(ids, list):
        raise _refuse(
            "an episode has logp and no token_ids: its text, encoded again, may be other tokens than those that were "
            "sampled; add token_ids, or leave logp out to imitate the text"
        )
    if len(ids) != len(logp):
        raise _refuse(
            f"an episode has {len(ids)} token_ids and {len(logp)} numbers of logp: give one per token of prompt and "
            "episode, and null for tokens that were not sampled; text that was encoded again has no log-probabilities"
        )
    sampled = [i for i, number in zip(ids, logp, strict=True) if number is not None]
    if wrong := [i for i in ids if not isinstance(i, int) or not 0 <= i < tokenizer.vocabulary]:
        raise _refuse(f"an episode has the token id {wrong[0]!r}, and this vocabulary has {tokenizer.vocabulary}")
    if bad := [x for x in logp if x is not None and not (_is_number(x) and -LARGEST <= x <= LOGP_ROUNDING)]:
        raise _refuse(f"an episode has the log-probability {bad[0]!r}, where a finite number up to 0 is possible")
    if not sampled or logp[0] is not None:
        raise _refuse("an episode has a logp for none of its tokens, or for the first, which nothing predicts")
    _check_distribution(one, sampled, sampling)
    return ids, [None if number is None else float(number) for number in logp]


def _check_distribution(one: dict[str, Any], sampled: list[int], sampling: Sampling) -> None:
    if "temperature" not in one:
        raise _refuse("an episode has logp and no temperature: say at which temperature these log-probabilities are")
    if one["temperature"] != sampling.temperature:
        raise _refuse(
            f"an episode was sampled at temperature {one['temperature']}, and rollout.temperature is "
            f"{sampling.temperature:g}: their log-probabilities cannot be compared; set rollout.temperature to it"
        )
    cut = [name for name, off in TRUNCATION.items() if one.get(name, off) != off]
    if cut or sampling.is_truncated:
        raise _refuse(
            f"{f'an episode was sampled with {cut[0]}' if cut else 'rollout has top_p, top_k or min_p'}, so the sets "
            "that its tokens were chosen from are unknown: an importance weight needs them"
        )
    allowed = one.get("allowed_tokens", [*sampling.allowed_texts])
    if not isinstance(allowed, list) or not all(isinstance(text, str) for text in allowed):
        raise _refuse(f"an episode's allowed_tokens must be a list of texts, found {allowed!r:.60}")
    if {*allowed} != {*sampling.allowed_texts}:
        raise _refuse("an episode was sampled from other allowed_tokens than rollout.allowed_tokens: set that to them")
    if outside := sampling.allowed.find_outside(sampled):
        raise _refuse(f"an episode has the token {outside[0]}, which rollout.allowed_tokens excludes here")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse(why: str) -> InvalidRow:
    return InvalidRow("bad_episode", why)
