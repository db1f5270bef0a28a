"""Peak memory of one training step, with all logits at once and in chunks: python -m tools.benchmarks.memory

A model with a small body (2 layers, 128 wide) and a vocabulary of 150 thousand, in bfloat16, so that the logits decide.
Sequences of 1024 trained tokens are packed into one micro-batch, and the local trainer makes one step of SFT with sgd,
which keeps no state: forward pass, backward pass, update. Each number comes from a process of its own. It is the peak
of the step beyond the loaded model: resident memory on a CPU, memory allocated by torch on a GPU.

Exit code 1 unless chunks (trainer.logits_mib) take less than all logits at once at the largest number of tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.benchmarks.processes import run_for_json

BODY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SEQUENCE = 1024
COLUMNS = ("tokens", "logits", "at once", "in chunks", "ratio", "s at once", "s in chunks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurement of one step, made in a process of its own."""

    peak_mib: float
    seconds: float
    loss: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.memory", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384], help="trained, in a micro-batch")
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--logits-mib", type=int, default=1024, help="trainer.logits_mib of the runs with chunks")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if wrong := [n for n in args.tokens if n < 1 or (n > SEQUENCE and n % SEQUENCE)]:
        parser.error(f"--tokens {wrong[0]}: give a multiple of {SEQUENCE}, or fewer")
    if args.one:
        print(json.dumps(asdict(measure_step(str(args.one), args.dtype, max(args.tokens), args.logits_mib))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.vocabulary, args.dtype)
        return compare(Path(folder), args)


def make_model(folder: Path, vocabulary: int, dtype: str) -> None:
    import torch

    from tools.benchmarks.random_task import save_model

    save_model(folder, BODY | {"vocab_size": vocabulary}, dtype=getattr(torch, dtype))


def compare(model: Path, args: argparse.Namespace) -> int:
    """Print the table; return the exit code."""
    width = 2 if args.dtype == "bfloat16" else 4
    print(f"vocabulary {args.vocabulary}, {args.dtype}, trainer.logits_mib=0 and {args.logits_mib}; MiB, seconds\n")
    print("".join(f"{name:>12}" for name in COLUMNS), flush=True)
    last = (0.0, 0.0)
    for tokens in sorted(args.tokens):
        whole, chunked = (run_alone(model, args.dtype, tokens, mib) for mib in (0, args.logits_mib))
        # less memory is worth nothing if it computes another loss
        if abs(whole.loss - chunked.loss) > 1e-3:
            print(f"the losses differ: {whole.loss} and {chunked.loss}")
            return 1
        logits = tokens * args.vocabulary * width / 2**20
        last = (whole.peak_mib, chunked.peak_mib)
        numbers = (tokens, logits, *last)
        print(
            "".join(f"{x:>12.0f}" for x in numbers)
            + f"{last[1] / last[0]:>12.2f}{whole.seconds:>12.1f}{chunked.seconds:>12.1f}",
            flush=True,
        )
    reached = last[1] < last[0]
    print(f"\ngoal, less memory in chunks at {max(args.tokens)} tokens: {'reached' if reached else 'missed'}")
    return 0 if reached else 1


def run_alone(model: Path, dtype: str, tokens: int, mib: int) -> Measured:
    settings = ["--tokens", str(tokens), "--dtype", dtype, "--logits-mib", str(mib)]
    command = [sys.executable, "-m", "tools.benchmarks.memory", "--one", str(model), *settings]
    return Measured(**run_for_json(command))


def measure_step(model: str, dtype: str, tokens: int, mib: int) -> Measured:
    """Make one step and return what it adds to the peak."""
    import torch

    from algs.sft import SFT
    from configs.trainer_schema import ModelConfig, TrainerConfig
    from data_feeds.packing.batches import micro_batches
    from tools.benchmarks.random_task import make_groups
    from trainers.local import LocalTrainer

    # one micro-batch for all, so that the peak is that of `tokens` tokens
    cfg = TrainerConfig(optimizer="sgd", micro_batch_tokens=tokens + SEQUENCE, logits_mib=mib)
    trainer = LocalTrainer(ModelConfig(path=model, dtype=dtype), cfg, SFT(), temperature=1.0, total_updates=2)
    length = min(SEQUENCE, tokens)
    # a prompt of one token, so that nearly every position has logits
    groups = make_groups(tokens // length, 1, prompt=1, response=length, vocabulary=1000)
    [batches] = micro_batches(groups, "token", cfg.micro_batch_tokens, padded=trainer.describe_layout().padded)

    on_gpu = torch.cuda.is_available()
    # a peak counts from the start of the process, and the size before is that of the loaded model
    before, start = torch.cuda.memory_allocated() / 2**20 if on_gpu else read_status("VmRSS"), time.perf_counter()
    loss = trainer.step([batches])["loss"]
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else read_status("VmHWM")
    return Measured(peak_mib=peak - before, seconds=time.perf_counter() - start, loss=loss)


def read_status(name: str) -> float:
    """Return a size of this process in MiB. getrusage would name the parent's peak where that is larger."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(kib) / 1024


if __name__ == "__main__":
    sys.exit(main())
