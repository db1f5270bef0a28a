"""--explain of an evaluation: print the consequences of a recipe without starting anything."""

from __future__ import annotations

import yaml

from configs.eval_schema import EvalConfig
from driver.evaluation.suites.setup import check_eval_devices


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
    parts = [
        "# the configuration as it will run",
        yaml.safe_dump(cfg.model_dump(), sort_keys=False).rstrip(),
        "",
        "# what follows from it",
        *(f"{name:<22} {text}" for name, text in facts.items()),
    ]
    if lacking := check_eval_devices(cfg):
        parts += ["", f"warning: {lacking}"]
    return "\n".join(parts)
