"""TRL's side of the benchmarks, for a Python that has trl and not us: python trl_side.py sft|dpo|grpo TASK.json

Trains on the rows of the task in their order and prints one line of JSON. sft and dpo: see `Measured` in beside_trl.py.
grpo: the seconds, the mean reward and the mean number of sampled tokens of each step. It imports nothing of ours but
the reward that a task names.

Optional keys of a task: seed; settings, for TRL's configuration; lrs, the learning rate of every update; reward, a
module of rewards/ without dependencies; save_to, a folder for the trained model.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Watch(TrainerCallback):
    """Clocks at the end of every step, as our side reads them, and the learning rates that a task gives."""

    def __init__(self, lrs):
        self.ends = []
        """Seconds of the wall and of the processor."""
        self.lrs = lrs
        """Learning rate of every update; None: constant."""

    def on_train_begin(self, args, state, control, **_):
        self.ends.append((time.perf_counter(), time.process_time()))

    on_step_end = on_train_begin

    def on_step_begin(self, args, state, control, optimizer, **_):
        if self.lrs is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.lrs[state.global_step]

    def measure_steps(self):
        """Return the seconds of each step, and its CPU seconds."""
        spans = list(pairwise(self.ends))
        return [after[0] - before[0] for before, after in spans], [after[1] - before[1] for before, after in spans]


def make_settings(task, *, rows, steps):
    """Return the settings of TRL that do not depend on the loss. rows: in an update, of which each step makes one."""
    return {
        "output_dir": task["scratch"],
        "per_device_train_batch_size": task["trl_batch"],
        "gradient_accumulation_steps": rows // task["trl_batch"],
        "max_steps": steps,
        "learning_rate": task["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "bf16": False,  # no autocast: the weights have the dtype of the task already
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": task.get("seed", 42),
        **task.get("settings", {}),
    }


def load_model(task):
    return AutoModelForCausalLM.from_pretrained(task["model"], dtype=getattr(torch, task.get("dtype", "float32")))


def train_and_save(trainer, task):
    trainer.train()
    if "save_to" in task:
        trainer.save_model(task["save_to"])


def train_supervised(trainer, task, watch):
    """Train, and return the fields of `Measured` of beside_trl.py; `accuracies` too where the model is saved."""
    train_and_save(trainer, task)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    seconds, cpu_seconds = watch.measure_steps()
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": mib}
    found["losses"] = [entry["loss"] for entry in logged]
    if "save_to" in task:
        found["accuracies"] = [entry.get("rewards/accuracies") for entry in logged]
    return found


def train_sft(task, watch):
    from trl import SFTConfig, SFTTrainer

    updates = task["updates"]
    rows = [row for update in updates for row in update]
    # -100 is the label that Hugging Face's losses ignore
    labels = [[t if yes else -100 for t, yes in zip(r["ids"], r["mask"], strict=True)] for r in rows]
    config = SFTConfig(
        **make_settings(task, rows=len(updates[0]), steps=len(updates)),
        train_sampling_strategy="sequential",  # the order of the task
        padding_free=task["trl_padding_free"],
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = SFTTrainer(
        model=load_model(task),
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": [r["ids"] for r in rows], "labels": labels}),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        callbacks=[watch],
    )
    return train_supervised(trainer, task, watch)


def train_dpo(task, watch):
    from trl import DPOConfig, DPOTrainer

    class OnGivenTokens(DPOTrainer):
        """DPOTrainer that takes token ids instead of text, so that both sides train on the same."""

        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

    updates = task["updates"]
    config = DPOConfig(
        **make_settings(task, rows=len(updates[0]), steps=len(updates)),
        train_sampling_strategy="sequential",  # the order of the task
        beta=0.1,
        max_length=None,
    )
    trainer = OnGivenTokens(
        model=load_model(task),
        ref_model=load_model(task),
        args=config,
        train_dataset=Dataset.from_list([row for update in updates for row in update]),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        callbacks=[watch],
    )
    return train_supervised(trainer, task, watch)


def find_reward(task):
    """Return the reward function: that of a module of rewards/, or equality of the words."""
    if "reward" not in task:
        return lambda completions, answer, **_: [
            float(c[-1]["content"].split() == a.split()) for c, a in zip(completions, answer, strict=True)
        ]
    sys.path.append(str(Path(__file__).parent.parent.parent))
    score = import_module(f"rewards.{task['reward']}").score

    def correct(completions, answer, **_):
        prompts = [SimpleNamespace(id="", answer=a) for a in answer]
        return [score(p, c)["correct"] for p, c in zip(prompts, completions, strict=True)]

    return correct


def train_grpo(task, watch):
    from trl import GRPOConfig, GRPOTrainer

    steps, updates = task["steps"], task["updates_per_step"]
    rows = len(steps[0]) * task["group_size"]
    # each of these steps is one generation, then the updates, which are TRL's steps
    settings = make_settings(task, rows=rows // updates, steps=len(steps) * updates)
    config = GRPOConfig(
        **settings,
        steps_per_generation=settings["gradient_accumulation_steps"] * updates,
        num_generations=task["group_size"],
        max_completion_length=task["new_tokens"],
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
    )
    trainer = GRPOTrainer(
        model=load_model(task),
        reward_funcs=find_reward(task),
        args=config,
        train_dataset=Dataset.from_list([row for step in steps for row in step]),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        callbacks=[watch],
    )
    train_and_save(trainer, task)
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    seconds = watch.measure_steps()[0]
    return {
        "seconds": [sum(seconds[i : i + updates]) for i in range(0, len(seconds), updates)],
        "rewards": [entry["reward"] for entry in logged],
        "lengths": [entry["completions/mean_length"] for entry in logged],
    }


def main():
    kind, file = sys.argv[1:]
    with open(file) as written:
        task = json.load(written)
    torch.set_num_threads(task["threads"])
    train = {"sft": train_sft, "dpo": train_dpo, "grpo": train_grpo}[kind]
    print(json.dumps(train(task, Watch(task.get("lrs")))))


if __name__ == "__main__":
    main()
