"""Policy weights of a checkpoint, read in a single process, from any trainer and any number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from core.errors import UserError
from trainers.checkpoint.state import reading


@torch.no_grad()
def load_policy(model: nn.Module, checkpoint: Path) -> None:
    """Copy the policy weights of a checkpoint into the run's model. Checkpoints omit frozen parameters.

    Raises UserError where it does not hold what the model trains.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved = read_policy(checkpoint / "policy", [*trained])
    for name, parameter in trained.items():
        if name not in saved or saved[name].shape != parameter.shape:
            raise UserError(f"the checkpoint {checkpoint} does not hold {name} of the run's model")
        parameter.copy_(saved[name])


def read_policy(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """Return the weights by name; names: of the trained parameters, in the model's order."""
    local = folder / "state.pt"
    if local.is_file():
        with reading(local):
            weights: list[Tensor] = torch.load(local, map_location="cpu", weights_only=True)["weights"]
        return dict(zip(names, weights, strict=False))  # what is missing is told by its name
    if any(folder.glob("*.safetensors")):
        from trainers.checkpoint.fsdp2_state import read_weights

        return read_weights(folder)
    from trainers.deepspeed import read_sharded_weights, read_whole_weights

    is_sharded = any(folder.glob("*optim_states.pt"))
    return read_sharded_weights(folder) if is_sharded else read_whole_weights(folder)
