"""Run tasks of lm_eval on a trained model: python -m tools.lm_eval --model MODEL --tasks TASK [options of lm_eval]

MODEL is a run, model, adapter or checkpoint folder, or a name on the hub. Log-likelihoods are the trainer's, texts come
from one of our engines; see tools/lm_eval_model.py. All other options are those of the command `lm_eval`: --tasks
(names, or YAML files), --num_fewshot, --limit, --apply_chat_template, --output_path, --log_samples and so on.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from unittest.mock import patch

from core.errors import UserError
from tools.speaker import run_tool

NOT_OURS = ("model_args", "batch_size", "max_batch_size", "device")
"""Options of lm_eval that mean nothing here: batches are made by their tokens, on the GPU where there is one."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.lm_eval",
        description="Run tasks of lm_eval on a trained model. All other options are those of the command lm_eval.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="a run, model, adapter or checkpoint folder, or a name")
    parser.add_argument("--engine", default="hf", help="engine of generated texts: hf, vllm or a path (default hf)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: that of the run")
    parser.add_argument("--max_length", type=int, help="tokens of the longest text (default: the model's)")
    parser.add_argument("--tensor_parallel_size", type=int, default=1, help="GPUs of the engine vllm (default 1)")
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.85, help="of the engine vllm (default 0.85)")
    ours, rest = parser.parse_known_args(argv)
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm_eval is not installed: run `.venv/bin/pip install -c constraints.txt lm_eval`")
    evaluate(vars(ours), rest)


def evaluate(ours: dict[str, object], rest: list[str]) -> None:
    """Call lm_eval's own command with our model."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    from tools.lm_eval_model import NAME

    setup_logging()
    command = HarnessCLI()
    with patch.object(sys, "argv", ["lm_eval", "run", *rest]):
        args = command.parse_args()
    for name in NOT_OURS:
        if getattr(args, name, None) is not None:
            raise UserError(f"--{name} has no meaning for our models: leave it out")
    args.model, args.model_args = NAME, {name: value for name, value in ours.items() if value is not None}
    command.execute(args)


if __name__ == "__main__":
    run_tool(main)
