"""The stage of two ranks: an update of FSDP2 and of ZeRO-3 beside the local trainer's, and their exports.

Each rank is a process: python -m tools.zoo.ranks LIBRARY NAME=FOLDER ...
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from core.cluster.addresses import listen_at
from core.errors import first_line
from tools.zoo.subject import BUCKET_BYTES, StageFailed, Subject
from trainers.distributed import DistributedTrainer
from trainers.trainer import Trainer

RANKS = 2
LIBRARIES: dict[str, dict[str, Any]] = {"fsdp2": {"strategy": "fsdp2"}, "zero3": {"zero_stage": 3}}
"""Keys of the trainer, by the library's name."""
UPDATE = {"optimizer": "sgd", "lr": 1.0}
"""Keys of the trainers: AdamW would turn the rounding of a tiny gradient into a whole step."""
TIMEOUT_S = 120.0
BOUND = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference of the updates, as a share of the update."""


def check_ranks(subject: Subject) -> Mapping[str, float | str]:
    """Compare an update on two ranks, and the weights that they export for vLLM, with the local trainer's."""
    trainer = subject.make_trainer(**UPDATE)
    before = trainer.flatten_weights()
    trainer.step(subject.make_batches(trainer))
    want = trainer.flatten_weights()
    sent = describe_export(trainer)
    found: dict[str, float | str] = {}
    for library in LIBRARIES:
        if not find_result(subject, library).exists():
            run_ranks([subject], library)
        got = torch.load(find_result(subject, library), weights_only=True)
        if "why" in got:
            raise StageFailed(f"{library} on {RANKS} ranks: {got['why']}")
        gap = float((got["weights"] - want).norm() / (want - before).norm())
        if not gap <= BOUND[subject.dtype]:
            raise StageFailed(f"an update of {library} on {RANKS} ranks differs by {gap:.1e} of it from the local one")
        if odd := [name for name in {**sent, **got["sent"]} if sent.get(name) != got["sent"].get(name)]:
            raise StageFailed(f"{library} on {RANKS} ranks exports {odd[0]} otherwise than the local trainer")
        found[library] = gap
    return found


def describe_export(trainer: Trainer) -> dict[str, str]:
    """Return shape and dtype of the tensors that vLLM would get, by name. Collective."""
    stream = trainer.export_weights(BUCKET_BYTES, "files")
    return {name: f"{list(t.shape)} {t.dtype}" for bucket in stream for name, t in bucket}


def find_result(subject: Subject, library: str) -> Path:
    """Return the file that rank 0 writes."""
    return subject.folder / f"{library}.pt"


def run_ranks(subjects: Sequence[Subject], library: str) -> None:
    """Run the ranks, each in a process; rank 0 writes a file for each model."""
    with listen_at("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "tools.zoo.ranks", library, *(f"{s.name}={s.folder}" for s in subjects)]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    errors, *_ = [rank.communicate()[1] for rank in ranks]
    for subject in subjects:
        if not find_result(subject, library).exists():
            why = (errors.strip().splitlines() or ["the processes have ended"])[-1]
            torch.save({"why": why}, find_result(subject, library))


def make_rank(subject: Subject, library: str) -> DistributedTrainer:
    # imported here: each library prepares its process
    if library == "fsdp2":
        from trainers.fsdp2 import FsdpTrainer as Library
    else:
        from trainers.deepspeed import DeepSpeedTrainer as Library
    settings = subject.make_settings(**UPDATE, ranks=RANKS, **LIBRARIES[library])
    return Library(*settings, timeout_s=TIMEOUT_S, temperature=1.0, total_updates=10)


def main(library: str, *places: str) -> None:
    """Be a rank: update every model, and write its weights. places: NAME=FOLDER."""
    torch.set_num_threads(1)
    for place in places:
        name, _, folder = place.partition("=")
        subject = Subject(name=name, folder=Path(folder))
        try:
            trainer = make_rank(subject, library)
            trainer.step([subject.make_batches(trainer, ranks=RANKS)[trainer.rank]])
            result: dict[str, Any] = {"weights": trainer.flatten_weights(), "sent": describe_export(trainer)}
        except Exception as error:  # a border: both ranks raise it, and it is this model's reason
            result = {"why": f"{type(error).__name__}: {first_line(error)}"}
        if os.environ["RANK"] == "0":
            torch.save(result, find_result(subject, library))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
