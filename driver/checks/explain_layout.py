"""Row layout of a run's policy before it is loaded, for --explain and the doctor."""

from __future__ import annotations

from configs.schema import RLConfig, RunConfig
from core.errors import UserError
from modeling.hf_config import ModelUnreadable, check_model_folder, is_text_use, read_config
from modeling.layout_forecast import forecast_layout
from modeling.layout_probe import LayoutProbe


def describe_rows(cfg: RunConfig) -> list[tuple[str, str]]:
    """Describe the row layout, as measured of a small model of the same kind, and the use for text."""
    path, trusts = cfg.model.path, cfg.model.trust_remote_code
    try:
        rows = [("rows", f"{measure_rows(cfg)}; measured again on the model itself when it is loaded")]
        if is_text_use(config := read_config(path, trust_remote_code=trusts), cfg.model.images):
            rows.append(("images", f"none: a {config.model_type} model is used for text, with all other parts frozen"))
        if isinstance(cfg, RLConfig) and cfg.rollout.batch_invariant:
            compared = "in each first pass" if cfg.updates_per_step == 1 else "in the pass for prox_logp"
            rows.append(("batch_invariant", f"engine and trainer add in one order, in one thread; compared {compared}"))
        return rows
    except ModelUnreadable as error:  # a recipe may name a model that is made later
        return [("rows", f"unknown: {error}")]
    except UserError as error:  # the model itself decides, when the run starts
        return [("rows", f"refused: {error}")]


def measure_rows(cfg: RunConfig) -> str:
    """Return the row layout of a small model of the same kind, with numbers. Raises UserError if it is refused."""
    model, trusts = cfg.model, cfg.model.trust_remote_code
    check_model_folder(model.path, trust_remote_code=trusts)
    found = forecast_layout(model.path, attention=model.attention, layout=cfg.trainer.layout, trust_remote_code=trusts)
    return found.describe() if isinstance(found, LayoutProbe) else found
