"""Tiny random Llama with a character tokenizer, in a folder that transformers and vLLM load.

python -m data_prep.tiny_model --out models/tiny
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path
from typing import TYPE_CHECKING

from core.types.action_tokens import list_action_tokens
from data_prep.script import read_options, run_script, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("system", "user", "assistant", "tool")
CHARACTERS = "\n" + string.digits + string.ascii_letters + string.punctuation + " "
# Only assistant turns end in a mark, since only the policy must learn to stop.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Content is text, or a list of parts.
PICTURE_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PICTURE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
"""Image tokens of Idefics3. The processor writes all but the last around and for an image."""
# Tools come first, each as name(arguments); a call is written as @name{...};
TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' }}{% for tool in tools %}"
    "{{ tool.function.name + '(' + tool.function.parameters.properties | join(',') + ')' }}"
    "{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '@' + call.function.name + call.function.arguments | tojson(separators=(',', ':')) + ';' }}"
    "{% endfor %}"
    "{% if message.role == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": "@(?P<name>[a-z_]+)",
            "close": ";",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": END, "content": "text"},
    },
}
"""Response template of transformers for these replies, saved with the tokenizer."""


def make_tokenizer(*, tools: bool = False, images: bool = False, actions: int = 0) -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token per ASCII character and per role. Other characters are unknown.

    tools: with a chat template that writes tools and calls, and a response template that parses calls. images: with the
    tokens of Idefics3, and a chat template that writes images. actions: number of action tokens. They are not special,
    so they appear in decoded text for the environment.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    added = [*(f"<|{role}|>" for role in ROLES), *(PICTURE_TOKENS if images else ())]
    specials = [PAD, END, UNKNOWN, *added]
    vocabulary = {token: i for i, token in enumerate([*specials, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    # [\s\S] and not a dot, which does not match a line break
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    # without a decoder, spaces would come between the characters
    tokenizer.decoder = decoders.Fuse()
    more = {"response_template": RESPONSE_TEMPLATE} if tools else {}
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=added,
        chat_template=TOOL_TEMPLATE if tools else PICTURE_TEMPLATE if images else CHAT_TEMPLATE,
        # True would remove spaces before punctuation, so that decoded text would differ from the sampled text
        clean_up_tokenization_spaces=False,
        **more,
    )
    made.add_tokens(list_action_tokens(actions))
    return made


def make(
    out: Path,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    max_length: int = 256,
    seed: int = 0,
    tools: bool = False,
) -> None:
    """Save model, tokenizer, chat template and generation config under `out`. The same seed gives the same bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(tools=tools)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=max_length,
        initializer_range=0.05,  # the usual 0.02 suits wide models; a narrow one learns more slowly from it
        # Llama's default is 1, the id of END here
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    save_model(model, tokenizer, out)
    print(f"{out}: a random Llama of {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save model, tokenizer, chat template and generation config under `out`."""
    from transformers import GenerationConfig
    from transformers.utils import logging

    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    logging.disable_progress_bar()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.tiny_model", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--hidden-size", type=whole(1), default=64, help="default %(default)s")
    parser.add_argument("--layers", type=whole(1), default=2, help="default %(default)s")
    parser.add_argument("--heads", type=whole(1), default=2, help="default %(default)s")
    parser.add_argument("--max-length", type=whole(1), default=256, help="positions (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--tools", action="store_true", help="with a chat template for tools and their calls")
    options = read_options(parser, argv)
    if options["hidden_size"] not in (32 * options["heads"], 64 * options["heads"]):
        parser.error("--hidden-size must be 32 or 64 times --heads: vLLM's CPU attention takes no other size of head")
    make(**options)


if __name__ == "__main__":
    run_script(main)
