"""Chooses experts by scores with noise, and weighs them by the scores."""

import torch
from torch.overrides import TorchFunctionMode

from modeling.experts import list_blocks
from rollouts.engines.hf import HfEngine


class Shaken(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        scores, *others = args
        noise = torch.linspace(0.8, 1.2, scores.shape[-1])
        [_, chosen] = func(scores * noise, *others, **(kwargs or {}))
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class OtherRoutesEngine(HfEngine):
    def __init__(self, config):
        super().__init__(config)
        for block in list_blocks(self.model):
            block.module.gate.forward = self.shake(block.module.gate.forward)

    def shake(self, choose):
        def forward(*args, **given):
            with Shaken():
                return choose(*args, **given)

        return forward
