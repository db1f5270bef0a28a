"""Token ids of texts, and masks of the tokens to train on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator
from typing import Any

from core.errors import UserError
from data_feeds.chat.turns import Piece

CHARS_AT_ONCE = 2**20
"""Characters per tokenizer call. The library needs some hundred bytes per token."""
Encoded = tuple[list[int], list[bool]]
"""Token ids of a piece, and the mask of trained tokens."""


def encode_pieces(hf: Any, pieces: list[Piece]) -> list[Encoded]:
    """Encode texts, in few tokenizer calls. The library parallelizes a call over the cores."""
    encoded: list[Encoded] = []
    for batch in _split_by_size(pieces):
        texts = [text for text, _ in batch]
        found = hf(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
        # the library keeps the offsets of all tokens; as Python's objects they would take longer than the encoding
        kept = found.encodings or [None] * len(batch)
        for ids, places, (text, learnt) in zip(found["input_ids"], kept, batch, strict=True):
            if not isinstance(learnt, list) or not learnt:
                encoded.append((ids, [bool(learnt)] * len(ids)))
            elif places is None:
                encoded.append((ids, _mask_by_prefixes(hf, text, ids, learnt)))
            else:
                encoded.append((ids, mask_by_offsets(ids, places.token_to_chars, learnt, hf.added_tokens_decoder)))
    return encoded


def mask_by_offsets(
    ids: list[int], find: Callable[[int], tuple[int, int]], learnt: list[range], added: Container[int]
) -> list[bool]:
    """Return the mask of the tokens in some ranges of characters.

    find: offsets [begin, end) of a token by number; both rise from token to token. added: ids of added tokens.
    """
    mask = [False] * len(ids)
    before = 0
    for span in sorted(learnt, key=lambda span: span.start):
        first = bisect_left(range(len(ids)), span.start, key=lambda n: find(n)[0])
        after = bisect_left(range(len(ids)), span.stop, lo=first, key=lambda n: find(n)[0])
        mask[first:after] = [True] * (after - first)
        # A token of the header that holds the first characters of the turn too is trained, unless it is an added token:
        # some of those swallow the white space around them. Several tokens may write one character.
        while first and (place := find(first - 1))[1] > span.start and place[0] >= before:
            first -= 1
            mask[first] = ids[first] not in added
        before = span.stop
    return mask


def _mask_by_prefixes(hf: Any, text: str, ids: list[int], learnt: list[range]) -> list[bool]:
    """Return the mask for a tokenizer without offsets: prefixes of the text are encoded to count their tokens."""
    mask = [False] * len(ids)
    for span in learnt:
        begin, end = (len(_encode_prefix(hf, text[:at], ids)) for at in (span.start, span.stop))
        mask[begin:end] = [True] * (end - begin)
    return mask


def _encode_prefix(hf: Any, text: str, ids: list[int]) -> list[int]:
    found: list[int] = hf.encode(text, add_special_tokens=False) if text else []
    if ids[: len(found)] != found:
        raise UserError(
            "the tokenizer of this model gives no offsets, and writes the beginning of a conversation with other "
            "tokens than the whole: take a tokenizer of the library tokenizers (tokenizer.json)"
        )
    return found


def encode_after(hf: Any, before: str, text: str) -> list[int]:
    """Return the ids of a text as they are after `before`, which ends where a token ends."""
    if not before or not text:
        return hf.encode(text, add_special_tokens=False) if text else []
    ids: list[int] = hf.encode(before + text, add_special_tokens=False)
    alone: list[int] = hf.encode(before, add_special_tokens=False)
    return ids[len(alone) :]


def find_added_ids(hf: Any) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer itself puts before and after a text, such as a BOS token."""
    bare: list[int] = hf.encode("a", add_special_tokens=False)
    whole: list[int] = hf.encode("a")
    at = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    return whole[:at], whole[at + len(bare) :]


def join_encoded(parts: list[Encoded]) -> Encoded:
    """Concatenate the encoded pieces of one conversation."""
    return [i for ids, _ in parts for i in ids], [learnt for _, mask in parts for learnt in mask]


def _split_by_size(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Yield batches of pieces with about CHARS_AT_ONCE characters each. A long piece is a batch alone."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= CHARS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
