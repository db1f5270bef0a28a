"""Supervised run: preparation, and the calls of a training step in the order of main_sl.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from algs.base import Algorithm, PolicyGradient, assign_advantages
from algs.measures import plan_measures
from algs.totals import prepare_update
from configs.schema import SLConfig
from core import metrics as names
from core.cluster.workers import Workers, copy_to_groups
from core.errors import RunStopped, UserError
from core.timing.phases import Phase
from core.types.arrays import Floats
from core.types.batch import RowLayout
from core.types.measures import list_teachers
from core.types.samples import Group
from data_feeds.chat.template_args import check_template_args, make_tokenizer
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import Feed, load_groups
from data_feeds.packing.batches import Plan, plan_update
from driver.alg_state import measure_algorithm, move_algorithm, restore_algorithm, state_to_json
from driver.checkpoint import Checkpoint, RunState
from driver.checks.hub_upload import check_hub_upload
from driver.checks.machines import claim_machines
from driver.checks.models import check_policy, check_teacher_models, check_trainer, check_user_code
from driver.checks.output_folder import check_output_folders
from driver.context import RunContext
from driver.load_recipe import Loaded, with_forms
from driver.records.rollout_metrics import name_train_metrics
from driver.records.run_result import name_start
from driver.records.speed import describe_trainers, read_tflops
from driver.records.trackers import check_trackers
from driver.resume import collect_settings, find_checkpoint_to_resume, pin_template_date
from driver.rl.scoring import add_ref_logp, compute_columns, index_reference
from driver.rl.teachers import Reader, check_teacher_sources, score_groups
from driver.run_inputs import hash_inputs
from driver.start.devices import check_devices
from driver.start.observers import observe_sources
from driver.start.trainers import plan_trainer, plan_trainer_role, start_trainers
from modeling.hf_config import check_model_folder
from trainers.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Checked and loaded inputs of a run, before any process is started."""

    loaded: Loaded[SLConfig]
    """Recipe with `epochs` converted to `steps`."""
    alg: Algorithm
    tokenizer: ChatTokenizer
    rows: Feed[Group]
    held_out: Feed[Group] | None
    settings: dict[str, Any]
    checkpoint: Checkpoint | None
    """The checkpoint that the run resumes."""


def prepare(loaded: Loaded[SLConfig]) -> Prepared:
    """Check the recipe against model, data and code. Raises UserError for problems that the user must fix."""
    cfg, alg = loaded.cfg, loaded.alg
    if isinstance(alg, PolicyGradient):
        raise UserError(f"alg {cfg.alg.get('name') or cfg.alg['file']} trains on samples: run it with main_rl.py")
    if lacking := check_devices(cfg):
        raise UserError(lacking)
    check_output_folders(cfg, alg)
    check_hub_upload(cfg)
    check_trackers(cfg.trackers, cfg.tracking)
    check_rows(cfg, alg)
    trusts = cfg.model.trust_remote_code
    check_model_folder(cfg.model.path, trust_remote_code=trusts)
    check_trainer(cfg, alg)
    tokenizer = make_tokenizer(cfg.model, cfg.data)
    check_template_args(tokenizer, cfg.data)
    loaded = pin_template_date(loaded, tokenizer)
    cfg = loaded.cfg
    check_policy(cfg.model, tokenizer)
    check_teacher_models(alg, tokenizer, cfg.model)
    check_user_code(cfg)
    rows = load_groups(cfg.data, "train", tokenizer, rows=alg.rows, seed=cfg.seed)
    if cfg.precompute_ref_logp and (lazy := [source.name for source in rows.sources if source.is_lazy]):
        raise UserError(f"precompute_ref_logp computes all rows before the start, and {lazy[0]} is lazy: leave it out")
    check_teacher_sources(alg.teachers, {group[0].prompt.source for group in rows.all()})
    check_groups(cfg, alg, rows)
    held_out = None
    if cfg.data.eval is not None:
        held_out = load_groups(cfg.data, "eval", tokenizer, rows=alg.rows, seed=cfg.seed)
        check_groups(cfg, alg, held_out)
    loaded = with_forms(loaded, rows, held_out)
    # Only after loading is the number of valid rows known, and so the steps of `epochs`.
    loaded = replace(loaded, cfg=loaded.cfg.with_steps(rows.rows))
    settings = collect_settings(loaded, {}, hash_inputs(loaded, {}, tokenizer, rows))
    return Prepared(
        loaded=loaded,
        alg=alg,
        tokenizer=tokenizer,
        rows=rows,
        held_out=held_out,
        settings=settings,
        checkpoint=find_checkpoint_to_resume(loaded, settings),
    )


def check_groups(cfg: SLConfig, alg: Algorithm, rows: Feed[Group]) -> None:
    """Raise UserError for a row whose completions, which the loss compares, are too long for one micro-batch."""
    for group in rows.all() if alg.whole_groups else ():
        try:
            # with shared prefixes, the least that a group can take
            plan_update(
                *([group], alg.loss_norm, cfg.trainer.micro_batch_tokens),
                padded=False,
                share_prefixes=True,
                whole_groups=True,
            )
        except RunStopped as error:
            raise UserError(f"row {group[0].prompt.id}: {error}") from error


def check_rows(cfg: SLConfig, alg: Algorithm) -> None:
    """Raise UserError if the recipe does not fit the algorithm's kind of rows."""
    size, budget = cfg.data.max_tokens, cfg.trainer.micro_batch_tokens
    # The loss of a pair needs both completions in one forward pass.
    if alg.rows != "conversations" and 2 * size > budget:
        raise UserError(
            f"two completions of data.max_tokens={size} may have to be in one micro-batch, and trainer."
            f"micro_batch_tokens={budget} has no room for them: raise that to {2 * size}, or lower the first"
        )
    if alg.rows == "unpaired" and cfg.rows_per_step < 2:
        raise UserError("rows_per_step=1 leaves no other row's completion to compare with: set it to 2 or more")
    if alg.model_kind == "reward" and cfg.model.lora is not None:
        raise UserError("model.lora: a reward model is trained whole, because its head is new: leave model.lora out")
    if cfg.precompute_ref_logp and "ref_logp" not in alg.required_columns:
        raise UserError("precompute_ref_logp is true, and this algorithm uses no reference: leave it out")
    if any(t.moves or t.prompt is not None for t in alg.teachers.values()):
        raise UserError("alg has a teacher that follows the policy or has a prompt: run it with main_rl.py")
    reads_reference = "ref_logp" in list_teachers(alg.measures) or "ref_logp" in plan_measures(alg).columns
    if cfg.precompute_ref_logp and reads_reference:
        raise UserError(
            "precompute_ref_logp keeps one number per token, and this algorithm reads the reference's distribution: "
            "leave it out"
        )
    if cfg.precompute_ref_logp and alg.rows == "unpaired":
        raise UserError(
            "precompute_ref_logp cannot be true: this algorithm pairs prompts and completions again at each step: "
            "leave it out"
        )


async def start(prepared: Prepared, context: RunContext) -> Run:
    """Start the trainers; return when they have loaded their models."""
    cfg, rows = prepared.loaded.cfg, prepared.rows
    context.report_data({"data.train": rows, "data.eval": prepared.held_out})
    plan = plan_trainer(cfg, prepared.alg, observers=observe_sources(rows.mixed))
    with context.clock.phase(Phase.START):
        await claim_machines(context, [plan_trainer_role(cfg)], {"model.path": cfg.model.path})
        trainers = await start_trainers(context.cluster, cfg, plan)
        layout, context.facts["peak_tflops"] = await describe_trainers(trainers, cfg)
    context.report_layout(layout)
    run = Run(
        cfg=cfg,
        alg=prepared.alg,
        rows=rows,
        held_out=prepared.held_out,
        tokenizer=prepared.tokenizer,
        trainers=trainers,
        context=context,
        settings=prepared.settings,
        layout=layout,
    )
    if cfg.precompute_ref_logp:
        await run.compute_reference()  # before a checkpoint is loaded: the reference is the initial model
    run.first_step = await context.resume(trainers, prepared.checkpoint, prepared.settings)
    run.alg = await restore_algorithm(run.alg, trainers, prepared.checkpoint)
    return run


@dataclass
class Run:
    """Supervised or preference run, with trainers and data."""

    cfg: SLConfig
    alg: Algorithm
    """The algorithm of the next step: each step replaces it by a copy with another state."""
    rows: Feed[Group]
    held_out: Feed[Group] | None
    tokenizer: ChatTokenizer
    trainers: Workers[Trainer]
    context: RunContext
    layout: RowLayout
    """Layout of the trainers' rows, which depends on the loaded model."""
    settings: dict[str, Any]
    """Settings that a resumed run must share with this one; see driver/resume.py."""
    first_step: int = 0
    """First step to run; a resumed run does not repeat earlier ones."""
    reference: dict[str, Floats] | None = None
    """Precomputed reference log-probabilities, by the hash of the sample."""

    def remaining_steps(self) -> Iterator[int]:
        """Yield the steps that the run makes; `stop_when` may end them early."""
        return self.context.count_steps(self.first_step)

    def draw_rows(self, step: int) -> list[Group]:
        """Return the rows of a step."""
        n = self.cfg.rows_per_step
        # Rows depend on the step alone, so a resumed run needs no data position.
        groups = [self.rows.draw(ticket) for ticket in range(step * n, (step + 1) * n)]
        if step + 1 < self.cfg.n_steps:
            self.rows.prepare(range((step + 1) * n, (step + 2) * n))  # while the trainers work on these
        return groups

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the step's metrics."""
        self.context.log(step, metrics | self.rows.count_draws((step + 1) * self.cfg.rows_per_step))

    async def train(self, groups: list[Group]) -> dict[str, float]:
        """Make a single update on the rows of a step."""
        groups = await self._with_advantages(groups)
        with self.context.clock.phase(Phase.TRAIN):
            plan = self._plan(groups, self.rows.mixed)
            batches = plan.batches()
            # one update: [rank][update][micro-batch] with a single update
            shards = copy_to_groups([[micro] for micro in batches], len(self.trainers))
            # Every rank returns the metrics of the whole step.
            measured, *_ = await self.trainers.scatter(Trainer.step, shards)
            speed = await read_tflops(self.trainers)
            of_plan = {names.TRAIN_PADDING: plan.padding, names.TRAIN_SHARED: plan.measure_shared(batches)}
        metrics = name_train_metrics(measured) | of_plan | speed | measure_algorithm(self.alg)
        self.alg = await move_algorithm(self.alg, self.trainers, groups, measured)
        return metrics

    async def evaluate_if_due(self, step: int) -> dict[str, float]:
        """Measure the held-out rows after every `eval_every` steps."""
        every = self.cfg.eval_every
        if self.held_out is None or every == 0 or (step + 1) % every:
            return {}
        return await self._measure(self.held_out)

    async def evaluate(self, when: str) -> None:
        """Measure the held-out rows and show the loss."""
        if self.held_out is None:
            return
        measured = await self._measure(self.held_out)
        when = name_start(when, self.first_step)
        self.context.facts[when] = measured
        self.context.log_evaluation(self.context.facts.get("steps_done", self.first_step), measured)
        shown = [f"loss {measured[names.EVAL_LOSS]:.4f}"]
        if names.EVAL_PAIR_ACCURACY in measured:
            shown.append(f"accuracy {measured[names.EVAL_PAIR_ACCURACY]:.3f}")
        self.context.console.say(f"{when}: held-out {', '.join(shown)} over {len(self.held_out.all())} rows")

    async def _measure(self, feed: Feed[Group]) -> dict[str, float]:
        """Return loss and metrics over all rows, without an update."""
        groups = await self._with_advantages(feed.all())
        with self.context.clock.phase(Phase.EVALUATE):
            shards = copy_to_groups(self._plan(groups).batches(), len(self.trainers))
            measured, *_ = await self.trainers.scatter(Trainer.measure_loss, shards)
        return {names.EVAL.format(name): value for name, value in measured.items() if name != "tokens"}

    async def _with_advantages(self, groups: list[Group]) -> list[Group]:
        groups = self.alg.prepare_groups(groups)
        columns = self.alg.required_columns
        if self.reference is not None:
            groups, columns = add_ref_logp(groups, self.reference), columns - {"ref_logp"}
        if columns:
            reader = Reader(cfg=self.cfg, tokenizer=self.tokenizer, plan=self._plan, plan_rows=self._plan)
            with self.context.clock.phase(Phase.LOGP):
                groups = await score_groups(self.trainers, groups, columns, teachers=self.alg.teachers, reader=reader)
        return prepare_update(self.alg, assign_advantages(self.alg, groups))  # a step is a single update

    async def compute_reference(self) -> None:
        """Compute reference log-probabilities of all rows with the untrained model."""
        feeds = [self.rows] if self.held_out is None else [self.rows, self.held_out]
        with self.context.clock.phase(Phase.LOGP):
            groups = self.alg.prepare_groups([group for feed in feeds for group in feed.all()])
            # The untrained model is the reference, so its own log-probabilities serve, without a second model.
            filled = await compute_columns(self.trainers, groups, self._plan(groups), frozenset({"prox_logp"}))
        self.reference = index_reference(filled)

    def _plan(self, groups: list[Group], sources: Sequence[str] = ()) -> Plan:
        return plan_update(
            groups,
            self.alg.loss_norm,
            self.cfg.trainer.micro_batch_tokens,
            ranks=self.cfg.trainer.data_parallel_size,
            horizon=self.cfg.data.max_tokens,
            padded=self.layout.padded,
            share_prefixes=self.layout.shares_prefixes,
            whole_groups=self.alg.whole_groups,
            sources=sources,
            terms=self.alg.terms,
        )

    async def checkpoint_if_due(self, step: int, metrics: dict[str, float]) -> None:
        """Write a checkpoint after every `checkpoint.every` steps."""
        if self.context.checkpoint_is_due(step + 1):
            state = RunState(
                steps_done=step + 1,
                metrics=metrics,
                position={},
                recipe=self.settings,
                alg_state=state_to_json(self.alg),
            )
            await self.context.write_checkpoint(self.trainers, self.tokenizer, state)

    async def save(self) -> None:
        """Write the trained model."""
        await self.context.save_model(self.trainers, self.tokenizer, self.alg)
