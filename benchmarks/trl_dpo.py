"""TRL's side of benchmarks/dpo_vs_trl.py, for a Python that has trl and not us: python trl_dpo.py TASK.json

Trains on the pairs of the task in their order and prints one line of JSON: see `Measured` in beside_trl.py.
"""

from __future__ import annotations

import json
import resource
import sys
from itertools import pairwise

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl_sft import Watch


class OnGivenTokens(DPOTrainer):
    """DPOTrainer that takes token ids instead of text, so that both sides train on the same."""

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset


def main() -> None:
    with open(sys.argv[1]) as file:
        task = json.load(file)
    torch.set_num_threads(task["threads"])
    rows = [row for update in task["updates"] for row in update]
    config = DPOConfig(
        output_dir=task["scratch"],
        per_device_train_batch_size=task["trl_batch"],
        gradient_accumulation_steps=len(task["updates"][0]) // task["trl_batch"],
        max_steps=len(task["updates"]),
        train_sampling_strategy="sequential",  # the pairs of an update lie sorted by length
        beta=0.1,
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    watch = Watch()
    trainer = OnGivenTokens(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(rows),
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
