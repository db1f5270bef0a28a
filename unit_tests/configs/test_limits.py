"""Limits that keys set one another: a recipe at the limit is valid, and one beyond it gets a sentence."""

from __future__ import annotations

import re

import pytest

from configs.eval_schema import EvalConfig
from configs.load import apply_override, validate
from configs.schema import RLConfig, SLConfig
from core.errors import UserError

COMMON = "name=a model.path=m"
TRAINED = f"{COMMON} backend=local data.train=a.jsonl"
PROGRAMS = {
    "rl": (
        RLConfig,
        f"{TRAINED} steps=2 groups_per_step=4 alg.name=grpo reward.function=arithmetic rollout.engine=hf "
        "data.max_prompt_tokens=32 rollout.max_new_tokens=8",
    ),
    "sl": (SLConfig, f"{TRAINED} rows_per_step=4 alg.name=sft data.max_tokens=32"),
    "eval": (EvalConfig, f"{COMMON} reward.function=arithmetic data.sets=[{{path: a.jsonl}}]"),
}
RANKS = "backend=ray trainer.sequence_parallel=2"
TWO = "data.train=[{path: a.jsonl}, {path: b.jsonl}]"
LIMITS = [
    # program, keys beyond the limit, its sentence, keys at the limit
    ("rl", "groups_per_step=6 updates_per_step=4", "must be a multiple of updates_per_step=4", "updates_per_step=4"),
    ("rl", "sample_reuse=3 max_staleness=2", "must be a multiple of sample_reuse=3", "sample_reuse=4 max_staleness=3"),
    ("rl", "weight_sync.every=3 max_staleness=1", "raise max_staleness to 2", "weight_sync.every=3 max_staleness=2"),
    (
        *("rl", "weight_sync.max_kl=0.1", "raise weight_sync.every"),
        "weight_sync.max_kl=0.1 weight_sync.every=2 max_staleness=1",
    ),
    ("rl", "trainer.micro_batch_tokens=39", "one sample may reach 40 tokens", "trainer.micro_batch_tokens=40"),
    ("rl", "trainer.warmup_updates=3", "never reaches trainer.lr", "trainer.warmup_updates=2"),
    ("rl", "eval_every=1", "set data.eval", "eval_every=1 data.eval=b.jsonl"),
    ("rl", "weight_sync.transport=gloo", "set weight_sync.transport to auto", "weight_sync.transport=auto"),
    ("rl", "rollout.num_engines=2", "backend: local is one process", "backend=ray rollout.num_engines=2"),
    ("rl", "rollout.tensor_parallel_size=2", "is one process", "backend=ray rollout.tensor_parallel_size=2"),
    ("rl", "rollout.num_engines=0", "at least one engine", "rollout.num_engines=1"),
    (
        *("rl", "backend=ray rollout.num_engines={min: 2, max: 2}", "2 must be above min"),
        "backend=ray rollout.num_engines={min: 2, max: 3}",
    ),
    ("rl", "trainer.optimizer_settings={lr: 1}", "use trainer.lr", "trainer.optimizer_settings={momentum: 1}"),
    ("rl", "trainer.optimizer=lion", "optimizer=lion is not known", "trainer.optimizer=torch.optim.NAdam"),
    ("rl", "trainer.decay_fraction=0.5", "belongs to lr_schedule: wsd", "trainer.lr_schedule=linear"),
    ("rl", "trainer.lr_schedule=wsd", "set decay_fraction", "trainer.lr_schedule=wsd trainer.decay_fraction=0.5"),
    (
        *("rl", "trainer.lr_min_fraction=0.1", "lr_schedule is constant"),
        "trainer.lr_min_fraction=0.1 trainer.lr_schedule=linear",
    ),
    ("rl", f"{RANKS} trainer.ranks=3", "ranks=3 is no multiple", f"{RANKS} trainer.ranks=4"),
    (
        *("rl", f"{RANKS} trainer.ranks=2 trainer.layout=padded", "layout is padded"),
        f"{RANKS} trainer.ranks=2 trainer.layout=packed",
    ),
    (
        *("rl", f"{RANKS} trainer.ranks=2 model.attention=sdpa", "set it to auto"),
        "backend=ray trainer.ranks=2 model.attention=sdpa",
    ),
    ("rl", "model.quantization=nf4", "lora is unset", "model.quantization=nf4 model.lora={merge_on_save: true}"),
    ("rl", "model.quantization=nf4 model.lora={}", "set lora.merge_on_save to true", "model.lora={}"),
    ("rl", "model.lora={experts: true, dora: true}", "no DoRA for experts", "model.lora={experts: true}"),
    ("rl", "rollout.servers=[http://h]", "needs 0", "rollout.engine=http rollout.servers=[http://h]"),
    ("rl", "rollout.engine=http", "engine=http with num_engines=1 needs 1", "rollout.engine=hf"),
    (
        *("rl", "reward.by_source={a: {gsm8k: 1}} reward.settings={x: 1}", "write functions instead of function"),
        "reward.by_source={a: {gsm8k: 1}}",
    ),
    (
        "rl",
        "data.train=[{path: mean.jsonl}, {path: b.jsonl}]",
        "a source of data.train is called mean, as is another reward in the log: set its name",
        "data.train=mean.jsonl",
    ),
    (
        "rl",
        f"{TWO} data.curriculum=[{{rows: 1, ratios: {{a: 1}}}}]",
        "give each a ratio",
        TWO,
    ),
    ("sl", "steps=1 trainer.micro_batch_tokens=31", "one row may have 32", "steps=1 trainer.micro_batch_tokens=32"),
    ("sl", "steps=1 data.train_on=[]", "train_on names no role", "steps=1 data.train_on=[user]"),
    ("sl", f"epochs=1 {TWO}", "set steps instead", f"steps=1 {TWO}"),
    ("sl", "steps=1 eval_every=1", "set data.eval", "steps=1 eval_every=1 data.eval={from_train: 1}"),
    ("sl", "steps=1 epochs=1", "and not both", "epochs=1"),
    ("eval", "rollout.temperature=0.009", "set 0 for greedy sampling", "rollout.temperature=0.01"),
    ("eval", "samples=2 rollout.temperature=0", "set samples to 1", "samples=1 rollout.temperature=0"),
    ("eval", "k=[3] samples=2", "no prompt has more than 2 samples", "k=[2] samples=2"),
    ("eval", "rollout.num_engines={min: 1, max: 2}", "write a plain number", "rollout.num_engines=2"),
    ("eval", "backend=local rollout.num_engines=2", "is one process", "backend=local rollout.num_engines=1"),
]


@pytest.mark.parametrize(("program", "beyond", "said", "at"), LIMITS, ids=range(len(LIMITS)))
def test_a_limit_is_where_its_sentence_says(program, beyond, said, at):
    cls, base = PROGRAMS[program]

    def load(changes: str) -> object:
        raw: dict[str, object] = {}
        # a value in braces or brackets has spaces of its own
        for item in re.split(r" (?=[\w.]+=)", f"{base} {changes}"):
            apply_override(raw, item)
        return validate(cls, raw, prefix="")

    assert load(at)
    with pytest.raises(UserError, match=re.escape(said)):
        load(beyond)
