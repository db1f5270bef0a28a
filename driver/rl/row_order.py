"""Order of the prompts of an RL run: the sampler, and the buffer that starts tickets."""

from __future__ import annotations

from collections.abc import Callable

from configs.schema import RLConfig
from core.loading import FileSpec
from core.types.samples import Prompt
from data_feeds.feed import Feed
from data_feeds.samplers.base import Sampler
from data_feeds.samplers.find import find_sampler
from driver.checkpoint import Checkpoint
from rollouts.scheduling.buffer import ReplayBuffer, Schedule
from rollouts.scheduling.sampled_rows import SampledRows


def check_sampler(cfg: RLConfig, prompts: Feed[Prompt]) -> FileSpec | None:
    """Return the file of the sampler, or None without one. Raises UserError if it cannot choose the first rows."""
    sampled = make_sampled(cfg, prompts)
    if sampled is None:
        return None
    sampled.draw(0)
    return find_sampler(cfg.data.sampler or "")[0]


def describe_sampler(sampler: Sampler) -> str:
    """Return the sentence on a sampler and its bias, for the start of a run."""
    return (
        f"data.sampler={sampler.name or sampler.file}: rows are drawn with unequal probabilities q, so the run "
        "optimises the reward weighted by q, not its mean over data.train, and reward/mean is of the drawn rows; "
        "compare data/drawn_pass_rate with data/given_pass_rate; data.eval is not affected"
    )


def make_sampled(cfg: RLConfig, prompts: Feed[Prompt]) -> SampledRows | None:
    """Return the rows as the sampler of the recipe chooses them; None without a sampler."""
    if cfg.data.sampler is None:
        return None
    _, sampler = find_sampler(cfg.data.sampler)
    per_block = make_schedule(cfg).fresh
    return SampledRows(prompts, sampler, per_block=per_block, max_staleness=cfg.max_staleness)


def make_buffer(
    cfg: RLConfig,
    checkpoint: Checkpoint | None,
    draw_prompt: Callable[[int], Prompt],
    sampled: SampledRows | None,
) -> ReplayBuffer:
    """Return an empty buffer, or the buffer of the resumed checkpoint."""
    schedule = make_schedule(cfg)
    if checkpoint is None:
        return ReplayBuffer(schedule, sampled=sampled)
    state = checkpoint.state
    return ReplayBuffer.from_state(state.position, schedule, draw_prompt, step=state.steps_done, sampled=sampled)


def make_schedule(cfg: RLConfig) -> Schedule:
    return Schedule(
        steps=cfg.steps,
        per_step=cfg.groups_per_step,
        max_staleness=cfg.max_staleness,
        sync_every=cfg.weight_sync.every,
        max_kl=cfg.weight_sync.max_kl,
        sample_reuse=cfg.sample_reuse,
    )
