"""Reward model as a reward function: a model of algs/reward_model.py, or any sequence classifier with one label.

    reward: {function: reward_model, settings: {model: runs/rm/model}, weights: {reward: 1.0}, workers: 1}

`template` must be the data.template of the reward model's training, and `template_date` its data.template_date, if its
template writes the date. `trust_remote_code: true` allows code in the reward
model's folder; model.trust_remote_code does not apply. Every worker loads a copy of the model, on the CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt

Template = Literal["chat", "plain"]


def score(
    prompt: Prompt,
    messages: list[Message],
    *,
    model: str,
    template: Template = "chat",
    template_date: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, float]:
    """Return {"reward": r}, the value at the last token of the conversation, as in training."""
    # imported here: whoever lists the rewards imports this file, and needs no torch
    import torch

    from algs.reward_model import append_scored_token
    from core.types import samples as types
    from core.types.messages import find_images
    from data_feeds.packing.batches import pack
    from modeling.forward import compute_values

    net, tokenizer, media = load_once(model, template, template_date, trust_remote_code)
    turns = [*prompt.messages, *messages]
    ids, mask = tokenizer.mask_turns(turns, tools=prompt.tools)
    # columns of sampling, which a Sample must have and a reward model does not read
    nothing = [0.0] * len(ids)
    whole = types.Prompt(id=prompt.id, messages=[])  # the conversation is in the tokens, so the prompt is empty
    sample = types.make_sample(
        prompt=whole,
        token_ids=ids,
        action_mask=mask,
        rollout_logp=nothing,
        versions=[-1] * len(ids),
        images=tokenizer.place(ids, find_images(turns)),
    )
    with torch.no_grad():
        batch = media.load(pack([append_scored_token(sample)], [0.0]))
        return {"reward": float(compute_values(net, batch, layout="padded", model=net))}


def prepare(
    *, model: str, template: Template = "chat", template_date: str | None = None, trust_remote_code: bool = False
) -> None:
    load_once(model, template, template_date, trust_remote_code)


# one model per worker: all samples of a run have the same settings
@lru_cache(maxsize=1)
def load_once(
    model: str, template: Template, template_date: str | None, trust_remote_code: bool
) -> tuple[Any, Any, Any]:
    from core.errors import UserError
    from data_feeds.chat.template_args import make_clock, writes_date
    from data_feeds.chat.tokenizer import ChatTokenizer
    from modeling.hf_config import check_model_folder
    from modeling.layout_probe import set_exact_attention
    from modeling.load import load_scalar_model
    from modeling.media import MediaLoader

    given: dict[str, Any] = {"key": "reward.settings.model", "trust_remote_code": trust_remote_code}
    check_model_folder(model, **given)
    tokenizer = ChatTokenizer(model, template, template_args=make_clock(template_date), **given)
    # today's date would change the reward from day to day
    if template_date is None and writes_date(tokenizer):
        raise UserError(
            f"reward.settings.model={model}: its chat template writes the date: set reward.settings.template_date to "
            "data.template_date of its training (in that run's config.yaml)"
        )
    net = load_scalar_model(model, dtype="float32", attention="auto", **given).eval()
    set_exact_attention(net, device="cpu")
    media = MediaLoader(net, model, device="cpu", trust_remote_code=trust_remote_code)
    return net, tokenizer, media
