"""A model folder with new tokens, whose rows in embedding and head are the mean of the other tokens' rows.

    python -m data_prep.add_tokens --model models/base --out models/more --tokens '<think>' '</think>'

Rewards and environments read tokens of `--tokens` as text. They do not see those of `--special`, as they do not see the
marks of turns. Train the whole model: a LoRA adapter leaves embedding and head as they are.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import UserError, quote
from data_feeds.chat.tokenizer import ChatTokenizer
from data_prep.script import read_options, run_script
from modeling.hf_config import check_model_folder, read_config
from modeling.load import DTYPES, load_model
from modeling.model_files import find_model_file
from modeling.saved_model import check_saved, save_whole

if TYPE_CHECKING:
    from torch import Tensor, nn

COPIED = ("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md")
"""Files of the model that are about its licence."""


def make(model: str, out: Path, *, tokens: Sequence[str] = (), special: Sequence[str] = ()) -> list[int]:
    """Save the model with more tokens under `out`, and return their ids.

    Raises UserError for a token that is empty, known or named twice, and for a folder that exists.

    tokens: part of decoded text. special: not part of it.
    """
    check_model_folder(model, key="--model")
    if out.exists():
        raise UserError(f"--out={out} is there already: name another folder")
    # plain: a base model may have no chat template
    tokenizer = ChatTokenizer(model, "plain", key="--model")
    old = sorted({*tokenizer.hf.get_vocab().values()})
    ids = add_to_tokenizer(tokenizer.hf, tokens, special)
    dtype = str(read_config(model).dtype).removeprefix("torch.")
    dtype = dtype if dtype in DTYPES else "float32"
    hf: Any = load_model(model, dtype=dtype, attention="auto", key="--model")
    rows = hf.get_input_embeddings().weight.shape[0]
    if max(ids) >= rows:
        hf.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    fill_rows(hf, ids, old)
    for sentence in save_whole(hf, out):
        print(sentence)
    tokenizer.save(out)
    for name in COPIED:
        if (found := find_model_file(model, name)) is not None:
            shutil.copyfile(found, out / name)
    check_saved(out, dtype=dtype)
    named = ", ".join(f"{token} {i}" for token, i in zip([*tokens, *special], ids, strict=True))
    print(
        f"{out}: {len(ids)} new tokens ({named}); the model has rows for {max(rows, max(ids) + 1)} ids, and had {rows}"
    )
    return ids


def add_to_tokenizer(hf: Any, tokens: Sequence[str], special: Sequence[str]) -> list[int]:
    """Add tokens to a tokenizer in place and return their ids, in order."""
    from transformers import AddedToken

    given, known = [*tokens, *special], hf.get_vocab()
    if not given:
        raise UserError("--tokens and --special are both empty: name at least one token")
    for at, token in enumerate(given):
        if not token.strip() or token in known or token in given[:at]:
            why = "is empty" if not token.strip() else "is a token already" if token in known else "is named twice"
            raise UserError(f"--tokens, --special: {quote(token) or repr(token)} {why}: leave it out")
    for names, is_special in ((tokens, False), (special, True)):
        # not normalized: the token is found in text exactly as it is written
        hf.add_tokens([AddedToken(t, special=is_special, normalized=False) for t in names], special_tokens=is_special)
    ids = [hf.convert_tokens_to_ids(token) for token in given]
    for token, i in zip(given, ids, strict=True):
        if hf.encode(token, add_special_tokens=False) != [i]:
            raise UserError(
                f"--tokens, --special: the tokenizer splits {quote(token)} all the same: choose another text"
            )
    return ids


def fill_rows(model: Any, ids: Sequence[int], old: Sequence[int]) -> None:
    """Set the rows of `ids` in embedding and head to the mean of the rows of `old`."""
    import torch

    head: nn.Module = model.get_output_embeddings()
    found = [model.get_input_embeddings().weight, head.weight, getattr(head, "bias", None)]
    distinct: dict[int, Tensor] = {id(p): p for p in found if p is not None}  # a tied head is the embedding
    with torch.no_grad():
        for parameter in distinct.values():
            # in float32: a sum of many rows in bfloat16 would lose most digits
            parameter[[*ids]] = parameter[[*old]].float().mean(0).to(parameter.dtype)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.add_tokens", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder or hub name of a model")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--tokens", nargs="+", default=[], help="tokens that are part of a reply's text")
    parser.add_argument("--special", nargs="+", default=[], help="tokens that are not, such as marks of turns")
    make(**read_options(parser, argv))


if __name__ == "__main__":
    run_script(main)
