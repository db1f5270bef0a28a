"""What a recipe's keys become in trainers, engines, weight sync and the buffer of an RL run, value by value."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import RLConfig, SLConfig
from core.cluster.capacity import Role
from core.cluster.ray_workers import Remote
from core.cluster.workers import Local
from core.types.allowed_tokens import AllowedTokens
from driver.load_recipe import load_recipe
from driver.rl.row_order import make_schedule
from driver.start.rollouts import build_worker, plan_engine_role, plan_engines, plan_rollouts, share_for_engine
from driver.start.trainers import TrainerPlan, plan_trainer
from driver.start.weight_sync import make_weight_sync
from rollouts.agents.task import HOST_KEY
from rollouts.scheduling.buffer import Schedule
from trainers.weight_sync.base import Probe
from trainers.weight_sync.publisher import LocalWeightSync, RemoteWeightSync

Recipe = Callable[..., str]


def with_rollout(cfg: RLConfig, **keys: Any) -> RLConfig:
    return cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=keys)})


def test_a_trainer_is_planned_from_the_keys_of_its_recipe(recipe: Recipe) -> None:
    changes = {"rollout.temperature": 0.7, "updates_per_step": 2, "seed": 3, "timeout_s": 77.0}
    loaded, observers, tokens = load_recipe(RLConfig, recipe(changes), []), {"capture.every": SimpleNamespace}, (3, 5)

    def plan(cfg: RLConfig | SLConfig) -> TrainerPlan:
        given: Any = observers
        return plan_trainer(cfg, loaded.alg, observers=given, allowed_tokens=AllowedTokens(allowed=tokens))

    planned = plan(loaded.cfg)
    assert planned == TrainerPlan(
        **{"model": loaded.cfg.model, "trainer": loaded.cfg.trainer, "alg": loaded.alg, "observers": observers},
        **{"temperature": 0.7, "total_updates": 4, "seed": 3, "timeout_s": 77.0},
        allowed_tokens=AllowedTokens(allowed=tokens),
        **{"has_ref_logp": False, "router_replay": "off", "batch_invariant": False, "shares_device": False},
    )
    for cfg, own in (
        (with_rollout(loaded.cfg, router_replay="watch"), {"router_replay": "watch"}),
        (with_rollout(loaded.cfg, batch_invariant=True), {"batch_invariant": True}),
        (loaded.cfg.model_copy(update={"placement": "colocate"}), {"shares_device": True}),
    ):
        assert plan(cfg) == replace(planned, **own)
    compiled = loaded.cfg.trainer.model_copy(update={"compile": True})
    assert plan(loaded.cfg.model_copy(update={"trainer": compiled})).observers.keys() == {"capture.every", "compile"}
    supervised = load_recipe(SLConfig, recipe({"steps": 3}, kind="sl"), []).cfg
    for has_ref_logp in (False, True):
        found = plan(supervised.model_copy(update={"precompute_ref_logp": has_ref_logp}))
        assert (found.temperature, found.total_updates, found.has_ref_logp) == (1.0, 3, has_ref_logp)
        assert (found.router_replay, found.batch_invariant, found.shares_device) == ("off", False, False)


def test_the_schedule_of_groups_is_that_of_the_recipe(recipe: Recipe) -> None:
    changes = {"steps": 6, "groups_per_step": 8, "max_staleness": 5, "sample_reuse": 4}
    changes |= {"weight_sync.every": 2, "weight_sync.max_kl": 0.5}
    assert make_schedule(load_recipe(RLConfig, recipe(changes), []).cfg) == Schedule(
        steps=6, per_step=8, max_staleness=5, sync_every=2, max_kl=0.5, sample_reuse=4
    )


def test_a_worker_has_the_parts_of_its_recipe(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_KEY, "key")
    agent = {"rollout.agent": {"address": ["http://127.0.0.1:9"]}, "rollout.max_turns": 3}
    cfg = load_recipe(RLConfig, recipe(agent | {"seed": 5, "data.max_prompt_tokens": 30}), []).cfg

    async def build() -> None:
        collects = gc.get_threshold()
        worker = build_worker(None, plan_engines(cfg, cfg.model))
        try:
            assert worker.agents is not None, "it plays the environment instead"
            assert worker.agents.processes.plan.address == ("http://127.0.0.1:9",)
            assert (worker.seed, worker.max_prompt_tokens, worker.rank) == (5, 30, 0)
            assert (worker.reward, worker.rollout) == (cfg.reward, cfg.rollout)
            assert worker.judge is worker.second is worker.opponent is None
            assert gc.get_threshold() == collects, "this process is not the engine's alone"
        finally:
            await worker.close()

    asyncio.run(build())


def test_engines_need_the_run_folder_only_to_read_from_it(recipe: Recipe, tmp_path: Path) -> None:
    cfg = load_recipe(RLConfig, recipe({"backend": "ray", "rollout.num_engines": 2}), []).cfg
    plan = plan_rollouts(cfg)
    by_files, merged = replace(plan, transports=("disk",)), replace(plan.engine, model_path=str(tmp_path / "merged"))
    in_store = cfg.model_copy(update={"weight_sync": cfg.weight_sync.model_copy(update={"folder": "/store"})})
    for own, of_engines, needs in (
        (cfg, plan, False),
        (cfg, replace(plan, transports=("gloo", "direct", "disk")), False),
        (cfg, by_files, True),
        (in_store, by_files, False),
        (with_rollout(cfg, opponent_every=2), plan, True),
        (cfg, replace(plan, engine=merged), True),
    ):
        assert plan_engine_role(own, of_engines, tmp_path) == Role(
            name="engine", n=2, resources=share_for_engine(own), needs_run_folder=needs
        )


# Weight sync -------------------------------------------------------------------------------------------------


def remote(name: str, n: int) -> Remote[Any]:
    """Return workers without processes, which a test does not call."""
    slots: Any = SimpleNamespace(role=SimpleNamespace(name=name, n=n), name_worker=lambda rank: f"{name} {rank}")
    return Remote(slots, lambda rank: None, 60.0, None)


def sync_between(cfg: RLConfig, trainers: Any, engines: Any, **more: Any) -> Any:
    probe = Probe(token_ids=[1, 2], bound=0.1)
    return make_weight_sync(cfg, trainers, engines, probe, rollouts=plan_rollouts(cfg), **more)


def test_a_sync_in_one_process_sends_buckets_of_the_size_of_the_recipe(recipe: Recipe, tmp_path: Path) -> None:
    cfg = load_recipe(RLConfig, recipe({"weight_sync.bucket_mib": 3}), []).cfg
    trainer, worker = SimpleNamespace(timer=1), SimpleNamespace(timer=2, engine=3)
    sync = sync_between(cfg, Local(trainer), Local(worker), say=print, facts={}, folder=tmp_path)
    assert isinstance(sync, LocalWeightSync)
    assert (sync.trainer, sync.engine, sync.timers) == (trainer, 3, (1, 2))
    assert (sync.max_bytes, sync.scope) == (3 * 2**20, "whole")


def test_a_sync_of_actors_has_the_settings_of_the_recipe(recipe: Recipe, tmp_path: Path) -> None:
    base = {"backend": "ray", "weight_sync.bucket_mib": 3, "weight_sync.timeout_s": 20.0}
    rows: list[tuple[dict[str, Any], set[int], list[str], bool, int, list[str]]] = [
        # changes, engines without the run folder; transports, whether they may change, whole_every, what is said
        ({}, set(), ["gloo", "direct", "disk"], True, 0, []),
        ({"max_staleness": 1}, set(), ["gloo", "direct", "disk"], False, 0, []),
        ({"weight_sync.transport": "direct"}, set(), ["direct"], True, 0, []),
        ({"weight_sync.delta": True, "weight_sync.whole_every": 7}, set(), ["gloo", "direct", "disk"], True, 7, []),
        (
            {},
            {1, 0},
            ["gloo", "direct"],
            True,
            0,
            [
                "engine 0, engine 1: no weights can go there by files (disk), because the machine does not see the run "
                "folder"
            ],
        ),
    ]
    for changes, blind, transports, may_fall_back, whole_every, told in rows:
        cfg = load_recipe(RLConfig, recipe(base | changes), []).cfg
        trainers, engines, said, facts = remote("trainer", 1), remote("engine", 2), list[str](), dict[str, Any]()
        engines.without_run_folder = blind
        sync = sync_between(cfg, trainers, engines, say=said.append, facts=facts, folder=tmp_path)
        assert isinstance(sync, RemoteWeightSync)
        assert [transport.name for transport in sync.transports] == transports, changes
        assert (sync.may_fall_back, sync.whole_every, said) == (may_fall_back, whole_every, told), changes
        ends = sync.ends
        assert (ends.max_bytes, ends.timeout_s, ends.ranks_per_engine, ends.scope) == (3 * 2**20, 20.0, 1, "whole")
        assert [
            (handle.name, handle.prefix, handle.timeout_s, handle.timeout_key)
            for handle in (ends.trainers, ends.sources, ends.engines, ends.engine_timers, sync.engines)
        ] == [
            # workers report before the driver gives up on them
            ("trainer", "", 25.0, "weight_sync.timeout_s"),
            ("trainer", "weight_source.", 25.0, "weight_sync.timeout_s"),
            ("engine", "engine.", 25.0, "weight_sync.timeout_s"),
            ("engine", "timer.", 25.0, "weight_sync.timeout_s"),
            ("engine", "engine.", 60.0, "timeout_s"),
        ]
        assert sync.facts is facts
