"""Takes the prompt as text and encodes it with a beginning-of-text token that the trainer's prompt does not have."""

from transformers import AutoTokenizer

from rollouts.engines.hf import HfEngine


class PromptOfTextEngine(HfEngine):
    def __init__(self, config):
        super().__init__(config)
        self.tokenizer = AutoTokenizer.from_pretrained(config.model_path)

    async def generate(self, token_ids, *, max_new_tokens, seed):
        prompt = self.tokenizer.encode(self.tokenizer.decode(token_ids, skip_special_tokens=False))
        return await super().generate(prompt, max_new_tokens=max_new_tokens, seed=seed)
