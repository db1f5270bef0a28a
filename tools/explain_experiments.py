"""Memory of the reference experiments by --explain, for eight GPUs and for one: python -m tools.explain_experiments

The models come from the hub, which may be out of reach, so they are explained from folders that hold a config.json of
their published sizes and nothing else. --write puts the table into docs/reference/experiments.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import RLConfig
from driver.checks.explain import estimate_memory, explain
from driver.checks.memory_estimate import CUDA_GIB
from driver.checks.shared_memory import plan_colocation, refuse_tight
from driver.load_recipe import load_recipe
from tools.layers import ROOT

PAGE = ROOT / "docs" / "reference" / "experiments.md"
MADE = "<!-- made by `python -m tools.explain_experiments --write`; a test compares it with the code -->"
GPU_GIB, MACHINE_GIB = 80.0, 128.0
"""Memory of a GPU, and least memory of the machine with one GPU."""
ONE_GPU = ["placement=colocate", "rollout.num_engines=1"]
LANGUAGE = {"vocab_size": 151936, "tie_word_embeddings": True}
QWEN_VL: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Recipe of a reference experiment, and the sizes of the model."""

    recipe: str
    model: dict[str, Any]
    trainer: str
    """Change of `trainer` for one GPU, besides ONE_GPU."""


EXPERIMENTS = (
    Experiment(
        recipe="gsm8k_qwen2.5_1.5b",
        model={
            "model_type": "qwen2",
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        },
        trainer="trainer.ranks=1",
    ),
    Experiment(
        recipe="deepscaler_qwen3_4b",
        model={
            "model_type": "qwen3",
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        # float32 weights alone: DeepSpeed keeps bfloat16 ones, and a buffer, beside them
        trainer="trainer={strategy: fsdp2, lr: 1.0e-6, micro_batch_tokens: 20480, gradient_checkpointing: true}",
    ),
    Experiment(
        recipe="mm_math_qwen2.5_vl_3b",
        model=QWEN_VL,
        trainer="trainer={strategy: fsdp2, lr: 1.0e-6, gradient_checkpointing: true}",
    ),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.explain_experiments", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    table = make_table(EXPERIMENTS)
    if args.write:
        PAGE.write_text(insert(PAGE.read_text(), table))
    else:
        print(table)
    return 0


def make_table(experiments: tuple[Experiment, ...]) -> str:
    """Return a Markdown table with a row for each experiment and number of GPUs."""
    rows = [
        "| recipe | GPUs | changed | parameters | of a trainer's GPU | weights on an engine's GPU | of the machine |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as place:
        for experiment in experiments:
            folder = Path(place) / experiment.recipe
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(LANGUAGE | experiment.model))
            rows += describe(experiment, folder)
    return "\n".join(rows)


def describe(experiment: Experiment, folder: Path) -> Iterator[str]:
    """Yield the row for eight GPUs and for one. Raises UserError if a run does not fit. folder: of the model."""
    for gpus, overrides in ((8, []), (1, [*ONE_GPU, experiment.trainer])):
        file = str(ROOT / "configs" / f"{experiment.recipe}.yaml")
        loaded = load_recipe(RLConfig, file, [*overrides, f"model.path={folder}"])
        explain(loaded)
        memory = estimate_memory(loaded)
        parts = {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer}
        parts |= {"buckets": memory.buckets, "CUDA": CUDA_GIB}
        machine = "-"
        if gpus == 1:
            needs = plan_colocation(loaded.cfg, memory, gpu_gib=GPU_GIB, machine_gib=MACHINE_GIB)
            refuse_tight(needs)
            machine = f"{needs[-1].total:.1f} GiB"
        added = " + ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib)
        cells = [f"`{experiment.recipe}`", str(gpus), f"`{shlex.join(overrides)}`" if overrides else "-"]
        cells += [f"{memory.parameters:,}", f"{added} = {sum(parts.values()):.1f} GiB"]
        yield f"| {' | '.join([*cells, f'{memory.per_engine:.1f} GiB', machine])} |"


def insert(page: str, table: str) -> str:
    """Return the page with this table below the mark."""
    before, mark, after = page.partition(MADE)
    if not mark:
        raise SystemExit(f"error: {PAGE} has no line {MADE}")
    # the old table ends at the first empty line behind it
    rest = after.lstrip("\n").partition("\n\n")[2]
    return f"{before}{mark}\n\n{table}\n\n{rest}"


if __name__ == "__main__":
    sys.exit(main())
