"""Attention over packed rows without padding: causal per sequence, with shared prefixes computed once.

A packed row [1, T] contains segments end to end (modeling/segments.py): whole sequences, or parts of sequences that
share prefixes. The model receives them as the input `segments`, which transformers passes to every layer. The queries
of a segment attend to the keys and values of all its ancestors and of the segment itself:

    row     [prompt | reply A | reply B]         parents [-1, 0, 0]
    call 1  queries of prompt    keys [prompt]
    call 2  queries of reply A   keys [prompt | reply A]
            queries of reply B   keys [prompt | reply B]

Only attention mixes tokens of a sequence, so hidden states and gradients equal those of each sequence alone. The
gradient of the prompt's keys is summed over the replies. On a CPU torch's scaled_dot_product_attention runs on each
segment, or on several equal segments at once; on a GPU see attention_varlen.py. Capped scores and sinks are computed
by attention_scores.py on both. No other kernel and no padding is needed. The name in transformers is BY_SEQUENCE.

In a vision-language model this is the attention of the language part only. Patches of an image attend in both
directions, so the vision tower keeps torch's kernel, and this kernel refuses a layer that is not causal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from core.patches import read_attention
from modeling.attention_scores import Scores, attend
from modeling.attention_varlen import attend_varlen, fits_varlen
from modeling.image_blocks import ImageEnds
from modeling.segments import EqualSegments, Segments

BY_SEQUENCE = "by_sequence"
"""Name of this attention in transformers. It must not contain "sdpa": models without torch's kernel would refuse it."""
FIXED_ORDER = "fixed_order"
"""Name of the attention of attention_fixed.py."""
TAKE_SEGMENTS = (BY_SEQUENCE, FIXED_ORDER)
"""Attention kernels that receive the input `segments`."""

WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "use_cache", "return_dict", "output_attentions", "output_hidden_states"}
    | {"output_router_logits", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
)
"""Arguments of transformers' attention interface that change no number of a pass without a cache. Borders of a packed
row come as `segments`."""

TAKE_BORDERS = ("flash_attention_2", *TAKE_SEGMENTS)
"""Attention kernels that receive the sequence boundaries of a packed row and need no mask."""


def attend_by_sequence_if_able(model: nn.Module) -> None:
    """Replace the attention of transformers by this one, in models whose code takes an attention by its name.

    modeling/layout_probe.py measures whether it is the same attention, and takes it back if not.
    """
    config: Any = model.config
    text = config.get_text_config()
    # a chunk is longer than the sequences of the probe, which would see no difference
    has_chunks = getattr(text, "attention_chunk_size", None) is not None
    if read_attention(text) in ("sdpa", "eager") and not has_chunks:
        set_attention(model, BY_SEQUENCE)


def set_attention(model: nn.Module, name: str) -> None:
    """Set the attention of a model's language part by its name in transformers; other parts keep theirs.

    A model whose code takes no attention by name keeps what it has: `read_attention` tells.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    if BY_SEQUENCE not in AttentionInterface().valid_keys():  # trainers/compiled.py registers another
        AttentionInterface.register(BY_SEQUENCE, attend_by_sequence)
    AttentionMaskInterface.register(BY_SEQUENCE, flash_attention_mask)  # no mask, unless a caller brings one
    hf: Any = model
    text = hf.config.get_text_config()
    configs = {part: own for part in hf.config.sub_configs if (own := getattr(hf.config, part)) is not None}
    parts = {part: read_attention(own) for part, own in configs.items()}
    of_text = {part: name for part, own in configs.items() if own is text}
    hf.set_attn_implementation({**parts, **of_text} if of_text else name)


def refuse_sequence_parallel(config: Any, size: int) -> str | None:
    """Return why `size` ranks cannot compute a row of this model together; None if they can."""
    if getattr(config, "vision_config", None) is not None:
        return f"a {config.model_type} model reads images, and ranks share rows of text models only"
    heads = config.num_attention_heads
    of_keys = getattr(config, "num_key_value_heads", None) or heads
    # With fewer heads of keys than ranks, several ranks get a copy of the same head (SequenceGroup.to_heads).
    if heads % size or (of_keys % size and size % of_keys):
        return (
            f"the model has {heads} heads of queries and {of_keys} of keys and values, and its ranks share them: take "
            "a number that divides both, or divides the first and is a multiple of the second"
        )
    # A rank sees only a slice of the row, so it cannot know the length on which such an embedding depends.
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope.get("rope_type"), *(of.get("rope_type") for of in rope.values() if isinstance(of, dict))):
        if kind in ("dynamic", "longrope"):
            return f"the model's rotary embedding ({kind}) depends on the longest sequence of the whole row"
    return None


def attend_by_sequence(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    segments: Segments | None = None,
    image_ends: ImageEnds | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention: [B, H, T, D] queries, [B, Hkv, T, D] keys and values -> [B, T, H, D].

    This is the attention interface of transformers. Without segments each of the B rows is a sequence, padded on the
    right. A window is exact: a token attends to the last `sliding_window` tokens of its sequence, including itself.
    softcap and s_aux: cap and sinks of `Scores`. image_ends: images whose tokens attend to each other.
    Raises ValueError for a layer that is not causal, and for an argument that is not known here: both would silently
    be computed as something else.
    """
    has_mask = attention_mask is not None and attention_mask.numel() > 0  # forward.py sends an empty one
    if has_mask or query.shape[2] != key.shape[2]:
        raise ValueError(f"attention {BY_SEQUENCE} is for training: it takes neither a mask nor a cache")
    refuse_others(BY_SEQUENCE, module, is_causal=is_causal, dropout=dropout, others=others)
    scores = Scores(scaling=scaling, window=sliding_window, cap=softcap, sinks=s_aux)
    ends = None if image_ends is None else image_ends.for_layer(sliding_window)
    together = None if segments is None else segments.sequence_group
    if together is not None:
        # positions are exchanged for heads first, so that each rank has whole sequences
        query, key, value = together.to_heads(query, key, value)
        scores = scores.of_rank(together)
    q, k, v = (_widen(x) for x in (query, key, value))
    if segments is None:
        # padding on the right is a part of the segment: no real token attends to it, because attention is causal
        rows = Segments([query.shape[2]] * len(query), [-1] * len(query))
        mask = rows.find_mask(rows.runs[0], sliding_window, query.device, leading=scores.leading, image_ends=ends)
        attended = attend(q, k, v, mask, scores).transpose(1, 2)
    else:
        attended = attend_row(q, k, v, segments, scores, ends)
    attended = attended.to(query.dtype)
    return attended if together is None else together.to_positions(attended), None


def _widen(x: Tensor) -> Tensor:
    """Return 16-bit floats on a CPU as float32.

    There the gradient of short segments takes torch's kernel up to three times as long in bfloat16.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.device.type == "cpu" else x


def refuse_others(
    name: str, module: nn.Module, *, is_causal: bool | None, dropout: float, others: dict[str, Any]
) -> None:
    """Raise ValueError for arguments that an attention does not compute. others: unknown arguments."""
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"attention {name} is causal, and {type(module).__name__} is not")
    unknown = sorted(key for key, given in others.items() if given is not None and key not in WITHOUT_EFFECT)
    if dropout or unknown:
        raise ValueError(
            f"attention {name} does not compute {', '.join(unknown) or 'dropout'}, which {type(module).__name__} asks "
            "for"
        )


def attend_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scores: Scores,
    image_ends: Tensor | None = None,
) -> Tensor:
    """Compute attention of a whole row: [1, H, T, D] queries, [1, Hkv, T, D] keys and values -> [1, T, H, D]."""
    # that kernel takes no mask
    if scores.leading is None and image_ends is None and fits_varlen(query, value):
        return attend_varlen(query, key, value, segments, scaling=scores.scaling, window=scores.window)

    def attend_run(q: Tensor, k: Tensor, v: Tensor, run: EqualSegments) -> Tensor:
        mask = segments.find_mask(run, scores.window, q.device, leading=scores.leading, image_ends=image_ends)
        return attend(q, k, v, mask, scores)

    return attend_runs(query, key, value, segments, attend_run)


def attend_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    attend_run: Callable[[Tensor, Tensor, Tensor, EqualSegments], Tensor],
) -> Tensor:
    """Compute attention of a whole row, run by run; as `attend_row`.

    attend_run: computes [count, H, own, D] queries and [count, Hkv, above + own, D] keys and values of a run.
    """
    # split, not slices: the gradient of each slice would be as large as the whole row
    queries = query.split([run.own * run.count for run in segments.runs], dim=2)
    keys, values = (_keys_of_runs(x, segments) for x in (key, value))
    parts: list[Tensor] = []
    for run, q, k, v in zip(segments.runs, queries, keys, values, strict=True):
        done = attend_run(_as_batch(q, run), _as_batch(k, run), _as_batch(v, run), run)
        # the layout that the attention interface returns: positions before heads
        parts.append(done.transpose(1, 2).flatten(0, 1))  # [count * own, H, D]
    return torch.cat(parts)[None]


def _as_batch(x: Tensor, run: EqualSegments) -> Tensor:
    """Reshape the segments of a run to rows: [1, H, count * n, D] -> [count, H, n, D]."""
    # squeeze, not [0]: the gradient of an index would be a copy
    return x if run.count == 1 else x.squeeze(0).unflatten(1, (run.count, -1)).transpose(0, 1)


def _keys_of_runs(x: Tensor, segments: Segments) -> list[Tensor]:
    """Return keys or values per run: for each segment, those of its ancestors and of itself."""
    if not segments.are_shared:
        # without ancestors the keys of a run lie together as its queries do, and nothing is copied
        return list(x.split([run.own * run.count for run in segments.runs], dim=2))
    pieces = x.split(segments.lengths, dim=2)
    return [
        torch.cat([pieces[a] for i in range(run.first, run.first + run.count) for a in [*segments.chains[i], i]], dim=2)
        for run in segments.runs
    ]
