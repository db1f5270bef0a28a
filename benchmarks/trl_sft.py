"""TRL's side of benchmarks/sft_vs_trl.py, for a Python that has trl and not us: python trl_sft.py TASK.json

Trains on the rows of the task in their order and prints one line of JSON: see `Measured` in beside_trl.py.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from itertools import pairwise

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Watch(TrainerCallback):
    """Seconds from the end of one update to the end of the next, as our side measures them."""

    def __init__(self):
        self.ends = []

    def on_train_begin(self, args, state, control, **_):
        self.ends.append((time.perf_counter(), time.process_time()))

    on_step_end = on_train_begin


def main() -> None:
    with open(sys.argv[1]) as file:
        task = json.load(file)
    torch.set_num_threads(task["threads"])
    rows = [row for update in task["updates"] for row in update]
    labels = [[t if yes else -100 for t, yes in zip(r["ids"], r["mask"], strict=True)] for r in rows]
    config = SFTConfig(
        output_dir=task["scratch"],
        per_device_train_batch_size=task["trl_batch"],
        gradient_accumulation_steps=len(task["updates"][0]) // task["trl_batch"],
        max_steps=len(task["updates"]),
        train_sampling_strategy="sequential",  # the rows of an update lie sorted by length
        padding_free=task["trl_padding_free"],
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    watch = Watch()
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": [r["ids"] for r in rows], "labels": labels}),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        callbacks=[watch],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    spans = list(pairwise(watch.ends))
    seconds = [after[0] - before[0] for before, after in spans]
    cpu_seconds = [after[1] - before[1] for before, after in spans]
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "losses": losses, "peak_mib": mib}))


if __name__ == "__main__":
    main()
