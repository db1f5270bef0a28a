"""A mistake gets one sentence that names the key or the file and the mend, exit code 2, and nothing is started."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import main_rl
import main_sl
from configs.schema import RLConfig, SLConfig
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.checks.explain import describe_arithmetic
from driver.load_recipe import load_recipe
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import file_of

ROOT = Path(__file__).parent.parent.parent
RECIPES = sorted(path for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith("eval_"))


def parquet(path: Path, rows: dict) -> str:
    pq.write_table(pa.table(rows), path)
    return str(path)


ARRANGES = """
from algs.base import GroupRelative
class Arranges(GroupRelative):
    def prepare_groups(self, groups):
        return groups[:1]
    def loss(self, policy, tokens):
        return -policy.logp * tokens.advantage, {}
"""
KEEPS = """
from algs.base import Algorithm
class Keeps(Algorithm):
    def accept_group(self, group):
        return False
    def loss(self, policy, tokens):
        return -policy.logp, {}
"""
TWO_LOSSES = "from algs.sft import SFT\nclass A(SFT): pass\nclass B(SFT): pass\n"
CONVERSATION = [{"role": "user", "content": "1+1="}]

BROKEN = {
    # name: (changes to the recipe, what the sentence must hold)
    "unknown key": ({"trainer.lerning_rate": 1}, ["trainer.lerning_rate", "known keys", "lr"]),
    "near miss": ({"rollout.temprature": 1}, ["rollout.temprature", "did you mean 'temperature'"]),
    "unknown hyper-parameter": ({"alg.clip_hgih": 0.3}, ["alg.clip_hgih", "did you mean 'clip_high'"]),
    "wrong type": ({"steps": "many"}, ["steps='many'", "integer"]),
    "missing key": ({"groups_per_step": None}, ["groups_per_step is missing"]),
    "unknown algorithm": ({"alg.name": "grop"}, ["alg.name", "did you mean 'grpo'"]),
    "algorithm of the other program": ({"alg": {"name": "sft"}}, ["main_sl.py"]),
    "k1 in the loss": ({"alg.kl": {"coef": 0.1, "estimator": "k1"}}, ["alg.kl", "expected gradient of zero"]),
    "a target that nothing adapts to": ({"alg.kl": {"target": 0.1}}, ["target adapts coef, and 0 stays 0"]),
    "a drift from the policy itself": (
        {"alg.correction": {"max_drift": 0.1, "drift_from": "prox"}},
        ["alg.correction.drift_from is prox", "which never drifts"],
    ),
    "rounding that the loss of a source does not correct": (
        {
            "rollout.quantization": "int8",
            "alg": {"by_source": {"a": {"name": "grpo", "correction": {"level": "none"}}}},
        },
        ["alg.by_source.a.correction.level is none"],
    ),
    "a correction too many": ({"alg": {"name": "p3o", "correction": {"level": "token"}}}, ["correction.level to none"]),
    "a clip that never binds": ({"alg": {"name": "gspo", "clip_high": 0.2}}, ["clip_high=0.2 never binds"]),
    "missing teacher": ({"alg": {"name": "opd", "teacher": "/nowhere/t"}}, ["/nowhere/t does not exist"]),
    "missing algorithm file": ({"alg": {"file": "/nowhere/mine.py"}}, ["/nowhere/mine.py"]),
    "missing data": ({"data.train": "/nowhere/train.parquet"}, ["data.train=/nowhere/train.parquet", "no such file"]),
    "unreadable kind of data": ({"data.train": __file__}, ["must end in .parquet, .jsonl or .csv"]),
    "an unreadable source of a mixture": (
        {"data.train": [{"path": "/nowhere/a.jsonl"}, {"path": "/nowhere/b.jsonl", "ratio": 2}]},
        ["data.train[0]=/nowhere/a.jsonl", "no such file"],
    ),
    "a key that a source has not": ({"data.train": [{"path": "a", "ratoi": 2}]}, ["data.train.0.ratoi", "'ratio'"]),
    "sources of one name": ({"data.train": [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}]}, ["are called x"]),
    "a source called like a reward": (
        {"data.train": [{"path": "correct.jsonl"}, {"path": "x.jsonl"}]},
        ["called correct", "set its name"],
    ),
    "held-out rows of a wrong form": ({"data.eval": {"path": "a", "columns": {"x": "y"}}}, ["data.eval.columns", "x"]),
    "missing reward": ({"reward.function": "aritmetic"}, ["reward.function", "did you mean 'arithmetic'"]),
    "unknown engine": ({"rollout.engine": "vlm"}, ["rollout.engine: there is no 'vlm'", "did you mean 'vllm'"]),
    "unknown environment": ({"rollout.env": "chess"}, ["rollout.env: there is no 'chess'", "single_turn"]),
    "missing model folder": ({"model.path": "/nowhere/model"}, ["model.path=/nowhere/model does not exist"]),
    "prompt longer than the model": ({"data.max_prompt_tokens": 300}, ["308 tokens", "has 256 positions"]),
    "sample longer than a micro-batch": ({"trainer.micro_batch_tokens": 20}, ["40 tokens", "micro_batch_tokens=20"]),
    "too few devices": ({"backend": "ray", "trainer.ranks": 512}, ["512 trainer ranks", "lower trainer.ranks"]),
    "ranks in one process": ({"trainer.ranks": 2}, ["backend: local is one process"]),
    "updates that do not divide": ({"updates_per_step": 3}, ["groups_per_step=4", "multiple of updates_per_step=3"]),
    "a group of one": ({"group_size": 1}, ["group_size is 1"]),
    "a key of ours for DeepSpeed": (
        {"trainer.deepspeed": {"gradient_accumulation_steps": 8}},
        ["gradient_accumulation_steps follows from other keys"],
    ),
    "a key that DeepSpeed has not": (
        {"trainer.deepspeed": {"zero_optimisation": {"offload_optimizer": {"device": "cpu"}}}},
        ["zero_optimisation is no key of DeepSpeed", "did you mean 'zero_optimization'"],
    ),
    "tensor parallelism of the hf engine": (
        {"backend": "ray", "rollout.tensor_parallel_size": 2},
        ["rollout.engine=hf has no tensor parallelism", "rollout.tensor_parallel_size to 1"],
    ),
    "ZeRO-0 with bfloat16": (
        {"backend": "ray", "trainer.zero_stage": 0, "model.dtype": "bfloat16"},
        ["trainer.zero_stage to 1"],
    ),
    "only too long prompts": (
        {"data.max_prompt_tokens": 2},
        ["none of 30 rows is valid: 30 too_long", "max_prompt_tokens=2"],
    ),
    "an adapter for no layer": (
        {"model.lora": {"targets": ["q_prj"]}},
        ["model.lora.targets names 'q_prj'", "down_proj", "or all-linear"],
    ),
    "fewer episodes than engines": (
        {"backend": "ray", "rollout.num_engines": 4, "rollout.max_concurrency": 2},
        ["max_concurrency=2 is less than an episode for each of 4 engines", "raise it"],
    ),
    "an adapter sent without one": ({"weight_sync.lora": "adapter"}, ["weight_sync.lora is adapter", "set model.lora"]),
    "an adapter sent to the hf engine": (
        {"weight_sync.lora": "adapter", "model.lora": {}},
        [
            "rollout.engine=hf does not sample with an adapter",
            "set rollout.engine to vllm, or weight_sync.lora to merged",
        ],
    ),
    "a DoRA sent to vLLM": (
        {"weight_sync.lora": "adapter", "model.lora": {"dora": True}, "rollout.engine": "vllm"},
        ["vLLM has no DoRA", "model.lora.dora", "or weight_sync.lora to merged"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_recipe_gets_one_sentence(name, refused):
    changes, words = BROKEN[name]
    refused(changes, *words)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: parquet(d / "x.parquet", {"messages": [1]}), ["row 0", "messages must be text or a list"]),
        (lambda d: file_of(d / "x.jsonl", '{"messages": \n'), ["line 1 is not JSON"]),
        (lambda d: file_of(d / "x.jsonl", json.dumps({"messages": CONVERSATION, "extra": "{"})), ["row 0: extra must"]),
        (
            lambda d: file_of(d / "x.jsonl", json.dumps({"messages": [CONVERSATION[0] | {"function_call": 1}]})),
            ["row 0", "'function_call'"],
        ),
    ],
)
def test_broken_data_names_file_and_row(make, words, refused, tmp_path):
    refused({"data.train": make(tmp_path)}, "data.train", *words)


def test_broken_files_of_the_user(refused, tmp_path, tiny_path):
    two = file_of(tmp_path / "two.py", TWO_LOSSES)
    empty = tmp_path / "model"
    empty.mkdir()
    other = tmp_path / "other"
    shutil.copytree(tiny_path, other)
    foreign = ChatTokenizer(tiny_path, "chat")
    foreign.hf.add_tokens(["<foreign>"])
    foreign.save(other)
    cases = [
        ({"alg": {"file": two}}, "exactly one subclass of algs.base.Algorithm, found A, B"),
        ({"alg": {"file": file_of(tmp_path / "bad.py", "import nowhere\n")}}, "bad.py, line 1"),
        ({"alg": {"file": file_of(tmp_path / "arranges.py", ARRANGES)}}, "its prepare_groups would never be read"),
        ({"alg": {"file": file_of(tmp_path / "keeps.py", KEEPS)}}, "its accept_group would never be read"),
        ({"reward.function": file_of(tmp_path / "r.py", "x = 1\n")}, "no function score"),
        ({"model.path": str(empty)}, "no config.json"),
        ({"alg": {"name": "opd", "teacher": str(other)}}, "whose vocabulary is not that of model.path"),
    ]
    for changes, words in cases:
        refused(changes, words)


def test_broken_command_lines(recipe, tmp_path):
    good = recipe()
    cases = [
        (["--config", str(tmp_path / "rk.yaml")], "did you mean 'rl.yaml'"),
        (["--config", file_of(tmp_path / "bad.yaml", "a: [1\n")], "bad.yaml, line"),
        (["--config", file_of(tmp_path / "list.yaml", "- 1\n")], "must hold keys and values"),
        (["--config", file_of(tmp_path / "twice.yaml", "a: 1\na: 2\n")], "a is given twice"),
        (["--config", good, "steps"], "not of the form key=value"),
        (["--config", good, "." * 5000 + "=1"], "a key has at most 32 sections above it, found 5000"),
        (["--config", good, "name.x=1"], "name is not a section"),
    ]
    for argv, words in cases:
        code, err = run_here(main_rl, *argv)
        assert code == 2 and len(err.splitlines()) == 1 and words in err, err


def test_supervised_data_without_replies_is_refused(refused, sums):
    refused({"data.train": str(sums / "train.parquet")}, "30 no_reply", "it has no turn of assistant", kind="sl")


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_loads_and_explains_itself(path, capsys):
    supervised = "rows_per_step" in path.read_text()
    loaded = load_recipe(SLConfig if supervised else RLConfig, str(path), [])
    again = type(loaded.cfg).model_validate(loaded.cfg.model_dump())
    assert again == loaded.cfg
    assert run_here(main_sl if supervised else main_rl, "--config", str(path), "--explain")[0] == 0
    out = capsys.readouterr().out
    assert "what follows from it" in out and "optimizer updates" in out


def test_explain_does_the_arithmetic_and_warns_of_missing_devices(recipe, capsys, tmp_path):
    changes = {"backend": "ray", "trainer.ranks": 512, "updates_per_step": 2, "trainer.micro_batch_tokens": 64}
    assert run_here(main_rl, "--config", recipe(changes), "--explain", "steps=7")[0] == 0
    out = capsys.readouterr().out
    assert "4 prompts x 4 samples -> 16 sequences" in out
    assert "7 steps -> 112 sequences -> 14 optimizer updates" in out
    assert "\na reply                ends with <|end|>, which the chat template writes after it\n" in out
    assert "warning: 512 trainer ranks" in out
    assert not (tmp_path / "runs").exists()


def test_explain_states_the_sizes_of_a_step(recipe):
    sizes = {"backend": "ray", "trainer.ranks": 2, "updates_per_step": 2, "trainer.micro_batch_tokens": 64}
    assert dict(describe_arithmetic(load_recipe(RLConfig, recipe(sizes | {"max_staleness": 1}), []))) == {
        "a step": "4 prompts x 4 samples -> 16 sequences",
        "a sequence": "at most 32 prompt + 8 new = 40 tokens",
        "tokens of a step": "at most 640, dealt over 2 optimizer updates (prox_logp is scored before the first)",
        "micro-batches": "at most 64 tokens each -> at most about 3 per rank and update, on 2 ranks",
        "the run": "2 steps -> 32 sequences -> 4 optimizer updates",
        "generation": "runs up to 8 groups ahead of the trainer (max_staleness=1); weights are synced every step",
    }
    rows = {"data.max_tokens": 50, "trainer.micro_batch_tokens": 64}
    assert dict(describe_arithmetic(load_recipe(SLConfig, recipe(rows, kind="sl"), []))) == {
        "a step": "5 rows -> at most 250 tokens -> 1 optimizer update",
        "micro-batches": "at most 64 tokens each -> at most about 4 per rank and update, on 1 ranks",
        "the run": "2 steps -> 10 rows -> 2 optimizer updates",
    }


def test_explain_shows_the_schedules(recipe, capsys):
    parts = [{"start": 0.2, "end": 0.3, "steps": 10}, {"start": 0.3, "end": 0.25, "steps": 5, "shape": "cosine"}]
    assert run_here(main_rl, "--config", recipe({"alg.schedules": {"clip_high": parts}}), "--explain")[0] == 0
    lines = capsys.readouterr().out.splitlines()
    assert "alg.clip_high          0.2 -> 0.3 in 10 steps (linear), then 0.3 -> 0.25 in 5 steps (cosine)" in lines


def test_explain_counts_what_an_adapter_trains(recipe, capsys):
    path = recipe({"model.lora": {"r": 1, "targets": ["q_proj"]}, "alg.kl": {"coef": 0.1}})
    assert run_here(main_rl, "--config", path, "--explain")[0] == 0
    out = capsys.readouterr().out
    # two layers of q_proj, 64 -> 64: A and B have 64 numbers each
    assert "and 256 of the adapter" in out
    assert "gradients 0.00, optimizer 0.00, frozen models 0.00" in out


def test_explain_counts_what_is_kept_in_four_bits(recipe, capsys):
    path = recipe({"model.lora": {"r": 1, "merge_on_save": True}, "model.quantization": "nf4"})
    assert run_here(main_rl, "--config", path, "--explain")[0] == 0
    # two blocks of width 64: four matrices of attention, and three of 64 x 256 beside it
    assert f"; {2 * (4 * 64 * 64 + 3 * 64 * 256):,} are kept in four bits" in capsys.readouterr().out


def test_memory_is_unknown_where_the_config_cannot_be_read(recipe, capsys):
    assert run_here(main_rl, "--config", recipe({"model.path": "some/model"}), "--explain")[0] == 0
    assert "memory                 unknown" in capsys.readouterr().out


def test_overrides_reach_the_algorithm(recipe):
    assert load_recipe(RLConfig, recipe(), ["alg.clip_low=0.1", "seed=3"]).cfg.alg["clip_low"] == 0.1


def test_the_penalty_for_length_begins_at_the_budget_of_new_tokens(recipe):
    penalty = {"alg.overlong": {"mode": "penalty", "buffer": 2}, "rollout.max_new_tokens": 9}
    assert load_recipe(RLConfig, recipe(penalty), []).cfg.alg["overlong"]["max_tokens"] == 9
    own = penalty | {"alg.overlong": {"mode": "penalty", "buffer": 2, "max_tokens": 5}}
    assert load_recipe(RLConfig, recipe(own), []).cfg.alg["overlong"]["max_tokens"] == 5
