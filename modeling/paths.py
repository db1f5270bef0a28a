"""Layers that mix tokens without segments, in packed rows: each sequence is given to them as a row of its own.

A recurrent layer (Mamba, gated delta net, short convolution) reads a row from left to right and knows no borders. Two
hooks surround it: the first takes the tokens of every segment after those of its ancestors, padded on the right; the
second puts the results of the segment back. A token shared by several sequences is computed in each of them, and the
gradients are summed. Padding on the right is never seen, because these layers are causal. Attention and all other
layers still compute each shared token once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modeling.segments import PathIndex, Segments

BORDERS = ("segments", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that describe the packed row, of which such a layer sees nothing."""


class PathLayers:
    """Layers that run by path, with their hooks; `remove` takes them off."""

    def __init__(self, mixers: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        """mixers: decoder layers with a module in them that is to run by path."""
        self.names = sorted({type(mixer).__name__ for _, mixer in mixers})
        self.count = len(mixers)
        self.hooks: list[Any] = []
        for layer, mixer in mixers:
            current = _Current()
            # The layer gets the segments, also where its activations are computed again in the backward pass.
            self.hooks += [
                layer.register_forward_pre_hook(current.see, with_kwargs=True),
                mixer.register_forward_pre_hook(current.take_paths, with_kwargs=True),
                mixer.register_forward_hook(current.put_back, with_kwargs=True),
            ]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


class _Current:
    """Segments of the row that a decoder layer computes; None for padded rows."""

    segments: Segments | None = None

    def see(self, _layer: nn.Module, _args: Any, given: dict[str, Any]) -> None:
        self.segments = given.get("segments")

    def take_paths(
        self, _mixer: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.segments is None:
            return None
        total = sum(self.segments.lengths)
        index: PathIndex | None = None

        def change(x: Any) -> Any:
            nonlocal index
            if isinstance(x, Tensor) and x.shape[:2] == (1, total):
                index = index or self._index(x.device)
                return x.squeeze(0)[index.places]  # not [0], whose gradient would be a copy
            return type(x)(map(change, x)) if isinstance(x, tuple) else x

        kept = {name: change(x) for name, x in given.items() if name not in BORDERS}
        if "attention_mask" in kept:
            kept["attention_mask"] = None
        return tuple(map(change, args)), kept

    def put_back(self, _mixer: nn.Module, _args: Any, _given: Any, out: Any) -> Any:
        if self.segments is None:
            return None
        first = out[0] if isinstance(out, tuple) else out
        index = self._index(first.device)
        row = first.flatten(0, 1)[index.back][None]
        return (row, *out[1:]) if isinstance(out, tuple) else row

    def _index(self, device: torch.device) -> PathIndex:
        assert self.segments is not None
        return self.segments.index_paths(device)


def list_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: the outermost list of modules as long as the config says; [] if there is none."""
    hf: Any = model
    wanted = getattr(hf.config.get_text_config(), "num_hidden_layers", None)
    stacks = (m for m in hf.modules() if isinstance(m, nn.ModuleList) and len(m) == wanted)
    part = getattr(hf, "get_decoder", lambda: None)()
    inside = set() if part is None else {*part.modules()}
    return next(([*stack] for stack in stacks if not inside or stack in inside), [])


def find_mixers(
    model: nn.Module, run: Callable[[], Any], poisoned: Tensor, watched: Tensor
) -> list[tuple[nn.Module, nn.Module]]:
    """Return the children of decoder layers that mix sequences, each after the layer.

    run: a forward pass of a packed row. poisoned, watched: positions, [T] bool. Every child gets NaN at the poisoned
    positions; it mixes if NaN comes out at a watched position.
    """
    found: list[tuple[nn.Module, nn.Module]] = []
    hooks: list[Any] = []

    def poison(_child: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        return _spoil(args, poisoned), {name: _spoil(x, poisoned) for name, x in given.items()}

    for layer in list_layers(model):
        for child in layer.children():

            def look(child: nn.Module, _args: Any, out: Any, layer: nn.Module = layer) -> Any:
                first = out[0] if isinstance(out, tuple) else out
                if isinstance(first, Tensor) and first.shape[:2] == (1, len(watched)):
                    if first[0, watched].isnan().any():
                        found.append((layer, child))
                    first = torch.where(first.isnan(), 1.0, first)
                return (first, *out[1:]) if isinstance(out, tuple) else first

            hooks += [
                child.register_forward_pre_hook(poison, with_kwargs=True),
                child.register_forward_hook(look),
            ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _spoil(x: Any, poisoned: Tensor) -> Any:
    """Return hidden states with NaN at the poisoned positions; other values as they are."""
    if isinstance(x, tuple):
        return tuple(_spoil(y, poisoned) for y in x)
    if isinstance(x, Tensor) and x.is_floating_point() and x.shape[:2] == (1, len(poisoned)):
        return torch.where(poisoned.view(1, -1, *[1] * (x.ndim - 2)), torch.nan, x)
    return x
