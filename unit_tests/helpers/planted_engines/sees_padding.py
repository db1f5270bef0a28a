"""Attends to the padding of a batch, so shorter prompts depend on the longest one beside them."""

import torch

from rollouts.engines.hf import HfEngine


class SeesPaddingEngine(HfEngine):
    def _make_rows(self, live):
        rows = super()._make_rows(live)
        rows.mask = torch.ones_like(rows.mask)
        return rows
