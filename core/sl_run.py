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
from core.scoring import ReferenceAhead, with_scores
from core.session import Session
from core.types import Group
from data_feeds.feed import Feed, load_groups
from data_feeds.packing import Plan, plan_update
from data_feeds.tokenizer import ChatTokenizer
from trainers.models import check_model_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that can be read and refused before a process is started."""

    loaded: Loaded[SLConfig]
    alg: Algorithm
    tokenizer: ChatTokenizer
    rows: Feed[Group]
    held_out: Feed[Group] | None


def prepare(loaded: Loaded[SLConfig]) -> Prepared:
    """Raises UserError for whatever the user must mend."""
    cfg = loaded.cfg
    alg = load_algorithm(loaded.alg_spec, cfg.alg)
    if isinstance(alg, PolicyGradient):
        raise UserError(f"alg {cfg.alg.get('name') or cfg.alg['file']} learns from samples: run it with main_rl.py")
    if lacking := check_devices(cfg):
        raise UserError(lacking)
    check_model_folder(cfg.model.path)
    tokenizer = ChatTokenizer(cfg.model.path, cfg.data.template)
    rows = load_groups(cfg.data, "train", tokenizer, rows="conversations", seed=cfg.seed)
    held_out = None
    if cfg.data.eval is not None:
        held_out = load_groups(cfg.data, "eval", tokenizer, rows="conversations", seed=cfg.seed)
    return Prepared(loaded=loaded, alg=alg, tokenizer=tokenizer, rows=rows, held_out=held_out)


async def start(prepared: Prepared, session: Session) -> Run:
    cfg, rows = prepared.loaded.cfg, prepared.rows
    session.tell_data({"data.train": rows, "data.eval": prepared.held_out})
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
    rows: Feed[Group]
    held_out: Feed[Group] | None
    tokenizer: ChatTokenizer
    trainers: Workers
    session: Session
    reference_ahead: ReferenceAhead | None = None

    def draw(self, step: int) -> list[Group]:
        n = self.cfg.rows_per_step
        return [self.rows.draw(ticket) for ticket in range(step * n, (step + 1) * n)]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.session.log(step, metrics | self.rows.progress((step + 1) * self.cfg.rows_per_step))

    async def learn(self, groups: list[Group]) -> dict[str, float]:
        groups = await self._credited(groups)
        with self.session.clock.phase("train"):
            per_rank = self._plan(groups).batches()
            metrics = await self.trainers.map("step", [([micro],) for micro in per_rank])
        return {f"train/{name}": value for name, value in metrics[0].items()}

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
            with self.session.clock.phase("score"):
                groups = await with_scores(self.trainers, groups, self._plan(groups), columns)
        return self.alg.credit(groups)

    async def score_reference(self) -> None:
        """Once for all rows, by the model itself, before it is trained."""
        feeds = [self.rows] if self.held_out is None else [self.rows, self.held_out]
        with self.session.clock.phase("score"):
            groups = self.alg.arrange([group for feed in feeds for group in feed.all()])
            scored = await with_scores(self.trainers, groups, self._plan(groups), frozenset({"prox_logp"}))
        self.reference_ahead = ReferenceAhead.of(scored)

    def _plan(self, groups: list[Group]) -> Plan:
        return plan_update(
            groups,
            self.alg.loss_norm,
            self.cfg.trainer.micro_batch_tokens,
            ranks=len(self.trainers),
            horizon=self.cfg.data.max_prompt_tokens,
            padded=self.cfg.trainer.layout != "packed",
            whole_groups=self.alg.whole_groups,
        )

    async def save(self) -> None:
        await self.session.save_model(self.trainers, self.tokenizer)
