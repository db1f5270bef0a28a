"""Muon: an update is the momentum of a weight matrix, orthogonalised.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon); Liu et al. 2025 (arXiv:2502.16982, equation 4) for the
scale of the update, with which Muon takes AdamW's learning rate and weight decay. AdamW updates all parameters that are
no matrices of a layer: embeddings, heads, routers, norms, biases, convolutions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from modeling.experts import is_router, list_expert_weights

MOMENTUM = 0.95
"""Default of `trainer.optimizer_settings.momentum`."""
RMS = 0.2
"""Root mean square of AdamW's usual updates, which Muon's are scaled to."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the Newton-Schulz iteration x -> a x + b x^3 + c x^5 on the singular values."""
ITERATIONS = 5


class Muon(torch.optim.AdamW):
    """Optimizer that updates parameter groups with `is_matrix` by Muon, and the others by AdamW."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        momentum: float = MOMENTUM,
        gather: Callable[[Tensor, Tensor], Tensor] = lambda _, values: values,
        cut: Callable[[Tensor, Tensor], Tensor] = lambda _, whole: whole,
        **adamw: Any,
    ):
        """gather: (parameter, values of its part) -> whole matrix. cut: (parameter, whole matrix) -> its part.

        Both are called for every matrix in the same order on all ranks, whose updates are equal therefore.
        """
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must be at least 0 and below 1")
        super().__init__(groups, **adamw)
        self.momentum, self.gather, self.cut = momentum, gather, cut

    def __setstate__(self, state: dict[str, Any]) -> None:
        # AdamW reads the number of updates in every state
        own = {p: kept for p, kept in state["state"].items() if "momentum" in kept}
        rest = defaultdict(dict, {p: kept for p, kept in state["state"].items() if "momentum" not in kept})
        super().__setstate__(state | {"state": rest})
        self.state.update(own)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["is_matrix"] else ():
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                mean = state["momentum"].lerp_(parameter.grad, 1 - self.momentum)
                whole = self.gather(parameter, parameter.grad.lerp(mean, self.momentum))  # Nesterov's momentum
                scale = RMS * math.sqrt(max(whole.shape[-2:]))
                update = self.cut(parameter, orthogonalize(whole))
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"] * scale)
                parameter.grad = None  # AdamW leaves it out
        super().step(closure)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return U V^T of the singular value decomposition U S V^T, nearly: with singular values of 0.7 to 1.2.

    matrix: [..., rows, columns]. It is computed in bfloat16 on a GPU and in float32 on a CPU.
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    is_high = x.shape[-2] > x.shape[-1]
    x = x.mT if is_high else x
    # the largest singular value is at most 1
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if is_high else x).to(matrix.dtype)


def list_matrices(model: nn.Module) -> set[str]:
    """Return the names of the parameters that Muon updates: weights of linear layers, and of all experts of a layer."""
    hf: Any = model
    head = hf.get_output_embeddings() if hasattr(hf, "get_output_embeddings") else None
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and name.rpartition(".")[2] != "score"
        and not is_router(model, name)
    }
    return linear | {*list_expert_weights(model)}
