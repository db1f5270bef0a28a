"""Local trainer and engine of a recipe in one process, to sample, score and send weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from algs.base import Algorithm
from analysis.doctor.target import Target
from configs.schema import RLConfig
from core.errors import UserError
from core.timing.clock import ActivityTimer
from core.timing.phases import ENGINE_ACTIVITIES
from core.types.arrays import Floats
from core.types.images import PlacedImage, as_argument
from core.types.kept_sets import KeptSets
from core.types.measures import ENTROPY
from core.types.routes import Routes, extend, fill_unknown
from core.types.samples import Batch, Policy, Prompt, Sample, ScoredColumn, make_sample
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.packing.batches import plan_update
from data_feeds.packing.columns import add_columns
from driver.rl.setup import Prepared
from driver.start.devices import list_cores, uses_gpus
from driver.start.rollouts import RolloutPlan, build_engine, plan_rollouts
from driver.start.weight_sync import choose_scope
from modeling.experts import list_blocks
from modeling.forward import forward
from modeling.layout_probe import layout_for
from modeling.route_counts import RouteReplay
from rollouts.engines.base import Completion, Engine, EngineLacks
from rollouts.registry import load_engine_class
from rollouts.seeds import make_seed
from rollouts.transcript import check_completion, find_places
from trainers.checkpoint.saved_policy import load_policy
from trainers.local import LocalTrainer, TorchLearner
from trainers.weight_sync.base import Probe
from trainers.weight_sync.fingerprint import describe_difference
from trainers.weight_sync.publisher import LocalWeightSync

SIBLINGS = 4
"""Sequences of a prompt."""
TOKENS_AT_ONCE = 4096
"""Tokens of a scoring pass, at most."""
Weights = list[Tensor]
"""Values of the parameters in training, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of the sampling, and the bound of a mismatch."""

    sequences: int
    tokens: int
    bound: float | None = None
    """Largest accepted mean difference in nats; None: the bound of the weight sync's probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request for a sequence of tokens."""

    prompt_ids: list[int]
    seed: int
    images: tuple[PlacedImage, ...] = ()
    """Images of the prompt."""


class Bench:
    """Local trainer, and engines that receive weights from it. `engine` is the open engine."""

    engine: Engine
    sync: LocalWeightSync

    def __init__(self, target: Target, prepared: Prepared, sampling: Sampling):
        self.cfg = in_one_process(prepared.loaded.cfg)
        self.plan: RolloutPlan = plan_rollouts(self.cfg)
        self.tokenizer: ChatTokenizer = prepared.tokenizer
        quantized = self.cfg.rollout.quantization is not None
        self.bound = sampling.bound or self.cfg.weight_sync.bound_probe(self.cfg.model.dtype, quantized=quantized)
        self.max_new_tokens = min(sampling.tokens, self.cfg.rollout.max_new_tokens)
        self.requests = self._make_requests(prepared, sampling.sequences)
        torch.manual_seed(self.cfg.seed)
        self.trainer = LocalTrainer(
            self.cfg.model,
            self.cfg.trainer,
            Algorithm(),
            temperature=self.cfg.rollout.temperature,
            allowed_tokens=prepared.allowed_tokens,
            total_updates=1,
            router_replay=self.cfg.rollout.router_replay,
        )
        self._watch_routes()
        if target.checkpoint is not None:
            load_policy(self.trainer.model, target.checkpoint)
        learner = self.trainer.policy
        assert isinstance(learner, TorchLearner)
        self.parameters = learner.parameters
        self.version = 0

    def _watch_routes(self) -> None:
        """Record routes also where the recipe does not, if engine and model can."""
        model = self.trainer.model
        if self.trainer.routes is not None or not list_blocks(model):
            return
        try:
            load_engine_class(self.plan.engine_spec).check_routes(
                self.cfg.rollout, on_gpu=uses_gpus(self.cfg), aborts=False
            )
            self.trainer.routes = RouteReplay(model, model, forces=False, device=self.trainer.device)
        except UserError:  # then routes are no cause that the doctor can tell
            return

    def _make_requests(self, prepared: Prepared, sequences: int) -> list[Request]:
        # rounded up, so that a last prompt with fewer siblings is drawn too
        prompts = [prepared.prompts.draw(i) for i in range(-(-sequences // SIBLINGS))]
        ids = [self.tokenizer.render(prompt.messages, prompt.tools) for prompt in prompts]
        images = [find_places(self.tokenizer, i, p.messages) for i, p in zip(ids, prompts, strict=True)]
        seeds = [make_seed(self.cfg.seed, i // SIBLINGS, i % SIBLINGS, 0) for i in range(sequences)]
        return [
            Request(prompt_ids=ids[i // SIBLINGS], seed=seed, images=images[i // SIBLINGS])
            for i, seed in enumerate(seeds)
        ]

    # --- weights

    def copy_weights(self) -> Weights:
        return [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def set_weights(self, weights: Weights) -> None:
        for parameter, value in zip(self.parameters, weights, strict=True):
            parameter.copy_(value)

    def open_engine(self, **changes: Any) -> None:
        """Start an engine of the plan, with some settings changed."""
        is_routed = self.trainer.routes is not None
        config = replace(self.plan.engine, cores=list_cores(None), routes=is_routed, **changes)
        self.engine, _, _ = build_engine(self.plan, config)
        self.sync = LocalWeightSync(
            self.trainer,
            self.engine,
            (self.trainer.timer, ActivityTimer(*ENGINE_ACTIVITIES)),
            Probe(token_ids=[], bound=self.bound),
            self.cfg.weight_sync.bucket_mib * 2**20,
            choose_scope(self.cfg, self.plan),
        )

    async def push_weights(self) -> str | None:
        """Send the trainer's weights to the engine; return how the engine's fingerprint differs, None if it does not.

        Raises UserError for an engine that does not accept weights from the same process.
        """
        try:
            sent = await self.sync.transfer(self.version)
        except EngineLacks as error:
            raise UserError(
                f"rollout.engine={self.cfg.rollout.engine}: {error}, and the doctor runs both in one: add "
                "load_weights, as in rollouts/engines/hf.py"
            ) from error
        # every transfer is a new version to the engine, even with unchanged weights
        self.version += 1
        return describe_difference(sent.checksums, await self.engine.read_fingerprint())

    # --- sequences

    async def sample(self, requests: Sequence[Request], *, together: bool = True) -> list[Sample]:
        """Sample all requests at once, or sequentially."""
        if together:
            done = await asyncio.gather(*(self._generate(request) for request in requests))
        else:
            done = [await self._generate(request) for request in requests]
        return [as_sample(r, [d]) for r, d in zip(requests, done, strict=True)]

    async def sample_by_token(self, requests: Sequence[Request], *, tokens: int) -> list[Sample]:
        """Sample all sequences at once, with a separate request for every token."""
        done: list[list[Completion]] = [[] for _ in requests]
        for turn in range(min(tokens, self.max_new_tokens)):
            # a request for one token ends with "length" unless that token ended the reply
            live = [i for i, parts in enumerate(done) if not parts or parts[-1].stop == "length"]
            steps = [
                Request(
                    prompt_ids=requests[i].prompt_ids + [t for part in done[i] for t in part.token_ids],
                    # a new seed for every token: with the same one each would be drawn with the same random number
                    seed=make_seed(requests[i].seed, turn, 0, 0),
                    images=requests[i].images,
                )
                for i in live
            ]
            parts = await asyncio.gather(*(self._generate(step, max_new_tokens=1) for step in steps))
            for i, part in zip(live, parts, strict=True):
                done[i].append(part)
        return [as_sample(r, parts) for r, parts in zip(requests, done, strict=True)]

    async def _generate(self, request: Request, max_new_tokens: int | None = None) -> Completion:
        tokens = max_new_tokens or self.max_new_tokens
        seen = as_argument(request.images)
        done = await self.engine.generate(request.prompt_ids, max_new_tokens=tokens, seed=request.seed, **seen)
        check_completion(done, max_new_tokens=tokens, is_truncated=self.cfg.rollout.is_truncated)
        return done

    def score(self, samples: Sequence[Sample], compute: Callable[[Batch], Policy] | None = None) -> list[Sample]:
        """Return the samples with the column prox_logp: the trainer's log-probabilities, or those of `compute`."""
        layout = self.trainer.describe_layout()
        plan = plan_update(
            # siblings form a group, so prefixes are shared as in training
            [list(samples[i : i + SIBLINGS]) for i in range(0, len(samples), SIBLINGS)],
            "token",
            min(TOKENS_AT_ONCE, self.cfg.trainer.micro_batch_tokens),
            padded=layout.padded,
            share_prefixes=layout.shares_prefixes,
        )
        [batches] = plan.batches()
        scored: list[dict[ScoredColumn, Floats]]
        if compute is None:
            scored = self.trainer.compute_columns(batches, frozenset({"prox_logp"}))
        else:
            with torch.no_grad():
                on_device = map(self.trainer.media.load, batches)
                scored = [{"prox_logp": compute(batch).logp.cpu().numpy()} for batch in on_device]
        filled = add_columns(plan, [scored])
        return [filled[id(sample)] for sample in samples]

    def run_model(
        self,
        batch: Batch,
        *,
        temperature: float | None = None,
        model: nn.Module | None = None,
        entropy: bool = False,
        in_chunks: bool = True,
    ) -> Policy:
        """Run the trainer's model, or another one, at the run's temperature or at another."""
        hf = self.trainer.model if model is None else model
        return forward(
            hf,
            hf,
            batch,
            layout=layout_for(self.cfg.trainer.layout, hf),
            temperature=temperature or self.cfg.rollout.temperature,
            logits_mib=self.cfg.trainer.logits_mib if in_chunks else 0,
            measures=ENTROPY if entropy else {},
            allowed_tokens=self.trainer.allowed_tokens,
        )


def in_one_process(cfg: RLConfig) -> RLConfig:
    """Return the configuration with a single trainer rank and engine, both in this process."""
    changes: dict[str, Any] = {
        # one process, because the toggles change the trainer's weights and the engine's settings directly
        "backend": "local",
        "trainer": cfg.trainer.model_copy(update={"ranks": 1, "sequence_parallel": 1, "deepspeed": {}}),
        "rollout": cfg.rollout.model_copy(update={"num_engines": 1, "tensor_parallel_size": 1}),
        "weight_sync": cfg.weight_sync.model_copy(update={"transport": "auto"}),
    }
    return cfg.model_copy(update=changes)


def as_sample(request: Request, parts: Sequence[Completion]) -> Sample:
    """Return the training sample of a prompt and its completion, given in one or more parts."""
    ids = [token for part in parts for token in part.token_ids]
    given, n = len(request.prompt_ids), len(ids)
    sets = [part.kept for part in parts if part.kept is not None]
    routes: Routes | None = None
    for part in parts:
        routes = routes if part.routes is None else fill_unknown(routes, part.routes)
    return make_sample(
        prompt=Prompt(id="doctor", messages=[]),
        token_ids=[*request.prompt_ids, *ids],
        action_mask=[False] * given + [True] * n,
        rollout_logp=[0.0] * given + [logp for part in parts for logp in part.logp],
        versions=[-1] * given + [version for part in parts for version in part.versions],
        images=request.images,
        kept=None if not sets else KeptSets.join([KeptSets.none(given), *sets]),
        routes=None if routes is None else extend(routes, given + n),
    )
