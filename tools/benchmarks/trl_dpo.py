"""TRL's side of tools/benchmarks/dpo_vs_trl.py, for a Python that has trl and not us: python trl_dpo.py TASK.json

Trains on the pairs of the task in their order and prints one line of JSON: see `Measured` in beside_trl.py.
"""

from __future__ import annotations

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl_shared import Watch, make_settings, read_task, train_supervised


class OnGivenTokens(DPOTrainer):
    """DPOTrainer that takes token ids instead of text, so that both sides train on the same."""

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset


def main() -> None:
    task = read_task()
    updates = task["updates"]
    config = DPOConfig(
        **make_settings(task, rows=len(updates[0]), steps=len(updates)),
        train_sampling_strategy="sequential",  # the pairs of an update lie sorted by length
        beta=0.1,
        max_length=None,
    )
    watch = Watch()
    trainer = OnGivenTokens(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list([row for update in updates for row in update]),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        callbacks=[watch],
    )
    train_supervised(trainer, watch)


if __name__ == "__main__":
    main()
