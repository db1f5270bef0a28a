"""A model of the zoo with its folder, trainers on it, and samples for an update."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from algs.grpo import GRPO
from configs.sync_schema import WeightSyncConfig
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.types.routes import RouterReplay
from core.types.samples import Batch, Group, Prompt, Sample, make_sample
from data_feeds.packing.batches import micro_batches
from rollouts.engines.base import EngineConfig
from tools.zoo.models import BFLOAT16, VOCABULARY, make_model
from trainers.local import LocalTrainer
from trainers.trainer import Trainer
from trainers.weight_sync.base import Probe

BUCKET_BYTES = 200_000
"""Size of a bucket: a dozen for each model, and no tensor of all experts fits one."""
LENGTHS = ((31, 9), (12, 40), (70, 20))
"""Tokens of prompt and reply, by group."""


class StageFailed(Exception):
    """Failure of a stage whose calls all succeeded: their results are wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Model that the stages check."""

    name: str
    folder: Path
    """Folder for everything that is written."""

    @property
    def path(self) -> str:
        return str(self.folder / "model")

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.name in BFLOAT16 else "float32"

    @property
    def bound(self) -> float:
        """Largest mean difference of log-probabilities after a sync, in nats: the default of a run."""
        return WeightSyncConfig().bound_probe(self.dtype)

    @property
    def probe(self) -> Probe:
        return Probe(token_ids=make_tokens(96, seed=3), bound=self.bound)

    def make(self) -> None:
        """Write the model."""
        make_model(self.name, Path(self.path), dtype=getattr(torch, self.dtype))

    def make_settings(self, **keys: Any) -> tuple[ModelConfig, TrainerConfig, GRPO]:
        """Return the arguments of a trainer.

        keys: path, dtype, lora and attention are of `model`, the others of `trainer`.
        """
        own = {key: keys.pop(key) for key in ("path", "dtype", "lora", "attention") if key in keys}
        model = ModelConfig(**{"path": self.path, "dtype": self.dtype} | own)
        return model, TrainerConfig(**{"lr": 1e-2, "micro_batch_tokens": 300} | keys), GRPO()

    def make_trainer(self, *, router_replay: RouterReplay = "off", **keys: Any) -> LocalTrainer:
        settings = self.make_settings(**keys)
        return LocalTrainer(*settings, temperature=1.0, total_updates=10, router_replay=router_replay)

    def make_batches(self, trainer: Trainer, *, groups: list[Group] | None = None, ranks: int = 1) -> list[list[Batch]]:
        """Return the micro-batches of one update, by rank. Collective, where the trainer's forward pass is.

        groups: None are those of the trainer.
        """
        layout = trainer.describe_layout()
        how = {"padded": layout.padded, "share_prefixes": layout.shares_prefixes}
        return micro_batches(groups or make_groups(trainer), "token", 300, ranks=ranks, **how)

    def engine_config(self, *, path: str | None = None, **settings: Any) -> EngineConfig:
        small = {"temperature": 1.0, "max_model_len": 256, "stop_token_ids": [2], "kv_cache_gib": 0.1}
        return EngineConfig(model_path=path or self.path, dtype=self.dtype, **small | settings)


def make_tokens(n: int, *, seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, VOCABULARY), k=n)


def make_groups(trainer: Trainer) -> list[Group]:
    """Return samples of two for every prompt, with the trainer's log-probabilities and random advantages."""
    chance = random.Random(0)
    groups: list[Group] = []
    for number, (prompt, reply) in enumerate(LENGTHS):
        group: Group = []
        for sibling in range(2):
            ids = make_tokens(prompt, seed=number) + make_tokens(reply, seed=10 * (number + 1) + sibling)
            logp = trainer.probe(ids)[prompt - 1 :]
            group.append(make_reply(str(number), ids, logp, advantage=chance.gauss(0, 1)))
        groups.append(group)
    return groups


def make_reply(prompt_id: str, ids: list[int], logp: list[float], *, advantage: float, **others: Any) -> Sample:
    """Return a sample whose last tokens, as many as `logp` has, are the reply. others: fields of the sample."""
    prompt, reply = len(ids) - len(logp), len(logp)
    return make_sample(
        prompt=Prompt(id=prompt_id, messages=[]),
        token_ids=ids,
        action_mask=[False] * prompt + [True] * reply,
        rollout_logp=[0.0] * prompt + logp,
        versions=[-1] * prompt + [0] * reply,
        reward=0.0,
        advantage=[advantage] * len(ids),
        **others,
    )


@torch.no_grad()
def perturb(trainer: Trainer, *, seed: int) -> None:
    """Add noise to every weight of a trainer and to every saved buffer, as no update does."""
    chance = torch.Generator().manual_seed(seed)
    model, kept = trainer.model, trainer.model.state_dict().keys()
    buffers = [b for name, b in model.named_buffers() if name in kept and b.is_floating_point()]
    for tensor in [*model.parameters(), *buffers]:
        tensor.add_((0.02 * torch.randn(tensor.shape, generator=chance)).to(tensor.dtype))


def mean_gap(a: Sequence[float] | Tensor, b: Sequence[float] | Tensor) -> float:
    """Return the mean absolute difference, in nats."""
    return float((torch.as_tensor(a) - torch.as_tensor(b)).abs().mean())
