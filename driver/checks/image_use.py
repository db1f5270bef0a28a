"""Use of a vision-language model: with images, or for text (`model.images`)."""

from __future__ import annotations

from configs.eval_schema import EvalConfig
from core.errors import UserError
from modeling.hf_config import ImageUse, ModelUnreadable, check_model_folder, read_config, vision_family
from rollouts.registry import load_engine_class, resolve_engine


def settle_images(given: ImageUse, path: str, *, engine: str, trust_remote_code: bool) -> tuple[ImageUse, str]:
    """Return the value of model.images, and the reason where it is off in place of auto.

    It is off for a model whose images the engine cannot read. engine: rollout.engine. So a Gemma 3 with text rows is
    sampled by vLLM, which computes its images otherwise.
    """
    if given == "off":
        return given, ""
    try:
        check_model_folder(path, trust_remote_code=trust_remote_code)  # before the hub is asked for a local path
        config = read_config(path, trust_remote_code=trust_remote_code)
    except ModelUnreadable:  # a recipe may name a model that is made later
        return given, ""
    if vision_family(config) is None:
        return given, ""
    engine_class = load_engine_class(resolve_engine(engine))
    try:
        engine_class.check_images(config, path=path)
    except UserError as error:
        return "off", f"the model is used for text only, as with model.images=off: {error}"
    return given, ""


def settle_eval_images(cfg: EvalConfig) -> tuple[ImageUse, str]:
    """Return the use of images in an evaluation, as `settle_images`."""
    model = cfg.model
    return settle_images(model.images, model.path, engine=cfg.rollout.engine, trust_remote_code=model.trust_remote_code)
