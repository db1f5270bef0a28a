"""Prices of knobs of the engines, as a page: python -m tools.benchmarks.knobs [--page PATH] [--only NAME ...]

The doctor measures each knob on the tiny model: an engine with the knob beside one without, on the same requests.
Speeds and memory are those of this machine. The first lines of configs/tiny.yaml make the model and its data.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ("configs/tiny.yaml", "rollout.engine=vllm", "rollout.max_new_tokens=64", "rollout.kv_cache_gib=0.2")
NGRAM = "{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 3}"
KNOBS = (
    "quantization=int8",
    "kv_cache_dtype=fp8",
    "kv_cache_dtype=fp8_e5m2",
    "compilation_config={custom_ops: [none]}",
    "compilation_config={custom_ops: [all, -silu_and_mul]}",
    "compilation_config={custom_ops: [all, -rotary_embedding]}",
    "block_size=16",
    f"speculative_config={NGRAM}",
    "block_size=64",
    "block_size=128",
    "max_num_seqs=4",
    "max_num_seqs=1",
    "max_num_batched_tokens=128",
    "enable_prefix_caching=false",
    "async_scheduling=true",
    "scheduling_policy=priority",
    "disable_cascade_attn=true",
    "enable_chunked_prefill=true",
    "cpu_offload_gb=1",
    "quantization=fp8",
    "speculative_config={method: suffix}",
    "speculative_config={method: eagle, model: drafts}",
    "seed=1",
    "dtype=float32",
    "model_impl=transformers",
    "hf_overrides={rope_theta: 500000}",
    "logprobs_mode=raw_logprobs",
    "override_generation_config={temperature: 0.5}",
)
HEAD = """# Prices of the engine's knobs

<!-- made by `python -m tools.benchmarks.knobs --page docs/reference/knobs.md` -->

`feynrl doctor RECIPE --knob NAME=VALUE` on configs/tiny.yaml in bfloat16: 32 sequences of at most 64 tokens, on two
cores of a CPU. Gaps of log-probabilities are in nats, and between engine and trainer. Changed are the sequences with
other tokens or log-probabilities than without the knob, to the bit. The doctor prints tokens per second, too; they
depend on the machine.

| knob | mean gap | largest gap | KL | changed | GiB |
|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.knobs", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--page", type=Path, help="page to write")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of the knobs to measure")
    args = parser.parse_args()
    knobs = [knob for knob in KNOBS if args.only is None or knob.partition("=")[0] in args.only]
    page = HEAD + "\n".join(measure(knobs)) + "\n"
    print(page)
    if args.page is not None:
        args.page.write_text(page, encoding="utf-8")
    return 0


def measure(knobs: list[str]) -> list[str]:
    """Return the rows of the table. Knobs that the doctor refuses at once are measured alone, for their sentence."""
    accepted, refused = list[str](), dict[str, str]()
    for knob in knobs:
        if said := find_refusal(knob):
            refused[knob] = said
        else:
            accepted.append(knob)
    prices = {price["knob"]: price for price in run_doctor(accepted)["knobs"]}
    rows = [describe(prices["none"]), *(describe(prices[knob]) for knob in accepted)]
    return rows + [describe({"knob": knob, "gap": None, "refused": said}) for knob, said in refused.items()]


def find_refusal(knob: str) -> str:
    """Return the sentence that refuses a knob before an engine starts, or ""."""
    from analysis.doctor.knobs import read_knobs
    from configs.schema import RLConfig
    from core.errors import UserError
    from driver.load_recipe import load_recipe

    try:
        read_knobs([knob], load_recipe(RLConfig, RECIPE[0], [*RECIPE[1:]]).cfg)
    except UserError as error:
        return str(error)
    return ""


def run_doctor(knobs: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "analysis.doctor", *RECIPE, "model.dtype=bfloat16", "--json"]
    for knob in knobs:
        command += ["--knob", knob]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"the doctor ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def describe(price: dict[str, Any]) -> str:
    """Return a row of the table."""
    knob, gap = f"`{price['knob']}`", price["gap"]
    if gap is None:
        return f"| {knob} | refused: {price['refused'].replace('|', ' ')} | | | | |"
    numbers = f"{gap['mean']:.3g} | {gap['largest']:.2g} | {gap['kl']:.2g} | {price['changed']:.0%}"
    return f"| {knob} | {numbers} | {price['memory_gib']:.2f} |"


if __name__ == "__main__":
    sys.exit(main())
