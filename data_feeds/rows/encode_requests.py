"""Batched tokenization for rows: the texts of many rows are encoded in one call, over all cores.

Each row is a generator. It yields the texts to encode, is sent their ids, and returns the Prompt or Group.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import NoReturn, TypeVar

from data_feeds.chat.tokenizer import Encoded
from data_feeds.chat.turns import Piece

Made = TypeVar("Made")
EncodeRequest = Generator[list[Piece], list[Encoded], Made]
Outcome = Callable[[], Made]
"""Returns the converted row, or raises the row's error."""
ROWS_AT_ONCE = 256


def encode_requests(
    drafts: Iterable[EncodeRequest[Made]],
    encode: Callable[[list[Piece]], list[Encoded]],
    *,
    at_once: int = ROWS_AT_ONCE,
) -> Iterator[Outcome[Made]]:
    """Run row generators in batches of `at_once`. Yield one outcome per row, in order.

    Errors are raised by the outcomes, so the first error raised is that of the first invalid row.
    """
    left = iter(drafts)
    while chunk := list(islice(left, at_once)):
        yield from _encode_chunk(chunk, encode)


def _encode_chunk(
    chunk: list[EncodeRequest[Made]], encode: Callable[[list[Piece]], list[Encoded]]
) -> Iterator[Outcome[Made]]:
    outcomes: dict[int, Outcome[Made]] = {}
    answers: dict[int, list[Encoded] | None] = dict.fromkeys(range(len(chunk)))
    # A row may yield several times. Each round encodes the pending texts of all rows in one call.
    while answers:
        asked: dict[int, list[Piece]] = {}
        for i, answer in answers.items():
            try:
                asked[i] = next(chunk[i]) if answer is None else chunk[i].send(answer)
            except StopIteration as end:
                outcomes[i] = partial(_give, end.value)
            except Exception as error:  # not lost: its outcome raises it
                outcomes[i] = partial(_raise, error)
        encoded = iter(encode([piece for pieces in asked.values() for piece in pieces]))
        answers = {i: list(islice(encoded, len(pieces))) for i, pieces in asked.items()}
    return (outcomes[i] for i in range(len(chunk)))


def _give(made: Made) -> Made:
    return made


def _raise(error: Exception) -> NoReturn:
    raise error
