"""Setup of an RL run: check the recipe, then start trainers and engines."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from algs.base import PolicyGradient, accepts_group
from configs.eval_schema import EvalConfig
from configs.schema import RLConfig
from core.cluster.elastic_workers import ElasticWorkers
from core.cluster.ray_workers import Remote
from core.cluster.workers import Workers
from core.errors import UserError
from core.tasks import gather_fail_fast
from core.timing.deadlines import GROUP_TIMEOUT_GRACE_S, MEMBERSHIP_POLL_S
from core.timing.phases import Phase
from core.types.allowed_tokens import AllowedTokens
from core.types.batch import RowLayout
from core.types.samples import Prompt
from data_feeds.chat.template_args import check_template_args, make_tokenizer
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.chat.tool_parsing import check_parser
from data_feeds.feed import Feed, load_prompts
from driver.alg_state import restore_algorithm
from driver.checkpoint import Checkpoint
from driver.checks.engine import check_images, check_rounded, check_sampling, make_sampling
from driver.checks.engine_memory import check_engine_memory
from driver.checks.explain import estimate_memory
from driver.checks.hub_upload import check_hub_upload
from driver.checks.machines import claim_machines
from driver.checks.models import (
    check_policy,
    check_room,
    check_teacher_models,
    check_trainer,
    check_user_code,
)
from driver.checks.output_folder import check_output_folders
from driver.checks.shared_memory import check_colocation
from driver.checks.terms import check_given, check_judged
from driver.context import RunContext
from driver.load_recipe import Loaded, with_forms
from driver.records.engine_timers import EngineTimers
from driver.records.speed import describe_trainers
from driver.records.time_account import TimeBreakdown
from driver.records.trackers import check_trackers
from driver.resume import collect_settings, find_checkpoint_to_resume, pin_template_date
from driver.rl.colocation import make_colocation, make_judge_turns, offload_after_start
from driver.rl.evaluation import make_evaluation
from driver.rl.observers import ObserverPlan, RunObservers, StartedRun
from driver.rl.opponent import make_snapshots
from driver.rl.row_order import check_sampler, describe_sampler, make_buffer, make_sampled
from driver.rl.run import Run
from driver.rl.teachers import check_teacher_sources
from driver.run_inputs import hash_inputs
from driver.start.devices import check_devices, share_devices, shares_devices
from driver.start.judges import Judges, address_judge, make_key, name_judge_model, plan_judge_roles, start_judges
from driver.start.observers import plan_observers
from driver.start.opponent import name_opponent
from driver.start.rollouts import (
    RolloutPlan,
    check_reward_and_env,
    plan_engine_role,
    plan_rollouts,
    start_rollouts,
)
from driver.start.trainers import TrainerPlan, plan_trainer, plan_trainer_role, start_trainers
from driver.start.weight_sync import make_probe, make_weight_sync
from modeling.hf_config import check_model_folder
from rollouts.scheduling.availability import EngineAvailability
from rollouts.scheduling.buffer import FinishedGroup
from rollouts.scheduling.elastic_engines import Bounds, ElasticAvailability
from rollouts.scheduling.generation import Generation
from rollouts.scheduling.judge_turns import JudgeTurns
from rollouts.worker import RolloutWorker
from trainers.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Checked and loaded inputs of a run, before any process is started."""

    loaded: Loaded[RLConfig]
    alg: PolicyGradient
    tokenizer: ChatTokenizer
    prompts: Feed[Prompt]
    held_out: Feed[Prompt] | None
    rollouts: RolloutPlan
    allowed_tokens: AllowedTokens
    """Tokens that the policy may choose."""
    observers: dict[str, ObserverPlan]
    settings: dict[str, Any]
    checkpoint: Checkpoint | None
    """The checkpoint that the run resumes."""


def prepare(loaded: Loaded[RLConfig]) -> Prepared:
    """Check the recipe against model, data and code. Raises UserError for problems that the user must fix."""
    cfg, alg = loaded.cfg, loaded.alg
    # cheap checks first: loading the data takes longest, and the checks after it need the data
    if not isinstance(alg, PolicyGradient):
        raise UserError(f"alg {cfg.alg.get('name') or cfg.alg['file']} trains on given text: run it with main_sl.py")
    if alg.needs_siblings and cfg.group_size < 2:
        raise UserError("group_size is 1, and a group of one has no other sample to compare with: set it to 2 or more")
    if not alg.with_state(alg.state, step=cfg.steps - 1).trains_policy:
        raise UserError(f"steps={cfg.steps} are over before the policy is trained: raise steps, or lower critic_warmup")
    if lacking := check_devices(cfg):
        raise UserError(lacking)
    check_output_folders(cfg, alg)
    check_hub_upload(cfg)
    check_trackers(cfg.trackers, cfg.tracking)
    check_model_folder(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    check_trainer(cfg, alg)
    check_room(cfg)
    if cfg.placement == "colocate":
        check_colocation(cfg, estimate_memory(loaded))
    check_images(cfg)
    check_rounded(cfg.model, cfg.rollout)
    observers = plan_observers(loaded)
    rollouts = plan_rollouts(cfg)
    check_reward_and_env(cfg, rollouts)
    env_tools = rollouts.load_code()
    tokenizer = make_tokenizer(cfg.model, cfg.data, skip_special_tokens=cfg.rollout.skip_special_tokens)
    check_template_args(tokenizer, cfg.data)
    loaded = pin_template_date(loaded, tokenizer)
    cfg, rollouts = loaded.cfg, replace(rollouts, data=loaded.cfg.data)
    check_policy(cfg.model, tokenizer, cfg.rollout.opponent_folder, longest=cfg.longest_sample)
    check_engine_memory(cfg)
    allowed_tokens = check_sampling(cfg, tokenizer)
    check_teacher_models(alg, tokenizer, cfg.model, longest=cfg.longest_sample)
    check_user_code(cfg)
    sampling = make_sampling(cfg, allowed_tokens)
    prompts = load_prompts(cfg.data, "train", tokenizer, seed=cfg.seed, env_tools=env_tools, sampling=sampling)
    check_teacher_sources(alg.teachers, {prompt.source for prompt in prompts.all()})
    check_given(cfg, alg, prompts, rollouts.reward_functions)
    held_out = None
    if cfg.data.eval is not None:
        held_out = load_prompts(cfg.data, "eval", tokenizer, seed=cfg.seed, env_tools=env_tools)
        check_judged(held_out.all(), "data.eval", rollouts.reward_functions, rollouts.eval_functions)
    loaded = with_forms(loaded, prompts, held_out)
    has_tools = any(prompt.tools for feed in (prompts, held_out) if feed is not None for prompt in feed.all())
    check_parser(cfg.rollout.tool_parser, tokenizer, has_tools=has_tools or bool(env_tools))
    files = rollouts.files | {"data.sampler": check_sampler(cfg, prompts)}
    settings = collect_settings(loaded, files, hash_inputs(loaded, files, tokenizer, prompts))
    return Prepared(
        loaded=loaded,
        alg=alg,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        rollouts=rollouts,
        allowed_tokens=allowed_tokens,
        observers=observers,
        settings=settings,
        checkpoint=find_checkpoint_to_resume(loaded, settings),
    )


async def start(prepared: Prepared, context: RunContext) -> Run:
    """Start trainers and engines; return when both are ready."""
    cfg, feed = prepared.loaded.cfg, prepared.prompts
    context.report_data({"data.train": feed, "data.eval": prepared.held_out})
    plan = plan_trainer(
        cfg,
        prepared.alg,
        observers={key: observer.on_trainer for key, observer in prepared.observers.items()},
        allowed_tokens=prepared.allowed_tokens,
    )
    with context.clock.phase(Phase.START):
        trainers, engines, judges = await start_workers(prepared, context, plan)
    weights = make_weight_sync(
        cfg,
        trainers,
        engines,
        make_probe(cfg, prepared.tokenizer, feed.all()),
        rollouts=prepared.rollouts,
        say=context.console.say,
        facts=context.facts,
        folder=context.folder.path,
    )
    colocation = None
    if plan.shares_device:
        colocation = make_colocation(cfg, trainers, engines, weights, context.clock, judges)
        await colocation.give_to_trainers()
    with context.clock.phase(Phase.START):
        layout, context.facts["peak_tflops"] = await describe_trainers(trainers, cfg)
    context.report_layout(layout)
    # Colocated trainers were reloaded above: a checkpoint is loaded into their tensors.
    first_step = await context.resume(trainers, prepared.checkpoint, prepared.settings)
    availability = watch_engines(cfg, engines, context, judges)
    generation = make_generation(prepared, context, engines, availability, make_judge_turns(colocation))
    if prepared.checkpoint is not None:
        generation.judges.restore(prepared.checkpoint.state.metrics)
    run = Run(
        cfg=cfg,
        alg=await restore_algorithm(prepared.alg, trainers, prepared.checkpoint),
        prompts=feed,
        evaluation=make_evaluation(cfg, context, generation, held_out=prepared.held_out),
        tokenizer=prepared.tokenizer,
        trainers=trainers,
        weights=weights,
        colocation=colocation,
        context=context,
        settings=prepared.settings,
        first_step=first_step,
        steps_done=first_step,
        generation=generation,
        layout=layout,
        time=await TimeBreakdown.start(context.clock, trainers=trainers, engines=EngineTimers(engines, availability)),
        observers=start_observers(prepared, context, trainers, layout),
        snapshots=make_snapshots(
            cfg, context, prepared.tokenizer, trainers=trainers, engines=engines, checkpoint=prepared.checkpoint
        ),
    )
    generation.accept_group = run.accept_group  # by the algorithm of the step, which the run replaces
    return run


def make_generation(
    prepared: Prepared,
    context: RunContext,
    engines: Workers[RolloutWorker],
    availability: EngineAvailability,
    turns: JudgeTurns | None,
) -> Generation:
    """Return the background generation of groups. It also reports progress to the terminal."""
    cfg = prepared.loaded.cfg
    sampled = make_sampled(cfg, prepared.prompts)
    draw_prompt = prepared.prompts.draw if sampled is None else sampled.draw
    if sampled is not None:
        context.console.say(describe_sampler(sampled.sampler))
    buffer = make_buffer(cfg, prepared.checkpoint, draw_prompt, sampled)

    def show_progress(finished: FinishedGroup) -> None:
        tokens = sum(sample.n_sampled for sample in finished.group)
        context.console.count_group(done=buffer.n_collected, wanted=cfg.groups_per_step, tokens=tokens)

    return Generation(
        engines,
        # A ticket always draws the same prompt, so a resumed run can draw its groups again.
        draw_prompt=draw_prompt,
        accept_group=partial(accepts_group, prepared.alg),
        buffer=buffer,
        group_size=cfg.group_size,
        timeout_s=cfg.rollout.timeout_s,
        engines=availability,
        judge_budget=cfg.reward.judge_budget,
        turns=turns,
        waits_for_places=cfg.rollout.max_concurrency is not None,
        on_finished=show_progress,
    )


def start_observers(
    prepared: Prepared, context: RunContext, trainers: Workers[Trainer], layout: RowLayout
) -> RunObservers:
    """Return the driver observers that the recipe enables."""
    run = StartedRun(
        loaded=prepared.loaded,
        tokenizer=prepared.tokenizer,
        allowed_tokens=prepared.allowed_tokens,
        checkpoint=prepared.checkpoint,
        context=context,
        trainers=trainers,
        layout=layout,
    )
    return RunObservers([observer.start(run) for observer in prepared.observers.values()])


async def start_workers(
    prepared: Prepared, context: RunContext, plan: TrainerPlan
) -> tuple[Workers[Trainer], Workers[RolloutWorker], Judges | None]:
    """Start trainers and engines together; with colocation, start the engines after the trainers are offloaded.

    The engines of a judge start before those of the policy.
    """
    cfg, earlier = prepared.loaded.cfg, prepared.checkpoint
    if prepared.loaded.why_text:
        context.console.say(prepared.loaded.why_text)
    # a checkpoint is <run folder>/checkpoints/<step>
    resumed = None if earlier is None else earlier.folder.parents[1]
    rollouts = prepared.rollouts.in_folder(context.folder.path, resumed)
    run_folder, key = context.folder.path, make_key()
    roles = [plan_trainer_role(cfg), plan_engine_role(cfg, rollouts, run_folder), *plan_judge_roles(cfg, run_folder)]
    models = {"model.path": cfg.model.path} | name_judge_model(cfg) | name_opponent(cfg.rollout)
    await claim_machines(context, roles, models)

    async def start_engines(
        rollouts: RolloutPlan, gpus: Sequence[str] = ()
    ) -> tuple[Workers[RolloutWorker], Judges | None]:
        # the judge first, because the engines' reward processes need its address
        judges = await start_judges(context.cluster, cfg, context.console.say, key, gpus)
        plan = rollouts.with_rewards(partial(address_judge, key=key, urls=() if judges is None else judges.urls))
        # Stored at once, so that `close` reaches the engines even if the trainers fail to start.
        context.engines = await start_rollouts(context.cluster, cfg, plan)
        return context.engines, judges

    if plan.shares_device:
        trainers = await start_trainers(context.cluster, cfg, plan)
        # Before the engines start, because they measure the free memory of the device then.
        gpus = await offload_after_start(trainers)
        per_engine = cfg.rollout.tensor_parallel_size
        rollouts = replace(rollouts, devices=share_devices(gpus, per_engine=per_engine))
        return trainers, *await start_engines(rollouts, gpus)
    calls: list[Coroutine[Any, Any, Any]] = [start_trainers(context.cluster, cfg, plan), start_engines(rollouts)]
    # Side by side, because both load the model, and neither needs the other.
    trainers, (engines, judges) = await gather_fail_fast(calls)
    return trainers, engines, judges


def watch_engines(
    cfg: RLConfig | EvalConfig, engines: Workers[RolloutWorker], context: RunContext, judges: Judges | None = None
) -> EngineAvailability:
    """Return the engine availability: elastic, restarting, or fixed for colocated and in-process engines.

    The judge's engines are restarted beside it.
    """
    rollout = cfg.rollout
    if isinstance(engines, ElasticWorkers):
        bounds = Bounds(
            least=rollout.least_engines,
            most=rollout.most_engines,
            few_s=cfg.timeout_s,
            leave_s=rollout.timeout_s + GROUP_TIMEOUT_GRACE_S,
        )
        elastic = ElasticAvailability(bounds, engines, budget=rollout.restarts, say=context.console.say)
        elastic.open_slots()
        elastic.start_watch(engines.find_leaving, every_s=MEMBERSHIP_POLL_S)
        context.availability = elastic
    else:
        # A new process of a colocated engine would be awake while the trainers use the device.
        restart = engines.restart if isinstance(engines, Remote) and not shares_devices(cfg) else None
        context.availability = EngineAvailability(
            len(engines), restart=restart, budget=rollout.restarts, say=context.console.say
        )
    if judges is not None:
        context.availability.run_beside(judges.watch)
    return context.availability
