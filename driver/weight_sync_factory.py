"""Choose the transports of a run and build its weight sync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import RLConfig
from core.errors import UserError
from core.ray_cluster import Remote
from core.workers import Local, Workers
from weight_sync.base import Part, Probe, WeightSync
from weight_sync.publisher import LocalSync, RemoteSync
from weight_sync.transports import GRACE_S, Ends, Parcels, Stream, Transport, TransportName

if TYPE_CHECKING:
    pass

from driver.devices import on_gpu
from rollouts.registry import OUR_ENGINES, by_path, engine_class_of


def transports_of(cfg: RLConfig) -> list[TransportName]:
    """What weights go over, and what a synchronous run may fall back to, in this order.

    From GPU to GPU where there are any, but over gloo to the hf engine and to engines of one's own.
    """
    engine = engine_class_of(by_path(cfg.rollout.engine, OUR_ENGINES, key="rollout.engine"))
    is_fed = engine is None or hasattr(engine, "feed")
    if (chosen := cfg.weight_sync.transport) == "auto":
        first = "nccl" if cfg.rollout.engine == "vllm" and on_gpu(cfg) else "gloo"
        return [first, "direct", "disk"] if is_fed else [first]
    if chosen in ("direct", "disk") and not is_fed:
        raise UserError(
            f"weight_sync.transport is {chosen}, and the Engine of rollout.engine={cfg.rollout.engine} has no method "
            "feed: add it and open_feed, as in rollouts/engines/hf.py, or set the transport to auto"
        )
    return [chosen]


def weight_sync_of(
    cfg: RLConfig,
    trainers: Workers,
    rollouts: Workers,
    probe_ids: list[int],
    *,
    say: Callable[[str], None],
    facts: dict[str, Any],
    folder: Path,
) -> WeightSync:
    """say: tells the user that another transport is used; facts: gets the name of the last one.
    folder: of the run, where weights may lie for a moment."""
    bound = cfg.weight_sync.probe_tolerance or (0.002 if cfg.model.dtype == "float32" else 0.1)
    probe = Probe(token_ids=probe_ids, bound=bound)
    max_bytes = cfg.weight_sync.bucket_mib * 2**20
    part: Part = "adapter" if cfg.weight_sync.lora == "adapter" else "whole"
    if isinstance(trainers, Local) and isinstance(rollouts, Local):
        return LocalSync(trainers, rollouts, probe, max_bytes, part)
    assert isinstance(trainers, Remote) and isinstance(rollouts, Remote)
    deadline_s, key = cfg.weight_sync.timeout_s + GRACE_S, "weight_sync.timeout_s"
    ends = Ends(
        trainers=trainers.within(deadline_s, key=key),
        engines=rollouts.within(deadline_s, key=key),
        ranks_per_engine=cfg.rollout.tensor_parallel,
        max_bytes=max_bytes,
        part=part,
        timeout_s=cfg.weight_sync.timeout_s,
    )
    return RemoteSync(
        ends=ends,
        rollouts=rollouts,
        probe=probe,
        transports=[transport_of(name, ends, folder) for name in transports_of(cfg)],
        may_fall_back=cfg.max_lag == 0,
        say=say,
        facts=facts,
    )


def transport_of(name: TransportName, ends: Ends, folder: Path) -> Transport:
    if name in ("nccl", "gloo"):
        return Stream(name, ends)
    return Parcels(name, ends, folder / "weights" if name == "disk" else None)
