"""Draws at another temperature than the run's, and returns log-probabilities at the run's."""

from rollouts.engines.hf import HfEngine


class SecretlyColderEngine(HfEngine):
    def _draw_tokens(self, logp, live):
        return super()._draw_tokens((logp / 0.7).log_softmax(-1), live)
