"""The parts of an RL step, in the order main_rl.py calls them, over the objects of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from algs import load_algorithm
from algs.base import PolicyGradient
from configs.load import Loaded
from configs.schema import RLConfig
from core.account import Account, bottleneck
from core.build import (
    RolloutPlan,
    check_devices,
    engine_class_of,
    environment_of,
    plan_rollouts,
    plan_trainer,
    start_rollouts,
    start_trainers,
    weight_sync_of,
)
from core.checkpoint import Checkpoint, Stand
from core.cluster import Workers, together
from core.describe import check_failures, describe, describe_drawn, describe_lag
from core.errors import RunStopped, UserError
from core.recipe import recipe_of, resume_from
from core.scoring import with_scores
from core.session import Session
from core.types import Group, Prompt, Scored
from data_feeds.feed import Feed, load_prompts
from data_feeds.packing import Plan, plan_update
from data_feeds.tokenizer import ChatTokenizer
from rewards import load_reward
from rollouts.buffer import ReplayBuffer, Schedule
from rollouts.generation import Generation
from rollouts.publish import WeightSync
from trainers.lora import check_recipe
from trainers.models import check_model_folder, max_positions

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


@dataclass
class Run:
    cfg: RLConfig
    alg: PolicyGradient
    prompts: Feed[Prompt]
    held_out: Feed[Prompt] | None
    tokenizer: ChatTokenizer
    rollouts: Workers
    trainers: Workers
    weights: WeightSync
    session: Session
    recipe: dict[str, Any]
    first_step: int
    """Of this run: what a resumed one has behind it is not done again."""
    generation: Generation
    pads: bool
    """Do the trainers pad rows? Only they know, having seen the model."""
    account: Account

    @property
    def steps(self) -> int:
        return self.cfg.steps

    @property
    def buffer(self) -> ReplayBuffer:
        return self.generation.buffer

    async def take(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """The step's groups, `groups_per_step` of them, and what was drawn for them in numbers."""
        with self.session.clock.phase("wait_for_data"):
            groups, drawn = await self.buffer.take(step)
        with self.session.clock.phase("check"):
            check_failures([d.group for d in drawn], bearable_share=self.cfg.reward.max_failed_share)
            if len(groups) < self.cfg.groups_per_step:
                raise RunStopped(
                    f"of {len(drawn)} groups, the algorithm keeps {len(groups)} of the groups_per_step="
                    f"{self.cfg.groups_per_step} that a step wants: the reward may be the same for every answer"
                )
            lag = describe_lag(groups, step=step, max_lag=self.cfg.max_lag)
            return groups, lag | describe_drawn(drawn) | self.prompts.progress(drawn[-1].ticket + 1)

    async def score(self, groups: list[Group]) -> list[Group]:
        """Add the columns that credit and loss ask for, from the trainer's models as they are now.

        With one update per step the proximal policy is the one being trained, so only more need its column.
        """
        proximal: frozenset[Scored] = frozenset({"prox_logp"} if self.cfg.updates_per_step > 1 else ())
        columns = self.alg.needs | proximal
        with self.session.clock.phase("logp"):
            return await with_scores(self.trainers, groups, self._plan(groups), columns)

    def credit(self, groups: list[Group]) -> list[Group]:
        """Every token's advantage, over all groups of the step."""
        with self.session.clock.phase("credit"):
            return self.alg.credit(groups)

    async def learn(self, groups: list[Group]) -> dict[str, float]:
        """Train on the groups of a step, dealt over its updates."""
        k = self.cfg.updates_per_step
        with self.session.clock.phase("train"):
            plans = [self._plan(groups[i::k]) for i in range(k)]
            updates = [plan.batches() for plan in plans]  # [update][rank][micro-batch]
            self.account.ask_engines()
            metrics = await self.trainers.map(
                "step", [([update[rank] for update in updates],) for rank in range(len(self.trainers))]
            )
        learnt = {f"train/{name}": value for name, value in metrics[0].items()}
        learnt["train/padding"] = sum(plan.padding for plan in plans) / k
        if "train/mismatch/ratio" in learnt:
            learnt["train/mismatch/ess"] = learnt["train/mismatch/ratio"] ** 2 / learnt.pop("train/mismatch/ratio_sq")
        return learnt

    def _plan(self, groups: list[Group]) -> Plan:
        return plan_update(
            groups,
            self.alg.loss_norm,
            self.cfg.trainer.micro_batch_tokens,
            ranks=len(self.trainers),
            horizon=self.cfg.rollout.max_new_tokens,
            padded=self.pads,
            whole_groups=self.alg.whole_groups,
        )

    async def publish(self, version: int) -> dict[str, float]:
        with self.session.clock.phase("sync"):
            proof = await self.weights.publish(version)
        self.buffer.publish(version)
        return proof

    async def publish_if_due(self, done: int, learnt: dict[str, float]) -> dict[str, float]:
        """After `done` steps, as the schedule says."""
        drift = learnt.get("train/mismatch/kl")  # there is none where no update of the step was made
        if not self.buffer.schedule.is_due(done, version=self.buffer.version, drift=drift):
            return {}
        return await self.publish(done)

    async def log(self, step: int, groups: list[Group], metrics: dict[str, float]) -> None:
        with self.session.clock.phase("log"):
            numbers = describe(groups, self.prompts.mixed) | metrics
            self.session.folder.save_samples(step, groups, self.tokenizer.decode)
            numbers |= await self.account.lap()
        numbers["rollout/asked_again"] = float(self.generation.lost)
        self.session.log(step, numbers)

    async def evaluate_if_due(self, done: int) -> dict[str, float]:
        every = self.cfg.eval_every
        return await self.evaluate(f"after step {done}") if every and done % every == 0 and done < self.steps else {}

    async def evaluate(self, when: str) -> dict[str, float]:
        """Reward on the held-out prompts, one sample of each at the run's temperature; failures are counted apart."""
        if self.held_out is None:
            return {}
        with self.session.clock.phase("evaluate"):
            prompts = self.held_out.all()
            groups = await together(self.generation.ask(-1 - i, prompt, 1) for i, prompt in enumerate(prompts))
        check_failures(groups, bearable_share=self.cfg.reward.max_failed_share)
        numbers = describe(groups)
        self.session.facts[when] = {k: v for k, v in numbers.items() if k.startswith("reward/") or "failed" in k}
        self.session.progress.say(f"{when}: held-out reward {numbers['reward/mean']:.3f} over {len(groups)} prompts")
        return {f"eval/{name}": value for name, value in self.session.facts[when].items()}

    async def checkpoint_if_due(self, step: int, metrics: dict[str, float]) -> None:
        if self.session.checkpoint_is_due(step + 1):
            stand = Stand(steps_done=step + 1, metrics=metrics, position=self.buffer.state(), recipe=self.recipe)
            await self.session.checkpoint(self.trainers, stand)

    async def save(self) -> None:
        """The model, and where the time went."""
        await self.session.save_model(self.trainers, self.tokenizer)
        devices = await self.account.close()
        self.session.facts["devices"] = devices
        self.session.facts["bottleneck"] = bottleneck(devices, max_lag=self.cfg.max_lag)
