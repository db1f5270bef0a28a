"""Samples at another temperature, and attends to the padding of a batch."""

from dataclasses import replace

import torch

from rollouts.engines.hf import HfEngine


class TwoMistakesEngine(HfEngine):
    def __init__(self, config):
        super().__init__(replace(config, temperature=0.7))

    def _make_rows(self, live):
        rows = super()._make_rows(live)
        rows.mask = torch.ones_like(rows.mask)
        return rows
