"""Sample files of a run, samples/step_*.jsonl, written by a background thread."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import RLConfig
from core.errors import writing
from core.text.atomic_write import append_lines
from core.text.json_text import dump_json
from core.types.messages import describe_message, describe_messages
from core.types.samples import Group, Sample
from driver.records.rollout_metrics import count_versions

MAX_WAITING = 2
"""Maximum number of steps whose samples wait to be written; the training loop waits for a slower disk."""


class SampleFiles:
    """Writer of a file per step. An error stops the run at the next step or at the end."""

    def __init__(self, folder: Path):
        self.folder = folder
        # One thread, so that the files are written in the order of the steps.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._waiting: deque[Future[None]] = deque()

    async def write(self, step: int, groups: list[Group], sampling: dict[str, Any] | None = None) -> None:
        """Write the samples of a step in the background. Raises RunStopped if an earlier write failed.

        sampling: see make_sample_record.
        """
        path = self.folder / f"step_{step:05d}.jsonl"
        self._waiting.append(self._thread.submit(write_samples, path, groups, sampling))
        while self._waiting and self._waiting[0].done():  # without a turn of the loop, which has other work by now
            self._waiting.popleft().result()
        while len(self._waiting) > MAX_WAITING:
            await self._finish_oldest()

    async def flush(self) -> None:
        """Wait until all samples are written. Raises RunStopped on failure."""
        while self._waiting:
            await self._finish_oldest()

    async def _finish_oldest(self) -> None:
        oldest = asyncio.wrap_future(self._waiting[0])
        await asyncio.wait([oldest])  # unlike `await oldest`, this lets it go on where the run is interrupted
        self._waiting.popleft()
        oldest.result()

    def close(self) -> list[str]:
        """Wait until all samples are written, also after an error; return failures as sentences."""
        self._thread.shutdown(wait=True)
        return [str(error) for one in self._waiting if (error := one.exception())]


def write_samples(path: Path, groups: list[Group], sampling: dict[str, Any] | None = None) -> None:
    """Write a JSON object per sample: prompt, completion, reward and parts, advantage, versions, turns."""
    records = (make_sample_record(sample, ticket, sampling) for ticket, group in enumerate(groups) for sample in group)
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    meaning = "the steps before are logged"
    with writing(path, meaning=meaning, needs=lambda: len(lines)), path.open("wb", buffering=0) as file:
        append_lines(file, lines)


def make_sample_record(sample: Sample, group: int, sampling: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a sample's JSON record; tools, turns, counts, notes and log only if not empty.

    sampling: settings that the tokens were sampled with, to record with them; None: tokens are not recorded.
    """
    record = {
        "group": group,
        "id": sample.prompt.id,
        "prompt": describe_messages(sample.prompt.messages),
        "answer": sample.prompt.answer,
        "completion": sample.completion,
        "stop": sample.stop,
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "failure": sample.failure,
        "advantage": _first_advantage(sample),
        "versions": sorted(count_versions(sample)),
        "new_tokens": sample.n_sampled,
    }
    # Empty ones are dropped: most samples are single replies, and a run may write millions.
    more: dict[str, Any] = {
        "tools": sample.prompt.tools,
        "turns": list_turns(sample),
        "counts": sample.counts,
        "notes": sample.notes,
        "log": sample.log,
    }
    if sample.episode is not None:
        more["episode"] = sample.episode
    if sample.player:
        more["player"] = sample.player
    if sample.origin != "policy":
        more["origin"] = sample.origin
    if sampling is not None and sample.origin != "demonstration":
        logp = zip(sample.action_mask.tolist(), sample.rollout_logp.tolist(), strict=True)
        more |= {"token_ids": sample.token_ids.tolist(), "logp": [x if chosen else None for chosen, x in logp]}
        # a reward may read the row's other columns, and they may be anything
        more["extra"] = json.loads(dump_json(sample.prompt.extra, default=str))
        record |= sampling
    return record | {name: value for name, value in more.items() if value not in ([], {}, "")}


def describe_sampling(cfg: RLConfig) -> dict[str, Any] | None:
    """Return the settings that a run samples with, to record with the tokens; None if it records none."""
    if not cfg.record_tokens:
        return None
    rollout = cfg.rollout
    cut = {"top_p": rollout.top_p, "top_k": rollout.top_k, "min_p": rollout.min_p} if rollout.is_truncated else {}
    return {"temperature": rollout.temperature, "allowed_tokens": rollout.allowed_tokens, **cut}


def list_turns(sample: Sample) -> list[dict[str, Any]]:
    """Return the messages after the prompt; the policy's with number of tokens and earned reward."""
    if not sample.transcript:
        return []
    replies = sum(message["role"] == "assistant" for message in sample.transcript)
    before = max(0, replies - len(sample.spans))  # context: of an earlier branch, or told by a harness
    spans = iter([None] * before + [*sample.spans])
    rewards = iter([None] * before + [*sample.turn_rewards])
    turns: list[dict[str, Any]] = []
    for message in sample.transcript:
        turn = describe_message(message)
        if message["role"] == "assistant" and (span := next(spans, None)) is not None:
            turn["tokens"] = span[1] - span[0]
            if (reward := next(rewards, None)) is not None:
                turn["reward"] = reward
        turns.append(turn)
    return turns


def _first_advantage(sample: Sample) -> float | None:
    """Return the advantage of the first trained token, with as few digits as the dtype needs."""
    if sample.advantage is None or not sample.n_trained:
        return None
    return float(str(sample.advantage[np.argmax(sample.loss_mask)]))
