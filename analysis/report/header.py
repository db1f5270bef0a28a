"""Page header of a run: recipe, model, algorithm, end, code, held-out results, warnings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from analysis.report.run_files import RunRecord
from configs.profile_schema import FOLDER as PROFILE
from core import metrics as names
from core.metrics import PHASE_MEANINGS, find_metric
from core.timing.phases import (
    ENGINE_ACTIVITIES,
    ENGINE_TURNS,
    IDLE,
    REST,
    TRAINER_ACTIVITIES,
    TRAINER_TURNS,
    Activity,
    time_metric,
)
from core.types.run_summary import GitState, Warned

NOT_ENDED = "no summary.json: the run goes on, or was killed"


def describe_run(run: RunRecord, key: str) -> dict[str, Any]:
    """Return the header of a run."""
    config, summary = run.config, run.summary
    flat = flatten(config)
    lines = run.metrics
    return {
        "key": key,
        "name": run.name,
        "exit_reason": summary.get("exit_reason", NOT_ENDED),
        "facts": [[label, text] for label, text in list_facts(run, flat).items() if text],
        "last_step": lines[-1][names.STEP_NUMBER],
        "warnings": list_warnings(run),
        "held_out": {when: summary[when] for when in ("before", "after") if isinstance(summary.get(when), dict)},
        "config": flat,
        "packages": summary.get("packages", {}),
        "devices": summary.get("devices", {}),
    }


def list_profile(run: RunRecord, page: Path) -> list[list[str]]:
    """Return the files of `profile`: the name of each, and a link that is relative to the page."""
    files = sorted((run.folder / PROFILE).glob("*"))
    return [[file.name, quote(os.path.relpath(file, page.absolute().parent))] for file in files]


def list_facts(run: RunRecord, flat: dict[str, str]) -> dict[str, str]:
    """Return the facts at the head of the page, text by label. An unknown fact has an empty text."""
    summary = run.summary
    seconds = summary.get("seconds", {}).get("all")
    return {
        "recipe": flat.get("name", ""),
        "algorithm": flat.get("alg.name") or flat.get("alg.file", ""),
        "model": flat.get("model.path", ""),
        "data": flat.get("data.train", ""),
        "steps": _count_steps(run.metrics, flat.get("steps", "")),
        "samples a step": _times(flat.get("groups_per_step", ""), flat.get("group_size", "")),
        "engine": flat.get("rollout.engine", ""),
        "backend": flat.get("backend", ""),
        "seed": flat.get("seed", ""),
        "time": f"{seconds:.1f} s" if isinstance(seconds, int | float) else "",
        "git": describe_git(summary.get("git")),
        "resumed": str((summary.get("resumed") or {}).get("checkpoint", "")),
        "bottleneck": str(summary.get("bottleneck", "")),
    }


def _count_steps(lines: Sequence[Mapping[str, float]], planned: str) -> str:
    """Describe the steps of a run; a resumed run continues the count of the run before it.

    >>> _count_steps([{"step": 50.0}, {"step": 51.0}], "100")
    '52 of 100, the first 50 by the resumed run'
    """
    first, last = (int(lines[i][names.STEP_NUMBER]) for i in (0, -1))
    done = f"{last + 1} of {planned}" if planned else str(last + 1)
    return f"{done}, the first {first} by the resumed run" if first else done


def _times(groups: str, size: str) -> str:
    return f"{groups} groups x {size}" if groups and size else ""


def describe_git(state: GitState | str | None) -> str:
    """Return the git state of a run as a line, or "" if the run has not written it.

    >>> describe_git({"commit": "0a1b2c", "branch": "main", "changed_files": 2})
    '0a1b2c on main, 2 files changed'
    """
    if not isinstance(state, dict):
        return state or ""
    changed = state["changed_files"]
    return f"{state['commit']} on {state['branch']}, {changed} file{'' if changed == 1 else 's'} changed"


def list_warnings(run: RunRecord) -> list[dict[str, Any]]:
    """Return the warnings in the summary of a run, and those derived from the log."""
    given: list[Warned] = run.summary.get("warnings", [])
    found: list[dict[str, Any]] = [{"step": one["step"], "text": one["text"]} for one in given]
    if skipped := sum(line.get(names.TRAIN_SKIPPED, 0.0) for line in run.metrics):
        why = "a gradient was not finite, or no token was trained"
        found.append({"step": None, "text": f"{skipped:g} updates were skipped: {why}"})
    if failed := sum(line.get(names.ROLLOUT_FAILED, 0.0) for line in run.metrics):
        found.append({"step": None, "text": f"{failed:g} samples have no reward, because it failed"})
    return found


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Return dotted keys with their values as text.

    >>> flatten({"a": {"b": 1, "c": [1, 2]}, "d": None})
    {'a.b': '1', 'a.c': '[1, 2]', 'd': 'null'}
    """
    if isinstance(value, dict) and value:
        return {k: v for key, one in value.items() for k, v in flatten(one, f"{prefix}.{key}".lstrip(".")).items()}
    return {prefix: _as_text(value)}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def describe_metrics(runs: list[RunRecord]) -> dict[str, dict[str, str]]:
    """Return unit and meaning of every logged metric, in the order of the declarations, unknown ones last."""
    logged = dict.fromkeys(name for run in runs for line in (*run.metrics, *run.evaluations.values()) for name in line)
    order = {metric.name: i for i, metric in enumerate(names.METRICS)}
    declared = {name: find_metric(name) for name in logged if name != names.STEP_NUMBER}
    by_place = sorted(declared, key=lambda name: order[metric.name] if (metric := declared[name]) else len(order))
    return {
        name: {"unit": metric.unit, "meaning": metric.meaning} if (metric := declared[name]) else {}
        for name in by_place
    }


def describe_time() -> dict[str, list[dict[str, str]]]:
    """Return the parts of a step's time: of the driver, the mean trainer rank and the mean engine."""

    def device(kind: str, activities: tuple[Activity, ...]) -> list[dict[str, str]]:
        parts = [*map(str, activities), IDLE]
        return [{"name": part, "metric": names.DEVICE_SECONDS.format(kind, part)} for part in parts]

    driver = [*map(str, PHASE_MEANINGS), REST]
    return {
        "driver": [{"name": part, "metric": time_metric(part)} for part in driver],
        "mean trainer rank": device("trainer", (*TRAINER_ACTIVITIES, *TRAINER_TURNS)),
        "mean engine": device("engine", (*ENGINE_ACTIVITIES, *ENGINE_TURNS, Activity.RESTART)),
    }
