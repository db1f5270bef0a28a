"""LoRA by PEFT: W' = W + s B A, with W frozen; with DoRA W' = m (W + s B A) / |W + s B A| per output row.

https://arxiv.org/abs/2106.09685, rsLoRA (s = alpha / sqrt(r)) https://arxiv.org/abs/2312.03732, DoRA
https://arxiv.org/abs/2402.09353.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from configs.trainer_schema import LoraConfig, ModelConfig
from core.errors import UserError, first_line
from modeling.hf_config import is_text_use, meta_model, vision_family

if TYPE_CHECKING:
    from peft import PeftModel


ADAPTER = "default"
"""PEFT's name of the only adapter."""


def with_adapter(model: nn.Module, lora: LoraConfig, *, path: str) -> PeftModel:
    """Add a new adapter without any effect yet; all other weights are frozen.

    The adapter has the model's dtype. Initial values depend only on the seed, not on earlier random draws.
    """
    import peft

    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        r=lora.r,
        lora_alpha=lora.alpha,
        # with dropout, two passes of the same policy would differ
        lora_dropout=0.0,
        target_modules=lora.targets if lora.targets == "all-linear" else check_targets(model, lora, path=path),
        exclude_modules=_exclude_vision(model, lora),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    # All ranks must begin with the same adapter, however many random numbers each has drawn before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        try:
            wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:  # as of DoRA on experts
            raise UserError(f"model.lora makes no adapter for model.path={path}: {first_line(error)}") from error
    if lora.merge_on_save:
        refuse_merge(wrapped, path=path, why="model.lora.merge_on_save merges")
    return wrapped.train()


def refuse_merge(wrapped: PeftModel, *, path: str, why: str) -> None:
    """Raise UserError if the adapter has layers that `merged_weight` cannot merge, as of a mixture's experts.

    PEFT adapts the experts and routers of some families with "all-linear", and their weights are no linear layers.
    why: key that needs a merge, with a verb.
    """
    if (layer := find_unmergeable(wrapped)) is not None:
        base: nn.Module = wrapped.get_base_model()
        names = ", ".join(sorted({name.rpartition(".")[2] for name, m in base.named_modules() if _is_plain(m)}))
        raise UserError(
            f"{why} the adapter into the weights, and those of {layer} in model.path={path} are experts or a router, "
            f"into which none can be merged here: set model.lora.targets=[{names}]"
        )


def find_unmergeable(wrapped: PeftModel) -> str | None:
    """Return an adapted layer that is not linear; None if the whole adapter can be merged."""
    from peft.tuners.lora import LoraLayer

    layers = [(name, m) for name, m in wrapped.get_base_model().named_modules() if isinstance(m, LoraLayer)]
    return next((name for name, m in layers if not _is_plain(m)), None)


def _is_plain(module: object) -> bool:
    """Tell whether a module is an adapted linear layer."""
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), nn.Linear | Conv1D)


def check_targets(model: nn.Module, lora: LoraConfig, *, path: str) -> list[str]:
    """Return the target names; raise UserError unless each matches linear layers below the head."""
    targets = [] if lora.targets == "all-linear" else lora.targets
    reach = modules_in_reach(model, lora)
    for target in targets:
        matched = [m for name, m in reach if f".{name}".endswith(f".{target}")]
        if not matched or not all(_may_adapt(model, m) for m in matched):
            raise UserError(
                f"model.lora.targets names {target!r}, which is no linear layer below the head of model.path={path}: "
                f"take some of {', '.join(linear_names(model, lora))}, or all-linear"
            )
    return targets


def modules_in_reach(model: nn.Module, lora: LoraConfig) -> list[tuple[str, nn.Module]]:
    """Return the modules that may get an adapter, by name: those of the language part, or all."""
    language = _name_language(model, lora)
    return [(name, m) for name, m in model.named_modules() if language is None or f"{name}.".startswith(f"{language}.")]


def linear_names(model: nn.Module, lora: LoraConfig) -> list[str]:
    """Return the last name parts of all linear layers in reach, below the head."""
    return sorted({name.rpartition(".")[2] for name, m in modules_in_reach(model, lora) if _may_adapt(model, m)})


def _exclude_vision(model: nn.Module, lora: LoraConfig) -> str | None:
    """Return PEFT's pattern of excluded modules; None without any."""
    language = _name_language(model, lora)
    return None if language is None else rf"(?!{re.escape(language)}\.).*"


def _name_language(model: nn.Module, lora: LoraConfig) -> str | None:
    """Return the name of the language part, outside of which nothing gets an adapter; None without other parts."""
    hf: Any = model
    if (parts := vision_family(hf.config)) is not None:
        return None if lora.vision else parts.language
    if not is_text_use(hf.config):
        return None
    decoder = hf.get_decoder()
    return next(name for name, m in model.named_modules() if m is decoder)


def check_lora(model: ModelConfig, *, sends_merged: bool = False) -> None:
    """Raise UserError before the start for an adapter that cannot be made, or not merged where a merge is needed.

    sends_merged: engines receive merged weights.
    """
    if model.lora is None:
        return
    empty_model = meta_model(model.path, trust_remote_code=model.trust_remote_code)
    check_targets(empty_model, model.lora, path=model.path)
    _check_rank(empty_model, model.lora)
    wrapped = with_adapter(empty_model, model.lora, path=model.path)
    if sends_merged:
        refuse_merge(wrapped, path=model.path, why="weight_sync.lora=merged merges")


def _check_rank(model: nn.Module, lora: LoraConfig) -> None:
    targets = linear_names(model, lora) if lora.targets == "all-linear" else lora.targets
    endings = tuple(f".{target}" for target in targets)
    reach = modules_in_reach(model, lora)
    adapted: list[Any] = [m for name, m in reach if _may_adapt(model, m) and f".{name}".endswith(endings)]
    width = min(min(m.weight.shape) for m in adapted)
    if lora.r > width:
        raise UserError(
            f"model.lora.r={lora.r} is above {width}, the width of the narrowest layer that gets an adapter: a rank "
            f"above it adds nothing, so lower it to {width} or less"
        )


def name_lora_targets(lora: LoraConfig, path: str, *, trust_remote_code: bool = False) -> LoraConfig:
    """Replace "all-linear" by the names of the layers."""
    if lora.targets != "all-linear":
        return lora
    names = linear_names(meta_model(path, trust_remote_code=trust_remote_code), lora)
    return lora.model_copy(update={"targets": names})


def _may_adapt(model: nn.Module, module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D) and module is not model.get_output_embeddings()


def merged_weight(
    weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None = None, *, scaling: float, transposed: bool = False
) -> Tensor:
    """Compute W' of the formula above, [out, in], from weight [out, in], a [r, in], b [out, r], magnitude [out].

    Computed in float32 and rounded once, into a new tensor. transposed: weight and result are [in, out].
    """
    # Rounded once: a product in bfloat16 would lose most digits of a small update.
    delta = scaling * (b.float() @ a.float())
    whole = (weight.T if transposed else weight).float() + delta
    if magnitude is not None:
        whole = whole * (magnitude.float() / whole.norm(dim=1))[:, None]
    return (whole.T.contiguous() if transposed else whole).to(weight.dtype)
