"""Kept sets: for each token, the ids that truncated sampling chose from (core/types/truncation.py).

`KeptSets` are those of a sample's tokens, `KeptTokens` those of a batch's trained tokens. A token without a set was not
sampled from one, as a token of the prompt; its softmax is over all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import RunStopped, UserError
from core.types.allowed_tokens import LOWEST, divide
from core.types.arrays import INTS, Ids, Mask, to_column, with_tensors, without_tensors


# eq=False: the generated == would compare arrays, and an array of booleans has no truth value.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptSets:
    """Kept sets of L tokens, end to end (CSR): that of token t is ids[offsets[t]:offsets[t + 1]]."""

    ids: Ids
    """[N] int32."""
    offsets: Ids
    """[L + 1] int32, from 0 to N, never falling."""

    def __post_init__(self) -> None:
        if self.ids.dtype != INTS or self.offsets.dtype != INTS:
            raise UserError(f"kept sets must be int32, found {self.ids.dtype} ids and {self.offsets.dtype} offsets")
        ends = self.offsets[[0, -1]].tolist() if len(self.offsets) else []
        if ends != [0, len(self.ids)] or (np.diff(self.offsets) < 0).any():
            raise UserError(f"offsets of kept sets must rise from 0 to the number of ids, {len(self.ids)}")
        for array in (self.ids, self.offsets):
            array.setflags(write=False)  # as Ray returns them

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptSets):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.offsets, other.offsets)

    def __len__(self) -> int:
        """Return L, the number of tokens."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ids:
        """[L] int32, number of ids in each set; 0 for a token without a set."""
        return np.diff(self.offsets)

    @staticmethod
    def of_sizes(ids: Any, sizes: Any) -> KeptSets:
        """Return sets of `sizes` [L] whose ids [N] are end to end."""
        offsets = np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])
        return KeptSets(ids=to_column(ids, INTS), offsets=to_column(offsets, INTS))

    @staticmethod
    def of_lists(sets: Sequence[Sequence[int]]) -> KeptSets:
        """Return the sets of a list of ids per token.

        >>> KeptSets.of_lists([[], [3, 5]]).offsets.tolist()
        [0, 0, 2]
        """
        return KeptSets.of_sizes([i for ids in sets for i in ids], [len(ids) for ids in sets])

    @staticmethod
    def none(length: int) -> KeptSets:
        """Return `length` tokens without a set."""
        return KeptSets.of_sizes([], [0] * length)

    @staticmethod
    def join(parts: Sequence[KeptSets]) -> KeptSets:
        """Concatenate."""
        if len(parts) == 1:
            return parts[0]
        ids, sizes = [p.ids for p in parts], [p.sizes for p in parts]
        return KeptSets.of_sizes(np.concatenate(ids), np.concatenate(sizes)) if parts else KeptSets.none(0)

    def take(self, tokens: NDArray[np.integer[Any]]) -> KeptSets:
        """Return the sets of these tokens, in this order."""
        begins, sizes = self.offsets[:-1][tokens], self.sizes[tokens]
        ends = np.cumsum(sizes, dtype=np.int64)
        # the place of every id: its set's first place, and how far it is behind it
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - sizes, sizes)
        return KeptSets.of_sizes(self.ids[np.repeat(begins, sizes) + within], sizes)

    def contain(self, token_ids: NDArray[np.integer[Any]]) -> Mask:
        """Return [L] bool, True where a token of `token_ids` [L] is in its own set. A token without a set is not."""
        tokens = np.repeat(np.arange(len(self)), self.sizes)
        found = np.zeros(len(self), dtype=np.bool_)
        found[tokens[self.ids == token_ids[tokens]]] = True
        return found

    def check(self, action_mask: Mask) -> None:
        """Raise UserError unless the sampled tokens of a sample, and no others, have sets."""
        if len(self) != len(action_mask):
            raise UserError(f"kept of a Sample must have a set per token: {len(self)} for {len(action_mask)} tokens")
        if not np.array_equal(self.sizes > 0, action_mask):
            raise UserError("kept of a Sample must have a set for each sampled token, and empty sets for the others")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """Kept sets of the M trained tokens of a Batch."""

    ids: Tensor
    """[N] int32, ids of all sets, end to end."""
    offsets: Tensor
    """[M + 1] int64, the first id of each set, and N."""
    sizes: Tensor
    """[M] int64, number of ids in each set. Stays on the CPU: widths of tensors are computed from it."""

    def __reduce__(self) -> Any:
        return with_tensors, (KeptTokens, without_tensors(self))

    @staticmethod
    def of(sets: KeptSets) -> KeptTokens:
        """Return the sets of trained tokens as tensors."""
        ids, offsets = torch.from_numpy(sets.ids.copy()), torch.from_numpy(sets.offsets.astype(np.int64))
        return KeptTokens(ids=ids, offsets=offsets, sizes=offsets.diff())

    def to(self, device: torch.device | str) -> KeptTokens:
        """Return the sets on a device."""
        return KeptTokens(ids=self.ids.to(device), offsets=self.offsets.to(device), sizes=self.sizes)

    def select(self, tokens: slice | Tensor) -> KeptTokens:
        """Return the sets of a range of tokens, which needs no copy, or of a mask [M] on the CPU."""
        if isinstance(tokens, Tensor):
            where = tokens.repeat_interleave(self.sizes).to(self.ids.device)
            ids, sizes = self.ids[where], self.sizes[tokens]
            offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(self.ids.device)
            return KeptTokens(ids=ids, offsets=offsets, sizes=sizes)
        begin, end, _ = tokens.indices(len(self.sizes))
        return KeptTokens(ids=self.ids, offsets=self.offsets[begin : end + 1], sizes=self.sizes[begin:end])

    def check_labels(self, labels: Tensor) -> None:
        """Raise RunStopped if a trained token with a set, of labels [M], is not in its set."""
        tokens = torch.arange(len(labels)).repeat_interleave(self.sizes)
        found = torch.zeros(len(labels), dtype=torch.bool)
        found[tokens[self.ids.cpu() == labels.cpu()[tokens]]] = True
        # Its log-probability would be about -8e28: a single token would decide the loss.
        if (wrong := (~found & (self.sizes > 0)).nonzero()).numel():
            raise RunStopped(
                f"a sample contains the sampled token {int(labels[wrong[0, 0]])}, which is not in its own kept set "
                "(rollout.top_p, top_k, min_p): the engine must report the set that it drew the token from"
            )

    def restrict(self, logits: Tensor, temperature: float) -> Tensor:
        """Return logits [m, V] of these m tokens restricted to their sets, [m, K], as AllowedTokens.restrict does.

        K is the size of the largest set; smaller sets are filled up with tokens of probability 0. K = V if a token has
        no set.
        """
        columns, is_own = self._lay_out()
        if (self.sizes == 0).any():
            # rare: tokens that were not sampled are trained on beside sampled ones
            counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
            is_own = (counts.scatter_add(-1, columns, is_own.int()) > 0) | (self.offsets.diff() == 0)[:, None]
        else:
            # Select before the conversion, so that only K of the V columns exist in float32.
            logits = logits.gather(-1, columns)
        return divide(logits, temperature).masked_fill(~is_own, LOWEST)

    def to_columns(self, ids: Tensor) -> Tensor:
        """Map a token id per token, [m], to its column in the restricted logits. It must be in the token's set."""
        if (self.sizes == 0).any():
            return ids
        columns, is_own = self._lay_out()
        return ((columns == ids[:, None]) & is_own).int().argmax(-1)

    def _lay_out(self) -> tuple[Tensor, Tensor]:
        """Return the ids of the sets as rows, [m, K] int64, and a mask of those that are in the row's set."""
        # one column and one id at least, for tokens that are none, or have no sets
        within = torch.arange(max(1, int(self.sizes.max())) if len(self.sizes) else 1, device=self.ids.device)
        ids = self.ids if len(self.ids) else self.ids.new_zeros(1)
        places = (self.offsets[:-1, None] + within).clamp(max=len(ids) - 1)
        return ids[places].long(), within < self.offsets.diff()[:, None]
