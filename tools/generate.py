"""Let a trained model write: python -m tools.generate MODEL --prompt "1+1=" [--n 4]

MODEL is a run, model, adapter or checkpoint folder, or a name on the hub. See tools/speaker.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json

from core.errors import UserError
from tools.speaker import add_arguments, open_speaker, run_tool


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.generate", description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--prompt", action="append", required=True, help="a user turn; may be given several times")
    parser.add_argument("--n", type=int, default=1, help="replies per prompt (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per reply")
    args = parser.parse_args(argv)
    if args.n < 1:
        raise UserError(f"--n={args.n} must be 1 or more")
    if args.temperature == 0 and args.n > 1:
        raise UserError(f"--temperature=0 makes the {args.n} replies of a prompt equal: leave --n out")
    speaker = open_speaker(args)
    seeds = [args.seed + i for i in range(args.n)]
    for prompt in args.prompt:
        replies = asyncio.run(speaker.reply([{"role": "user", "content": prompt}], seeds))
        for seed, reply in zip(seeds, replies, strict=True):
            print(json.dumps({"prompt": prompt, "seed": seed, "reply": reply}) if args.json else reply, flush=True)


if __name__ == "__main__":
    run_tool(main)
