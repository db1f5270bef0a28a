"""TRL's side of tools/benchmarks/sft_vs_trl.py, for a Python that has trl and not us: python trl_sft.py TASK.json

Trains on the rows of the task in their order and prints one line of JSON: see `Measured` in beside_trl.py.
"""

from __future__ import annotations

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl_shared import Watch, make_settings, read_task, train_supervised


def main() -> None:
    task = read_task()
    updates = task["updates"]
    rows = [row for update in updates for row in update]
    labels = [[t if yes else -100 for t, yes in zip(r["ids"], r["mask"], strict=True)] for r in rows]
    config = SFTConfig(
        **make_settings(task, rows=len(updates[0]), steps=len(updates)),
        train_sampling_strategy="sequential",  # the rows of an update lie sorted by length
        padding_free=task["trl_padding_free"],
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    watch = Watch()
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": [r["ids"] for r in rows], "labels": labels}),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        callbacks=[watch],
    )
    train_supervised(trainer, watch)


if __name__ == "__main__":
    main()
