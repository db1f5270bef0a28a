"""Factory of the weight sync of a run, with transports and probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from configs.schema import RLConfig
from configs.sync_schema import WeightSyncConfig
from core.cluster.ray_workers import Remote
from core.cluster.workers import Local, Workers
from core.errors import UserError
from core.stores import is_remote
from core.timing.clock import ActivityTimer
from core.timing.deadlines import SYNC_TIMEOUT_GRACE_S
from core.types.messages import find_images
from core.types.samples import Prompt
from core.types.weights import ExportScope
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.checks.weight_store import locate_folder
from driver.start.rollouts import RolloutPlan
from modeling.model_files import explain_gap
from rollouts.registry import load_engine_class
from rollouts.transcript import find_places
from rollouts.worker import RolloutWorker
from trainers.trainer import Trainer
from trainers.weight_sync.base import Probe, ReceivesWeights, TransportName, WeightSync
from trainers.weight_sync.publisher import LocalWeightSync, RemoteWeightSync
from trainers.weight_sync.source import WeightSource
from trainers.weight_sync.transports import (
    BroadcastTransport,
    ChunkedTransport,
    HandleTransport,
    StoreTransport,
    SyncEndpoints,
    Transport,
)

PROBE_TOKENS = 64
"""Length of the probe prompt in tokens; counted after the first image, if there is any."""


def make_probe(cfg: RLConfig, tokenizer: ChatTokenizer, prompts: Sequence[Prompt]) -> Probe:
    """Make the probe from the first prompt, or the first prompt with images if there is any.

    Raises UserError if it has fewer than two tokens.
    """
    prompt = prompts[0]
    if tokenizer.images is not None:
        # A text prompt would leave the vision part of the weights unproven.
        prompt = next((p for p in prompts if find_images(p.messages)), prompt)
    ids = tokenizer.render(prompt.messages, prompt.tools)
    if len(ids) < 2:
        raise UserError("data.train: the first prompt has fewer than two tokens")
    places = find_places(tokenizer, ids, prompt.messages)
    end = PROBE_TOKENS + (places[0].end if places else 0)
    end = min([end, *(place.begin for place in places if place.end > end)])  # an image is never cut
    return Probe(
        token_ids=ids[:end],
        bound=cfg.weight_sync.bound_probe(cfg.model.dtype, quantized=cfg.rollout.quantization is not None),
        images=tuple(place for place in places if place.end <= end),
        explain=partial(explain_gap, cfg.model.path, trust_remote_code=cfg.model.trust_remote_code),
    )


def make_weight_sync(
    cfg: RLConfig,
    trainers: Workers[Trainer],
    workers: Workers[RolloutWorker],
    probe: Probe,
    *,
    rollouts: RolloutPlan,
    say: Callable[[str], None],
    facts: dict[str, Any],
    folder: Path,
) -> WeightSync:
    """Return the weight sync of a run.

    say: prints a warning when the transport changes. facts: receives the name of the last transport. folder: the run
    folder.
    """
    max_bytes = cfg.weight_sync.bucket_mib * 2**20
    scope = choose_scope(cfg, rollouts)
    # In one process the tensors are handed over, without any transport.
    if isinstance(trainers, Local) and isinstance(workers, Local):
        trainer, worker = trainers.worker, workers.worker
        return LocalWeightSync(trainer, worker.engine, (trainer.timer, worker.timer), probe, max_bytes, scope)
    assert isinstance(trainers, Remote) and isinstance(workers, Remote)
    deadline_s, key = cfg.weight_sync.timeout_s + SYNC_TIMEOUT_GRACE_S, "weight_sync.timeout_s"
    sources: Remote[WeightSource] = trainers.attribute("weight_source")
    engines: Remote[ReceivesWeights] = workers.attribute("engine")
    timers: Remote[ActivityTimer] = workers.attribute("timer")
    ends = SyncEndpoints(
        trainers=trainers.with_deadline(deadline_s, key=key),
        sources=sources.with_deadline(deadline_s, key=key),
        engines=engines.with_deadline(deadline_s, key=key),
        engine_timers=timers.with_deadline(deadline_s, key=key),
        ranks_per_engine=cfg.rollout.tensor_parallel_size,
        max_bytes=max_bytes,
        scope=scope,
        timeout_s=cfg.weight_sync.timeout_s,
    )
    return RemoteWeightSync(
        ends=ends,
        engines=engines,
        probe=probe,
        transports=[
            make_transport(name, choose_store(cfg.weight_sync, folder))
            for name in list_usable(rollouts.transports, workers, say, store=cfg.weight_sync.folder)
        ],
        may_fall_back=cfg.max_staleness == 0,
        say=say,
        facts=facts,
        whole_every=cfg.weight_sync.whole_every if cfg.weight_sync.delta else 0,
    )


def choose_scope(cfg: RLConfig, rollouts: RolloutPlan) -> ExportScope:
    """Return the weights that the engines receive, and under which names."""
    if cfg.weight_sync.lora == "adapter":
        return "adapter"
    return "files" if load_engine_class(rollouts.engine_spec).capabilities.file_names else "whole"


def list_usable(
    names: Sequence[TransportName], workers: Remote[RolloutWorker], say: Callable[[str], None], *, store: str | None
) -> list[TransportName]:
    """Return the transports without `disk` if an engine's machine does not see the run folder; print a warning.

    store: weight_sync.folder, which takes the place of the run folder.
    """
    if store is not None or "disk" not in names or not workers.without_run_folder:
        return [*names]
    blind = ", ".join(workers.slots.name_worker(rank) for rank in sorted(workers.without_run_folder))
    say(f"{blind}: no weights can go there by files (disk), because the machine does not see the run folder")
    return [name for name in names if name != "disk"]


def choose_store(sync: WeightSyncConfig, run_folder: Path) -> str:
    """Return the address of the run's own folder for weights, which every sync removes.

    Raises UserError for a weight_sync.folder in the run folder.
    """
    if sync.folder is None:
        return str(run_folder / "weights")
    folder = locate_folder(sync.folder)
    if not is_remote(folder) and Path(folder).resolve().is_relative_to(run_folder.resolve()):
        raise UserError(
            f"weight_sync.folder={sync.folder} lies in the run folder {run_folder}: name another folder, or leave the "
            "key out, for the run folder's weights/"
        )
    # A prefix of its own, because with weight_sync.folder=run_dir the name alone is the run folder.
    return f"{folder}/feynrl-weights-{run_folder.name}"


def make_transport(name: TransportName, store: str) -> Transport:
    """store: address of the run's own folder for weights."""
    if name in ("nccl", "gloo"):
        return BroadcastTransport(name)
    if name == "ipc":
        return HandleTransport(name)
    return StoreTransport(store) if name == "disk" else ChunkedTransport(name)
