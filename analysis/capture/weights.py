"""Find the weights of a captured update, load them into a local trainer, and verify the checksum.

If the user names a folder, only that one is tried. Otherwise they are looked for in the snapshot, in the checkpoint of
that step, and for the first step of a run in `model.path`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from algs.base import Algorithm
from analysis.capture.snapshot import StepSnapshot
from analysis.capture.step_recorder import fingerprint_weights
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.errors import UserError, first_line
from core.types.weights import ExportScope
from modeling.export import exported_tensors
from trainers.checkpoint.saved_policy import load_policy
from trainers.local import LocalTrainer

Fingerprints = Mapping[ExportScope, Mapping[str, int]]


def load_trainer(snapshot: StepSnapshot, update: int, model: str | None) -> tuple[LocalTrainer, str]:
    """Return a local trainer with the weights before an update, and the source of the weights.

    model: folder that the user names. Raises UserError if the weights are not found.
    """
    expected: Fingerprints = snapshot.manifest.updates[update].fingerprints
    if not snapshot.manifest.run.on_cpu:  # merged weights may differ in the last bit from those of another device
        expected = {k: v for k, v in expected.items() if k == "adapter" or "adapter" not in expected}
    if model is not None:
        trainer = load_folder(snapshot, model, key="--model")
        if difference := describe_difference(expected, fingerprint_weights(trainer)):
            raise UserError(f"--model {model} does not hold the weights of {snapshot.folder}: {difference}")
        return trainer, model
    tried: list[str] = []
    for name, load in list_sources(snapshot, update).items():
        try:
            trainer = load()
        except UserError as error:
            tried.append(f"{name} ({first_line(error)})")
            continue
        # a place is no proof: model.path or a checkpoint may have been overwritten since the run
        if not (difference := describe_difference(expected, fingerprint_weights(trainer))):
            return trainer, name
        tried.append(f"{name} ({difference})")
    looked = f"; looked in {'; '.join(tried)}" if tried else ""
    raise UserError(
        f"{snapshot.folder} does not hold its weights, and they were not found{looked}: name the folder with --model, "
        "or capture with capture.weights=true"
    )


def list_sources(snapshot: StepSnapshot, update: int) -> dict[str, Callable[[], LocalTrainer]]:
    """Return the loaders of the weights by place, in the order to try."""
    manifest, found = snapshot.manifest, dict[str, Callable[[], LocalTrainer]]()
    # first: written for this very update, while the other places hold weights from before the step
    own = snapshot.folder / "weights" / f"update_{update}"
    if own.is_dir():
        found[str(own)] = partial(load_folder, snapshot, str(own), key="snapshot")
    if update:  # checkpoints and model.path hold weights from before the first update only
        return found
    beside = snapshot.folder.parent.parent / "checkpoints" / f"step_{manifest.step:05d}"
    named = [] if manifest.checkpoint is None else [Path(manifest.checkpoint)]
    for folder in [beside, *named]:
        if folder.is_dir():
            found[str(folder)] = partial(load_checkpoint, snapshot, folder)
    # version 0: no step has changed the weights of model.path yet
    if manifest.version == 0:
        found[str(manifest.run.model["path"])] = partial(make_trainer, snapshot)
    return found


def make_trainer(snapshot: StepSnapshot, path: str | None = None) -> LocalTrainer:
    """Return a trainer of the run's model, or of another folder's, without optimizer state and without losses."""
    run = snapshot.manifest.run
    given: dict[str, Any] = run.model | ({} if path is None else {"path": path})
    # the kernel exists on GPUs only, and a run of a GPU may be replayed on a CPU
    if not torch.cuda.is_available() and given["attention"] == "flash_attention_2":
        given["attention"] = "auto"
    # one process computes the whole update, whatever the number of ranks in the run
    settings: dict[str, Any] = run.trainer | {"ranks": 1, "sequence_parallel": 1, "deepspeed": {}}
    cfg = TrainerConfig(**settings)
    return LocalTrainer(
        ModelConfig(**given),
        cfg,
        Algorithm(),
        temperature=run.temperature,
        allowed_tokens=run.allowed_tokens,
        total_updates=1,
        router_replay=run.router_replay,
    )


def load_folder(snapshot: StepSnapshot, folder: str, *, key: str) -> LocalTrainer:
    """Return a trainer with the weights of a folder: a model, or for a run with LoRA an adapter in PEFT's format."""
    if not Path(folder).is_dir():
        raise UserError(f"{key} {folder}: there is no such folder")
    if snapshot.manifest.run.model["lora"] is None:
        return make_trainer(snapshot, folder)
    trainer = make_trainer(snapshot)
    load_adapter(trainer, Path(folder), key=key)
    return trainer


@torch.no_grad()
def load_adapter(trainer: LocalTrainer, folder: Path, *, key: str) -> None:
    """Read the tensors of an adapter into the trainer's."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    try:
        saved = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{key} {folder}: {file.name} cannot be read ({first_line(error)})") from error
    wanted = {exported.name: exported.parameters[0] for exported in exported_tensors(trainer.model)["adapter"]}
    wrong = [n for n in {*saved, *wanted} if n not in saved or n not in wanted or saved[n].shape != wanted[n].shape]
    if wrong:
        # min: `wrong` comes from a set, whose order changes from one process to the next
        raise UserError(f"{key} {folder} does not hold the adapter of this run: {min(wrong)} does not fit")
    for name, parameter in wanted.items():
        parameter.copy_(saved[name])


def load_checkpoint(snapshot: StepSnapshot, folder: Path) -> LocalTrainer:
    """Return a trainer with the weights of a checkpoint, of the local trainer or of DeepSpeed's ranks."""
    trainer = make_trainer(snapshot)
    load_policy(trainer.model, folder)
    return trainer


def describe_difference(expected: Fingerprints, found: Fingerprints) -> str:
    """Return how two sets of checksums differ, in a clause; "" if they are equal."""
    for scope, sums in expected.items():
        other = found.get(scope, {})
        changed = [name for name in sums if sums[name] != other.get(name)]
        if changed or other.keys() - sums.keys():
            first = (changed or sorted(other.keys() - sums.keys()))[0]
            return f"{len(changed) or len(other.keys() - sums.keys())} of {len(sums)} tensors differ, such as {first}"
    return ""
