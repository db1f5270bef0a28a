"""Load a language or vision-language model for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from configs.trainer_schema import LoraConfig
from core.errors import UserError, first_line
from core.patches import read_attention
from modeling.attention import BY_SEQUENCE, FIXED_ORDER, attend_by_sequence_if_able
from modeling.attention_fixed import use_fixed_order
from modeling.head import use_scoring_head
from modeling.hf_config import choose_class, needs_images, read_config, vision_family
from modeling.pretrained import Place, load_placed, load_pretrained, refuse_own_code

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NEW_HEADS, OLD_HEADS = "score.", "lm_head."
"""Prefixes of the head of a scalar model (created) and of a language model (dropped for it)."""


def load_model(
    path: str,
    *,
    dtype: str,
    attention: str,
    gradient_checkpointing: bool = False,
    lora: LoraConfig | None = None,
    key: str = "model.path",
    trust_remote_code: bool = False,
    place: Place | None = None,
    quantization: Literal["nf4"] | None = None,
) -> nn.Module:
    """Load a Hugging Face language model on the CPU, without dropout, so that two passes of the same policy agree.

    With `lora` the model gets a new adapter, and all other weights are frozen. Raises UserError, starting with `key`,
    if loading fails or the files do not contain exactly the tensors of the config. place: shards the empty model, see
    `load_placed`. Not used for DoRA, whose adapter is initialised from norms of whole weights, and not with
    `quantization` of the frozen weights, whose blocks are no rows.
    """
    needs_whole = quantization is not None or (lora is not None and lora.dora)
    model = _load_pretrained(
        choose_class(read_config(path, key=key, trust_remote_code=trust_remote_code), path=path, key=key),
        path,
        dtype,
        attention,
        gradient_checkpointing,
        key=key,
        trust_remote_code=trust_remote_code,
        place=None if needs_whole else place,
    )
    if quantization is not None:
        from modeling.nf4 import quantize

        quantize(model)
    if lora is None:
        return model
    from modeling.lora import with_adapter

    return with_adapter(model, lora, path=path)


def load_scalar_model(
    path: str,
    *,
    dtype: str,
    attention: str,
    gradient_checkpointing: bool = False,
    key: str = "model.path",
    trust_remote_code: bool = False,
    place: Place | None = None,
    n_labels: int = 1,
) -> nn.Module:
    """Load a value or reward model: the transformer of `path` with a sequence classifier's head of `n_labels` labels.

    A saved reward model's head is kept; a new head starts at zero. Raises UserError as `load_model` does. place: as
    there; not used for a vision-language model with a new head.
    """
    from transformers import AutoModelForSequenceClassification

    kind: dict[str, Any] = {"key": key, "trust_remote_code": trust_remote_code}
    is_new = not _is_scalar(path, **kind)
    if is_new and needs_images(path, **kind):
        from modeling.images.vision_scalar import with_scalar_head

        whole = load_model(
            path, dtype=dtype, attention=attention, gradient_checkpointing=gradient_checkpointing, **kind
        )
        model: Any = with_scalar_head(whole).train()
    else:
        _register_scalar_class(read_config(path, **kind))
        settings: dict[str, Any] = {"new_head": is_new, "num_labels": n_labels, "place": place}
        model = _load_pretrained(
            AutoModelForSequenceClassification, path, dtype, attention, gradient_checkpointing, **kind, **settings
        )
    if not hasattr(model, "score"):
        raise UserError(
            f"{key}={path} comes with code whose sequence classifier has no linear layer named score, from which "
            "rewards and values are read: name it so"
        )
    if is_new:
        # Zero, so that the first advantages are those without a value model.
        nn.init.zeros_(model.score.weight)
    # A sequence classifier needs it to find the last token; values are read elsewhere, see forward.compute_values.
    config = model.config.get_text_config()
    config.pad_token_id = config.pad_token_id or 0
    return model


def count_labels(path: str, *, trust_remote_code: bool = False) -> int:
    """Return the number of labels of a saved sequence classifier; 0 for another model."""
    if not _is_scalar(path, trust_remote_code=trust_remote_code):
        return 0
    return read_config(path, trust_remote_code=trust_remote_code).num_labels


def check_weights(path: str, *, key: str = "model.path", trust_remote_code: bool = False) -> None:
    """Raise UserError if a folder's files do not contain exactly the tensors of the model.

    It reads only names and shapes, in a fraction of a second, and needs accelerate, a dependency of peft. Without
    accelerate, and for a Hub name, the check happens at loading.
    """
    from transformers.utils import is_accelerate_available

    if Path(path).is_dir() and is_accelerate_available():
        load_empty(path, key=key, trust_remote_code=trust_remote_code)


def load_empty(path: str, *, key: str = "model.path", trust_remote_code: bool = False, **settings: Any) -> nn.Module:
    """Load a model on the meta device, without memory for weights, as `load_model` or `load_scalar_model` would.

    Raises UserError if its files do not contain exactly its tensors. It needs accelerate.
    """
    from transformers import AutoModelForSequenceClassification

    config = read_config(path, key=key, trust_remote_code=trust_remote_code)
    auto = choose_class(config, path=path, key=key)
    settings |= {"key": key, "trust_remote_code": trust_remote_code, "device_map": "meta"}
    if _is_scalar(path, trust_remote_code=trust_remote_code):
        _register_scalar_class(config)
        return _read_pretrained(AutoModelForSequenceClassification, path, num_labels=1, **settings)
    return _read_pretrained(auto, path, **settings)


def _register_scalar_class(config: Any) -> None:
    """Register the sequence classifier of a vision-language family; transformers has those of text models."""
    if vision_family(config) is not None:
        from modeling.images.vision_scalar import scalar_class

        scalar_class(config.model_type)


def _is_scalar(path: str, *, key: str = "model.path", trust_remote_code: bool) -> bool:
    """Tell whether `path` is a saved reward or value model. Classes in a model's own code may have any name."""
    config = read_config(path, key=key, trust_remote_code=trust_remote_code)
    own: str = (getattr(config, "auto_map", None) or {}).get("AutoModelForSequenceClassification", "")
    names = getattr(config, "architectures", None) or []
    return any("SequenceClassification" in name or name == own.rpartition(".")[2] for name in names)


def _load_pretrained(
    auto: Any,
    path: str,
    dtype: str,
    attention: str,
    checkpointing: bool,
    *,
    key: str,
    new_head: bool = False,
    **settings: Any,
) -> nn.Module:
    if attention not in ("auto", FIXED_ORDER):
        config = read_config(path, trust_remote_code=settings["trust_remote_code"])  # it was read before
        # flash attention takes the borders of a packed row, which are not those of the images' patches
        split = getattr(config, "vision_config", None) is not None and attention == "flash_attention_2"
        settings["attn_implementation"] = {"text_config": attention, "vision_config": "sdpa"} if split else attention
    model = _read_pretrained(auto, path, key=key, new_head=new_head, dtype=DTYPES[dtype], **settings)
    # With dropout two passes of the same policy differ, and ratios on policy would not be 1.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    parts = [model.config, *(getattr(model.config, name) for name in model.config.sub_configs)]
    if any(getattr(c, name, 0.0) for c in parts for name in ("attention_dropout", "attn_pdrop", "hidden_dropout")):
        raise UserError(f"{key}={path} has dropout in its config.json: set it to 0")
    if attention in ("auto", FIXED_ORDER):
        attend_by_sequence_if_able(model)
    if attention == FIXED_ORDER and read_attention(model.config.get_text_config()) == BY_SEQUENCE:
        use_fixed_order(model)
    if checkpointing:
        # non-reentrant: the other kind gives no gradient if no input needs one, as with LoRA's frozen embeddings
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _read_pretrained(
    auto: Any, path: str, *, key: str, new_head: bool = False, place: Place | None = None, **settings: Any
) -> Any:
    """Load the model. Raises UserError if files are unreadable, or do not contain exactly its tensors."""
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its report of what does not fit is refused below
    # mismatched shapes are reported with all other misfits, and refused in a single sentence by _check_report
    settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}

    def prepare(model: nn.Module) -> None:
        use_scoring_head(model)  # before a library hooks itself to the head
        if place is not None:
            place(model)

    try:
        model, report = (
            load_pretrained(auto, path, **settings) if place is None else load_placed(auto, path, prepare, **settings)
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        refusal = refuse_own_code(error, key=key, path=path, trust_remote_code=settings["trust_remote_code"])
        raise UserError(
            refusal or f"{key}={path} cannot be loaded: {first_line(error)}: save or download it again"
        ) from error
    _check_report(report, f"{key}={path}", new_head=new_head)
    _correct_tie(model)
    use_scoring_head(model)
    return model


def _correct_tie(model: Any) -> None:
    """Correct the config of a model whose files hold a head of its own, so that it is saved and reloaded untied."""
    # transformers drops a tie whose two tensors are in the files with different values, and only warns
    if model.get_expanded_tied_weights_keys(all_submodels=True).keys() <= model.all_tied_weights_keys.keys():
        return
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


def _check_report(report: dict[str, Any], who: str, *, new_head: bool) -> None:
    """Raise UserError for a missing, wrongly shaped or unused tensor. transformers would initialise missing ones
    randomly.

    new_head: the model gets a new head instead of the saved head.
    """
    # A new head is missing in the files on purpose, and the old head is unexpected on purpose.
    missing = sorted(name for name in report["missing_keys"] if not (new_head and name.startswith(NEW_HEADS)))
    unexpected = sorted(name for name in report["unexpected_keys"] if not (new_head and name.startswith(OLD_HEADS)))
    wrong = sorted(name for name, *_ in report["mismatched_keys"])
    shapes = {name: (list(saved), list(wanted)) for name, saved, wanted in report["mismatched_keys"]}
    if wrong:
        saved, wanted = shapes[wrong[0]]
        found = f"{wrong[0]} has shape {saved} in its files, and {wanted} by its config.json"
    elif missing:
        found = f"its files lack {missing[0]}"
        if unexpected:
            found += f" and hold {unexpected[0]}, which no such model has"
    elif unexpected:
        found = f"its files hold {unexpected[0]}, which no model of its config.json has"
    else:
        return
    others = len({*wrong, *missing, *unexpected}) - 1
    more = f" ({others} tensors more do not fit)" if others else ""
    raise UserError(f"{who}: {found}{more}: save model and config.json together again")
