"""Text of token ids. Every decoding of the product goes through here, so that it is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def decode_exactly(hf: Any, ids: Sequence[int], *, special: bool) -> str:
    """Return the text of tokens. hf: tokenizer of Hugging Face. special: with the special tokens."""
    # the clean-up, which a tokenizer's file may ask for, turns "print(' .')" into "print('.')"
    return hf.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def list_special_tokens(hf: Any) -> dict[int, str]:
    """Return the special tokens, which a decoding may leave out, by id."""
    # of a file's added tokens, hf.all_special_ids has only those with a name, such as eos_token
    added = {i: token.content for i, token in hf.added_tokens_decoder.items() if token.special}
    return added | dict(zip(hf.all_special_ids, hf.all_special_tokens, strict=True))
