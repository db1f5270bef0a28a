"""The parts of an RL step, in the order main_rl.py calls them, over the objects of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from algs.base import PolicyGradient
from configs.schema import RLConfig
from core.errors import RunStopped
from core.types import Group, Prompt, Scored
from core.workers import Workers, together
from data_feeds.feed import Feed
from data_feeds.packing import Plan, plan_update
from data_feeds.tokenizer import ChatTokenizer
from driver.checkpoint import Stand
from driver.metrics import check_failures, describe, describe_drawn, describe_lag
from driver.scoring import with_scores
from driver.session import Session
from driver.time_account import Account, bottleneck
from rollouts.buffer import ReplayBuffer
from rollouts.generation import Generation
from weight_sync.base import WeightSync


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
