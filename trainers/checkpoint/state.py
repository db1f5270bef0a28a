"""State of a trainer in a checkpoint: every learner's weights and optimizer, and each rank's counters and random state.
Frozen models are not in it: they are loaded from the paths of the recipe. Teachers that follow the policy are.

A checkpoint is data. Its files are pickles, as torch writes them; one that would run code when it is read is refused.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed import DistError
from torch.serialization import safe_globals

from core.cluster.scratch import restore_environment
from core.errors import UserError, first_line
from modeling.nf4 import Nf4Linear
from trainers.learner import Learner
from trainers.references import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """State of one trainer rank that a checkpoint saves."""

    rank: int
    ranks: int
    updates_done: int
    skipped_in_a_row: int
    learners: dict[str, Learner]
    """Learners by the name of their folder."""
    references: dict[str, Reference]
    """Copies of the policy's weights that follow it, by the name of their teacher."""
    settings: dict[str, Any]
    """Recipe keys that the files depend on, and their values."""

    @property
    def fits(self) -> dict[str, Any]:
        """Values that checkpoint and trainer must share, by the recipe key that decides them."""
        trained = {
            # with ZeRO-3 a parameter has no shape of its own; with FSDP2 it has that of the whole
            f"{name}.{parameter}": list(getattr(p, "ds_shape", p.shape))
            for name, learner in self.learners.items()
            for parameter, p in learner.model.named_parameters()
            if p.requires_grad
        }
        return {**self.settings, "model": trained}


def rank_file(rank: int) -> str:
    return f"rank_{rank}.pt"


def estimate_bytes(learners: Iterable[Learner], *, ranks: int = 1, has_optimizer: bool = False) -> int:
    """Return about how many bytes a rank writes for its part of the weights.

    has_optimizer: for a checkpoint, with three float32 numbers per trained parameter: a master weight and the
    optimizer's two moments. Without, it is for a saved model, whose layers in four bits are dequantised.
    """
    found = 0
    for learner in learners:
        for p in learner.model.parameters():
            size = p.element_size() + (12 if has_optimizer and p.requires_grad else 0)
            found += getattr(p, "ds_numel", p.numel()) * size  # with ZeRO-3 it has no shape
        if not has_optimizer:  # a checkpoint does not hold them
            layers = (m for m in learner.model.modules() if isinstance(m, Nf4Linear))
            found += sum(m.in_features * m.out_features * m.dtype.itemsize for m in layers)
    return found // ranks


def save_state(state: RankState, folder: Path) -> None:
    """Write this rank's part into the existing folder `folder`."""
    for name, learner in state.learners.items():
        learner.save_state(folder / name)
    for name, reference in state.references.items():
        reference.save_state(state.learners["policy"], folder / f"teacher_{name}")
    # a file for each rank, because random states differ
    rest = {
        "fits": state.fits,
        "ranks": state.ranks,
        "updates_done": state.updates_done,
        "skipped_in_a_row": state.skipped_in_a_row,
        "random": torch.get_rng_state(),
        "random_gpu": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    torch.save(rest, folder / rank_file(state.rank))


def load_state(state: RankState, folder: Path) -> tuple[int, int]:
    """Restore the state saved in `folder`; return updates_done and skipped_in_a_row, the same on every rank.

    Raises UserError if it does not fit this trainer.
    """
    first = read_rest(folder, 0)
    check_fit(first["fits"], state.fits, folder)
    for name, learner in state.learners.items():
        learner.load_state(folder / name)
    for name, reference in state.references.items():
        reference.load_state(state.learners["policy"], folder / f"teacher_{name}")
    rest = read_rest(folder, state.rank % first["ranks"])  # more ranks may go on than have saved
    torch.set_rng_state(rest["random"])
    if rest["random_gpu"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(rest["random_gpu"])
    return rest["updates_done"], rest["skipped_in_a_row"]


def check_fit(then: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raise UserError with the first key that differs between checkpoint and trainer."""
    for key in (key for key in now if key != "model"):
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
    with reading(path):
        return torch.load(path, map_location="cpu", weights_only=True)


@contextmanager
def reading(path: Path, *, classes: Sequence[type] = ()) -> Generator[None]:
    """Restrict torch.load to tensors, numbers and `classes`, whatever a caller requests.

    Raises UserError naming `path` if the file contains anything else or cannot be read.
    """
    # environment variables, because DeepSpeed calls torch.load itself, with arguments that we cannot pass
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.get(name) for name in names}
    restore_environment({names[0]: "1", names[1]: None})
    try:
        with safe_globals([*classes]):
            yield
    except UnpicklingError as error:
        raise UserError(
            f"resume: {path} is refused, because it is damaged or holds what a checkpoint of a run never holds, such "
            f"as code ({first_line(error)}): resume from a checkpoint that a run of this project wrote"
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, DistError) or "gloo" in str(error):  # another rank has failed, and says why
            raise
        raise UserError(
            f"resume: {path} cannot be read ({type(error).__name__}: {first_line(error)}): the checkpoint is damaged, "
            "resume from an earlier one"
        ) from error
    finally:
        restore_environment(before)
