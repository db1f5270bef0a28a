"""Seconds of one RL step, phase by phase, beside the raw ceiling of the same work: python -m benchmarks.rl_step

The work: SmolLM2-135M-Instruct in bfloat16 (--dtype float32 for CPUs that multiply bfloat16 in software), 8 prompts x
8 samples of at most 32 tokens, one update, no KL, all cores in each phase. Ours is main_rl.py on Ray, DeepSpeed and
vLLM. The ceiling is bare vLLM generating the same prompts, and bare torch training on sequences of the lengths ours
had: padded rows, head on the response positions, plain AdamW on the weights as they are. Each part runs in a process
of its own, one after another; the first step of each is warm-up and not counted; medians of the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from core.phases import REST, STEP, Phase, time_metric

ROOT = Path(__file__).parent.parent
PROMPTS, SAMPLES, NEW_TOKENS, MICRO_BATCH_TOKENS = 8, 8, 32, 2048
LR = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="models/smollm2", help="made by python -m data_prep.smollm2")
    parser.add_argument("--data", default="data/smollm2_arithmetic/train.parquet")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--bare", choices=["generate", "train"], help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare == "generate":
        print(json.dumps(bare_generate(args.model, args.dtype, args.run)))
    elif args.bare == "train":
        print(json.dumps(bare_train(args.model, args.dtype, args.run)))
    else:
        compare(args.model, args.data, args.dtype, args.steps)


def compare(model: str, data: str, dtype: str, steps: int) -> None:
    """Run both and print the table."""
    with tempfile.TemporaryDirectory() as scratch:
        run = our_run(model, data, dtype, steps, Path(scratch))
        ours = read_phases(run)
        ceiling = {what: statistics.median(run_bare(what, model, dtype, run)[1:]) for what in ("generate", "train")}
    print(make_table(ours, ceiling))


def read_phases(run: Path) -> dict[str, float]:
    """Return the median seconds of each phase of a step, without the first step; `step` is the whole of it."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    known = {time_metric(name): str(name) for name in (*Phase, REST, STEP)}
    logged = {name for row in rows for name in row if re.fullmatch(r"time/\w+_s", name)}
    if unknown := sorted(logged - known.keys()):
        raise SystemExit(f"error: {run} logs {unknown[0]}, which is no phase of core/phases.py")
    return {
        known[metric]: statistics.median(row.get(metric, 0.0) for row in rows) for metric in known if metric in logged
    }


def make_table(ours: dict[str, float], ceiling: dict[str, float]) -> str:
    """Return our phases beside the ceiling, in seconds.

    Synchronous: the driver waits for data while the engine generates.
    """
    beside = {str(Phase.WAIT_FOR_DATA): ceiling["generate"], str(Phase.TRAIN): ceiling["train"]}
    step, total = ours[STEP], sum(ceiling.values())
    lines = [f"{'phase':<15}{'ours':>10}{'ceiling':>10}   median seconds on {os.cpu_count()} cores"]
    lines += [f"{phase:<15}{ours[phase]:>10.2f}{beside.get(phase, 0.0):>10.2f}" for phase in ours if phase != STEP]
    lines += [f"{'step':<15}{step:>10.2f}{total:>10.2f}", "", f"our step / ceiling: {step / total:.2f}"]
    other = 1 - (ours[Phase.WAIT_FOR_DATA] + ours[Phase.TRAIN]) / step
    return "\n".join([*lines, f"neither generation nor training: {other:.1%} of our step"])


def our_run(model: str, data: str, dtype: str, steps: int, scratch: Path) -> Path:
    recipe = scratch / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {
                "name": "rl-step",
                "steps": steps,
                "run_dir": str(scratch / "runs"),
                "groups_per_step": PROMPTS,
                "group_size": SAMPLES,
                "model": {"path": str(Path(model).absolute()), "dtype": dtype},
                "alg": {"name": "grpo"},
                "data": {"train": str(Path(data).absolute()), "max_prompt_tokens": 128},
                "reward": {"fn": "arithmetic"},
                "rollout": {"max_new_tokens": NEW_TOKENS},
                "trainer": {"micro_batch_tokens": MICRO_BATCH_TOKENS, "lr": LR},
            }
        )
    )
    subprocess.run([sys.executable, "main_rl.py", "--config", str(recipe)], cwd=ROOT, check=True)
    [run] = (scratch / "runs").iterdir()
    return run


def run_bare(what: str, model: str, dtype: str, run: Path) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.rl_step", "--bare", what]
    command += ["--run", str(run), "--model", model, "--dtype", dtype]
    out = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def steps_of(run: Path) -> list[list[dict]]:
    files = sorted((run / "samples").iterdir())
    return [[json.loads(line) for line in f.read_text().splitlines()] for f in files]


def bare_generate(model: str, dtype: str, run: Path) -> list[float]:
    """Measure the seconds of vLLM alone for the prompts of every step."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(model)
    llm = LLM(model, dtype=dtype, max_model_len=256, enforce_eager=True, kv_cache_memory_bytes=2**30)
    params = SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, n=SAMPLES, detokenize=False)
    seconds = []
    for step in steps_of(run):
        chats = [row["prompt"] for row in step[::SAMPLES]]
        prompts = [
            {"prompt_token_ids": tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)}
            for c in chats
        ]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        llm.reset_prefix_cache()
    return seconds


def bare_train(model: str, dtype: str, run: Path) -> list[float]:
    """Measure forward, backward and AdamW on sequences of the same lengths, padded to rows of similar length."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=LR)
    seconds = []
    for step in steps_of(run):
        lengths = sorted(
            (
                len(tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False)),
                r["new_tokens"],
            )
            for r in step
        )
        start = time.perf_counter()
        while lengths:
            rows: list[tuple[int, int]] = []
            while lengths and (len(rows) + 1) * max(sum(x) for x in [*rows, lengths[-1]]) <= MICRO_BATCH_TOKENS:
                rows.append(lengths.pop())
            width = max(prompt + new for prompt, new in rows)
            ids = torch.randint(0, 1000, (len(rows), width))
            hidden = lm.model(input_ids=ids, use_cache=False).last_hidden_state
            at = [(i, prompt + t - 1) for i, (prompt, new) in enumerate(rows) for t in range(new)]
            row, column = torch.tensor(at).T
            logp = lm.lm_head(hidden[row, column]).float().log_softmax(-1)
            logp.gather(-1, ids[row, column + 1][:, None]).mean().neg().backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
