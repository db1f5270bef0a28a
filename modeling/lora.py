"""LoRA by PEFT: W' = W + s B A, with W frozen; with DoRA W' = m (W + s B A) / |W + s B A| per output row.

https://arxiv.org/abs/2106.09685, rsLoRA (s = alpha / sqrt(r)) https://arxiv.org/abs/2312.03732, DoRA
https://arxiv.org/abs/2402.09353.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from configs.trainer_schema import LoraConfig, ModelConfig, TrainerConfig
from core.errors import UserError
from modeling.experts import is_router, list_expert_weights
from modeling.hf_config import is_text_use, meta_model, vision_family

if TYPE_CHECKING:
    from peft import PeftModel


# PEFT imports it where it is installed, and it reports a kernel for CPUs that it does without
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

ADAPTER = "default"
"""PEFT's name of the only adapter."""


def with_adapter(model: nn.Module, lora: LoraConfig, *, path: str) -> PeftModel:
    """Add a new adapter without any effect yet; all other weights are frozen.

    The adapter has the model's dtype. Initial values depend only on the seed, not on earlier random draws.
    """
    import peft

    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        # with dropout, two passes of the same policy would differ
        lora_dropout=0.0,
        # PEFT's own "all-linear" also adapts routers and experts
        target_modules=check_targets(model, lora, path=path),
        target_parameters=_name_experts(model, path=path) if lora.experts else None,
        exclude_modules=_exclude_vision(model, lora),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    # All ranks must begin with the same adapter, however many random numbers each has drawn before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False).train()


def _name_experts(model: nn.Module, *, path: str) -> list[str]:
    """Return the last two name parts of the experts' weights; raise UserError if the model has none."""
    found = list_expert_weights(model)
    if not found:
        raise UserError(
            f"model.lora.experts is true, and model.path={path} has no experts in tensors of three dimensions: leave "
            "it out"
        )
    return sorted({".".join(name.split(".")[-2:]) for name in found})


def check_targets(model: nn.Module, lora: LoraConfig, *, path: str) -> list[str]:
    """Return the names of the adapted layers; raise UserError unless each matches linear layers below the head."""
    reach = modules_in_reach(model, lora)
    targets = linear_names(model, lora) if lora.targets == "all-linear" else lora.targets
    for target in targets:
        if _means_experts(model, target):
            raise UserError(
                f"model.lora.targets names {target!r}, which PEFT takes for the experts of model.path={path}: leave it "
                "out, and set model.lora.experts to adapt those"
            )
        matched = [name for name, _ in reach if f".{name}".endswith(f".{target}")]
        if not matched or not all(_may_adapt(model, name) for name in matched):
            raise UserError(
                f"model.lora.targets names {target!r}, which is no linear layer below the head of model.path={path}, "
                "or one whose weight a fused kernel reads: "
                f"take some of {', '.join(linear_names(model, lora))}, or all-linear"
            )
    return targets


def modules_in_reach(model: nn.Module, lora: LoraConfig) -> list[tuple[str, nn.Module]]:
    """Return the modules that may get an adapter, by name: those of the language part, or all."""
    language = _name_language(model, lora)
    return [(name, m) for name, m in model.named_modules() if language is None or f"{name}.".startswith(f"{language}.")]


def linear_names(model: nn.Module, lora: LoraConfig) -> list[str]:
    """Return the ends of the names of linear layers that all-linear means: no head, router or gate of one output.

    An end is the last part of a name, or more parts where that is also the end of another module's name.
    """
    plain: list[str] = []
    others: set[str] = set()
    for name, _ in modules_in_reach(model, lora):
        if is_plain_linear(model, name):
            plain.append(name)
        else:
            others |= {*_list_ends(name)}
    ends = {next(end for end in _list_ends(name) if end not in others) for name in plain}
    return sorted(end for end in ends if not _means_experts(model, end))


def _means_experts(model: nn.Module, target: str) -> bool:
    """Tell whether PEFT takes a target for the weights of experts, as files of transformers 4 named those.

    Then it would adapt these, and no linear layer of that name, such as one of a shared expert.
    """
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = peft.LoraConfig(target_modules=[target])
    try:
        convert_peft_config_for_transformers(config, model, conversions=None)
    except ValueError:  # gate and up are a single weight, and PEFT asks for both
        return True
    return target not in (config.target_modules or ())


def _list_ends(name: str) -> list[str]:
    """Return the ends of a dotted name, the shortest first.

    >>> _list_ends("layers.0.proj")
    ['proj', '0.proj', 'layers.0.proj']
    """
    parts = name.split(".")
    return [".".join(parts[n:]) for n in reversed(range(len(parts)))]


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


def check_lora(model: ModelConfig, trainer: TrainerConfig) -> None:
    """Raise UserError before the start for an adapter that cannot be made or trained."""
    if model.lora is None:
        return
    # PEFT reads the experts' weights before DeepSpeed has gathered them
    if model.lora.experts and trainer.strategy == "deepspeed" and trainer.zero_stage == 3:
        raise UserError(
            "model.lora.experts is true, and with trainer.zero_stage=3 PEFT finds the experts sharded: set it to 2 or "
            "less, or trainer.strategy to fsdp2"
        )
    empty_model = meta_model(model.path, trust_remote_code=model.trust_remote_code)
    _check_rank(empty_model, model.lora, check_targets(empty_model, model.lora, path=model.path))
    with_adapter(empty_model, model.lora, path=model.path)


def _check_rank(model: nn.Module, lora: LoraConfig, targets: list[str]) -> None:
    endings = tuple(f".{target}" for target in targets)
    reach = modules_in_reach(model, lora)
    adapted: list[Any] = [m for name, m in reach if _may_adapt(model, name) and f".{name}".endswith(endings)]
    experts = [*list_expert_weights(model).values()] if lora.experts else []
    width = min(min(shape) for shape in [*(m.weight.shape for m in adapted), *(p.shape[1:] for p in experts)])
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


def is_plain_linear(model: nn.Module, name: str) -> bool:
    """Tell whether a module is a linear layer, and no head, router of experts or gate of a single output."""
    module = model.get_submodule(name)
    is_gate = isinstance(module, nn.Linear) and module.out_features == 1
    return _may_adapt(model, name) and not is_gate and not is_router(model, name)


def _may_adapt(model: nn.Module, name: str) -> bool:
    from transformers.pytorch_utils import Conv1D

    parent, _, last = name.rpartition(".")
    # Mamba's fused kernel reads the weight of its output layer, and would pass an adapter by; only its mixers have D
    if last == "out_proj" and hasattr(model.get_submodule(parent), "D"):
        return False
    module = model.get_submodule(name)
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


def merged_experts(weight: Tensor, a: Tensor, b: Tensor, *, scaling: float, transposed: bool) -> Tensor:
    """Compute W' of every expert: weight [E, out, in], a [E r, in], b [out, r E], as PEFT orders them.

    transposed: weight and result are [E, in, out]. One expert at a time, as a float32 copy of all would be large.
    """
    number = len(weight)
    of_a, of_b = a.reshape(number, -1, a.shape[1]), b.reshape(b.shape[0], -1, number)
    merged = torch.empty_like(weight)
    for e in range(number):
        merged[e] = merged_weight(weight[e], of_a[e], of_b[:, :, e], scaling=scaling, transposed=transposed)
    return merged
