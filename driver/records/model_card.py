"""Model card and recipe in the folder of a trained model: where it comes from, and how its reward went."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from configs.schema import RLConfig, RunConfig
from core import metrics as names
from core.text.secrets import hide_secrets
from core.types.weights import SavedModel
from driver.records.trackers.jsonl import FILE
from modeling.model_files import find_model_file

CARD, RECIPE = "README.md", "recipe.yaml"
LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md")
"""Files of a base model that its licence wants beside every copy."""
LICENCE_KEYS = ("license", "license_name", "license_link")
MOST_ROWS = 20
"""Rows of the curve."""

KINDS: dict[str, str] = {
    "value": "value model: from a prefix, the return that the policy expects",
    "ema": "exponential moving average of the policy's weights (`trainer.ema={ema}`)",
}
"""Models other than the policy."""


def write_card(folder: Path, cfg: RunConfig, *, run: Path, steps: int, which: SavedModel = "policy") -> None:
    """Write README.md and recipe.yaml, and copy the licence of the base model.

    run: the run folder, with config.yaml and metrics.jsonl. steps: steps done. which: the model in the folder; a
    value model is always whole.
    """
    from huggingface_hub import ModelCard, ModelCardData

    folder.mkdir(parents=True, exist_ok=True)
    recipe = (run / "config.yaml").read_bytes()
    (folder / RECIPE).write_bytes(recipe)
    for name in LICENCES:
        if (file := find_model_file(cfg.model.path, name)) is not None:
            shutil.copyfile(file, folder / name)
    alg = str(cfg.alg.get("name") or Path(str(cfg.alg.get("file"))).stem)
    is_adapter = _is_adapter(cfg) and which != "value"
    sources = [source.path for source in cfg.data.list_sources("train")]
    licence = read_licence(cfg.model.path, folder)
    tags = ["value-model"] if which == "value" else ["lora"] if cfg.model.lora is not None else []
    data = ModelCardData(
        # the Hub takes names of its own only
        base_model=None if os.path.isdir(cfg.model.path) else cfg.model.path,
        # hub:NAME/CONFIG
        datasets=["/".join(path[4:].split("/")[:2]) for path in sources if path.startswith("hub:")] or None,
        library_name="peft" if is_adapter else "transformers",
        tags=["feynrl", alg, *tags],
        ignore_metadata_errors=True,
        license=licence.get("license"),
        license_name=licence.get("license_name"),
        license_link=licence.get("license_link"),
    )
    is_packed = cfg.model.quantization is not None and which != "value"
    in_bits = f", quantised to {cfg.model.quantization}, with a LoRA adapter merged in" if is_packed else ""
    facts = {
        **({"model": KINDS[which].format(ema=cfg.trainer.ema)} if which in KINDS else {}),
        "base model": f"`{cfg.model.path}`" + (", of which this is a LoRA adapter" if is_adapter else "") + in_bits,
        "algorithm": f"`{alg}`",
        "data": ", ".join(f"`{hide_secrets(path)}`" for path in sources),
        **({"reward": _name_rewards(cfg)} if isinstance(cfg, RLConfig) else {}),
        "steps": f"{steps} of {cfg.n_steps}",
        "recipe": f"`{RECIPE}`, SHA-256 `{hashlib.sha256(recipe).hexdigest()}`",
        "run": f"`{run.name}`",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    text = f"# {cfg.name}\n\nTrained with FeynRL.\n\n| | |\n|---|---|\n{table}\n{_write_curve(run / FILE, cfg)}"
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}", ignore_metadata_errors=True)
    (folder / CARD).write_text(str(card), encoding="utf-8")


def read_licence(path: str, folder: Path) -> dict[str, str]:
    """Return the licence that the base model's card states; with its licence file alone, that it is another one.

    folder: the saved model, with the copied licence file.
    """
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    stated: dict[str, Any] = {}
    if (file := find_model_file(path, CARD)) is not None:
        try:
            stated = ModelCard(file.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.to_dict()
        except (ValueError, YAMLError):  # a card that cannot be read states no licence
            stated = {}
    found = {key: str(stated[key]) for key in LICENCE_KEYS if stated.get(key)}
    copied = next((name for name in LICENCES[:3] if (folder / name).is_file()), None)
    if not found and copied is not None:
        found = {"license": "other", "license_name": "of-the-base-model", "license_link": copied}
    return found


def _is_adapter(cfg: RunConfig) -> bool:
    return cfg.model.lora is not None and not cfg.model.lora.merge_on_save


def _name_rewards(cfg: RLConfig) -> str:
    reward = cfg.reward
    used = [reward.function, *reward.functions, *(name for names in reward.by_source.values() for name in names)]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(filter(None, used)))


def _write_curve(file: Path, cfg: RunConfig) -> str:
    """Return the curve as a table of up to MOST_ROWS steps; "" without metrics.jsonl."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    by_step: dict[float, dict[str, float]] = {}
    for line in map(json.loads, lines):  # a step and an evaluation of the weights that it starts with have one number
        by_step.setdefault(line[names.STEP_NUMBER], {}).update(line)
    main = names.REWARD_MEAN if isinstance(cfg, RLConfig) else names.TRAIN_LOSS
    held_out = names.EVAL.format(names.REWARD_MEAN) if isinstance(cfg, RLConfig) else names.EVAL_LOSS
    rows = [row for _, row in sorted(by_step.items()) if main in row or held_out in row]
    if not rows:
        return ""
    columns = [main, *([held_out] if any(held_out in row for row in rows) else [])]
    n = min(MOST_ROWS, len(rows))
    # evenly, with the first and the last; and the steps that were measured on held-out rows as far as there is room
    chosen = {round(i * (len(rows) - 1) / max(1, n - 1)) for i in range(n)}
    measured = [i for i, row in enumerate(rows) if held_out in row]
    chosen |= {*measured} if len(measured) <= MOST_ROWS else set()
    body = [
        "| " + " | ".join([f"{rows[i][names.STEP_NUMBER]:.0f}", *(_show(rows[i].get(c)) for c in columns)]) + " |"
        for i in sorted(chosen)
    ]
    head = ["| step | " + " | ".join(f"`{column}`" for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    return "\n## Curve\n\n" + "\n".join([*head, *body]) + "\n"


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
