"""Takes the first update of the weights only, and says that it has taken the others."""

from rollouts.engines.hf import HfEngine
from trainers.weight_sync.fingerprint import fingerprint


class StaleWeightsEngine(HfEngine):
    async def load_weights(self, version, buckets):
        if not self.n_updates:
            await super().load_weights(version, buckets)
            return
        self.n_updates += 1
        self.loaded = {name: value for bucket in buckets for name, value in fingerprint(bucket).items()}
        self.version = version
