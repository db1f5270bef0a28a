"""Memory and time of a step of GKD beside one of SFT: python -m tools.benchmarks.distill_cost

Student and teacher have a small body (1 layer, 1024 wide) and a vocabulary of 150 thousand, in float32, so that the
head decides. The local trainer makes one step of sgd on one micro-batch, each algorithm in a process of its own. Memory
is the peak of the step beyond the loaded models: resident on a CPU, allocated by torch on a GPU. Time is that of the
processors on a CPU, which other programs of the machine hardly change.

Exit code 1 unless GKD takes at most 1.2 times the memory of SFT and at most 3 times its time, 2.2 times without the
teacher's forward pass.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.benchmarks.memory import read_status
from tools.benchmarks.processes import print_row, run_for_json

MEMORY, TIME, TIME_ALONE = 1.2, 3.0, 2.2
"""Largest ratios of GKD to SFT: memory, time, and time without the teacher's forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one step, measured in a process of its own."""

    peak_mib: float
    seconds: float
    teacher_s: float
    """Seconds of a forward pass of the teacher with its head, which `seconds` includes; 0 without a teacher."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.distill_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16_384, help="trained tokens of the step, a multiple of 512")
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--logits-mib", type=int, default=1024, help="trainer.logits_mib")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(asdict(measure_step(args.one, args.folder, args.tokens, args.logits_mib))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder), args.hidden, args.vocabulary)
        command = [sys.executable, "-m", "tools.benchmarks.distill_cost", "--folder", folder]
        command += ["--tokens", str(args.tokens), "--logits-mib", str(args.logits_mib)]
        sft, gkd = (Cost(**run_for_json([*command, "--one", name])) for name in ("sft", "gkd"))
    return report(args, sft, gkd)


def report(args: argparse.Namespace, sft: Cost, gkd: Cost) -> int:
    """Print both costs and the ratios; return the exit code."""
    print(f"{args.tokens} tokens, {args.hidden} wide, vocabulary {args.vocabulary}, logits_mib {args.logits_mib}")
    for name, cost in (("sft", sft), ("gkd", gkd)):
        print(f"{name}  {cost.peak_mib:8.0f} MiB  {cost.seconds:8.1f} s  of it the teacher's {cost.teacher_s:.1f} s")
    ratios = {
        "memory": (gkd.peak_mib / sft.peak_mib, MEMORY),
        "time": (gkd.seconds / sft.seconds, TIME),
        "time without the teacher's forward pass": ((gkd.seconds - gkd.teacher_s) / sft.seconds, TIME_ALONE),
    }
    for name, (ratio, goal) in ratios.items():
        print(f"{name}: {ratio:.2f} times, goal {goal}: {'reached' if ratio <= goal else 'missed'}")
    memory, slower, alone = (ratio for ratio, _ in ratios.values())
    times = f"{slower:.1f} times the time, {alone:.1f} without a forward pass of the teacher"
    print_row(f"{memory:.2f} of the memory beyond the weights, {times} (goals {MEMORY}, {TIME:g}, {TIME_ALONE})")
    return 0 if all(ratio <= goal for ratio, goal in ratios.values()) else 1


def make_models(folder: Path, hidden: int, vocabulary: int) -> None:
    import torch

    from tools.benchmarks.random_task import save_model

    shape = {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 1, "vocab_size": vocabulary}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": hidden // 8}
    for name in ("student", "teacher"):
        save_model(folder / name, shape | {"tie_word_embeddings": True}, dtype=torch.float32)


def measure_step(name: str, folder: Path, tokens: int, mib: int) -> Cost:
    """Return the cost of a step of an algorithm, sft or gkd."""
    import torch

    from algs import find_algorithm
    from configs.trainer_schema import ModelConfig, TrainerConfig
    from data_feeds.packing.batches import micro_batches
    from tools.benchmarks.random_task import make_groups
    from trainers.local import LocalTrainer

    settings = {"name": name} | ({"teacher": str(folder / "teacher")} if name == "gkd" else {})
    cfg = TrainerConfig(optimizer="sgd", lr=1e-4, micro_batch_tokens=2 * tokens, logits_mib=mib, layout="padded")
    model = ModelConfig(path=str(folder / "student"), dtype="float32")
    alg = find_algorithm(settings)[1](**settings)
    trainer = LocalTrainer(model, cfg, alg, temperature=1.0, total_updates=2)
    # pages of a file are in memory once they are read, and they are weights, not the step
    touched = sum(float(p.sum()) for m in trainer.list_models() for p in m.parameters())
    assert touched == touched
    groups = make_groups(tokens // 512, 1, prompt=1, response=512, vocabulary=1000)
    [batches] = micro_batches(groups, "token", cfg.micro_batch_tokens)
    on_gpu = torch.cuda.is_available()

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() if on_gpu else time.process_time()

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here, not from the loading
    before, start = torch.cuda.memory_allocated() / 2**20 if on_gpu else read_status("VmRSS"), now()
    trainer.step([batches])
    seconds = now() - start
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else read_status("VmHWM")
    start = now()
    for teacher in trainer.frozen.values():
        with torch.no_grad():
            trainer.forward(trainer.load(batches[0]), frozen=teacher, measures={})
    return Cost(peak_mib=peak - before, seconds=seconds, teacher_s=now() - start)


if __name__ == "__main__":
    sys.exit(main())
