"""Recipe checks of model, tokenizer, data, reward and folders, shared with the main programs.

`prepare` of main_rl.py and main_sl.py stops at the first mistake. Here each part is checked separately, so that all
mistakes are shown. `prepare` runs last, so that no check is missing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

from algs.base import Algorithm
from analysis.doctor.findings import Finding, Say, attempt, show_all
from configs.schema import RLConfig, RunConfig
from core.errors import UserError
from core.types.samples import Message, Prompt
from data_feeds.chat.template_args import check_template_args, make_tokenizer
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import Feed, Which, load_groups, load_prompts
from driver.checks.hub_upload import check_hub_upload
from driver.checks.models import (
    check_policy,
    check_room,
    check_teacher_models,
    check_trainer,
    check_user_code,
)
from driver.checks.output_folder import check_output_folders, check_run_dir
from driver.load_recipe import Loaded
from driver.records.trackers import check_trackers
from driver.rl import setup as rl_setup
from driver.sl import run as sl_run
from driver.start.rollouts import plan_rollouts
from modeling.hf_config import check_model_folder
from rewards.rewarder import Rewarder
from rewards.scored import RewardResult, merge_results
from rewards.weights import find_weights, weigh_parts
from rollouts.registry import load_env_class
from rollouts.stops import check_stops

STAND_IN_REPLY = "0"
"""Reply that a reward gets for a row without an answer."""


def check_recipe(
    loaded: Loaded[Any], say: Say, known: Sequence[Finding] = ()
) -> tuple[list[Finding], rl_setup.Prepared | None]:
    """Check everything and print a line for each part; return the findings and, in RL, the prepared run.

    known: findings already printed.
    """
    parts = Parts(loaded)
    prepared: rl_setup.Prepared | None = None
    refusal = ""
    try:
        if isinstance(loaded.cfg, RLConfig):
            prepared = rl_setup.prepare(loaded)
            parts.take(prepared.tokenizer, {"train": prepared.prompts, "eval": prepared.held_out})
        else:
            of_rows = sl_run.prepare(loaded)
            parts.take(of_rows.tokenizer, {"train": of_rows.rows, "eval": of_rows.held_out})
    except UserError as error:
        refusal = str(error)
    findings = show_all(parts.look(), say)
    # prepare stops at the first mistake, and the checks above may have found the same one
    if refusal and not any(f.found == refusal for f in [*known, *findings]):
        findings += show_all([Finding(check="recipe", level="error", found=refusal)], say)
    return findings, prepared


class Parts:
    """Loader of a recipe's parts; each part is read once. Reading a broken part raises UserError."""

    def __init__(self, loaded: Loaded[Any]):
        self.loaded = loaded
        self.cfg: RunConfig = loaded.cfg
        self.alg: Algorithm = loaded.alg
        self.feeds: dict[str, Feed[Any] | None] = {}

    def take(self, tokenizer: ChatTokenizer, feeds: dict[str, Feed[Any] | None]) -> None:
        """Use parts that have been read already."""
        # takes the place of the cached property, so that the tokenizer is not read twice
        self.tokenizer = tokenizer
        self.feeds = feeds

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return make_tokenizer(self.cfg.model, self.cfg.data)

    def look(self) -> Iterator[Finding]:
        """Yield a finding for each part whose inputs could be read."""
        yield attempt("folders", self.describe_folders)
        model = attempt("model", self.describe_model)
        yield model
        if model.level == "error" and not os.path.isdir(self.cfg.model.path):
            return  # without a folder there is no tokenizer, and without that no row can be read
        tokenizer = attempt("tokenizer", self.describe_tokenizer)
        yield tokenizer
        if model.level == tokenizer.level == "ok":
            yield attempt("weights", self.describe_weights)
        if tokenizer.level == "error":
            return
        yield from self.look_at_data("train")
        if self.cfg.data.eval is not None:
            yield from self.look_at_data("eval")
        if isinstance(self.cfg, RLConfig) and self.feeds.get("train") is not None:
            yield attempt("reward", partial(self.describe_reward, self.cfg))

    def describe_folders(self) -> str:
        cfg = self.cfg
        check_run_dir(cfg.run_dir)
        check_output_folders(cfg, self.alg)
        check_hub_upload(cfg)
        check_trackers(cfg.trackers, cfg.tracking)
        named = [cfg.run_dir, *filter(None, [cfg.save_to, cfg.push_to])]
        return f"results go to {', '.join(named)} and {', '.join(cfg.trackers)}"

    def describe_model(self) -> str:
        cfg = self.cfg
        check_model_folder(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
        check_trainer(cfg, self.alg)
        check_user_code(cfg)
        if isinstance(cfg, RLConfig):
            check_room(cfg)
        return f"{cfg.model.path} can be read"

    def describe_tokenizer(self) -> str:
        cfg, tokenizer = self.cfg, self.tokenizer
        check_template_args(tokenizer, cfg.data)
        if isinstance(cfg, RLConfig):
            check_stops(tokenizer, cfg.rollout.stop, cfg.rollout.stop_token_ids, tokenizer.vocabulary)
        return f"{tokenizer.vocabulary} ids, template {cfg.data.template}, replies end with {tokenizer.stop_token_ids}"

    def describe_weights(self) -> str:
        longest = self.cfg.longest_sample if isinstance(self.cfg, RLConfig) else None
        check_policy(self.cfg.model, self.tokenizer)
        check_teacher_models(self.alg, self.tokenizer, self.cfg.model, longest=longest)
        return "the files hold the tensors of the config, and every token has an embedding"

    def look_at_data(self, which: Which) -> Iterator[Finding]:
        """Yield the number of rows; with invalid ones it is a warning that says why."""
        finding = attempt(f"data.{which}", partial(self.describe_data, which))
        feed = self.feeds.get(which)
        if feed is None:
            yield finding
            return
        sentences, _ = feed.summary(f"data.{which}")
        yield Finding(
            check=finding.check, level="warning" if sentences else "ok", found="; ".join([finding.found, *sentences])
        )

    def describe_data(self, which: Which) -> str:
        feed = self.feeds.get(which)
        if feed is None:
            feed = self.feeds[which] = self.read_data(which)
        return f"{len(feed.all())} rows"

    def read_data(self, which: Which) -> Feed[Any]:
        cfg: Any = self.cfg
        if isinstance(cfg, RLConfig):
            return load_prompts(cfg.data, which, self.tokenizer, seed=cfg.seed)
        return load_groups(cfg.data, which, self.tokenizer, rows=self.alg.rows, seed=cfg.seed)

    def describe_reward(self, cfg: RLConfig) -> str:
        """Compute the reward of a real row with the row's answer as reply. Raises UserError if it fails."""
        feed = self.feeds["train"]
        assert feed is not None
        prompt: Prompt = feed.draw(0)
        plan = plan_rollouts(cfg)
        load_env_class(plan.env_spec)
        plan.reward_functions.load()
        result = compute_reward(Rewarder(plan.reward_functions, 1, cfg.reward.timeout_s), prompt)
        if result.failure:
            raise UserError(f"it fails on row {prompt.id} with the row's own answer as reply: {result.failure}")
        shown = ", ".join(f"{name} {value:g}" for name, value in result.reward_parts.items())
        if cfg.rollout.env == "single_turn":  # another environment adds parts of its own
            weights = find_weights(cfg.reward, result.reward_parts, prompt.source)
            shown += f"; together {weigh_parts(weights, result.reward_parts):g}"
        return f"row {prompt.id} with its own answer as reply: {shown}"


def compute_reward(rewarder: Rewarder, prompt: Prompt) -> RewardResult:
    """Return the reward of the row's answer as a reply, and close the processes."""
    reply: Message = {"role": "assistant", "content": prompt.answer or STAND_IN_REPLY}

    async def compute() -> RewardResult:
        found = await rewarder.compute_reward(prompt, [reply])
        if rewarder.scores_groups(prompt.source):  # beside a sibling that is equal
            found = merge_results([("", found), ("", (await rewarder.compute_group(prompt, [[reply], [reply]]))[0])])
        return found

    try:
        return asyncio.run(compute())
    finally:
        rewarder.close()
