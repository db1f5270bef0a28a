"""One step of a run with compared losses and capture, and losses with planted mistakes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from transformers import AutoTokenizer

from configs.schema import RLConfig
from core.cluster.workers import Local
from core.timing.clock import Clock
from core.types.allowed_tokens import EVERY_TOKEN
from core.types.samples import Group
from driver.load_recipe import load_recipe
from driver.rl.observers import RunObservers, StartedRun
from driver.rl.run import Run
from driver.start.observers import plan_observers
from driver.start.trainers import build_trainer, plan_trainer
from unit_tests.helpers.examples import a_changed

WRONG_SIGN = '''
"""A planted mistake: what was worse than its siblings is made likelier too."""
from algs.grpo import GRPO

class WrongSign(GRPO):
    def loss(self, policy, tokens):
        return super().loss(policy, tokens.replace(advantage=tokens.advantage.abs()))
'''


NO_MASK = '''
"""A planted mistake: the tokens whose ratio is out of bounds keep their gradient."""
from algs.base import GroupRelative
from algs.ops import importance_ratio

class NoMask(GroupRelative):
    def loss(self, policy, tokens):
        return -importance_ratio(policy.logp, tokens.prox_logp) * tokens.advantage, {}
'''


def rewarded(groups: list[Group]) -> list[Group]:
    """Groups in which every one has both rewards, with advantages left to the algorithm."""
    return [[a_changed(s, reward=float(i % 2), advantage=None) for i, s in enumerate(g)] for g in groups]


class Step:
    """One step of a run, as main_rl.py makes it, with the observers of its recipe, in a run folder of its own."""

    def __init__(self, path: str, home: Path, *overrides: str):
        loaded = load_recipe(RLConfig, path, list(overrides))
        self.cfg = cfg = loaded.cfg
        self.home, self.said = home, list[str]()
        planned = plan_observers(loaded)
        on_trainer = {key: observer.on_trainer for key, observer in planned.items()}
        self.trainer = build_trainer(None, plan_trainer(cfg, loaded.alg, observers=on_trainer))
        context = SimpleNamespace(
            clock=Clock(), console=SimpleNamespace(say=self.said.append), folder=SimpleNamespace(path=home)
        )
        started = StartedRun(
            loaded=loaded,
            tokenizer=cast(Any, SimpleNamespace(hf=AutoTokenizer.from_pretrained(cfg.model.path))),
            allowed_tokens=EVERY_TOKEN,
            checkpoint=None,
            context=cast(Any, context),
            trainers=Local(self.trainer),
            layout=self.trainer.describe_layout(),
        )
        parts: dict[str, Any] = dict.fromkeys(Run.__dataclass_fields__)
        parts |= {"cfg": cfg, "alg": loaded.alg, "trainers": started.trainers, "layout": started.layout}
        parts |= {"context": context, "steps_done": 0}
        parts["time"] = SimpleNamespace(prefetch_engine_timers=lambda: None, prefetch_trainer_timers=lambda: None)
        parts["observers"] = RunObservers([observer.start(started) for observer in planned.values()])
        self.run = Run(**parts)

    def train(self, groups: list[Group]) -> dict[str, float]:
        async def go() -> dict[str, float]:
            measured = await self.run.train(self.run.compute_advantages(await self.run.compute_columns(groups)))
            await self.run.observers.finish()  # a run does not wait for a snapshot until the next one
            return measured

        return asyncio.run(go())
