"""Computes its head in bfloat16, whatever dtype it is given."""

import torch
from torch.nn.functional import linear

from rollouts.engines.hf import HfEngine


class RoundedHeadEngine(HfEngine):
    def __init__(self, config):
        super().__init__(config)
        head = self.model.get_output_embeddings()
        head.forward = lambda hidden: linear(hidden.to(torch.bfloat16), head.weight.to(torch.bfloat16))
