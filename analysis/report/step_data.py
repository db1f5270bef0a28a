"""Step data of the page: all rewards, and the selected groups with texts."""

from __future__ import annotations

from typing import Any

from analysis.report.run_files import Row
from analysis.report.selection import Chosen, Entry, choose_samples

OF_A_SAMPLE = ("completion", "stop", "reward", "reward_parts", "failure", "advantage", "versions", "new_tokens")
OF_AN_EPISODE = ("turns", "counts", "notes", "episode")
"""Of samples with tools, several turns or notes alone."""


def make_step(rows: list[Row], limit: int, *, step: int) -> dict[str, Any]:
    """Return the numbers of all samples of a step, and up to `limit` samples in full."""
    chosen = choose_samples([Entry(row["group"], row["reward"]) for row in rows], limit, step=step)
    return summarize_rows(rows) | {"groups": [make_group(rows, one) for one in chosen]}


def make_whole_step(rows: list[Row], *, step: int) -> dict[str, Any]:
    """Return a step with every sample in full."""
    members: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row["group"], []).append(i)
    groups = [Chosen(group=group, why="", samples=own) for group, own in members.items()]
    return summarize_rows(rows) | {"groups": [make_group(rows, one) for one in groups]}


def summarize_rows(rows: list[Row]) -> dict[str, Any]:
    """Return a list per number, over all samples of the step."""
    parts = sorted({name for row in rows for name in row.get("reward_parts") or {}})
    return {
        "group": [row["group"] for row in rows],
        "reward": [row["reward"] for row in rows],
        "tokens": [row.get("new_tokens") for row in rows],
        "advantage": [row.get("advantage") for row in rows],
        "parts": {name: [(row.get("reward_parts") or {}).get(name) for row in rows] for name in parts},
    }


def average_groups(rows: list[Row]) -> list[tuple[str, int, float]]:
    """Return prompt id, number and mean reward of every group that has a reward and a prompt id."""
    rewards: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row.get("id") and row["reward"] is not None:
            rewards.setdefault((row["id"], row["group"]), []).append(row["reward"])
    return [(prompt, group, sum(own) / len(own)) for (prompt, group), own in rewards.items()]


def make_group(rows: list[Row], chosen: Chosen) -> dict[str, Any]:
    """Return a group's prompt once, and its kept samples; `sample` is a sample's number in its group."""
    own = [i for i, row in enumerate(rows) if row["group"] == chosen.group]
    first = rows[own[0]]
    return {
        "group": chosen.group,
        "why": chosen.why,
        "size": len(own),
        "id": first.get("id", ""),
        "prompt": first["prompt"],
        "answer": first.get("answer", ""),
        "samples": [make_sample(rows[i], own.index(i)) for i in chosen.samples],
        **({"tools": first["tools"]} if first.get("tools") else {}),
    }


def make_sample(row: Row, number: int) -> dict[str, Any]:
    """Return the page data of a sample."""
    shown = {"sample": number, **{key: row.get(key) for key in OF_A_SAMPLE}}
    return shown | {key: row[key] for key in OF_AN_EPISODE if key in row}
