"""Takes weights from other processes only."""

from rollouts.engines.base import Engine
from rollouts.engines.hf import HfEngine


class RemoteOnlyEngine(HfEngine):
    async def load_weights(self, version, buckets):
        await Engine.load_weights(self, version, buckets)
