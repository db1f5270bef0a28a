"""The parts of a supervised step, in the order main_sl.py calls them, over the objects of one run."""

from __future__ import annotations

from dataclasses import dataclass

from algs import load_algorithm
from algs.base import Algorithm, PolicyGradient
from configs.load import Loaded
from configs.schema import SLConfig
from core.build import check_devices, plan_trainer, start_trainers
from core.cluster import Workers
from core.errors import UserError
from core.session import Session
from core.types import Group
from data_feeds.chats import ChatFeed, load_chats
from data_feeds.packing import Plan, plan_update
from data_feeds.tokenizer import ChatTokenizer
from trainers.lora import check_recipe
from trainers.models import check_model_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that can be read and refused before a process is started."""

    loaded: Loaded[SLConfig]
    alg: Algorithm
    tokenizer: ChatTokenizer
    rows: ChatFeed
    held_out: ChatFeed | None


def prepare(loaded: Loaded[SLConfig]) -> Prepared:
    """Raises UserError for whatever the user must mend."""
    cfg = loaded.cfg
    alg = load_algorithm(loaded.alg_spec, cfg.alg)
    if isinstance(alg, PolicyGradient):
        raise UserError(f"alg {cfg.alg.get('name') or cfg.alg['file']} learns from samples: run it with main_rl.py")
    if lacking := check_devices(cfg):
        raise UserError(lacking)
    check_model_folder(cfg.model.path)
    check_recipe(cfg.model)
    tokenizer = ChatTokenizer(cfg.model.path, cfg.data.template)
    limits = {"max_tokens": cfg.data.max_prompt_tokens, "seed": cfg.seed}
    rows = load_chats(cfg.data.train, tokenizer, key="data.train", **limits)
    held_out = None
    if cfg.data.eval is not None:
        held_out = load_chats(cfg.data.eval, tokenizer, key="data.eval", limit=cfg.data.eval_rows, **limits)
    return Prepared(loaded=loaded, alg=alg, tokenizer=tokenizer, rows=rows, held_out=held_out)


async def start(prepared: Prepared, session: Session) -> Run:
    cfg, rows = prepared.loaded.cfg, prepared.rows
    left_out = {"too_long": rows.rows.dropped, "no_reply": rows.no_reply}
    session.facts["rows"] = {"used": len(rows.samples), **left_out}
    if any(left_out.values()):
        session.progress.say(f"data.train: {len(rows.samples)} rows are used; left out: {left_out}")
    plan = plan_trainer(cfg, prepared.loaded.alg_spec, temperature=1.0, total_updates=cfg.total_updates)
    with session.clock.phase("start"):
        trainers = await start_trainers(session.cluster, cfg, plan)
    return Run(
        cfg=cfg,
        alg=prepared.alg,
        rows=rows,
        held_out=prepared.held_out,
        tokenizer=prepared.tokenizer,
        trainers=trainers,
        session=session,
    )


@dataclass
class Run:
    cfg: SLConfig
    alg: Algorithm
    rows: ChatFeed
    held_out: ChatFeed | None
    tokenizer: ChatTokenizer
    trainers: Workers
    session: Session

    async def learn(self, groups: list[Group]) -> dict[str, float]:
        with self.session.clock.phase("train"):
            per_rank = self._plan(groups).batches()
            metrics = await self.trainers.map("step", [([micro],) for micro in per_rank])
        return {f"train/{name}": value for name, value in metrics[0].items()}

    async def evaluate_if_due(self, step: int) -> dict[str, float]:
        every = self.cfg.eval_every
        if self.held_out is None or every == 0 or (step + 1) % every:
            return {}
        return {"eval/loss": await self._loss(self.held_out)}

    async def evaluate(self, when: str) -> None:
        if self.held_out is None:
            return
        loss = await self._loss(self.held_out)
        self.session.facts[when] = {"eval/loss": loss}
        self.session.progress.say(f"{when}: held-out loss {loss:.4f} over {len(self.held_out.samples)} rows")

    async def _loss(self, feed: ChatFeed) -> float:
        with self.session.clock.phase("evaluate"):
            per_rank = self._plan(feed.all()).batches()
            metrics = await self.trainers.map("measure", [(micro,) for micro in per_rank])
        return metrics[0]["loss"]

    def _plan(self, groups: list[Group]) -> Plan:
        return plan_update(
            groups,
            self.alg.loss_norm,
            self.cfg.trainer.micro_batch_tokens,
            ranks=len(self.trainers),
            horizon=self.cfg.data.max_prompt_tokens,
            padded=self.cfg.trainer.layout != "packed",
        )

    async def save(self) -> None:
        await self.session.save_model(self.trainers, self.tokenizer)
