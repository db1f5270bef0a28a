"""The parts of a supervised step, in the order main_sl.py calls them, over the objects of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from algs import load_algorithm
from algs.base import Algorithm, PolicyGradient
from configs.schema import SLConfig
from core.errors import UserError
from core.types import Group
from core.workers import Workers
from data_feeds.feed import Feed, load_groups
from data_feeds.packing import Plan, plan_update
from data_feeds.tokenizer import ChatTokenizer
from driver.checkpoint import Checkpoint, Stand
from driver.devices import check_devices
from driver.load_recipe import Loaded
from driver.resume import recipe_of, resume_from
from driver.scoring import ReferenceAhead, with_scores
from driver.session import Session
from driver.trainer_factory import plan_trainer, start_trainers
from modeling.hf_config import check_model_folder
from modeling.lora import check_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that can be read and refused before a process is started."""

    loaded: Loaded[SLConfig]
    alg: Algorithm
    tokenizer: ChatTokenizer
    rows: Feed[Group]
    held_out: Feed[Group] | None
    recipe: dict[str, Any]
    checkpoint: Checkpoint | None
    """What the run goes on from."""


def prepare(loaded: Loaded[SLConfig]) -> Prepared:
    """Raises UserError for whatever the user must mend."""
    cfg = loaded.cfg
    alg = load_algorithm(loaded.alg_spec, cfg.alg)
    if isinstance(alg, PolicyGradient):
        raise UserError(f"alg {cfg.alg.get('name') or cfg.alg['file']} learns from samples: run it with main_rl.py")
    if lacking := check_devices(cfg):
        raise UserError(lacking)
    check_rows(cfg, alg)
    check_model_folder(cfg.model.path)
    check_recipe(cfg.model)
    tokenizer = ChatTokenizer(cfg.model.path, cfg.data.template)
    rows = load_groups(cfg.data, "train", tokenizer, rows=alg.rows, seed=cfg.seed)
    held_out = None
    if cfg.data.eval is not None:
        held_out = load_groups(cfg.data, "eval", tokenizer, rows=alg.rows, seed=cfg.seed)
    recipe = recipe_of(loaded, {})
    return Prepared(
        loaded=loaded,
        alg=alg,
        tokenizer=tokenizer,
        rows=rows,
        held_out=held_out,
        recipe=recipe,
        checkpoint=resume_from(loaded, recipe),
    )


def check_rows(cfg: SLConfig, alg: Algorithm) -> None:
    """Raise UserError where the recipe and what the algorithm learns from do not go together."""
    size, budget = cfg.data.max_prompt_tokens, cfg.trainer.micro_batch_tokens
    if alg.rows != "conversations" and 2 * size > budget:
        raise UserError(
            f"two answers of data.max_prompt_tokens={size} may have to lie together, and trainer.micro_batch_tokens="
            f"{budget} has no room for them: raise that to {2 * size}, or lower the first"
        )
    if alg.rows == "labelled" and cfg.rows_per_step < 2:
        raise UserError("rows_per_step=1 leaves no other row's answer to compare with: set it to 2 or more")
    if alg.trains == "reward" and cfg.model.lora is not None:
        raise UserError("model.lora: a reward model is trained whole, for its head is new: leave model.lora out")
    if cfg.reference == "ahead" and "ref_logp" not in alg.needs:
        raise UserError("reference: ahead, and this algorithm compares with no reference: leave reference out")
    if cfg.reference == "ahead" and alg.rows == "labelled":
        raise UserError(
            "reference: ahead cannot be: what this algorithm compares is paired anew at each step: leave reference out"
        )


async def start(prepared: Prepared, session: Session) -> Run:
    cfg, rows = prepared.loaded.cfg, prepared.rows
    session.tell_data({"data.train": rows, "data.eval": prepared.held_out})
    plan = plan_trainer(
        cfg,
        prepared.loaded.alg_spec,
        temperature=1.0,
        total_updates=cfg.total_updates,
        sources=tuple(rows.mixed),
        reference_ahead=cfg.reference == "ahead",
    )
    with session.clock.phase("start"):
        trainers = await start_trainers(session.cluster, cfg, plan)
        pads = await trainers.call(0, "pads")
    run = Run(
        cfg=cfg,
        alg=prepared.alg,
        rows=rows,
        held_out=prepared.held_out,
        tokenizer=prepared.tokenizer,
        trainers=trainers,
        session=session,
        recipe=prepared.recipe,
        pads=pads,
    )
    if cfg.reference == "ahead":
        await run.score_reference()  # while the model is still the one that was loaded
    run.first_step = await session.resume(trainers, prepared.checkpoint, prepared.recipe)
    return run


@dataclass
class Run:
    cfg: SLConfig
    alg: Algorithm
    rows: Feed[Group]
    held_out: Feed[Group] | None
    tokenizer: ChatTokenizer
    trainers: Workers
    session: Session
    pads: bool
    """Do the trainers pad rows? Only they know, having seen the model."""
    recipe: dict[str, Any]
    first_step: int = 0
    """Of this run: what a resumed one has behind it is not done again."""
    reference_ahead: ReferenceAhead | None = None

    def draw(self, step: int) -> list[Group]:
        n = self.cfg.rows_per_step
        return [self.rows.draw(ticket) for ticket in range(step * n, (step + 1) * n)]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.session.log(step, metrics | self.rows.progress((step + 1) * self.cfg.rows_per_step))

    async def learn(self, groups: list[Group]) -> dict[str, float]:
        groups = await self._credited(groups)
        with self.session.clock.phase("train"):
            plan = self._plan(groups, self.rows.mixed)
            metrics = await self.trainers.map("step", [([micro],) for micro in plan.batches()])
        return {f"train/{name}": value for name, value in metrics[0].items()} | {"train/padding": plan.padding}

    async def evaluate_if_due(self, step: int) -> dict[str, float]:
        every = self.cfg.eval_every
        if self.held_out is None or every == 0 or (step + 1) % every:
            return {}
        return await self._measure(self.held_out)

    async def evaluate(self, when: str) -> None:
        if self.held_out is None:
            return
        measured = await self._measure(self.held_out)
        self.session.facts[when] = measured
        said = [f"loss {measured['eval/loss']:.4f}"]
        if "eval/pair/accuracy" in measured:
            said.append(f"accuracy {measured['eval/pair/accuracy']:.3f}")
        self.session.progress.say(f"{when}: held-out {', '.join(said)} over {len(self.held_out.all())} rows")

    async def _measure(self, feed: Feed[Group]) -> dict[str, float]:
        """All rows as one update that is not made."""
        groups = await self._credited(feed.all())
        with self.session.clock.phase("evaluate"):
            per_rank = self._plan(groups).batches()
            metrics = await self.trainers.map("measure", [(micro,) for micro in per_rank])
        return {f"eval/{name}": value for name, value in metrics[0].items() if name != "tokens"}

    async def _credited(self, groups: list[Group]) -> list[Group]:
        """The rows as the algorithm learns from them, with the columns it asked for."""
        groups = self.alg.arrange(groups)
        columns = self.alg.needs
        if self.reference_ahead is not None:
            groups, columns = self.reference_ahead.fill(groups), columns - {"ref_logp"}
        if columns:
            with self.session.clock.phase("logp"):
                groups = await with_scores(self.trainers, groups, self._plan(groups), columns)
        return self.alg.credit(groups)

    async def score_reference(self) -> None:
        """Once for all rows, by the model itself, before it is trained."""
        feeds = [self.rows] if self.held_out is None else [self.rows, self.held_out]
        with self.session.clock.phase("logp"):
            groups = self.alg.arrange([group for feed in feeds for group in feed.all()])
            scored = await with_scores(self.trainers, groups, self._plan(groups), frozenset({"prox_logp"}))
        self.reference_ahead = ReferenceAhead.of(scored)

    def _plan(self, groups: list[Group], sources: Sequence[str] = ()) -> Plan:
        return plan_update(
            groups,
            self.alg.loss_norm,
            self.cfg.trainer.micro_batch_tokens,
            ranks=len(self.trainers),
            horizon=self.cfg.data.max_prompt_tokens,
            padded=self.pads,
            whole_groups=self.alg.whole_groups,
            sources=sources,
        )

    async def checkpoint_if_due(self, step: int, metrics: dict[str, float]) -> None:
        if self.session.checkpoint_is_due(step + 1):
            stand = Stand(steps_done=step + 1, metrics=metrics, position={}, recipe=self.recipe)
            await self.session.checkpoint(self.trainers, stand)

    async def save(self) -> None:
        await self.session.save_model(self.trainers, self.tokenizer)
