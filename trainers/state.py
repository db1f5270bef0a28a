"""What a checkpoint holds of a trainer: every learner's weights and optimizer, and of every rank its counters and
random state. Frozen models are not in it: they come from where the recipe says.

Resume only from what you trust: DeepSpeed reads its files with pickle.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from core.checkpoint import rank_file
from core.errors import UserError

if TYPE_CHECKING:
    from trainers.step import Learner, Trainer


def save_state(trainer: Trainer, folder: Path) -> None:
    """Write this rank's share into `folder`, which is there."""
    for name, learner in learners_of(trainer).items():
        learner.save_state(folder / name)
    rest = {
        "fits": fits(trainer),
        "updates_done": trainer.updates_done,
        "skipped_in_a_row": trainer.skipped_in_a_row,
        "random": torch.get_rng_state(),
        "random_gpu": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    torch.save(rest, folder / rank_file(trainer.rank))


def load_state(trainer: Trainer, folder: Path) -> None:
    """Become what was saved in `folder`; raises UserError where that does not fit this trainer."""
    check_fit(read_rest(folder, 0)["fits"], fits(trainer), folder)
    for name, learner in learners_of(trainer).items():
        learner.load_state(folder / name)
    rest = read_rest(folder, trainer.rank)
    trainer.updates_done, trainer.skipped_in_a_row = rest["updates_done"], rest["skipped_in_a_row"]
    torch.set_rng_state(rest["random"])
    if rest["random_gpu"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(rest["random_gpu"])


def learners_of(trainer: Trainer) -> dict[str, Learner]:
    return {"policy": trainer.policy} | ({"critic": trainer.critic} if trainer.critic is not None else {})


def fits(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint and the trainer that reads it must share, by the key that decides it."""
    trained = {
        f"{name}.{parameter}": list(getattr(p, "ds_shape", p.shape))  # ZeRO-3 leaves a parameter no shape of its own
        for name, learner in learners_of(trainer).items()
        for parameter, p in learner.model.named_parameters()
        if p.requires_grad
    }
    return {
        "backend": "local" if trainer.zero_stage is None else "ray",
        "trainer.ranks": trainer.ranks,
        "trainer.zero_stage": trainer.zero_stage,
        "trainer.optimizer": trainer.cfg.optimizer,
        "model": trained,
    }


def check_fit(then: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    for key in ("backend", "trainer.ranks", "trainer.zero_stage", "trainer.optimizer"):
        if then[key] != now[key]:
            raise UserError(
                f"{key} is {now[key]} and the checkpoint {folder} was made with {then[key]}, whose files fit no other: "
                f"set {key}={then[key]}"
            )
    if then["model"] != now["model"]:
        other = sorted(k for k in {*then["model"], *now["model"]} if then["model"].get(k) != now["model"].get(k))
        raise UserError(
            f"model: the checkpoint {folder} does not hold what this run trains, {len(other)} tensors differ, such as "
            f"{other[0]}: resume with the model of the run that made it"
        )


def read_rest(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / rank_file(rank)
    if not path.is_file():
        raise UserError(
            f"resume: trainer rank {rank} does not see {path}: a checkpoint must lie where every machine of the run "
            "reads it"
        )
    return torch.load(path, map_location="cpu", weights_only=True)
