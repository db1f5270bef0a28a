"""Samples at another temperature than the run's, and returns log-probabilities at it."""

from dataclasses import replace

from rollouts.engines.hf import HfEngine


class ColderEngine(HfEngine):
    def __init__(self, config):
        super().__init__(replace(config, temperature=0.7))
