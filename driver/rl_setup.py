"""From a recipe to a Run: check everything, then start trainers and engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from algs import load_algorithm
from algs.base import PolicyGradient
from configs.schema import RLConfig
from core.errors import UserError
from core.types import Prompt
from core.workers import Workers, together
from data_feeds.feed import Feed, load_prompts
from data_feeds.tokenizer import ChatTokenizer
from driver.checkpoint import Checkpoint
from driver.devices import check_devices
from driver.load_recipe import Loaded
from driver.resume import recipe_of, resume_from
from driver.rl_run import Run
from driver.rollout_factory import RolloutPlan, plan_rollouts, start_rollouts
from driver.session import Session
from driver.time_account import Account
from driver.trainer_factory import plan_trainer, start_trainers
from driver.weight_sync_factory import weight_sync_of
from modeling.hf_config import check_model_folder, max_positions
from modeling.lora import check_recipe
from rewards import load_reward
from rollouts.buffer import ReplayBuffer, Schedule
from rollouts.generation import Generation
from rollouts.registry import engine_class_of, environment_of

PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that can be read and refused before a process is started."""

    loaded: Loaded[RLConfig]
    alg: PolicyGradient
    tokenizer: ChatTokenizer
    prompts: Feed[Prompt]
    held_out: Feed[Prompt] | None
    rollouts: RolloutPlan
    recipe: dict[str, Any]
    checkpoint: Checkpoint | None
    """What the run goes on from."""


def prepare(loaded: Loaded[RLConfig]) -> Prepared:
    """Raises UserError for whatever the user must mend."""
    cfg = loaded.cfg
    alg = load_algorithm(loaded.alg_spec, cfg.alg)
    if not isinstance(alg, PolicyGradient):
        raise UserError(f"alg {cfg.alg.get('name') or cfg.alg['file']} learns from given text: run it with main_sl.py")
    if alg.needs_siblings and cfg.group_size < 2:
        raise UserError("group_size is 1, and a group of one has no siblings to be compared with: set it to 2 or more")
    if lacking := check_devices(cfg):
        raise UserError(lacking)
    check_model_folder(cfg.model.path)
    check_recipe(cfg.model)
    positions = max_positions(cfg.model.path)
    if positions is not None and cfg.longest > positions:
        raise UserError(
            f"one sample may reach {cfg.longest} tokens (data.max_prompt_tokens + rollout.max_new_tokens), and "
            f"model.path={cfg.model.path} has room for {positions}: lower one of the two"
        )
    rollouts = plan_rollouts(cfg)
    load_reward(rollouts.reward_spec, cfg.reward.settings)
    environment_of(rollouts.env_spec, cfg.rollout.env)
    engine_class_of(rollouts.engine_spec)
    tokenizer = ChatTokenizer(cfg.model.path, cfg.data.template)
    for path in filter(None, alg.frozen.values()):
        check_model_folder(path, key="alg")
        if tokenizer.hf.get_vocab() != ChatTokenizer(path, "plain").hf.get_vocab():
            raise UserError(
                f"alg names the model {path}, whose vocabulary is not that of model.path={cfg.model.path}, so it "
                "cannot score the same tokens: take one with the same tokenizer"
            )
    prompts = load_prompts(cfg.data, "train", tokenizer, seed=cfg.seed)
    held_out = None
    if cfg.data.eval is not None:
        held_out = load_prompts(cfg.data, "eval", tokenizer, seed=cfg.seed)
    code = {"reward.fn": rollouts.reward_spec, "rollout.env": rollouts.env_spec, "rollout.engine": rollouts.engine_spec}
    recipe = recipe_of(loaded, code)
    return Prepared(
        loaded=loaded,
        alg=alg,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        rollouts=rollouts,
        recipe=recipe,
        checkpoint=resume_from(loaded, recipe),
    )


async def start(prepared: Prepared, session: Session) -> Run:
    """Start trainers and engines; returns when both are ready."""
    cfg, feed = prepared.loaded.cfg, prepared.prompts
    session.tell_data({"data.train": feed, "data.eval": prepared.held_out})
    plan = plan_trainer(
        cfg, prepared.loaded.alg_spec, temperature=cfg.rollout.temperature, total_updates=cfg.total_updates
    )

    async def engines() -> Workers:
        session.engines = await start_rollouts(session.cluster, cfg, prepared.rollouts)
        return session.engines

    with session.clock.phase("start"):
        rollouts, trainers = await together([engines(), start_trainers(session.cluster, cfg, plan)])
        pads = await trainers.call(0, "pads")
    probe = prepared.tokenizer.render(feed.all()[0].messages)[:PROBE_TOKENS]
    first_step = await session.resume(trainers, prepared.checkpoint, prepared.recipe)
    if len(probe) < 2:
        raise UserError("data.train: the first prompt has fewer than two tokens")
    schedule = schedule_of(cfg)
    if prepared.checkpoint is None:
        buffer = ReplayBuffer(schedule)
    else:
        buffer = ReplayBuffer.restored(prepared.checkpoint.stand.position, schedule, feed.draw, step=first_step)
    return Run(
        cfg=cfg,
        alg=prepared.alg,
        prompts=feed,
        held_out=prepared.held_out,
        tokenizer=prepared.tokenizer,
        rollouts=rollouts,
        trainers=trainers,
        weights=weight_sync_of(
            cfg, trainers, rollouts, probe, say=session.progress.say, facts=session.facts, folder=session.folder.path
        ),
        session=session,
        recipe=prepared.recipe,
        first_step=first_step,
        generation=Generation(
            rollouts,
            draw=feed.draw,
            keep=prepared.alg.keep,
            buffer=buffer,
            group_size=cfg.group_size,
            timeout_s=cfg.rollout.timeout_s,
        ),
        pads=pads,
        account=await Account.opened(session.clock, trainers=trainers, engines=rollouts),
    )


def schedule_of(cfg: RLConfig) -> Schedule:
    return Schedule(
        steps=cfg.steps,
        per_step=cfg.groups_per_step,
        max_lag=cfg.max_lag,
        publish_every=cfg.publish_every,
        publish_drift=cfg.publish_drift,
        reuse=cfg.reuse,
    )
