"""Step snapshot: a step of a run with everything to recompute it. RUN/snapshots/step_00010/ contains

    snapshot.json     the facts below, and the size of every other file; renamed into place last
    samples.jsonl, tokens.npz    for a viewer: the text and the numbers of every token (tokens.py)
    batch.jsonl, batch.npz       for a loss: ids, masks, rewards, advantages, columns (batch_file.py)
    algorithm.py     a copy of the run's algorithm, if it is a user file
    weights/update_0/, ...       the weights before each update, with capture.weights

A folder without snapshot.json was left by a run that was killed, and is never read.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from algs.base import Algorithm
from analysis.capture.batch_file import in_order, read_batch, write_batch
from analysis.capture.tokens import MANIFEST, SNAPSHOTS, UNREADABLE, CapturedSample, captured_steps, write_captured
from core.errors import UserError, first_line, writing
from core.loading import FileSpec, hash_file
from core.text.atomic_write import flush_folder, flush_path, measure_sizes, write_whole
from core.types.allowed_tokens import AllowedTokens
from core.types.arrays import Floats, from_json
from core.types.batch import RowLayout
from core.types.routes import RouterReplay
from core.types.samples import Group
from core.types.weights import ExportScope
from data_feeds.packing.batches import Plan

A = TypeVar("A", bound=Algorithm)
FORMAT = 1
ALGORITHM = "algorithm.py"
INCOMPLETE = "the snapshot is incomplete, and will not be read"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of the run required to recompute any step."""

    alg: dict[str, Any]
    """The algorithm's settings."""
    alg_file: FileSpec
    model: dict[str, Any]
    """The section `model` of the recipe."""
    trainer: dict[str, Any]
    temperature: float
    max_new_tokens: int
    updates_per_step: int
    layout: RowLayout
    on_cpu: bool
    allowed_tokens: AllowedTokens
    """Tokens over which the softmax is taken."""
    router_replay: RouterReplay = "off"  # older snapshots lack it
    """rollout.router_replay: replay makes the trainer's routers choose the engine's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFacts:
    """Facts of an update of the step."""

    samples: list[int]
    """Numbers of the trained samples in the step."""
    sample_weights: list[float]
    """Weight of each trained token, by sample."""
    bins: list[list[list[int]]]
    """[rank][micro-batch] -> indices into `samples`."""
    groups: list[int] | None
    families: list[int] | None
    loss: float
    """Loss before the update, averaged as train/loss is."""
    grad_norm: float | None
    """Norm of the gradient before clipping; None if it was not finite, and the update was skipped."""
    fingerprints: dict[ExportScope, dict[str, int]]
    """Checksums of the weights before the update, by scope and tensor; see trainers/weight_sync/fingerprint.py."""
    episodes: list[int]
    """Number of each sample's episode."""
    has_seq_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of snapshot.json."""

    step: int
    version: int
    """Policy version of the weights before the step: the number of steps that they have behind them."""
    reason: str
    """Key or event that kept the step."""
    run: RunFacts
    updates: list[UpdateFacts]
    metrics: dict[str, float]
    """Metrics of the trainer for the step, as logged."""
    checkpoint: str | None
    """Checkpoint that holds the weights before the step, if the run made one."""
    alg_state: dict[str, Any] = field(default_factory=dict[str, Any])
    """State of the algorithm in the step, as JSON."""
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSnapshot:
    """Complete snapshot on disk."""

    folder: Path
    manifest: Manifest
    groups: list[Group]
    """All groups of the step, with the columns and the advantages of the run's algorithm."""

    @property
    def alg_file(self) -> FileSpec:
        """File of the run's algorithm: the copy in the snapshot, or a module of algs/ as it is now."""
        spec = self.manifest.run.alg_file
        # found by module name: the path is that of the machine of the run
        if spec.in_package:
            return FileSpec(module=spec.module, path=spec.path, sha256=hash_file(own_module(spec)), in_package=True)
        return FileSpec(module=spec.module, path=str(self.folder / ALGORITHM), sha256=spec.sha256, in_package=False)

    def with_state(self, alg: A) -> A:
        """Return a loss for the captured step: with its scheduled values, and its state if the run's has these entries.

        Raises UserError for a loss with other entries, which the run did not move.
        """
        recorded: dict[str, float | Floats] = from_json(self.manifest.alg_state)
        if lacking := sorted(alg.state.keys() - recorded.keys()):
            raise UserError(
                f"--alg: {type(alg).__name__} reads the state {lacking[0]}, which the run's algorithm did not have and "
                "the snapshot does not hold: capture a run of this algorithm"
            )
        return alg.with_state(recorded, step=self.manifest.step)

    def groups_of(self, update: int, groups: list[Group]) -> list[Group]:
        """Return the groups of the step that an update trained on."""
        return groups[update :: self.manifest.run.updates_per_step]

    def plan_of(self, update: int) -> Plan:
        """Return the split of an update into micro-batches, as it was in the run."""
        facts, samples = self.manifest.updates[update], [s for g in self.groups for s in g]
        return Plan(
            samples=[samples[i] for i in facts.samples],
            weights=facts.sample_weights,
            bins=facts.bins,
            groups=facts.groups,
            families=facts.families,
            episodes=facts.episodes,
            has_seq_ids=facts.has_seq_ids,
            sources=(),
            padded=self.manifest.run.layout.padded,
        )


def own_module(spec: FileSpec) -> Path:
    """Return the file of a module of FeynRL on this machine."""
    return Path(__file__).parent.parent.parent / f"{spec.module.replace('.', '/')}.py"


def write_snapshot(
    folder: Path, manifest: Manifest, captured: list[CapturedSample], of_updates: list[list[Group]]
) -> None:
    """Write a snapshot; it exists when this returns, and not before."""
    with writing(folder, meaning=INCOMPLETE):
        folder.mkdir(parents=True, exist_ok=True)
        write_captured(folder, captured)
        write_batch(folder, in_order(of_updates))
        # a module of algs/ is in every clone, and its hash shows whether it has changed; a user's file may be gone
        if not manifest.run.alg_file.in_package:
            shutil.copyfile(manifest.run.alg_file.path, folder / ALGORITHM)
        # the manifest makes the snapshot complete, so all other files must be on the disk before it
        flush_folder(folder)
        facts = asdict(manifest) | {"sizes": measure_sizes(folder)}
        write_whole(folder / MANIFEST, json.dumps(facts) + "\n", meaning=INCOMPLETE)
        flush_path(folder)


def read_snapshot(folder: Path) -> StepSnapshot:
    """Read a snapshot. Raises UserError if it is missing, incomplete or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} is not a snapshot: {_describe_lack(folder)}")
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise UserError(f"{folder}: the snapshot has format {raw['format']}, and this version reads {FORMAT}")
        sizes: dict[str, int] = raw.pop("sizes")
        # sizes are enough to find a copy that was cut short, and need no second read of large files
        for name, size in sizes.items():
            if not (folder / name).is_file() or (folder / name).stat().st_size != size:
                raise UserError(f"the snapshot {folder} is damaged: {name} is missing or has another size than {size}")
        return StepSnapshot(folder=folder, manifest=_parse_manifest(raw), groups=read_batch(folder))
    except UNREADABLE as error:
        raise UserError(f"the snapshot {folder} is damaged: {first_line(error)}") from error


def _parse_manifest(raw: dict[str, Any]) -> Manifest:
    run = dict(raw.pop("run"))
    run |= {"alg_file": FileSpec(**run["alg_file"]), "layout": RowLayout(**run["layout"])}
    # JSON has lists only, and AllowedTokens holds tuples
    allowed, banned = run["allowed_tokens"]["allowed"], run["allowed_tokens"]["banned"]
    run["allowed_tokens"] = AllowedTokens(allowed=None if allowed is None else tuple(allowed), banned=tuple(banned))
    updates = [UpdateFacts(**u) for u in raw.pop("updates")]
    return Manifest(run=RunFacts(**run), updates=updates, **raw)


def _describe_lack(folder: Path) -> str:
    """Return the reason that a folder is no snapshot, and suggest a folder."""
    if not folder.is_dir():
        return "there is no such folder"
    if folder.parent.name == SNAPSHOTS:
        return f"it has no {MANIFEST}, so the run ended before it was complete"
    home = folder.parent if folder.name == SNAPSHOTS else folder
    if steps := captured_steps(home):
        return f"name one of the {len(steps)} in {home / SNAPSHOTS}, such as step_{steps[-1]:05d}"
    return f"it has no {MANIFEST}; a run keeps snapshots with capture.every"
