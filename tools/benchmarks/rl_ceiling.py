"""What the work of one RL step costs without a framework: bare vLLM, bare torch. Part of tools/benchmarks/rl_vs_trl.py.

    python -m tools.benchmarks.rl_ceiling generate-once --run FOLDER --model FOLDER --dtype bfloat16 --work short

generate: vLLM with its defaults on the prompts of every step of a run. generate-once: the same with KV cache blocks of
our engine's size, so that on a CPU, too, a short prompt is computed once for all of its samples. train: forward,
backward and AdamW on sequences of the lengths that the run had, in padded rows of similar length. train-once: the same
with each prompt computed once, in one row per group [prompt | completion | completion ...] under a dense mask. The head
runs on the completions' positions only. It prints the seconds of each step as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

from rollouts.engines.vllm_support.settings import CPU_BLOCK
from tools.benchmarks.rl_work import LR, WORKLOADS, Workload, read_steps

CEILINGS = ("generate", "generate-once", "train-once", "train")
Step = list[tuple[int, list[int]]]
"""Prompt length, and the lengths of its completions, of every group."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.rl_ceiling", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=CEILINGS)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--work", choices=WORKLOADS, required=True)
    args = parser.parse_args()
    work = WORKLOADS[args.work]
    measure = generate if args.what.startswith("generate") else train
    print(json.dumps(measure(args.model, args.dtype, args.run, work, once=args.what.endswith("-once"))))


def generate(model: str, dtype: str, run: Path, work: Workload, *, once: bool) -> list[float]:
    """Measure the seconds of vLLM alone for the prompts of every step."""
    os.environ |= {
        # one process, since nothing else runs beside it; no compilation, as in our engine on a CPU
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    import torch
    from vllm import LLM, SamplingParams

    settings: Any = {"dtype": dtype, "block_size": CPU_BLOCK if once and not torch.cuda.is_available() else None}
    longest = work.max_prompt + work.new_tokens
    llm = LLM(model, **settings, max_model_len=longest, enforce_eager=True, kv_cache_memory_bytes=2**30)
    params = SamplingParams(temperature=1.0, max_tokens=work.new_tokens, n=work.samples, detokenize=False)
    render = make_renderer(model)
    seconds: list[float] = []
    for step in read_steps(run):
        prompts: Any = [{"prompt_token_ids": render(row["prompt"])} for row in step[:: work.samples]]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        # in a run the weights change between steps, so no step could use the cache of another
        llm.reset_prefix_cache()
    return seconds


def make_renderer(model: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return lambda chat: tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def train(model: str, dtype: str, run: Path, work: Workload, *, once: bool) -> list[float]:
    """Measure forward, backward and AdamW on random tokens of the lengths of every step."""
    import torch
    from transformers import AutoModelForCausalLM

    render = make_renderer(model)
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=LR)
    seconds: list[float] = []
    for step in read_steps(run):
        groups = [step[i : i + work.samples] for i in range(0, len(step), work.samples)]
        lengths: Step = [(len(render(g[0]["prompt"])), [row["new_tokens"] for row in g]) for g in groups]
        start = time.perf_counter()
        for inputs, at in (rows_of_groups if once else rows_of_samples)(lengths, work.micro_batch_tokens):
            hidden = lm.model(**inputs, use_cache=False).last_hidden_state
            row, column, labels = (torch.tensor(x) for x in zip(*at, strict=True))
            logp = lm.lm_head(hidden[row, column]).float().log_softmax(-1)
            # the cost does not depend on the loss
            logp.gather(-1, labels[:, None]).mean().neg().backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds


def rows_of_samples(step: Step, max_tokens: int) -> Any:
    """Yield micro-batches of padded rows, the longest first: inputs, and [row, column, label] of every token."""
    import torch

    # the longest together: padding is least where rows have similar lengths
    left = sorted((prompt, new) for prompt, replies in step for new in replies)
    while left:
        rows: list[tuple[int, int]] = []
        while left and (len(rows) + 1) * max(sum(x) for x in [*rows, left[-1]]) <= max_tokens:
            rows.append(left.pop())
        ids = torch.randint(0, 1000, (len(rows), max(map(sum, rows))))
        at = [(i, prompt + t - 1, 7) for i, (prompt, new) in enumerate(rows) for t in range(new)]
        yield {"input_ids": ids}, at


def rows_of_groups(step: Step, max_tokens: int) -> Any:
    """Yield micro-batches with one row for each group, its prompt laid once; as `rows_of_samples`."""
    import torch

    left = sorted(step, key=lambda group: group[0] + sum(group[1]))
    while left:
        rows: Step = []
        while left and (len(rows) + 1) * max(p + sum(r) for p, r in [*rows, left[-1]]) <= max_tokens:
            rows.append(left.pop())
        width = max(p + sum(r) for p, r in rows)
        positions, at = torch.zeros(len(rows), width, dtype=torch.int64), []
        mask = torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1)  # padding sees itself
        for i, (prompt, replies) in enumerate(rows):
            positions[i, :prompt] = torch.arange(prompt)
            mask[i, :prompt, :prompt] = torch.ones(prompt, prompt, dtype=torch.bool).tril()
            for begin, new in zip(accumulate([prompt, *replies]), replies, strict=False):
                positions[i, begin : begin + new] = prompt + torch.arange(new)
                mask[i, begin : begin + new, :prompt] = True
                mask[i, begin : begin + new, begin : begin + new] = torch.ones(new, new, dtype=torch.bool).tril()
                # the first token of each reply is predicted by the prompt's last position, which all of them share
                at += [(i, prompt - 1, 7), *((i, begin + t, 7) for t in range(new - 1))]
        ids = torch.randint(0, 1000, (len(rows), width))
        yield {"input_ids": ids, "position_ids": positions, "attention_mask": mask[:, None]}, at


if __name__ == "__main__":
    main()
