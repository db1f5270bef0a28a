"""Samples of a step snapshot with every input of a loss: batch.npz, batch.jsonl, and each image once in images/.

Arrays of all samples are concatenated, in the order of the groups. An array that a sample lacks is filled with zeros,
and marked in `has/<name>`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from core.types.arrays import BOOLS, INTS, SINGLE
from core.types.images import EncodedImage, read_image
from core.types.kept_sets import KeptSets
from core.types.messages import describe_messages
from core.types.sample_json import collect_images, describe_places, restore_messages, restore_places
from core.types.samples import Group, Prompt, Sample, make_sample

ARRAYS, RECORDS, IMAGES = "batch.npz", "batch.jsonl", "images"
ROUTES = "routes/{}"
"""Array of the routes of a sample, by its number."""
T = TypeVar("T")


def in_order(of_updates: list[list[T]]) -> list[T]:
    """Return the groups of all updates in the order of the step: update i has every k-th of them, from i on.

    >>> in_order([["a", "c"], ["b", "d"]])
    ['a', 'b', 'c', 'd']
    """
    # the reverse of StepSnapshot.groups_of: one group of each update in turn restores the order of the step
    return [group for together in zip(*of_updates, strict=True) for group in together]


def write_batch(folder: Path, groups: list[Group]) -> None:
    """Write the groups of a step."""
    samples = [s for g in groups for s in g]
    arrays: dict[str, NDArray[Any]] = {
        "lengths": np.array([len(s.token_ids) for s in samples], dtype=np.int64),
        "group_sizes": np.array([len(g) for g in groups], dtype=np.int64),
    }
    # every sample has these four, so they need no mark
    for name in ("token_ids", "action_mask", "rollout_logp", "versions"):
        arrays[name] = np.concatenate([getattr(s, name) for s in samples])
    columns = sorted({name for s in samples for name in s.columns})
    some: dict[str, list[NDArray[Any] | None]] = {
        "advantage": [s.advantage for s in samples],
        "excluded": [s.excluded for s in samples],
        **{f"column/{name}": [s.columns.get(name) for s in samples] for name in columns},
    }
    for name, values in some.items():
        dtype = BOOLS if name == "excluded" else SINGLE
        # zeros are a valid value, so a mark says which samples have the array
        there = np.array([v is not None for v in values])
        if there.any():
            arrays[f"has/{name}"] = there
            several = next(v.shape[1:] for v in values if v is not None)
            filled = [
                np.zeros((n, *several), dtype) if v is None else v
                for v, n in zip(values, arrays["lengths"], strict=True)
            ]
            arrays[name] = np.concatenate(filled).astype(dtype, copy=False)
    if any(s.kept is not None for s in samples):
        sets = [KeptSets.none(len(s.token_ids)) if s.kept is None else s.kept for s in samples]
        arrays["has/kept"] = np.array([s.kept is not None for s in samples])
        arrays["kept_ids"], arrays["kept"] = (KeptSets.join(sets).ids, KeptSets.join(sets).sizes)
    for i, s in enumerate(samples):
        if s.routes is not None:  # one array per sample: their shapes may differ
            arrays[ROUTES.format(i)] = s.routes
    write_images(folder, samples)
    np.savez(folder / ARRAYS, **arrays)  # pyright: ignore[reportArgumentType]
    with (folder / RECORDS).open("w", encoding="utf-8") as file:
        for s in samples:
            record = {
                "prompt": describe_prompt(s.prompt),
                "stop": s.stop,
                "reward": s.reward,
                "reward_parts": s.reward_parts,
                "failure": s.failure,
                "completion": s.completion,
                "transcript": describe_messages(s.transcript),
                "images": describe_places(s.images),
                "counts": s.counts,
                "notes": s.notes,
                "log": s.log,
                "episode": s.episode,
                "turns": s.turns,
                "turn_rewards": s.turn_rewards,
                "turn_numbers": s.turn_numbers,
                "player": s.player,
                "origin": s.origin,
            }
            file.write(json.dumps(record, default=str) + "\n")  # `extra` may hold anything that a data set holds


def write_images(folder: Path, samples: Sequence[Sample]) -> None:
    """Write every image of the samples and of their messages, named by its hash."""
    found = collect_images(samples)
    if found:
        (folder / IMAGES).mkdir(exist_ok=True)
    for name, image in found.items():
        (folder / IMAGES / name).write_bytes(image.data)


def read_images(folder: Path) -> dict[str, EncodedImage]:
    """Return the images by their hash. Raises ValueError if an image does not match the hash in the file name."""
    there = sorted((folder / IMAGES).iterdir()) if (folder / IMAGES).is_dir() else []
    found = {path.name: read_image(path.read_bytes()) for path in there}
    # records refer to an image by its hash alone, so a changed file would silently be another input
    if wrong := [name for name, image in found.items() if image.hash != name]:
        raise ValueError(f"{IMAGES}/{wrong[0]} holds another image")
    return found


def describe_prompt(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as JSON, with images by name."""
    # a sample's prompt has no recorded episodes: they are samples of its group
    as_it_is = {f.name: getattr(prompt, f.name) for f in fields(prompt) if f.name != "recorded"}
    messages = {name: describe_messages(as_it_is[name]) for name in ("messages", "demonstration")}
    return as_it_is | messages


def read_batch(folder: Path) -> list[Group]:
    """Return the samples written by `write_batch`."""
    records = [json.loads(line) for line in (folder / RECORDS).read_text(encoding="utf-8").splitlines()]
    with np.load(folder / ARRAYS, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    if not len(records) == len(arrays["lengths"]) == arrays["group_sizes"].sum():
        raise ValueError(f"{RECORDS} and {ARRAYS} hold other numbers of samples")
    # np.split cuts before each index, so the end of the last sample is left out
    ends = np.cumsum(arrays["lengths"])[:-1]
    # the number of tokens tells the arrays of tokens from those with an entry per sample or group
    n_tokens = int(arrays["lengths"].sum())
    by_token = {name: a for name, a in arrays.items() if len(a) == n_tokens and not name.startswith(ROUTES[:-2])}
    parts = {name: np.split(a, ends) for name, a in by_token.items()}
    if "kept" in parts:  # sizes of sets by token; the ids of a sample's sets are as many as their sum
        of_samples = np.cumsum([sizes.sum() for sizes in parts["kept"]])[:-1]
        parts["kept_ids"] = np.split(arrays["kept_ids"], of_samples)
    images = read_images(folder)
    for record in records:
        for name in record["prompt"].keys() & {"messages", "demonstration"}:
            record["prompt"][name] = restore_messages(record["prompt"][name], images)
        record["transcript"] = restore_messages(record["transcript"], images)
        record["images"] = restore_places(record["images"], images)
    samples = [_read_sample(i, record, parts, arrays) for i, record in enumerate(records)]
    rest = iter(samples)
    return [[next(rest) for _ in range(int(n))] for n in arrays["group_sizes"]]


def _read_sample(i: int, record: dict[str, Any], parts: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Sample:
    def get(name: str) -> Any:
        # a copy, because np.split returns views, each of which would keep the array of the whole step alive
        return parts[name][i].copy() if f"has/{name}" in arrays and arrays[f"has/{name}"][i] else None

    columns = {name.removeprefix("has/column/"): None for name in arrays if name.startswith("has/column/")}
    found = {name: get(f"column/{name}") for name in columns}
    sizes = get("kept")
    return make_sample(
        prompt=Prompt(**record.pop("prompt")),
        token_ids=parts["token_ids"][i].astype(INTS),
        action_mask=parts["action_mask"][i].astype(BOOLS),
        rollout_logp=parts["rollout_logp"][i].astype(SINGLE),
        versions=parts["versions"][i].astype(INTS),
        advantage=get("advantage"),
        excluded=get("excluded"),
        kept=None if sizes is None else KeptSets.of_sizes(parts["kept_ids"][i], sizes),
        columns={name: values for name, values in found.items() if values is not None},
        routes=arrays.get(ROUTES.format(i)),
        **record,
    )
