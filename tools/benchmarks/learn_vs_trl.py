"""Learning curves beside TRL 1.16, at equal steps and at equal seconds: python -m tools.benchmarks.learn_vs_trl

    python -m tools.benchmarks.learn_vs_trl run --task tiny --method grpo --seed 0    both sides with one seed
    python -m tools.benchmarks.learn_vs_trl show [--image docs/learn_vs_trl.svg]      table of all seeds that are there

Both sides start from the same weights and train on the same rows in the same order, with the same reward, sampling,
loss, optimizer, and learning rate of every update (learn_work.py). `tiny` is the quickstart's model and its sums, in
one process with transformers' generation on both sides. `smollm2` is SmolLM2-135M-Instruct on sums, ours on Ray,
DeepSpeed and vLLM; TRL generates with transformers, because its vLLM backend needs a GPU, so equal seconds say nothing
about GPUs. `calls` is that model after supervised training on function calls of one turn (learn_calls.py).

These differ in GRPO: the sampled tokens; TRL 1.16 shuffles the samples of a step over its updates, and we deal whole
groups to them (--sides trl_groups runs TRL without the shuffle); TRL divides the loss of an update by the mean number
of tokens of the step's updates, and we by the update's own. alg.correction is on in `tiny` alone, where both policies
are transformers' in float32.

The order of the rows is equal by construction: one function draws them for TRL as our run does. For grpo it is compared
with the prompts that our run recorded; sft and dpo record none.

The measure of a step is computed before its update: the mean reward (grpo), exp(-loss) of the rows (sft), or the share
of pairs with a positive margin (dpo). Rows of sft and dpo are drawn once, but their sums may have been trained on: sft
has 24 copies of each, and the model of dpo was warmed up on sums of the same kind. The held-out reward after training
is sampled by main_eval.py from the model that each side saves.

On a machine with one GPU both sides train on it in float32, without TF32, and `smollm2` and `calls` run in the turns of
placement=colocate (learn_machine.py); several may run at once. TRL still generates with transformers.

A result is a file of docs/learn_vs_trl/, with seed, commit, device, load, and digests of settings and rows; a side
whose file is there is not run again, so that a stopped comparison goes on. Ours runs first with an even seed, and TRL
with an odd seed. A comparison has results of one device, because seconds of two are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from driver.records.git_state import read_git_state
from tools.benchmarks.beside_trl import say, trl_environment
from tools.benchmarks.learn_machine import Machine, find_machine
from tools.benchmarks.learn_report import (
    SIDES,
    WHOLE_GROUPS,
    Learnt,
    draw,
    list_circumstances,
    make_table,
    read_results,
)
from tools.benchmarks.learn_work import (
    WORKS,
    Work,
    measure_held_out,
    prepare,
    run_ours,
    run_theirs,
    write_recipe,
)
from tools.benchmarks.processes import ROOT, shorten_commit

RESULTS = ROOT / "docs" / "learn_vs_trl"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.learn_vs_trl", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("--task", choices=sorted({task for task, _ in WORKS}), default="tiny")
    parser.add_argument("--method", choices=sorted({method for _, method in WORKS}), default="grpo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sides", nargs="+", choices=[*SIDES, WHOLE_GROUPS], default=list(SIDES))
    parser.add_argument("--results", type=read_path, default=RESULTS, help="folder of the files")
    parser.add_argument("--image", type=read_path, help="draw the curves of --task into this SVG")
    parser.add_argument("--trl-python", type=read_path, help="a Python with trl; made under build/ if not given")
    parser.add_argument("--commit", help="of this code, on a machine without its clone")
    args = parser.parse_args(argv)
    # paths of the recipes begin there
    os.chdir(ROOT)
    if args.what == "show":
        results = read_results(args.results)
        print(make_table(results))
        print(list_circumstances(results))
        if args.image:
            args.image.write_text(draw(results, args.task))
        return 0
    work = WORKS.get((args.task, args.method))
    if work is None:
        listed = ", ".join(f"{task} {method}" for task, method in WORKS)
        parser.error(f"there is no comparison {args.task} {args.method}: choose one of {listed}")
    machine = find_machine()
    prepare(args.task)
    # in turns over the seeds, so that a machine whose speed drifts favours neither side
    for side in args.sides[::-1] if args.seed % 2 else args.sides:
        file = args.results / f"{args.task}-{args.method}-{side}-{args.seed}.json"
        if file.is_file():
            say(f"{file.name} is there; delete it to measure again")
            continue
        result = learn(args, work, side, machine)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(result)) + "\n")
        say(f"{file.name}: {result.values[0]:.3f} to {result.values[-1]:.3f}, held out {result.held_out:.3f}")
    return 0


def read_path(text: str) -> Path:
    """Return a path of the command line as absolute, because `main` changes the working folder."""
    return Path(text).absolute()


def learn(args: argparse.Namespace, work: Work, side: str, machine: Machine) -> Learnt:
    """Run a side with a seed; return the measures of the run and of the saved model, with the commit and the load."""
    state = args.commit or read_git_state()
    commit = state if isinstance(state, str) else shorten_commit(state, 12)
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        recipe = write_recipe(work, args.seed, scratch, machine)
        if side == "ours":
            done = run_ours(args.method, work, recipe, scratch)
        else:
            python, whole = args.trl_python or trl_environment(), side == WHOLE_GROUPS
            done = run_theirs(args.method, work, recipe, python, scratch, machine=machine, whole_groups=whole)
        # before the evaluation, whose own load is not that of the machine beside the run
        load = os.getloadavg()[0]
        with contextlib.redirect_stdout(io.StringIO()):
            held_out = measure_held_out(work, scratch / ("ours" if side == "ours" else "trl"), scratch)
    return Learnt(
        task=args.task,
        method=args.method,
        side=side,
        seed=args.seed,
        commit=commit,
        settings=work.hash_settings(),
        order=done.order,
        values=[round(value, 4) for value in done.values],
        seconds=[round(seconds, 3) for seconds in done.seconds],
        held_out=round(held_out, 4),
        cores=len(os.sched_getaffinity(0)),
        load=round(load, 1),
        device=machine.device,
    )


if __name__ == "__main__":
    sys.exit(main())
