"""Returns the ids of the reply's text, which need not be those that it has sampled."""

from dataclasses import replace

from transformers import AutoTokenizer

from rollouts.engines.hf import HfEngine


class IdsOfTextEngine(HfEngine):
    def __init__(self, config):
        super().__init__(config)
        self.tokenizer = AutoTokenizer.from_pretrained(config.model_path)

    async def generate(self, token_ids, *, max_new_tokens, seed):
        done = await super().generate(token_ids, max_new_tokens=max_new_tokens, seed=seed)
        text = self.tokenizer.decode(done.token_ids, skip_special_tokens=False)
        ids = self.tokenizer.encode(text, add_special_tokens=False)[: len(done.token_ids)]
        return replace(done, token_ids=ids, logp=done.logp[: len(ids)], versions=done.versions[: len(ids)])
