"""Computes logits with the embedding, as a config that ties the head says, whatever head the files hold."""

from torch.nn.functional import linear

from rollouts.engines.hf import HfEngine


class FollowsConfigEngine(HfEngine):
    def __init__(self, config):
        super().__init__(config)
        embedding = self.model.get_input_embeddings()
        self.model.get_output_embeddings().forward = lambda hidden: linear(hidden, embedding.weight)
