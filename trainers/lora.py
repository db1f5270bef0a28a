"""Low-rank adapters by PEFT: W' = W + s B A, with W frozen; with DoRA W' = m (W + s B A) / |W + s B A| by output row.

https://arxiv.org/abs/2106.09685, rsLoRA (s = alpha / sqrt(r)) https://arxiv.org/abs/2312.03732, DoRA
https://arxiv.org/abs/2402.09353.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from configs.schema import LoraConfig, ModelConfig
from core.errors import UserError
from trainers.models import skeleton
from trainers.weights import Part, Piece, piece_of

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

ADAPTER = "default"
"""PEFT's name of the only one."""


def with_adapter(model: nn.Module, lora: LoraConfig, *, path: str) -> PeftModel:
    """The model with a new adapter that changes nothing yet; all but the adapter is frozen.

    The adapter has the model's dtype, and begins the same for the same seed, whatever was drawn before.
    """
    import peft

    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=lora.targets if lora.targets == "all-linear" else check_targets(model, lora.targets, path=path),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return wrapped.train()


def check_targets(model: nn.Module, targets: list[str], *, path: str) -> list[str]:
    """The names as given, if each is that of linear layers other than the head."""
    matched = {t: [m for name, m in model.named_modules() if f".{name}".endswith(f".{t}")] for t in targets}
    for target, modules in matched.items():
        if not modules or not all(_may_adapt(model, m) for m in modules):
            raise UserError(
                f"model.lora.targets names {target!r}, which is no linear layer below the head of model.path={path}: "
                f"take some of {', '.join(linear_names(model))}, or all-linear"
            )
    return targets


def linear_names(model: nn.Module) -> list[str]:
    """Last parts of the names of all linear layers below the head."""
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if _may_adapt(model, module)})


def check_recipe(model: ModelConfig) -> None:
    """Raise UserError for a target that is no linear layer, before anything is started, if the model can be read."""
    if model.lora is None or model.lora.targets == "all-linear":
        return
    if (bones := skeleton(model.path)) is not None:
        check_targets(bones, model.lora.targets, path=model.path)


def with_named_targets(lora: LoraConfig, path: str) -> LoraConfig:
    """The same with its targets named one by one."""
    if lora.targets != "all-linear":
        return lora
    bones = skeleton(path)
    assert bones is not None, path
    return lora.model_copy(update={"targets": linear_names(bones)})


def _may_adapt(model: nn.Module, module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D) and module is not model.get_output_embeddings()


def merged_weight(
    weight: Tensor, a: Tensor, b: Tensor, *, scaling: float, magnitude: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """W' of the formula above, a new tensor: [out, in] from weight [out, in], a [r, in], b [out, r], magnitude [out].

    Computed in float32 and rounded once. `transposed`: weight and result are [in, out].
    """
    delta = scaling * (b.float() @ a.float())
    whole = (weight.T if transposed else weight).float() + delta
    if magnitude is not None:
        whole = whole * (magnitude.float() / whole.norm(dim=1))[:, None]
    return (whole.T.contiguous() if transposed else whole).to(weight.dtype)


def merged_pieces(model: PeftModel) -> list[Piece]:
    """All weights of the model under the names it had before it was wrapped, the adapter merged into copies."""
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    layers = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    adapter = {id(p) for p in model.parameters() if p.requires_grad}
    pieces = []
    for name, p in base.named_parameters():
        if id(p) in adapter:
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        plain = piece_of(name.replace(".base_layer.", "."), p)
        pieces.append(plain if layer is None else _merged_piece(plain.name, layer))
    return pieces


def _merged_piece(name: str, layer: LoraLayer) -> Piece:
    weight, a, b = layer.get_base_layer().weight, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    magnitude = layer.lora_magnitude_vector[ADAPTER].weight if ADAPTER in layer.lora_magnitude_vector else None
    make = partial(
        torch.no_grad()(merged_weight),
        *(weight, a, b),
        scaling=layer.scaling[ADAPTER],
        magnitude=magnitude,
        transposed=layer.fan_in_fan_out,
    )
    parameters = [p for p in (weight, a, b, magnitude) if p is not None]
    return Piece(name=name, nbytes=weight.nbytes, parameters=parameters, make=make)


def adapter_pieces(model: PeftModel) -> list[Piece]:
    """The adapter under the names that it has in a file of PEFT's."""
    return [piece_of(_name_in_file(name), p) for name, p in model.named_parameters() if p.requires_grad]


def _name_in_file(name: str) -> str:
    return name.replace(f"lora_magnitude_vector.{ADAPTER}.weight", "lora_magnitude_vector").replace(f".{ADAPTER}.", ".")


def saved_parts(lora: LoraConfig | None) -> list[Part]:
    """What a run leaves behind."""
    if lora is None:
        return ["whole"]
    return ["whole", "adapter"] if lora.merge_on_save else ["adapter"]


def save_parts(model: nn.Module, folder: Path, parts: dict[Part, dict[str, Tensor]]) -> None:
    """A whole model in Hugging Face format, so that `model.path` can name the folder, and its adapter below it.

    An adapter alone, in PEFT's format, lies in the folder itself.
    """
    from safetensors.torch import save_file

    if "whole" in parts:
        base = model.get_base_model() if "adapter" in parts else model
        base.save_pretrained(folder, state_dict=parts["whole"])
    if "adapter" in parts:
        home = folder / "adapter" if "whole" in parts else folder
        home.mkdir(parents=True, exist_ok=True)
        save_file(parts["adapter"], home / "adapter_model.safetensors", metadata={"format": "pt"})
        model.peft_config[ADAPTER].save_pretrained(home)
