"""Small tokenizers of every kind that chat models have: byte-level BPE, and Metaspace in its four forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Kind = Literal["bytes", "always", "first", "never", "legacy"]
"""bytes: byte-level BPE. The others write spaces as U+2581 and have byte fallback: always, first and never say where
Metaspace prepends one; legacy prepends it in the normalizer, before every text between two added tokens."""
CORPUS = (
    "The answer is 4 . What is 2 + 2 ? It is cold in Oslo, and 21 degrees in Rome. Be brief. And then? hm hm\n\n"
    "### Instruction: USER: ASSISTANT: User: Assistant: [INST] [/INST] <|user|>\n<|assistant|>\n<tool_call>\n"
) * 8
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def _train(kind: Kind) -> str:
    """Return a trained tokenizer as JSON."""
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        made.train_from_iterator([CORPUS], trainer)
        return made.to_str()
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=460, special_tokens=["<unk>", *BYTES], show_progress=False)
    # one word a text, for the trainer counts words
    made.train_from_iterator(CORPUS.replace("\n", " ").split(" "), trainer)
    space: list[Any] = [normalizers.Replace(" ", "\u2581")]
    if kind == "legacy":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *space])
        made.pre_tokenizer = None  # pyright: ignore[reportAttributeAccessIssue]
    elif kind == "never":
        made.normalizer, made.pre_tokenizer = space[0], pre_tokenizers.Split("\u2581", "merged_with_next")
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    strip = [] if kind == "never" else [decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    described = json.loads(made.to_str())
    # bytes are in the vocabulary, and no special tokens
    described["added_tokens"] = [t for t in described["added_tokens"] if t["content"] == "<unk>"]
    return json.dumps(described)


def make_hf(
    kind: Kind,
    special: Sequence[str | AddedToken],
    *,
    eos: str,
    bos: str | None = None,
    ordinary: Sequence[str] = (),
    adds_bos: bool = False,
    adds_eos: bool = False,
    **given: Any,
) -> Any:
    """Return a tokenizer of transformers. ordinary: added tokens that are not special; given: such as clean_up_..."""
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer.from_str(_train(kind))
    # not normalized: else a legacy tokenizer looks for them with a space in front
    made.add_special_tokens([t if isinstance(t, AddedToken) else AddedToken(t, normalized=False) for t in special])
    made.add_tokens([AddedToken(t, normalized=False) for t in ordinary])
    if adds_bos or adds_eos:
        names = [t for t, adds in ((bos, adds_bos), (eos, adds_eos)) if adds and t]
        made.post_processor = TemplateProcessing(
            single=f"{bos + ':0 ' if adds_bos else ''}$A:0{' ' + eos + ':0' if adds_eos else ''}",
            pair="$A:0 $B:1",
            special_tokens=[(t, made.token_to_id(t)) for t in names],
        )
    more = {} if kind == "bytes" else {"unk_token": "<unk>"}
    others = [t for t in map(str, (getattr(t, "content", t) for t in special)) if t not in (eos, bos)]
    named = {"eos_token": eos, "additional_special_tokens": others, **({"bos_token": bos} if bos else {})}
    return PreTrainedTokenizerFast(tokenizer_object=made, **named, **more, **given)
