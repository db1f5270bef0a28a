"""Probe of `rollout.batch_invariant`: a model decoded token by token has the bits of its training passes.

No list of families decides. A few sequences are decoded beside each other with a cache, from prompts of different
lengths, and scored by the trainer's forward pass in each layout that the model supports. A model with a part whose
order is not fixed (recurrent layers, experts, another attention) differs, and is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from core.errors import UserError, first_line
from core.patches import read_attention
from core.types.allowed_tokens import EVERY_TOKEN
from core.types.samples import Batch
from modeling.attention import FIXED_ORDER
from modeling.attention_fixed import use_fixed_order
from modeling.experts import list_blocks
from modeling.fixed_order import fixed_order
from modeling.forward import forward
from modeling.layout_probe import NAMES, Level, find_probe
from modeling.model_inputs import Layout
from modeling.probe_rows import draw_segments, list_sequences, make_batch, make_shared_batch
from modeling.softmax import normalize
from rollouts.engines.hf_support.rows import make_rows

DECODED = 9
"""Tokens of each sequence that are decoded."""


def check_batch_invariance(model: nn.Module) -> None:
    """Set the attention of fixed order. Raises UserError unless decoding has the bits of every training pass."""
    use_fixed_order(model)
    if read_attention(model.config.get_text_config()) != FIXED_ORDER:
        raise _refuse("its code takes no attention by name")
    if list_blocks(model):  # in bfloat16 a few tokens may agree by chance
        raise _refuse("a router chooses experts for all tokens together")
    try:
        found = _find_difference(model)
    except Exception as error:  # a border: a model's code may raise anything for inputs that it does not know
        raise _refuse(f"it cannot be decoded in fixed order ({first_line(error)})") from error
    if found is not None:
        raise _refuse(found)


@torch.no_grad()
def _find_difference(model: nn.Module) -> str | None:
    """Return a clause about the first layout with other bits than decoding; None if there is none."""
    segments = draw_segments(model)
    sequences = list_sequences(segments)
    level = find_probe(model).level
    with fixed_order():
        decoded = _decode(model, sequences)
        for name, layout, batch in _list_passes(level, segments, sequences):
            scored = forward(model, model, batch, layout=layout, temperature=1.0).logp
            last = torch.cat([own[-DECODED:] for own in scored.split([len(s) - 1 for s in sequences])])
            if n := int((last != decoded).sum()):
                return f"decoding and {NAMES[name]} differ at {n} of {len(last)} tokens"
    return None


def _list_passes(level: Level, segments: list[Tensor], sequences: list[Tensor]) -> list[tuple[Level, Layout, Batch]]:
    """Return the training passes that a model with this layout may make."""
    whole = make_batch(sequences)
    passes: list[tuple[Level, Layout, Batch]] = [
        ("shared", "packed", make_shared_batch(segments)),
        ("packed", "packed", whole),
        ("padded", "padded", whole),
    ]
    return passes[[name for name, *_ in passes].index(level) :]


def _decode(model: nn.Module, sequences: list[Tensor]) -> Tensor:
    """Return the log-probabilities of the last DECODED tokens of each sequence, decoded one by one, end to end."""
    rows = make_rows([(s[:-DECODED].tolist(), ()) for s in sequences], DynamicCache(), None, "cpu")
    found: list[Tensor] = []
    for chosen in torch.stack([s[-DECODED:] for s in sequences], 1):  # [sequences] each
        out = model(**rows.arguments())
        logp = normalize(EVERY_TOKEN.restrict(out.logits[:, -1], 1.0))
        found.append(logp.gather(-1, chosen[:, None])[:, 0])
        rows.append_tokens(chosen)
    return torch.stack(found, 1).flatten()


def _refuse(why: str) -> UserError:
    return UserError(
        f"rollout.batch_invariant is true, and this model has no fixed order: {why}; take a dense model, or leave it "
        "out"
    )
