"""What TRL's sides of the benchmarks share. It imports nothing of ours: their Python has trl and not us."""

from __future__ import annotations

import json
import resource
import sys
import time
from itertools import pairwise

import torch
from transformers import TrainerCallback


class Watch(TrainerCallback):
    """Clocks at the end of every step, as our side reads them."""

    def __init__(self):
        self.ends = []
        """Seconds of the wall and of the processor."""

    def on_train_begin(self, args, state, control, **_):
        self.ends.append((time.perf_counter(), time.process_time()))

    on_step_end = on_train_begin

    def measure_steps(self):
        """Return the seconds of each step, and its CPU seconds."""
        spans = list(pairwise(self.ends))
        return [after[0] - before[0] for before, after in spans], [after[1] - before[1] for before, after in spans]


def read_task():
    """Return the task that the command line names, and use its number of threads."""
    with open(sys.argv[1]) as file:
        task = json.load(file)
    torch.set_num_threads(task["threads"])
    return task


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
    }


def train_supervised(trainer, watch):
    """Train, and print what `Measured` of beside_trl.py holds."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds, cpu_seconds = watch.measure_steps()
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "losses": losses, "peak_mib": mib}))
