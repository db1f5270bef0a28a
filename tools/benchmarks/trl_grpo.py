"""TRL's side of tools/benchmarks/rl_vs_trl.py, for a Python that has trl and not us: python trl_grpo.py TASK.json

Runs GRPOTrainer on the prompts of the task in their order and prints one line of JSON: the seconds of each step, the
mean reward and the mean number of sampled tokens of each step.
"""

from __future__ import annotations

import json

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_shared import Watch, make_settings, read_task


def correct(completions, answer, **_):
    return [float(c[-1]["content"].split() == a.split()) for c, a in zip(completions, answer, strict=True)]


def main() -> None:
    task = read_task()
    steps = task["steps"]
    config = GRPOConfig(
        # one generation, then one update, in each step
        **make_settings(task, rows=len(steps[0]) * task["group_size"], steps=len(steps)),
        num_generations=task["group_size"],
        max_completion_length=task["new_tokens"],
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
    )
    watch = Watch()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=getattr(torch, task["dtype"])),
        reward_funcs=correct,
        args=config,
        train_dataset=Dataset.from_list([row for step in steps for row in step]),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        callbacks=[watch],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    print(
        json.dumps(
            {
                "seconds": watch.measure_steps()[0],
                "rewards": [entry["reward"] for entry in logged],
                "lengths": [entry["completions/mean_length"] for entry in logged],
            }
        )
    )


if __name__ == "__main__":
    main()
