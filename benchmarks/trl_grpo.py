"""TRL's side of benchmarks/rl_vs_trl.py, for a Python that has trl and not us: python trl_grpo.py TASK.json

Runs GRPOTrainer on the prompts of the task in their order and prints one line of JSON: the seconds of each step, the
mean reward and the mean number of sampled tokens of each step.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Watch(TrainerCallback):
    """Seconds from the end of one step to the end of the next, generation included."""

    def __init__(self):
        self.ends = []

    def on_train_begin(self, args, state, control, **_):
        self.ends.append(time.perf_counter())

    on_step_end = on_train_begin


def correct(completions, answer, **_):
    return [float(c[-1]["content"].split() == a.split()) for c, a in zip(completions, answer, strict=True)]


def main() -> None:
    with open(sys.argv[1]) as file:
        task = json.load(file)
    torch.set_num_threads(task["threads"])
    rows = [row for step in task["steps"] for row in step]
    samples = len(task["steps"][0]) * task["group_size"]
    config = GRPOConfig(
        output_dir=task["scratch"],
        per_device_train_batch_size=task["trl_batch"],
        gradient_accumulation_steps=samples // task["trl_batch"],  # one generation, then one update, in each step
        num_generations=task["group_size"],
        max_completion_length=task["new_tokens"],
        max_steps=len(task["steps"]),
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=False,  # no autocast: the weights have the dtype of the task already
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    watch = Watch()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=getattr(torch, task["dtype"])),
        reward_funcs=correct,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        callbacks=[watch],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    print(
        json.dumps(
            {
                "seconds": [after - before for before, after in pairwise(watch.ends)],
                "rewards": [entry["reward"] for entry in logged],
                "lengths": [entry["completions/mean_length"] for entry in logged],
            }
        )
    )


if __name__ == "__main__":
    main()
