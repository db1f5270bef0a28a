"""Stop strings and extra stop tokens of a recipe, besides the model's own stop tokens.

Engines check after every sampled token, so a reply ends with the token that completes a stop. No trained token is cut
or added. All engines use this file, and the text is the one that rewards read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Protocol

from core.errors import RunStopped, UserError, quote

MARGIN = 8
"""Extra tokens decoded before the longest stop string. The first characters of a window may be incomplete."""
UNFINISHED = "\ufffd"
"""Text of an incomplete character's bytes."""


class StopTokenizer(Protocol):
    """Tokenizer methods for stops; see data_feeds/chat/tokenizer.py."""

    @property
    def stop_token_ids(self) -> list[int]: ...
    @property
    def turn_end(self) -> list[int]: ...
    @property
    def end_in_letters(self) -> str: ...
    @property
    def written_ids(self) -> frozenset[int]: ...
    def decode(self, ids: list[int]) -> str: ...
    def encode(self, text: str) -> list[int]: ...


class StopStrings:
    """Search for stop strings in the text of sampled tokens, token by token."""

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str], written_ids: Collection[int]):
        """written_ids: tokens that appear in the text. Others, such as special tokens, add no text."""
        self.strings, self.decode, self.written_ids = list(strings), decode, written_ids
        # every token of the window brings at least one byte
        self.window = max(len(s.encode()) for s in strings) + MARGIN

    def find_end(self, ids: list[int], start: int = 0) -> int | None:
        """Return the length up to the first token, from `start` on, that completes a stop string, or None."""
        for end in range(start + 1, len(ids) + 1):
            # only the end is decoded for every token; a hit is confirmed on the whole text, as rewards read it
            if self.is_in(self._read_end(ids, end)) and self.is_in(self.decode(ids[:end])):
                return end
        return None

    def is_in(self, text: str) -> bool:
        """Return whether a text contains a stop string."""
        return any(string in text for string in self.strings)

    def _read_end(self, ids: list[int], end: int) -> str:
        """Return the end of the text of ids[:end]. It is longer than the longest stop string."""
        found: list[int] = []
        # Special tokens add no text, so the search goes back further than the window. The bound keeps each token cheap.
        for i in reversed(ids[max(0, end - 4 * self.window) : end]):
            if i in self.written_ids:
                found.append(i)
            if len(found) == self.window:
                break
        else:
            if end > 4 * self.window:  # so many tokens without text that the window has too little
                return self.decode(ids[:end])
        return self.decode(found[::-1])


class Stops:
    """Stops of the recipe: `rollout.stop` and `rollout.stop_token_ids`."""

    def __init__(self, tokenizer: StopTokenizer, strings: Sequence[str], token_ids: Sequence[int]):
        self.tokenizer, self.own = tokenizer, frozenset(tokenizer.stop_token_ids)
        self.token_ids = tuple(sorted(self.own | {*token_ids}))
        """All tokens that end a reply, the model's own included."""
        self.strings = StopStrings(strings, tokenizer.decode, tokenizer.written_ids) if strings else None

    def check_completion(self, ids: list[int], stop: str) -> None:
        """Raise RunStopped if an engine sampled past a stop string, or missed it."""
        if self.strings is None:
            return
        # without the last token: the token that completes a stop string belongs to the reply
        if self.strings.is_in(self.tokenizer.decode(ids[:-1])):
            raise RunStopped("the engine went on sampling after a stop string (rollout.stop): correct its generate()")
        if stop == "length" and self.strings.is_in(self.tokenizer.decode(ids)):
            raise RunStopped("the engine returned a stop string (rollout.stop) as if it had not seen it")

    def close_turn(self, ids: list[int]) -> list[int]:
        """Return the tokens that end a turn, if the reply stopped before the model sampled them.

        They are not trained on. The next turn then follows as the chat template writes it.
        """
        return [] if ids[-1] in self.own else self._turn_end

    @cached_property
    def _turn_end(self) -> list[int]:
        return self.tokenizer.turn_end


def join_turn(reply: list[int], closing: list[int], following: list[int]) -> list[int]:
    """Return the tokens after a reply: the end of its turn, and the turns that follow.

    Some templates end a turn only by the first token of the next one, where the policy has stopped.
    """
    is_begun = not closing and following[:1] == reply[-1:]
    return closing + following[is_begun:]


def check_stops(tokenizer: StopTokenizer, strings: Sequence[str], token_ids: Sequence[int], vocabulary: int) -> None:
    """Raise UserError for a stop that can never occur, and if no reply would stop where the template ends a turn.

    vocabulary: number of the tokenizer's token ids.
    """
    letters = tokenizer.end_in_letters
    if letters and not any(string in letters for string in strings):
        raise UserError(
            f"the chat template ends a turn with {quote(letters)}, which is no token of this model's tokenizer, so no "
            "reply would stop there: add it to the tokenizer, name another token in data.end_of_turn, or add the text "
            "to rollout.stop"
        )
    for string in strings:
        if UNFINISHED in string:
            raise UserError(
                f"rollout.stop names {quote(string)}, which stands for an unfinished character: leave it out"
            )
        if string not in tokenizer.decode(tokenizer.encode(string)):
            raise UserError(
                f"rollout.stop names {quote(string)}, which is never in the text of a reply: special tokens are not "
                "part of it; name the token in rollout.stop_token_ids"
            )
    for token in token_ids:
        if not 0 <= token < vocabulary:
            raise UserError(
                f"rollout.stop_token_ids names {token}, and the tokenizer has ids from 0 to {vocabulary - 1}"
            )
        if token in tokenizer.stop_token_ids:
            raise UserError(
                f"rollout.stop_token_ids names {token}, which ends a reply of this model anyway: leave it out"
            )
