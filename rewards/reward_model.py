"""Reward model as a reward function: a model of algs/reward_model.py, or any sequence classifier with a head `score`.

    reward: {function: reward_model, settings: {model: runs/rm/model}, weights: {reward: 1.0}}
    settings: {model: ..., labels: {helpful: 0, honest: 3}}      several parts, of a model with several labels

Each engine has one copy of the model, on the GPU that its process sees (`device: auto`), else on the CPU. Samples that
wait at the same time are scored in one batch of at most `batch_tokens`, padding included; `reward.max_concurrency` is
the most that wait.

`template` must be the data.template of the reward model's training, and `template_date` its data.template_date, if its
template writes the date. `trust_remote_code: true` allows code in the reward model's folder; model.trust_remote_code
does not apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from rewards.batches import Batcher

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt, Sample

Template = Literal["chat", "plain"]
Device = Literal["auto", "cpu"]
Dtype = Literal["float32", "bfloat16"]
ONLY_LABEL = {"reward": 0}
"""Part of a model with one label."""


async def score(
    prompt: Prompt,
    messages: list[Message],
    *,
    model: str,
    labels: Mapping[str, int] = ONLY_LABEL,
    template: Template = "chat",
    template_date: str | None = None,
    trust_remote_code: bool = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    batch_tokens: int = 16384,
) -> dict[str, float]:
    """Return a part per label, the values at the last token of the conversation, as in training."""
    scorer = load_once(
        model, tuple(labels.items()), template, template_date, trust_remote_code, device, dtype, batch_tokens
    )
    return await scorer.batcher.call(scorer.encode(prompt, messages))


def prepare(
    *,
    model: str,
    labels: Mapping[str, int] = ONLY_LABEL,
    template: Template = "chat",
    template_date: str | None = None,
    trust_remote_code: bool = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    batch_tokens: int = 16384,
) -> None:
    load_once(model, tuple(labels.items()), template, template_date, trust_remote_code, device, dtype, batch_tokens)


class Scorer:
    """Loaded reward model, with the queue in front of it."""

    def __init__(self, net: Any, tokenizer: Any, media: Any, labels: Sequence[tuple[str, int]], batch_tokens: int):
        """labels: name and number of each part. batch_tokens: maximum of a batch, padding included."""
        self.net, self.tokenizer, self.media, self.labels = net, tokenizer, media, labels
        self.batcher = Batcher(self.compute, lambda sample: len(sample.token_ids), batch_tokens)

    def encode(self, prompt: Prompt, messages: list[Message]) -> Sample:
        """Return the conversation as a sample of the reward model."""
        # imported here: whoever lists the rewards imports this file, and needs no torch
        from algs.reward_model import append_scored_token
        from core.types import samples as types
        from core.types.messages import find_images

        turns = join_begun(prompt.messages, messages)
        ids, mask = self.tokenizer.mask_turns(turns, tools=prompt.tools)
        sample = types.make_sample(
            prompt=types.Prompt(id=prompt.id, messages=[]),  # empty, because the conversation is in the tokens
            token_ids=ids,
            action_mask=mask,
            # columns of sampling, which a Sample must have and a reward model does not read
            rollout_logp=[0.0] * len(ids),
            versions=[-1] * len(ids),
            images=self.tokenizer.place(ids, find_images(turns)),
        )
        return append_scored_token(sample)

    def compute(self, samples: list[Sample]) -> list[dict[str, float]]:
        """Return the parts of each sample, in one forward pass."""
        import torch

        from data_feeds.packing.batches import pack
        from modeling.forward import compute_values

        with torch.no_grad():
            batch = self.media.load(pack(samples, [0.0] * len(samples)))
            found = compute_values(self.net, batch, layout="padded", model=self.net).T.tolist()  # [n, L]
        return [{name: values[at] for name, at in self.labels} for values in found]


def join_begun(asked: Sequence[Message], answered: Sequence[Message]) -> list[Message]:
    """Return the conversation. A reply that the prompt begins is one turn with the rest."""
    if not asked or not answered or asked[-1]["role"] != "assistant" or answered[0]["role"] != "assistant":
        return [*asked, *answered]
    # data.continue_final_message: as two turns, the reply would have an end and a header in the middle
    whole: Message = {**answered[0], "content": asked[-1]["content"] + answered[0]["content"]}
    return [*asked[:-1], whole, *answered[1:]]


# one model per process: all samples of a run have the same settings
@lru_cache(maxsize=1)
def load_once(
    model: str,
    labels: tuple[tuple[str, int], ...],
    template: Template,
    template_date: str | None,
    trust_remote_code: bool,
    device: Device,
    dtype: Dtype,
    batch_tokens: int,
) -> Scorer:
    """Load the model. Raises UserError for a setting that does not fit it."""
    from core.device import find_device
    from core.errors import UserError
    from data_feeds.chat.template_args import make_clock, writes_date
    from data_feeds.chat.tokenizer import ChatTokenizer
    from modeling.hf_config import check_model_folder
    from modeling.layout_probe import set_exact_attention
    from modeling.load import count_labels, load_scalar_model
    from modeling.media import MediaLoader

    given: dict[str, Any] = {"key": "reward.settings.model", "trust_remote_code": trust_remote_code}
    check_model_folder(model, **given)
    if not (n := count_labels(model, trust_remote_code=trust_remote_code)):
        raise UserError(
            f"reward.settings.model={model} is no sequence classifier, and its rewards would all be 0: name a reward "
            "model, such as one of algs/reward_model.py"
        )
    if labels == tuple(ONLY_LABEL.items()) and n > 1:
        raise UserError(
            f"reward.settings.model={model} has {n} labels: set reward.settings.labels to the numbers of those that "
            "you want as parts, such as {helpful: 0}"
        )
    if wrong := [name for name, at in labels if not 0 <= at < n]:
        raise UserError(f"reward.settings.labels.{wrong[0]}: {model} has the labels 0 to {n - 1}: correct the number")
    tokenizer = ChatTokenizer(model, template, template_args=make_clock(template_date), **given)
    # today's date would change the reward from day to day
    if template_date is None and writes_date(tokenizer):
        raise UserError(
            f"reward.settings.model={model}: its chat template writes the date: set reward.settings.template_date to "
            "data.template_date of its training (in that run's config.yaml)"
        )
    where = find_device() if device == "auto" else device
    net = load_scalar_model(model, dtype=dtype, attention="auto", n_labels=n, **given).eval().to(where)
    set_exact_attention(net, device=where)
    media = MediaLoader(net, model, device=where, trust_remote_code=trust_remote_code)
    return Scorer(net, tokenizer, media, labels, batch_tokens)
