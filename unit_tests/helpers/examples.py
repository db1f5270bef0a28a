"""Samples to train on, made by chance; and what several tests ask."""

from __future__ import annotations

import io
import json
import random
import sys
from contextlib import redirect_stderr, suppress
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from core.cli import run_guarded
from core.types.arrays import Floats
from core.types.samples import Batch, Group, Prompt, Rows, Sample, ScoredColumn, make_sample
from data_feeds.packing.batches import Plan
from rollouts.scheduling.buffer import FinishedGroup, ReplayBuffer, Schedule
from trainers.trainer import Trainer


def a_sample(
    rng: random.Random, *, group: int = 0, longest: int = 24, length: int | None = None, vocab: int = 64
) -> Sample:
    length = length or rng.randint(6, longest)
    prompt = rng.randint(1, min(4, length - 1))
    mask = [False] * prompt + [rng.random() < 0.8 for _ in range(length - prompt - 1)] + [True]
    return make_sample(
        prompt=Prompt(id=str(group), messages=[]),
        token_ids=[rng.randrange(2, vocab) for _ in range(length)],
        action_mask=mask,
        rollout_logp=[-4.0 + rng.gauss(0, 0.2) if m else 0.0 for m in mask],
        versions=[0 if m else -1 for m in mask],
        reward=float(rng.random() < 0.5),
        advantage=[rng.gauss(0, 1)] * length,
    )


def sample_of(ids: list[int], mask: list[bool], **more: Any) -> Sample:
    """A sample of these tokens; every one of them has another log-probability."""
    there = {"rollout_logp": [0.1 * t for t in range(len(ids))], "versions": [0] * len(ids)}
    there["prompt"] = Prompt(id="p", messages=[])
    return make_sample(token_ids=ids, action_mask=mask, **there | more)


def six_tokens(n: int = 6, *, chosen: str = "001101", **more: Any) -> Sample:
    """A sample of tokens 10, 11, ... of the source "a". chosen: the action mask as text."""
    there: dict[str, Any] = {"prompt": Prompt(id="p", messages=[], source="a"), "token_ids": range(10, 10 + n)}
    there |= {"action_mask": [one == "1" for one in chosen], "rollout_logp": [0.0] * n, "versions": [-1] * n}
    return make_sample(**there | more)


def with_routes(groups: list[Group], *, layers: int, experts: int, k: int) -> list[Group]:
    """Add routes by chance; those of every fifth token are unknown."""
    rng = np.random.default_rng(0)

    def routes(n: int) -> np.ndarray:
        chosen = rng.permuted(np.tile(np.arange(experts, dtype=np.uint8), (n, layers, 1)), axis=-1)[..., :k]
        return np.where(np.arange(n)[:, None, None] % 5 == 4, np.uint8(255), chosen)

    return [[replace(s, routes=routes(len(s.token_ids))) for s in g] for g in groups]


def with_values(groups: list[Group], *, seed: int = 0) -> list[Group]:
    """Add what a value model said, and what credit made of it, by chance."""
    rng = random.Random(seed)

    def column(s: Sample) -> list[float]:
        return [rng.gauss(0, 1) for _ in s.action_mask]

    return [[a_changed(s, columns={"values": column(s), "returns": column(s)}) for s in g] for g in groups]


def a_changed(sample: Sample, **changes: Any) -> Sample:
    """The sample with some fields changed, which may be lists."""
    there = {f.name: getattr(sample, f.name) for f in fields(sample)}
    return make_sample(**there | changes, dtype=sample.float_dtype)


def fill_batch(batch: Batch, columns: dict[ScoredColumn, Floats]) -> Batch:
    """The batch with what Trainer.compute_columns said of it."""
    return replace(batch, tokens=batch.tokens.replace(**{c: torch.tensor(v) for c, v in columns.items()}))


def with_kept(groups: list[Group], *, seed: int = 0, vocab: int = 64, largest: int = 9) -> list[Group]:
    """Give every sampled token a kept set by chance, with the token in it."""
    rng = random.Random(seed)

    def sets(s: Sample) -> list[list[int]]:
        drawn = [{rng.randrange(2, vocab) for _ in range(rng.randrange(largest))} for _ in s.token_ids]
        asked = zip(s.token_ids.tolist(), s.action_mask.tolist(), drawn, strict=True)
        return [sorted(own | {token}) if mask else [] for token, mask, own in asked]

    return [[a_changed(s, kept=sets(s)) for s in g] for g in groups]


def columns_of(trainer: Trainer, micro: list[Batch], *columns: ScoredColumn) -> list[dict[str, torch.Tensor]]:
    """What Trainer.compute_columns says, as tensors."""
    return [{c: torch.from_numpy(v) for c, v in b.items()} for b in trainer.compute_columns(micro, frozenset(columns))]


def some_groups(n: int = 4, size: int = 3, *, seed: int = 0, longest: int = 24) -> list[Group]:
    rng = random.Random(seed)
    return [[a_sample(rng, group=g, longest=longest) for _ in range(size)] for g in range(n)]


def through_checkpoint(group: Group, row: Prompt | None = None) -> tuple[ReplayBuffer, str, ReplayBuffer]:
    """Return a buffer with one waiting group, the JSON text of its checkpoint, and the buffer read from that.

    row: what its ticket draws; None: its prompt.
    """
    buffer = ReplayBuffer(Schedule(steps=2, per_step=2))
    buffer.started = {0, 1}
    buffer.add_group(FinishedGroup(ticket=0, group=group, accepted=True, seconds=1.0))
    text = json.dumps(buffer.get_state(), indent=1)
    draw = {0: row or group[0].prompt}
    return buffer, text, ReplayBuffer.from_state(json.loads(text), buffer.schedule, draw.__getitem__, step=0)


def run_here(program: ModuleType, *argv: str) -> tuple[int, str]:
    """Exit code and stderr of a whole run in this process, which has imported all of it: ten seconds less."""
    err = io.StringIO()
    with redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{program.__name__}.py", *argv])
        code = run_guarded(program.main)
    return code, err.getvalue()


def is_running(pid: int) -> bool:
    """False for a process that has ended, whether or not somebody has asked for its exit code."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(pid: int) -> str | None:
    """Return how a running process was called, None for one that has ended, were it a moment ago."""
    try:
        return " ".join(psutil.Process(pid).cmdline()) if is_running(pid) else None
    except psutil.NoSuchProcess:  # a zombie is one too
        return None


def children_named(beginning: str) -> list[psutil.Process]:
    """List the processes below this one whose name begins so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith(beginning):
                found.append(process)
    return found


def shared_of(plan: Plan) -> float:
    return plan.measure_shared(plan.batches())


def some_answers(rows: Rows, n: int = 4, *, seed: int = 0) -> list[Group]:
    """Rows of supervised learning, as data_feeds makes them: the mask is on the last turn."""
    rng = random.Random(seed)
    groups: list[Group] = []
    for g in range(n):
        prompt = [rng.randrange(2, 64) for _ in range(rng.randint(2, 6))]
        some = {"conversations": [1.0], "pairs": [1.0, 0.0], "unpaired": [float(g % 2)], "scored": [1.0, 0.0, 0.5]}
        groups.append([an_answer(rng, prompt, reward, row=g) for reward in some[rows]])
    return groups


def an_answer(rng: random.Random, prompt: list[int], reward: float, *, row: int) -> Sample:
    reply = [rng.randrange(2, 64) for _ in range(rng.randint(3, 12))]
    ids = prompt + reply
    return make_sample(
        prompt=Prompt(id=str(row), messages=[]),
        token_ids=ids,
        action_mask=[False] * len(prompt) + [True] * len(reply),
        rollout_logp=[0.0] * len(ids),
        versions=[-1] * len(ids),
        reward=reward,
    )


class Malicious:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def siblings(rng: random.Random, prompt: int, replies: list[int], *, group: int = 0, turns: bool = True) -> Group:
    """A group whose samples share a prompt, and two in three of them the first half of what follows, if `turns`.

    The shared half is sampled tokens and then an answer of the environment, so it is trained on in several samples.
    """
    ids = [rng.randrange(2, 64) for _ in range(prompt)]
    again = [rng.randrange(2, 64) for _ in range(max(replies))]

    def of_length(n: int, i: int) -> Sample:
        common = n // 2 if turns and i % 3 else 0
        reply = again[:common] + [rng.randrange(2, 64) for _ in range(n - common)]
        mask = [False] * prompt + [t != common - 1 for t in range(n)]  # the last shared one is the environment's
        return make_sample(
            prompt=Prompt(id=str(group), messages=[]),
            token_ids=ids + reply,
            action_mask=mask,
            rollout_logp=[-4.0 + rng.gauss(0, 0.2) if m else 0.0 for m in mask],
            versions=[0 if m else -1 for m in mask],
            reward=float(i % 2),
            advantage=[rng.gauss(0, 1)] * len(mask),
        )

    return [of_length(n, i) for i, n in enumerate(replies)]


def families(*, seed: int = 0) -> list[Group]:
    """Ragged groups with shared beginnings: one of one, replies of one token, a copy, one that begins another."""
    rng = random.Random(seed)
    first, second, lone = (
        siblings(rng, 9, [7, 12, 12, 1, 5, 8], group=0),
        siblings(rng, 5, [1, 1, 6, 3, 10], group=1),
        siblings(rng, 7, [6], group=2),
    )
    copy = first[1].with_advantage(0.5)
    return [[*first, copy], [*second, cut_short(second[4], 9)], lone]


def cut_short(sample: Sample, n: int) -> Sample:
    """The first n tokens of a sample."""
    return replace(
        sample,
        token_ids=sample.token_ids[:n],
        action_mask=sample.action_mask[:n],
        rollout_logp=sample.rollout_logp[:n],
        versions=sample.versions[:n],
        advantage=None if sample.advantage is None else sample.advantage[:n],
    )
