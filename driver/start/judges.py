"""Judge of a run: engines, their addresses for the rewards, and the restart of dead engines."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import RLConfig
from core.cluster.capacity import Resources, Role
from core.cluster.ray_workers import Cluster, Remote
from core.cluster.workers import Local, RankInfo, Workers
from core.errors import ProcessDied, RunStopped, UserError, quote
from core.gc_control import collect_seldom
from core.loading import needs_part
from core.tasks import gather_fail_fast
from core.timing.deadlines import MEMBERSHIP_POLL_S
from data_feeds.chat.template_args import list_arguments
from driver.start.devices import (
    find_cache_gib,
    judge_takes_turns,
    list_cores,
    share_devices,
    share_machine,
)
from modeling.hf_config import check_model_folder, max_positions
from rewards import RunJudge
from rewards.several import RewardPlan
from rollouts.engines.base import EngineConfig
from rollouts.registry import load_engine_class, resolve_engine
from rollouts.scheduling.availability import spend_restart

if TYPE_CHECKING:
    from rollouts.engines.base import Engine
    from rollouts.judges.endpoint import JudgeEndpoint, JudgeTokenizer
    from rollouts.judges.worker import JudgePlan, JudgeWorker

JUDGE_GROUP = "judge"
"""Name of the judge's worker group."""
LOOPBACK = ("127.0.0.1", 0)
DEFAULT_LENGTH = 4096
"""judge.max_model_len where it is unset, in tokens."""


def check_judge(cfg: RLConfig, rewards: Sequence[RewardPlan]) -> None:
    """Raise UserError for a judge that no reward asks, or that this recipe cannot serve."""
    judge = cfg.judge
    if judge is None:
        return
    if not any(plan.may_ask_judge for plan in rewards):
        raise UserError(
            "judge is set, and no reward asks it: set reward.function to judge or rubric without base_url in its "
            "settings, or leave judge out"
        )
    with needs_part("judge", otherwise="leave it out"):
        import rollouts.judges.endpoint as _  # noqa: F401
    if judge.is_policy:
        find_judge_length(cfg)
        return
    from rollouts.judges.worker import find_choices

    if cfg.backend == "local" and (judge.num_engines, judge.tensor_parallel_size) != (1, 1):
        raise UserError("backend: local is one process: set judge.num_engines and judge.tensor_parallel_size to 1")
    name, can = f"judge.engine={judge.engine}", load_engine_class(resolve_engine(judge.engine)).capabilities
    if judge.tensor_parallel_size != 1 and not can.tensor_parallel:
        raise UserError(f"{name} has no tensor parallelism: set judge.tensor_parallel_size to 1")
    if judge.placement == "colocate" and cfg.placement == "separate":
        raise UserError(
            "judge.placement is colocate, and trainers and engines have devices of their own: set placement to "
            "colocate, or leave judge.placement out"
        )
    if refused := _refuse_turns(cfg, sleeps=can.sleep):
        raise UserError(f"placement is colocate, and {refused}, or judge.placement to separate")
    if judge.allowed_tokens and not can.allowed_tokens:
        raise UserError(f"judge.allowed_tokens is set, and {name} samples from all tokens: leave it out")
    # last, since these read the judge's files
    check_model_folder(judge.model, key="judge.model", trust_remote_code=False)
    find_judge_length(cfg)
    tokenizer = plan_judge(cfg).make_tokenizer()
    find_choices(tokenizer, judge.allowed_tokens)
    if unread := sorted(judge.template_args.keys() - list_arguments(tokenizer)):
        raise UserError(
            f"judge.template_args: the judge's chat template does not read {quote(unread[0])}: leave it out"
        )


def _refuse_turns(cfg: RLConfig, *, sleeps: bool) -> str:
    """Return why the judge cannot take turns with trainers and engines; "" if it can. sleeps: the engine can."""
    judge = cfg.judge
    if judge is None or not judge_takes_turns(cfg):
        return ""
    if not sleeps:
        return f"judge.engine={judge.engine} does not sleep while others have the device: set judge.engine to vllm"
    if (ranks := judge.num_engines * judge.tensor_parallel_size) > cfg.trainer.ranks:
        return (
            f"{ranks} ranks of the judge cannot share the devices of {cfg.trainer.ranks} trainer ranks: lower "
            "judge.num_engines or judge.tensor_parallel_size"
        )
    if cfg.rollout.sleep_mode == "discard":
        return (
            "engines that sample again after the judge need the weights that rollout.sleep_mode=discard drops: set it "
            "to offload"
        )
    return ""


def find_judge_length(cfg: RLConfig) -> int:
    """Return judge.max_model_len, or its default. Raises UserError if the judge's model has fewer positions."""
    judge = cfg.judge
    assert judge is not None
    path, trusts = (cfg.model.path, cfg.model.trust_remote_code) if judge.is_policy else (judge.model, False)
    positions = max_positions(path, trust_remote_code=trusts)
    if judge.max_model_len is None:
        return DEFAULT_LENGTH if positions is None else min(positions, DEFAULT_LENGTH)
    if positions is not None and judge.max_model_len > positions:
        raise UserError(f"judge.max_model_len={judge.max_model_len}, and {path} has {positions} positions: lower it")
    return judge.max_model_len


def plan_judge(cfg: RLConfig, key: str = "") -> JudgePlan:
    """Return the plan of the judge's own engines, which sample text alone. key: of requests.

    Raises UserError for a judge.max_model_len beyond the model's positions.
    """
    from rollouts.judges.endpoint import Served
    from rollouts.judges.worker import JudgePlan

    judge = cfg.judge
    assert judge is not None
    engine = EngineConfig(
        model_path=judge.model,
        temperature=judge.temperature,
        max_model_len=find_judge_length(cfg),
        stop_token_ids=(),
        dtype=cfg.model.dtype,
        images="off",
        trust_remote_code=False,
        seed=cfg.seed,
        tensor_parallel_size=judge.tensor_parallel_size,
        kv_cache_gib=find_cache_gib(cfg),
        gpu_memory_utilization=cfg.rollout.gpu_memory_utilization,
        enforce_eager=cfg.rollout.enforce_eager,
        sleep="offload" if judge_takes_turns(cfg) else None,  # no weight sync would bring the weights again
    )
    return JudgePlan(
        engine_spec=resolve_engine(judge.engine),
        engine=engine,
        served=Served(model=judge.model, max_model_len=engine.max_model_len, key=key),
        allowed_tokens=judge.allowed_tokens,
        template_args=judge.template_args,
    )


def share_for_judge(cfg: RLConfig) -> Resources:
    """Return the resources of an engine of the judge: GPUs, or none if it takes turns on those of the trainers."""
    assert cfg.judge is not None
    resources = share_machine(cfg, cfg.judge.num_engines, gpus=cfg.judge.tensor_parallel_size)
    return replace(resources, gpus=0) if judge_takes_turns(cfg) else resources


def plan_judge_roles(cfg: RLConfig, run_folder: Path) -> list[Role]:
    """Return the cluster resources of the judge's own engines; empty without them."""
    if cfg.judge is None or cfg.judge.is_policy:
        return []
    in_folder = Path(cfg.judge.model).is_relative_to(run_folder)
    n = cfg.judge.num_engines
    return [Role(name=JUDGE_GROUP, n=n, resources=share_for_judge(cfg), needs_run_folder=in_folder)]


def name_judge_model(cfg: RLConfig) -> dict[str, str]:
    """Return the path of the judge's own model by key, for the comparison of machines."""
    return {} if cfg.judge is None or cfg.judge.is_policy else {"judge.model": cfg.judge.model}


def build_worker(info: RankInfo | None, plan: JudgePlan) -> JudgeWorker:
    """Return a judge worker; without `info`, in this process."""
    from rollouts.judges.worker import build_judge

    if info is not None and plan.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = plan.devices[info.rank]  # before CUDA is in use
    worker = build_judge(plan, list_cores(info))
    if info is not None:
        collect_seldom()
    return worker


@dataclass
class Judges:
    """Engines of a judge, with the address of each. A new engine takes the address of the one that died."""

    workers: Workers[JudgeWorker]
    say: Callable[[str], None]
    budget: int
    places: list[tuple[str, int]]
    """Address and port of each engine."""
    urls: tuple[str, ...] = ()
    n_restarts: int = 0
    is_awake: bool = True
    """False while others have the devices: then no engine may start again."""
    _restarting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _n_back: Counter[int] = field(default_factory=Counter[int])
    """Restarts of each engine."""

    async def listen(self, rank: int) -> str:
        """Serve requests at the engine's address; return the URL."""
        from rollouts.judges.worker import JudgeWorker

        address, _ = self.places[rank]
        url, port = await self.workers.call_one(rank, JudgeWorker.listen, *self.places[rank])
        self.places[rank] = address, port
        return url

    async def sleep(self) -> None:
        """Put all engines to sleep, once none is starting again. One that dies first is replaced."""
        async with self._restarting:
            await gather_fail_fast(self._put_to_sleep(rank) for rank in range(len(self.workers)))
            self.is_awake = False

    async def _put_to_sleep(self, rank: int) -> None:
        from rollouts.judges.worker import JudgeWorker

        while True:
            try:
                return await self.workers.call_one(rank, JudgeWorker.sleep)
            except ProcessDied as death:
                await self._bring_back(rank, death)

    async def wake(self) -> None:
        """Wake all engines."""
        from rollouts.judges.worker import JudgeWorker

        await self.workers.call_all(JudgeWorker.wake)
        self.is_awake = True

    async def watch(self, fail: Callable[[Exception], None]) -> None:
        """Restart engines that die, and close all when cancelled. fail: ends the run."""
        from rollouts.judges.worker import JudgeWorker

        try:
            await asyncio.gather(*(self._watch_one(rank) for rank in range(len(self.workers))))
        except Exception as error:  # this task has no caller
            fail(error)
        finally:
            if isinstance(self.workers, Local):  # the cluster ends its processes itself
                await self.workers.call_all(JudgeWorker.close)

    async def _watch_one(self, rank: int) -> None:
        from rollouts.judges.worker import JudgeWorker

        while True:
            before = self._n_back[rank]
            try:
                await self.workers.call_one(rank, JudgeWorker.stay, MEMBERSHIP_POLL_S)
            except ProcessDied as death:
                async with self._restarting:
                    if self._n_back[rank] == before:  # else `sleep` noticed the death first
                        await self._bring_back(rank, death)

    async def _bring_back(self, rank: int, death: ProcessDied) -> None:
        """Replace a dead engine. Raises ProcessDied if the restarts are used up."""
        if not self.is_awake:
            raise ProcessDied(f"{death}, while others had the device of the judge", worker=death.worker)
        assert isinstance(self.workers, Remote)
        while True:
            self.say(spend_restart(death, used=self.n_restarts, budget=self.budget))
            self.n_restarts += 1
            try:
                await self.workers.restart(rank)
                address, _ = await self.workers.find_free_address(rank)
                if address != self.places[rank][0]:
                    raise RunStopped(
                        f"judge {rank} started again on another machine, {address}, where no reward asks it: resume "
                        "the run"
                    )
                await self.listen(rank)
                self._n_back[rank] += 1
                return self.say(f"judge {rank} is back")
            except ProcessDied as again:
                death = again


async def start_judges(
    cluster: Cluster | None, cfg: RLConfig, say: Callable[[str], None], key: str, devices: Sequence[str] = ()
) -> Judges | None:
    """Start the judge's own engines; return when all can take requests, or sleep. None without them.

    devices: GPUs of every trainer rank. A judge that takes turns shares them, and sleeps after the start.
    """
    if cfg.judge is None or cfg.judge.is_policy:
        return None
    plan = plan_judge(cfg, key)
    if judge_takes_turns(cfg):
        plan = replace(plan, devices=share_devices(devices, per_engine=cfg.judge.tensor_parallel_size))
    places: list[tuple[str, int]] = [LOOPBACK]
    workers: Workers[JudgeWorker]
    if cluster is None:
        workers = Local(build_worker(None, plan))
    else:
        asked: dict[str, Any] = {"resources": share_for_judge(cfg), "timeout_s": cfg.timeout_s}
        remote = await cluster.spawn(JUDGE_GROUP, cfg.judge.num_engines, build_worker, plan, **asked)
        places = [await remote.find_free_address(rank) for rank in range(len(remote))]
        workers = remote
    judges = Judges(workers, say, cfg.rollout.restarts, places)
    judges.urls = tuple([await judges.listen(rank) for rank in range(len(workers))])
    if judge_takes_turns(cfg):
        await judges.sleep()
    return judges


def make_key() -> str:
    """Return the key of a run's judge."""
    return secrets.token_urlsafe()


def address_judge(rewards: RewardPlan, key: str, urls: tuple[str, ...] = ()) -> RewardPlan:
    """Return the rewards with the key and the addresses of the run's judge."""
    run = rewards.run
    if run.judge is None:
        return rewards
    return replace(rewards, run=replace(run, judge=replace(run.judge, key=key, urls=urls)))


def serve_policy(
    engine: Engine, tokenizer: JudgeTokenizer, max_model_len: int, judge: RunJudge | None
) -> JudgeEndpoint | None:
    """Return an endpoint of the policy's engine for rewards; None unless the policy judges."""
    if judge is None or judge.is_frozen:
        return None
    from rollouts.judges.endpoint import JudgeEndpoint, Served

    return JudgeEndpoint(engine, tokenizer, Served(model=judge.model, max_model_len=max_model_len, key=judge.key))
