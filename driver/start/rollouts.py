"""Factories of rollout workers and engines."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.data_schema import TemplateConfig
from configs.eval_schema import EvalConfig
from configs.rollout_schema import RewardConfig, RolloutConfig
from configs.schema import RLConfig
from configs.trainer_schema import ModelConfig
from core.cluster.capacity import Resources, Role
from core.cluster.elastic_workers import ElasticWorkers
from core.cluster.ray_workers import Cluster
from core.cluster.workers import Local, RankInfo, Workers
from core.errors import UserError
from core.gc_control import collect_seldom
from core.loading import FileSpec
from core.types.messages import ToolSpec
from data_feeds.chat.model_files import read_template
from data_feeds.chat.template_args import make_tokenizer
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.chat.tool_parsing import locate_parser, make_parser
from driver.start.devices import find_cache_gib, list_cores, share_machine, shares_devices, uses_gpus
from driver.start.judges import address_judge, check_judge, find_judge_length, serve_policy
from driver.start.opponent import build_opponent, check_game
from modeling.lora import name_lora_targets
from rewards.rewarder import Rewarder
from rewards.several import RewardPlan
from rewards.weights import plan_rewards
from rollouts.allowed_tokens import resolve_allowed_tokens
from rollouts.engines.base import Capabilities, Engine, EngineConfig
from rollouts.registry import (
    list_env_tools,
    load_engine_class,
    load_env_class,
    resolve_agent,
    resolve_engine,
    resolve_env,
)
from rollouts.scheduling.availability import ENGINE_GROUP
from rollouts.second_reward import SecondReward
from rollouts.stops import Stops
from rollouts.worker import RolloutWorker
from trainers.weight_sync.base import TransportName

if TYPE_CHECKING:
    from rollouts.agents.processes import AgentProcesses
    from rollouts.agents.remote import RemoteAgents
    from rollouts.agents.task import AgentPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """Settings of a rollout worker, which loads reward, environment and engine from these files."""

    model: ModelConfig
    data: TemplateConfig
    rollout: RolloutConfig
    reward: RewardConfig
    reward_functions: RewardPlan
    eval_reward: RewardConfig | None
    eval_functions: RewardPlan | None
    """Second reward of an RL run's evaluations."""
    env_spec: FileSpec
    agent: AgentPlan | None
    engine_spec: FileSpec
    engine: EngineConfig
    """Engine settings without stop tokens, allowed_tokens and cores, which the worker's process adds."""
    transports: tuple[TransportName, ...]
    """Transports of weights; in a synchronous run the next replaces a transport that fails."""
    devices: tuple[str, ...] = ()
    """GPUs of every engine, as CUDA_VISIBLE_DEVICES names them; empty leaves them to Ray."""
    max_prompt_tokens: int
    """Largest number of tokens before a policy's first reply: data.max_prompt_tokens."""
    seed: int

    @property
    def files(self) -> dict[str, FileSpec | None]:
        """Return every file that episodes depend on, by recipe key."""
        return {
            **self.reward_functions.files,
            "rollout.env": self.env_spec,
            "rollout.agent.file": None if self.agent is None else self.agent.file,
            "rollout.engine": self.engine_spec,
            "rollout.tool_parser": locate_parser(self.rollout.tool_parser),
        }

    def in_folder(self, folder: Path, earlier: Path | None) -> RolloutPlan:
        """Return the plan with the run folder for rewards, and that of the run that is resumed."""
        places = {"folder": str(folder), "earlier_folder": None if earlier is None else str(earlier)}
        return self.with_rewards(lambda rewards: replace(rewards, run=replace(rewards.run, **places)))

    def with_rewards(self, change: Callable[[RewardPlan], RewardPlan]) -> RolloutPlan:
        """Return the plan with the functions of both rewards changed."""
        second = None if self.eval_functions is None else change(self.eval_functions)
        return replace(self, reward_functions=change(self.reward_functions), eval_functions=second)

    def load_code(self) -> list[ToolSpec]:
        """Import environment and agent; return the tools of the environment.

        Raises UserError if either cannot be used.
        """
        if self.agent is not None:
            from rollouts.agents.launching import check_agent

            check_agent(self.agent)
        return list_env_tools(load_env_class(self.env_spec), max_turns=self.rollout.max_turns)


def plan_rollouts(cfg: RLConfig) -> RolloutPlan:
    """Return the rollout plan of an RL run: everything that does not depend on the worker's process."""
    plan = plan_engines(cfg, cfg.model)
    transports = choose_transports(cfg, load_engine_class(plan.engine_spec).capabilities)
    lora = cfg.model.lora if cfg.weight_sync.lora == "adapter" else None
    engine = replace(
        plan.engine,
        starts_empty=lora is None,  # the first weight sync sends all weights
        lora=lora and name_lora_targets(lora, cfg.model.path, trust_remote_code=cfg.model.trust_remote_code),
        over_nccl=transports[0] == "nccl",
        over_ipc=transports[0] == "ipc",
        sleep=cfg.rollout.sleep_mode if cfg.placement == "colocate" else None,
        timeout_s=cfg.weight_sync.timeout_s,
        pause_mode=cfg.weight_sync.pause_mode,
        routes=cfg.rollout.router_replay != "off",
    )
    return replace(plan, engine=engine, transports=transports)


def plan_engines(cfg: RLConfig | EvalConfig, model: ModelConfig) -> RolloutPlan:
    """Return the rollout plan of engines with fixed weights, loaded from the model folder."""
    engine_spec = resolve_engine(cfg.rollout.engine)
    # The stop and allowed tokens need the tokenizer, and the cores the rank, so the worker's process fills them in.
    engine = EngineConfig(
        model_path=model.path,
        temperature=cfg.rollout.temperature,
        truncation=cfg.rollout.truncation,
        max_model_len=find_longest(cfg),
        stop_token_ids=(),
        dtype=model.dtype,
        images=model.images,
        trust_remote_code=model.trust_remote_code,
        seed=cfg.seed,
        tensor_parallel_size=cfg.rollout.tensor_parallel_size,
        kv_cache_gib=find_cache_gib(cfg),
        gpu_memory_utilization=cfg.rollout.gpu_memory_utilization,
        enforce_eager=cfg.rollout.enforce_eager,
        quantization=cfg.rollout.quantization,
        batch_invariant=cfg.rollout.batch_invariant,
        options=cfg.rollout.vllm,
    )
    second, judge = (cfg.eval_reward, cfg.judge) if isinstance(cfg, RLConfig) else (None, None)
    facts: dict[str, Any] = {"engines": cfg.rollout.most_engines, "judge": judge}
    parser_file = locate_parser(cfg.rollout.tool_parser)  # another process may have another working folder
    moved: dict[str, Any] = {} if parser_file is None else {"tool_parser": parser_file.path}
    if isinstance(cfg, EvalConfig):
        moved["router_replay"] = "off"  # nothing is trained on these replies
    return RolloutPlan(
        model=model,
        data=carry_template(cfg.data),
        rollout=cfg.rollout.model_copy(update=moved),
        reward=cfg.reward,
        reward_functions=plan_rewards(cfg.reward, **facts),
        eval_reward=second,
        eval_functions=None if second is None else plan_rewards(second, **facts),
        env_spec=resolve_env(cfg.rollout.env),
        agent=None if cfg.rollout.agent is None else resolve_agent(cfg.rollout.agent),
        engine_spec=engine_spec,
        engine=engine,
        transports=(),
        max_prompt_tokens=cfg.data.max_prompt_tokens,
        seed=cfg.seed,
    )


def find_longest(cfg: RLConfig | EvalConfig) -> int:
    """Return the maximum tokens of a sequence of the engines: a sample, or a request if the policy judges."""
    if isinstance(cfg, RLConfig) and cfg.judge is not None and cfg.judge.is_policy:
        return max(cfg.longest_sample, find_judge_length(cfg))
    return cfg.longest_sample


def carry_template(data: TemplateConfig) -> TemplateConfig:
    """Return the settings with the text of a chat template in place of its path: another machine may not have it."""
    if data.chat_template is None:
        return data
    return data.model_copy(update={"chat_template": read_template(data.chat_template)})


def check_reward_and_env(cfg: RLConfig | EvalConfig, plan: RolloutPlan) -> None:
    """Raise UserError for invalid reward settings, or a reward or environment that this machine cannot run."""
    plan.reward_functions.load()
    check_game(cfg, plan.env_spec)
    check_siblings(cfg, plan.reward_functions)
    second = plan.eval_functions
    if isinstance(cfg, RLConfig):
        check_judge(cfg, [plan.reward_functions, *([] if second is None else [second])])
        check_second(cfg, second)
    if cfg.ray_address is None:  # else it is the engines' machines that need it
        plan.reward_functions.check(cfg.reward.timeout_s)
        if second is not None and plan.eval_reward is not None:
            second.check(plan.eval_reward.timeout_s)
        load_env_class(plan.env_spec).check()


def check_second(cfg: RLConfig, second: RewardPlan | None) -> None:
    """Raise UserError for an `eval_reward` that would measure nothing."""
    if second is None:
        return
    second.load()
    if cfg.data.eval is None:
        raise UserError("eval_reward is of the samples of data.eval: set it, or leave eval_reward out")
    if comparing := next((f for f in second.functions if f.kind.is_group), None):
        raise UserError(
            f"eval_reward: {comparing.spec.path} has score_group, which compares siblings: name a function with score"
        )


def check_siblings(cfg: RLConfig | EvalConfig, rewards: RewardPlan) -> None:
    """Raise UserError if a `score_group` would have no siblings to compare."""
    comparing = next((f for f in rewards.functions if f.kind.is_group), None)
    if comparing is None:
        return
    if isinstance(cfg, RLConfig):
        sizes = {"group_size": cfg.group_size} | ({"eval_samples": cfg.eval_samples} if cfg.data.eval else {})
    else:
        sizes = {"samples": min(map(cfg.count_samples, cfg.data.sets))}
    if alone := [f"{key}={size}" for key, size in sizes.items() if size < 2]:
        raise UserError(
            f"{alone[0]}: score_group() of {comparing.spec.path} compares the samples of a prompt, so there must be "
            f"at least two: set {alone[0].partition('=')[0]} to 2 or more"
        )


def choose_transports(cfg: RLConfig, can: Capabilities) -> tuple[TransportName, ...]:
    """Return the transport, followed by the fallbacks of a synchronous run; GPU to GPU if both ends support it."""
    if (chosen := cfg.weight_sync.transport) != "auto":
        return (chosen,)
    if cfg.placement == "colocate" and can.ipc and uses_gpus(cfg):
        return ("ipc",)
    separate_on_gpus = can.nccl and uses_gpus(cfg) and cfg.placement == "separate"
    first: TransportName = "nccl" if separate_on_gpus else "gloo"
    # The fallbacks form no process group, which is what may have failed. Both send chunks.
    return (first, "direct", "disk") if can.chunks else (first,)


def build_worker(info: RankInfo | None, plan: RolloutPlan) -> RolloutWorker:
    """Return a rollout worker with an engine; without `info`, everything is in this process."""
    if info is not None and plan.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = plan.devices[info.rank]  # before CUDA is in use
    agents: AgentProcesses | RemoteAgents | None = None
    if plan.agent is not None:  # its file is imported while the engine starts
        from rollouts.agents.remote import start_agents

        agents = start_agents(plan.agent)
    # The cores follow from the rank, which only this process knows.
    server = dict(enumerate(plan.rollout.servers)).get(0 if info is None else info.rank)
    engine, tokenizer, stops = build_engine(plan, replace(plan.engine, cores=list_cores(info), server=server))
    as_hf, config = replace(plan, engine_spec=resolve_engine("hf")), replace(plan.engine, cores=list_cores(info))
    judge = serve_policy(engine, tokenizer, plan.engine.max_model_len, plan.reward_functions.run.judge)
    if judge is not None:
        plan = plan.with_rewards(partial(address_judge, key=judge.key, urls=(judge.url,)))
    if info is not None:
        collect_seldom()
    return RolloutWorker(
        engine,
        tokenizer,
        load_env_class(plan.env_spec),
        make_rewarder(plan.reward, plan.reward_functions),
        reward=plan.reward,
        rollout=plan.rollout,
        seed=plan.seed,
        stops=stops,
        parser=make_parser(plan.rollout.tool_parser, tokenizer),
        max_prompt_tokens=plan.max_prompt_tokens,
        agents=agents,
        judge=judge,
        second=make_second(plan),
        opponent=build_opponent(plan.rollout, plan.model, config, lambda own: build_engine(as_hf, own)[0]),
        rank=0 if info is None else info.rank,
    )


def make_rewarder(reward: RewardConfig, functions: RewardPlan) -> Rewarder:
    """Return an engine's reward processes, with a share of the calls in flight."""
    share = share_concurrency(reward.max_concurrency, functions)
    return Rewarder(functions, reward.workers, reward.timeout_s, share)


def make_second(plan: RolloutPlan) -> SecondReward | None:
    """Return the second reward of an engine's evaluations, or None."""
    if plan.eval_reward is None or plan.eval_functions is None:
        return None
    return SecondReward(config=plan.eval_reward, rewards=make_rewarder(plan.eval_reward, plan.eval_functions))


def share_concurrency(of_run: int, functions: RewardPlan) -> int:
    """Return an engine's part of the calls in flight, at least 1."""
    return max(1, of_run // functions.run.engines)


def build_engine(plan: RolloutPlan, config: EngineConfig) -> tuple[Engine, ChatTokenizer, Stops]:
    """Return the engine of a plan with these settings, with the tokenizer and the stops used to build it."""
    tokenizer = make_tokenizer(plan.model, plan.data, skip_special_tokens=plan.rollout.skip_special_tokens)
    stops = Stops(tokenizer, plan.rollout.stop, plan.rollout.stop_token_ids)
    allowed_tokens = resolve_allowed_tokens(tokenizer, plan.rollout.allowed_tokens, stops.token_ids)
    engine = load_engine_class(plan.engine_spec)(
        replace(config, stop_token_ids=stops.token_ids, stop_strings=stops.strings, allowed_tokens=allowed_tokens)
    )
    return engine, tokenizer, stops


def share_for_engine(cfg: RLConfig | EvalConfig) -> Resources:
    """Return the resources of an engine: separate GPUs, or those that Ray gave to trainers (CUDA_VISIBLE_DEVICES)."""
    resources = share_machine(cfg, cfg.rollout.least_engines, gpus=cfg.rollout.tensor_parallel_size)
    return replace(resources, gpus=0) if shares_devices(cfg) or cfg.rollout.servers else resources


def plan_engine_role(cfg: RLConfig | EvalConfig, plan: RolloutPlan, run_folder: Path) -> Role:
    """Return the cluster resources of the engines. Engines may read weights or a model from the run folder."""
    by_files = plan.transports[:1] == ("disk",) and isinstance(cfg, RLConfig) and cfg.weight_sync.folder is None
    return Role(
        name=ENGINE_GROUP,
        n=cfg.rollout.least_engines,
        resources=share_for_engine(cfg),
        needs_run_folder=by_files
        or cfg.rollout.opponent_every is not None  # snapshots of the policy
        or Path(plan.engine.model_path).is_relative_to(run_folder),
    )


async def start_rollouts(
    cluster: Cluster | None, cfg: RLConfig | EvalConfig, plan: RolloutPlan
) -> Workers[RolloutWorker]:
    """Start the engines; return when all can take requests."""
    if cluster is None:
        return Local(build_worker(None, plan))
    least, most = cfg.rollout.least_engines, cfg.rollout.most_engines
    asked: dict[str, Any] = {"resources": share_for_engine(cfg), "timeout_s": cfg.timeout_s}
    if least == most:
        return await cluster.spawn(ENGINE_GROUP, least, build_worker, plan, **asked)
    kind = ElasticWorkers[RolloutWorker]
    elastic = await cluster.spawn_as(kind, ENGINE_GROUP, least, build_worker, plan, **asked)
    await elastic.add_slots(most - least)
    return elastic
