"""Sample files of a recorded run, as prompts with recorded episodes: a row for each group of a step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import UserError
from core.text.text_files import read_text
from data_feeds.rows.episodes import TRUNCATION
from data_feeds.rows.read_files import read_jsonl

_STEP = re.compile(r"step_\d+\.jsonl")
_ABOUT_TURNS = ("tokens", "reward")
"""Keys of a recorded turn that are no part of the message."""


def list_sample_files(path: str) -> list[Path]:
    """Return the sample files that a path names, as a run's folder or one of them; [] for any other path."""
    given = Path(path)
    if _STEP.fullmatch(given.name) and given.parent.name == "samples" and given.is_file():
        return [given]
    if not (given / "config.yaml").is_file():
        return []
    return sorted(file for file in (given / "samples").glob("*.jsonl") if _STEP.fullmatch(file.name))


def read_run(files: list[Path], key: str) -> list[dict[str, Any]]:
    """Return a row per group: id, messages, answer, tools, extra and episodes. Samples that failed are left out.

    Raises UserError for episodes whose samples cannot be replayed alone: those of agents, games and images.
    """
    return [row for file in files for row in _read_step(file, f"{key}, {file.name}")]


def _read_step(file: Path, where: str) -> Iterator[dict[str, Any]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for record in read_jsonl(read_text(file, where), where):
        if missing := [name for name in ("group", "id", "prompt", "completion") if name not in record]:
            raise UserError(f"{where} has a sample without {missing[0]}: it is no sample file of a run")
        if "episode" in record or "player" in record:
            raise UserError(
                f"{where} has samples of an agent's branches or of a game's players, which are no episodes alone: "
                "replay runs of one conversation per episode"
            )
        if type(record["group"]) is not int or not all(
            map(_is_conversation, (record["prompt"], record.get("turns", [])))
        ):
            raise UserError(
                f"{where} has a sample whose group is no whole number, or whose prompt or turns are no list of "
                "objects: it is no sample file of a run"
            )
        if any("parts" in message for message in [*record["prompt"], *record.get("turns", [])]):
            raise UserError(f"{where} has images, which sample files do not hold: replay runs of text")
        groups.setdefault(record["group"], []).append(record)
    for group, records in groups.items():
        if episodes := [_make_episode(record) for record in records if not record.get("failure")]:
            first = records[0]
            yield {
                "id": f"{first['id']}/{file.stem}/{group}",
                "messages": first["prompt"],
                "answer": first.get("answer", ""),
                "tools": first.get("tools") or None,
                "extra": first.get("extra"),
                "episodes": episodes,
            }


def _is_conversation(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(message, dict) for message in given)  # pyright: ignore[reportUnknownVariableType]


def _make_episode(record: dict[str, Any]) -> dict[str, Any]:
    names = ("completion", "stop", "token_ids", "logp", "temperature", "allowed_tokens", *TRUNCATION)
    episode = {name: record[name] for name in names if name in record}
    if "turns" in record:
        turns = [{k: v for k, v in turn.items() if k not in _ABOUT_TURNS} for turn in record["turns"]]
        episode["messages"] = turns
    return episode
