"""Tiny random Idefics3, a vision model, in a folder that transformers and vLLM load.

python -m data_prep.tiny_vision_model --out models/tiny_vision

Images are scaled to one square of a few tokens. Text is tokenized by characters, as in tiny_model.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.script import read_options, run_script, whole
from data_prep.tiny_model import make_tokenizer, save_model

if TYPE_CHECKING:
    from transformers import Idefics3Config, Idefics3Processor, PreTrainedTokenizerFast

HEAD = 32
"""Size of an attention head. vLLM's CPU attention supports no smaller size."""
SCALE = 2
"""SCALE x SCALE patches become one token."""
MEAN = STD = [0.5, 0.5, 0.5]
"""Maps colours from [0, 1] to [-1, 1]."""


def make(
    out: Path,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    vision_layers: int = 2,
    side: int = 56,
    patch: int = 14,
    max_length: int = 256,
    action_tokens: int = 0,
    seed: int = 0,
) -> None:
    """Save model, processor, tokenizer, chat template and generation config. The same seed gives the same bytes.

    side: side of the square of scaled images, in pixels. patch: side of a patch, in pixels. action_tokens: number of
    tokens <act_0>, <act_1>, ... for actions.
    """
    import torch
    from transformers import Idefics3ForConditionalGeneration

    tokenizer = make_tokenizer(images=True, actions=action_tokens)
    config = make_config(
        tokenizer,
        hidden_size=hidden_size,
        layers=layers,
        vision_layers=vision_layers,
        side=side,
        patch=patch,
        max_length=max_length,
    )
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(config)
    tokens = (side // patch // SCALE) ** 2
    save_model(model, tokenizer, out)
    make_processor(tokenizer, side=side, tokens=tokens).save_pretrained(out)
    print(
        f"{out}: a random Idefics3 of {model.num_parameters():,} parameters, {len(tokenizer)} tokens; an image is "
        f"{tokens} tokens of {side // patch * side // patch // tokens} patches"
    )


def make_config(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int,
    layers: int,
    vision_layers: int,
    side: int,
    patch: int,
    max_length: int,
) -> Idefics3Config:
    """Return the config of a model with equally wide vision and language parts."""
    from transformers import Idefics3Config

    shape = {
        "hidden_size": hidden_size,
        "num_attention_heads": hidden_size // HEAD,
        "initializer_range": 0.05,  # the usual 0.02 suits wide models; a narrow one learns more slowly from it
    }
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": layers,
        "num_key_value_heads": hidden_size // HEAD,
        "max_position_embeddings": max_length,
        # Llama's default is 1, the id of END here
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "image_size": side,
        "patch_size": patch,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": vision_layers,
    }
    return Idefics3Config(
        text_config=shape | text,
        vision_config=shape | vision,
        scale_factor=SCALE,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )


def make_processor(tokenizer: PreTrainedTokenizerFast, *, side: int, tokens: int) -> Idefics3Processor:
    """Return a processor that scales any image to one square of `tokens` tokens. It needs only PIL."""
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    images = Idefics3ImageProcessorPil(
        # a large image would be split into tiles, and its number of tokens would depend on its size
        do_image_splitting=False,
        size={"longest_edge": side},
        max_image_size={"longest_edge": side},
        image_mean=MEAN,
        image_std=STD,
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=tokens, chat_template=tokenizer.chat_template)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.tiny_vision_model", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--hidden-size", type=whole(1), default=64, help="a multiple of 32 (default %(default)s)")
    parser.add_argument("--layers", type=whole(1), default=2, help="of the language model (default %(default)s)")
    parser.add_argument("--vision-layers", type=whole(1), default=2, help="default %(default)s")
    parser.add_argument("--side", type=whole(1), default=56, help="of an image, in pixels (default %(default)s)")
    parser.add_argument("--patch", type=whole(1), default=14, help="side of a patch (default %(default)s)")
    parser.add_argument("--max-length", type=whole(1), default=256, help="positions (default %(default)s)")
    parser.add_argument("--action-tokens", type=whole(0), default=0, help="how many <act_i> (default none)")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    options = read_options(parser, argv)
    if options["hidden_size"] % HEAD:
        parser.error(f"--hidden-size {options['hidden_size']}: give a multiple of {HEAD}, the size of a head")
    side, unit = options["side"], SCALE * options["patch"]
    if side % unit:
        parser.error(f"--side {side}: give a multiple of {SCALE} x --patch, which is {unit}")
    make(**options)


if __name__ == "__main__":
    run_script(main)
