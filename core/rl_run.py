"""The parts of an RL step, in the order main_rl.py calls them, over the objects of one run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from algs import load_algorithm
from algs.base import PolicyGradient
from configs.load import Loaded
from configs.schema import RLConfig
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
from core.cluster import Workers, together
from core.describe import check_failures, describe, describe_drawn
from core.errors import RunStopped, UserError
from core.session import Session
from core.types import Group, Prompt, Scored
from data_feeds.packing import Plan, plan_update
from data_feeds.prompts import PromptFeed, load_prompts
from data_feeds.tokenizer import ChatTokenizer
from rewards import load_reward
from rollouts.publish import WeightSync
from trainers.lora import check_recipe
from trainers.models import check_model_folder, max_positions

REFILL_ROUNDS = 20
PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that can be read and refused before a process is started."""

    loaded: Loaded[RLConfig]
    alg: PolicyGradient
    tokenizer: ChatTokenizer
    prompts: PromptFeed
    held_out: PromptFeed | None
    rollouts: RolloutPlan


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
    load_reward(rollouts.reward_spec)
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
    limits = {"max_prompt_tokens": cfg.data.max_prompt_tokens, "seed": cfg.seed}
    prompts = load_prompts(cfg.data.train, tokenizer, key="data.train", **limits)
    held_out = None
    if cfg.data.eval is not None:
        held_out = load_prompts(cfg.data.eval, tokenizer, key="data.eval", limit=cfg.data.eval_rows, **limits)
    return Prepared(loaded=loaded, alg=alg, tokenizer=tokenizer, prompts=prompts, held_out=held_out, rollouts=rollouts)


async def start(prepared: Prepared, session: Session) -> Run:
    """Start trainers and engines; returns when both are ready."""
    cfg, feed = prepared.loaded.cfg, prepared.prompts
    feeds = {"data.train": feed} | ({"data.eval": prepared.held_out} if prepared.held_out else {})
    for key, read in feeds.items():
        if read.dropped:
            session.progress.say(
                f"{key}: {read.dropped} prompts have more than {cfg.data.max_prompt_tokens} tokens and are left out, "
                f"such as {read.example}"
            )
        session.facts[key] = {"used": len(read.prompts), "too_long": read.dropped}
    plan = plan_trainer(
        cfg, prepared.loaded.alg_spec, temperature=cfg.rollout.temperature, total_updates=cfg.total_updates
    )

    async def engines() -> Workers:
        session.engines = await start_rollouts(session.cluster, cfg, prepared.rollouts)
        return session.engines

    with session.clock.phase("start"):
        rollouts, trainers = await together([engines(), start_trainers(session.cluster, cfg, plan)])
    probe = prepared.tokenizer.render(feed.prompts[0].messages)[:PROBE_TOKENS]
    if len(probe) < 2:
        raise UserError("data.train: the first prompt has fewer than two tokens")
    return Run(
        cfg=cfg,
        alg=prepared.alg,
        prompts=feed,
        held_out=prepared.held_out,
        tokenizer=prepared.tokenizer,
        rollouts=rollouts,
        trainers=trainers,
        weights=weight_sync_of(cfg, trainers, rollouts, probe),
        session=session,
        tickets=count(),
    )


@dataclass
class Run:
    cfg: RLConfig
    alg: PolicyGradient
    prompts: PromptFeed
    held_out: PromptFeed | None
    tokenizer: ChatTokenizer
    rollouts: Workers
    trainers: Workers
    weights: WeightSync
    session: Session
    tickets: count[int]
    """Every prompt drawn has a number of its own; it seeds the sampling."""
    version: int = 0
    """Number of the last publish."""

    async def collect(self) -> tuple[list[Group], dict[str, float]]:
        """Exactly `groups_per_step` groups, and what was drawn for them in numbers.

        A group that the algorithm does not keep is replaced by another prompt's.
        """
        kept: list[Group] = []
        drawn: list[Group] = []
        with self.session.clock.phase("generate"):
            for _ in range(REFILL_ROUNDS):
                tickets = [next(self.tickets) for _ in range(self.cfg.groups_per_step - len(kept))]
                groups = await self._sample([(t, self.prompts.draw(t)) for t in tickets], self.cfg.group_size)
                drawn += groups
                check_failures(drawn, bearable_share=self.cfg.reward.max_failed_share)
                kept += [g for g in groups if self.alg.keep(g)]
                if len(kept) == self.cfg.groups_per_step:
                    return kept, describe_drawn(drawn)
        raise RunStopped(
            f"{REFILL_ROUNDS} rounds of sampling gave {len(kept)} of groups_per_step={self.cfg.groups_per_step} groups "
            "that the algorithm keeps: the reward may be the same for every answer"
        )

    async def _sample(self, tickets: list[tuple[int, Prompt]], group_size: int) -> list[Group]:
        """Dealt over the workers; groups in the order of the tickets."""
        n = len(self.rollouts)
        shards = await self.rollouts.map("collect", [(tickets[i::n], group_size) for i in range(n)])
        return [shards[k % n][k // n] for k in range(len(tickets))]

    async def score(self, groups: list[Group]) -> list[Group]:
        """Add the columns that credit and loss ask for, from the trainer's models as they are now.

        With one update per step the proximal policy is the one being trained, so only more need its column.
        """
        proximal: frozenset[Scored] = frozenset({"prox_logp"} if self.cfg.updates_per_step > 1 else ())
        columns = self.alg.needs | proximal
        if not columns:
            return groups
        with self.session.clock.phase("score"):
            plan = self._plan(groups)
            scored = await self.trainers.map("score", [(micro, columns) for micro in plan.batches()])
            filled = plan.with_columns(scored)
            return [[filled.get(id(s), s) for s in group] for group in groups]

    async def learn(self, groups: list[Group]) -> dict[str, float]:
        """Train on the groups of a step, dealt over its updates."""
        k = self.cfg.updates_per_step
        with self.session.clock.phase("train"):
            updates = [self._plan(groups[i::k]).batches() for i in range(k)]  # [update][rank][micro-batch]
            metrics = await self.trainers.map(
                "step", [([update[rank] for update in updates],) for rank in range(len(self.trainers))]
            )
        return {f"train/{name}": value for name, value in metrics[0].items()}

    def _plan(self, groups: list[Group]) -> Plan:
        return plan_update(
            groups,
            self.alg.loss_norm,
            self.cfg.trainer.micro_batch_tokens,
            ranks=len(self.trainers),
            horizon=self.cfg.rollout.max_new_tokens,
            padded=self.cfg.trainer.layout != "packed",
        )

    async def publish(self, version: int) -> dict[str, float]:
        with self.session.clock.phase("sync"):
            proof = await self.weights.publish(version)
        self.version = version
        return proof

    def log(self, step: int, groups: list[Group], metrics: dict[str, float]) -> None:
        numbers = describe(groups, version=step) | metrics
        self.session.folder.save_samples(step, groups, self.tokenizer.decode)
        self.session.log(step, numbers)

    async def evaluate(self, when: str) -> None:
        """Reward on the held-out prompts, one sample of each at the run's temperature; failures are counted apart."""
        if self.held_out is None:
            return
        with self.session.clock.phase("evaluate"):
            groups = await self._sample([(-1 - i, p) for i, p in enumerate(self.held_out.prompts)], 1)
        check_failures(groups, bearable_share=self.cfg.reward.max_failed_share)
        numbers = describe(groups, version=self.version)
        self.session.facts[when] = {k: v for k, v in numbers.items() if k.startswith("reward/") or "failed" in k}
        self.session.progress.say(f"{when}: held-out reward {numbers['reward/mean']:.3f} over {len(groups)} prompts")

    async def save(self) -> None:
        await self.session.save_model(self.trainers, self.tokenizer)
