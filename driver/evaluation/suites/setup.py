"""From recipe to evaluation: check everything that can be checked, then start the engines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.eval_schema import EvalConfig
from configs.load import apply_override, find_inherited, naming_inherited, read_recipe, validate
from configs.trainer_schema import ModelConfig
from core.cluster.ray_address import parse_address
from core.errors import UserError
from core.text.atomic_write import write_whole
from core.text.text_files import parse_json, read_text
from core.timing.phases import Phase
from data_feeds.chat.template_args import check_template_args, make_tokenizer, pin_date
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.chat.tool_parsing import check_parser
from data_feeds.rows.eval_sets import PromptSet, load_sets
from driver.checkpoint_model import CheckpointModel, find_checkpoint_model, write_checkpoint_model
from driver.checks.engine import check_engine, check_images, check_rounded, check_sampling
from driver.checks.engine_memory import check_engine_memory
from driver.checks.explain import format_explanation
from driver.checks.explain_devices import describe_gpus, describe_processes
from driver.checks.explain_rows import show_set_rows
from driver.checks.explain_texts import find_tokenizer
from driver.checks.image_use import settle_eval_images
from driver.checks.machines import claim_machines
from driver.checks.models import check_policy, check_room
from driver.checks.terms import check_judged
from driver.context import RunContext
from driver.evaluation.suites.generations import PartWriter, copy_parts
from driver.evaluation.suites.resume import Resumed, collect_eval_settings, find_samples
from driver.evaluation.suites.run import EvalRun, remove_merged
from driver.rl.setup import watch_engines
from driver.start.devices import advise_fewer_gpus, check_gpus, count_gpus, uses_gpus
from driver.start.opponent import name_opponent
from driver.start.rollouts import (
    RolloutPlan,
    check_reward_and_env,
    plan_engine_role,
    plan_engines,
    start_rollouts,
)
from modeling.hf_config import check_model_folder, meta_model
from modeling.merge import check_adapter, is_adapter, merge_adapter
from modeling.pretrained import runs_own_code
from rollouts.registry import load_engine_class
from rollouts.scheduling.generation import GroupRequests

SETTINGS = "evaluation.json"
"""File of a run folder with the settings of its samples."""
MERGED = "merged_model"
"""Temporary folder of a model with merged adapter, or of a checkpoint's model, from which engines load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEval:
    """Checked inputs of an evaluation, before any process starts."""

    cfg: EvalConfig
    tokenizer: ChatTokenizer
    sets: list[PromptSet]
    plan: RolloutPlan
    settings: dict[str, Any]
    resumed: Resumed | None
    checkpoint: CheckpointModel | None
    """Checkpoint named by `model.path`, if any."""
    why_text: str
    """Reason why a model that sees is used for text, where model.images is auto."""


def load_eval_recipe(recipe: str | Mapping[str, Any], overrides: Sequence[str]) -> EvalConfig:
    """Validate a recipe, given as a file or as keys. Raises UserError that names the file or key, and the fix."""
    raw = read_recipe(recipe)
    for item in overrides:
        apply_override(raw, item)
    with naming_inherited(find_inherited(recipe)):
        cfg: EvalConfig = validate(EvalConfig, raw, prefix="")
    if cfg.ray_address is not None:
        parse_address(cfg.ray_address)
    check_engine(cfg)
    return cfg


def prepare_eval(cfg: EvalConfig) -> PreparedEval:
    """Check the recipe against model, data and code. Raises UserError for the user's mistakes."""
    if lacking := check_eval_devices(cfg):
        raise UserError(lacking)
    trusts, given = cfg.model.trust_remote_code, cfg
    if (checkpoint := find_checkpoint_model(cfg.model.path)) is not None:
        cfg = with_base(cfg, checkpoint)
    if is_adapter(cfg.model.path):
        raise UserError(
            f"model.path={cfg.model.path} is an adapter without its model: name it in model.adapter, and in model.path "
            "the model that it was trained on"
        )
    check_model_folder(cfg.model.path, trust_remote_code=trusts)
    if cfg.model.adapter is not None:
        check_adapter(cfg.model.adapter, key="model.adapter")
    check_room(cfg)
    check_images(cfg)
    check_rounded(cfg.model, cfg.rollout)
    images, why_text = settle_eval_images(cfg)
    model = ModelConfig(path=cfg.model.path, dtype=cfg.model.dtype, trust_remote_code=trusts, images=images)
    plan = plan_engines(cfg, model)
    check_reward_and_env(cfg, plan)
    env_tools = plan.load_code()
    tokenizer = make_tokenizer(model, cfg.data, skip_special_tokens=cfg.rollout.skip_special_tokens)
    check_template_args(tokenizer, cfg.data)
    earlier = None if cfg.resume is None else read_settings(cfg.resume)["settings"].get("data.template_date")
    cfg = cfg.model_copy(update={"data": (data := pin_date(tokenizer, cfg.data, earlier))})
    given, plan = given.model_copy(update={"data": data}), replace(plan, data=data)
    check_sampling(cfg, tokenizer)
    check_policy(model, tokenizer, cfg.rollout.opponent_folder, longest=cfg.longest_sample)
    check_engine_memory(cfg)
    if trusts and runs_own_code(meta := meta_model(cfg.model.path, trust_remote_code=True)):
        load_engine_class(plan.engine_spec).check_user_code(meta, path=cfg.model.path)
    sets = load_sets(cfg, tokenizer, env_tools)
    check_judged((prompt for one in sets for prompt in one.prompts), "data.sets", plan.reward_functions)
    cfg, given = (with_set_forms(one, sets) for one in (cfg, given))
    has_tools = any(prompt.tools for one in sets for prompt in one.prompts)
    check_parser(cfg.rollout.tool_parser, tokenizer, has_tools=has_tools or bool(env_tools))
    # As given: `with_base` has replaced a checkpoint's path by that of its base model.
    base = None if checkpoint is None else checkpoint.base
    settings = collect_eval_settings(given, plan.files, tokenizer, base)
    resumed = None if cfg.resume is None else find_samples(cfg.resume, read_settings(cfg.resume), settings, sets)
    return PreparedEval(
        cfg=cfg,
        tokenizer=tokenizer,
        sets=sets,
        plan=plan,
        settings=settings,
        resumed=resumed,
        checkpoint=checkpoint,
        why_text=why_text,
    )


def with_set_forms(cfg: EvalConfig, sets: Sequence[PromptSet]) -> EvalConfig:
    """Return the recipe with the forms that the rows of its data sets were found to have."""
    named = [one.model_copy(update={"form": read.form}) for one, read in zip(cfg.data.sets, sets, strict=True)]
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"sets": named})})


def with_base(cfg: EvalConfig, checkpoint: CheckpointModel) -> EvalConfig:
    """Return the recipe with the base model of a checkpoint, whose config and tokenizer it shares."""
    if cfg.model.adapter is not None:
        raise UserError(
            f"model.path={cfg.model.path} is a checkpoint, and its adapter is in it: leave model.adapter out"
        )
    return cfg.model_copy(update={"model": cfg.model.model_copy(update={"path": checkpoint.base})})


def check_eval_devices(cfg: EvalConfig) -> str | None:
    """Return a sentence on missing devices; None if nothing is missing."""
    wanted, gpus, cores = cfg.rollout.most_engines * cfg.rollout.tensor_parallel_size, count_gpus(), os.cpu_count() or 1
    if cfg.ray_address is not None:
        return None  # core/cluster/placement.py and machine_check.py ask the cluster
    if refused := check_gpus(cfg):
        return refused
    if cfg.device == "cuda" and not gpus:
        return "device is cuda, and this machine has no GPU: set device=auto"
    there, kind = (gpus, "GPUs") if uses_gpus(cfg) else (cores, "CPU cores")
    if cfg.backend == "ray" and wanted > there:
        return f"{wanted} engine ranks are more than this machine's {there} {kind}: {advise_fewer_gpus(cfg, there)}"
    return None


def explain_eval(cfg: EvalConfig) -> str:
    """Return the resolved configuration and derived facts."""
    rollout = cfg.rollout
    how = "greedy" if rollout.temperature == 0 else f"at temperature {rollout.temperature:g}"
    counts = ", ".join(f"{one.source.log_name} {cfg.count_samples(one)}" for one in cfg.data.sets)
    where = "in this process" if cfg.backend == "local" else f"in {rollout.most_engines} Ray actors"
    facts = {
        "samples per prompt": f"{counts}; {how}",
        "a sample": f"at most {cfg.data.max_prompt_tokens} prompt + {rollout.max_new_tokens} new = "
        f"{cfg.longest_sample} tokens",
        "engines": f"{rollout.engine}, {where}, each {rollout.tensor_parallel_size} ranks and {cfg.prompts_per_engine} "
        "prompts at a time",
        "a sample passes": f"with a reward of {cfg.pass_reward:g} or more",
    }
    devices = [*describe_gpus(), *describe_processes(cfg)]
    model = ModelConfig(
        path=cfg.model.path,
        dtype=cfg.model.dtype,
        trust_remote_code=cfg.model.trust_remote_code,
        images=settle_eval_images(cfg)[0],
    )
    # the hub is not asked: a recipe is explained at once
    is_here = os.path.isdir(cfg.model.path)
    tokenizer = find_tokenizer(model, cfg.data) if is_here else f"model.path={cfg.model.path} is no folder here"
    rows = show_set_rows(cfg, tokenizer)
    return "\n".join([format_explanation(cfg, [*facts.items(), *devices], check_eval_devices(cfg)), "", *rows])


async def start_eval(prepared: PreparedEval, context: RunContext) -> EvalRun:
    """Start the engines; return after they have loaded the model."""
    cfg, folder = prepared.cfg, context.folder.path
    plan = prepared.plan.in_folder(folder, None if prepared.resumed is None else prepared.resumed.folder)
    write_whole(folder / SETTINGS, json.dumps(prepared.settings, indent=1) + "\n")
    if prepared.resumed is not None:
        copy_parts(prepared.resumed.folder, folder)
    if prepared.why_text:
        context.console.say(prepared.why_text)
    writer = PartWriter(folder, prompts_per_part=cfg.prompts_per_part)
    for one in prepared.sets:
        for note in one.notes:
            context.console.say(note)
        if one.invalid.rows:
            context.console.say(f"{one.name}: {one.invalid.rows} rows are invalid and not evaluated: {one.invalid}")
        if one.invalid.repeated_ids:
            context.console.say(f"{one.name}: {one.invalid.describe_repeats()}")
    merged = folder / MERGED if cfg.model.adapter is not None or prepared.checkpoint is not None else None
    try:
        with context.clock.phase(Phase.START):
            if merged is not None:
                write_merged(prepared, merged)
                plan = replace(plan, engine=replace(plan.engine, model_path=str(merged)))
            models = {"model.path": plan.engine.model_path} | name_opponent(cfg.rollout)
            await claim_machines(context, [plan_engine_role(cfg, plan, folder)], models)
            context.engines = await start_rollouts(context.cluster, cfg, plan)
    # Also on Ctrl-C: a merged model may take tens of GB.
    except BaseException:
        remove_merged(merged)
        raise
    availability = watch_engines(cfg, context.engines, context)
    requests = GroupRequests(
        context.engines,
        timeout_s=cfg.rollout.timeout_s,
        engines=availability,
        judge_budget=cfg.reward.judge_budget,
        waits_for_places=cfg.rollout.max_concurrency is not None,
    )
    done = {} if prepared.resumed is None else prepared.resumed.done
    return EvalRun(
        cfg=cfg, sets=prepared.sets, requests=requests, context=context, writer=writer, done=done, merged=merged
    )


def write_merged(prepared: PreparedEval, folder: Path) -> None:
    """Write the model that engines load instead of `model.path`: with merged adapter, or of a checkpoint."""
    model = prepared.cfg.model
    if prepared.checkpoint is not None:
        write_checkpoint_model(prepared.checkpoint, folder, trust_remote_code=model.trust_remote_code)
    elif model.adapter is not None:
        merge_adapter(model, model.adapter, folder)


def read_settings(folder: str) -> dict[str, Any]:
    """Read the settings of a run folder's samples. Raises UserError for a folder without an evaluation."""
    path = Path(folder).expanduser() / SETTINGS
    if not os.path.isfile(path):
        raise UserError(f"resume={folder} is no run folder of an evaluation: it has no {SETTINGS}")
    return dict(parse_json(read_text(path, str(path)), str(path)))
