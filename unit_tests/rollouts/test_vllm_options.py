"""Options of `rollout.vllm`: checked before the start, given to vLLM, and priced by the doctor."""

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from analysis.doctor.__main__ import main as doctor
from analysis.doctor.knobs import read_knobs
from configs.schema import RLConfig
from configs.trainer_schema import LoraConfig
from core.errors import UserError
from core.types.allowed_tokens import AllowedTokens
from core.types.samples import Prompt
from driver.load_recipe import load_recipe
from driver.records.episode_metrics import measure_counts
from driver.start.rollouts import plan_rollouts
from driver.start.weight_sync import choose_scope
from rollouts.engines.base import Completion, EngineConfig
from rollouts.engines.vllm import VllmEngine
from rollouts.engines.vllm_support.drafts import read_drafts
from rollouts.engines.vllm_support.options import KEYS, OURS, check_names, list_arguments, naming_refused
from rollouts.engines.vllm_support.patches import expand, hide_invented_dict, make_flat, name_loaders
from rollouts.engines.vllm_support.plugin import require_plugin
from rollouts.engines.vllm_support.settings import engine_args, prepare_gpu
from rollouts.transcript import Conversation
from tools.benchmarks.processes import ROOT
from unit_tests.helpers.sentences import tell
from unit_tests.helpers.vllm_lab import SETTINGS, Scripted

TINY = str(Path(__file__).parent.parent.parent / "configs" / "tiny.yaml")
REFUSED = {
    "rollout.vllm.max_num_seq=8": "no engine argument of the installed vLLM (did you mean 'max_num_seqs'?)",
    "rollout.vllm.seed=1": "rollout.vllm.seed is set by seed",
    "rollout.vllm.max_model_len=64": "is set by data.max_prompt_tokens and rollout.max_new_tokens",
    "rollout.vllm.spec_method=ngram": "speculative_config holds its settings",
    "rollout.vllm.speculative_config={method: eagle, model: m}": "needs a method without weights, ngram or suffix",
    "rollout.vllm.speculative_config={method: suffix}": "needs the package arctic-inference",
    "rollout.vllm.speculative_config={method: ngram, rejection-sample-method: synthetic}": "only rejection_sample",
    "rollout.vllm.quantization=fp8": "is set by rollout.quantization",
    "rollout.quantization=fp8": "is fp8, which vLLM does not have on a CPU: ",
    "rollout.vllm.pipeline_parallel_size=2": "engines have tensor parallelism and one adapter only",
    "rollout.vllm.max_cpu_loras=2": "engines have tensor parallelism and one adapter only",
    "rollout.vllm.override_generation_config={temperature: 0.1}": "it would change the distribution",
    "rollout.vllm.logprobs_mode=raw_logprobs": "must be those of the distribution that tokens are drawn from",
}


UNSHOWN = ("rollout.top_p=0.9", "rollout.allowed_tokens=[a, b]")
NGRAM = "rollout.vllm.speculative_config={method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 2}"


@pytest.mark.parametrize("other", UNSHOWN)
def test_drafts_are_refused_with_what_they_were_not_shown_with(other):
    with pytest.raises(UserError, match=r"speculative_config and rollout\..* have not been shown to be exact"):
        load_recipe(RLConfig, TINY, ["rollout.engine=vllm", NGRAM, other])
    load_recipe(RLConfig, TINY, ["rollout.engine=vllm", NGRAM])


def test_drafts_are_refused_where_vllm_ignores_a_ban_and_with_an_adapter(tiny_path):
    options = {"speculative_config": {"method": "ngram"}}
    config = EngineConfig(model_path=tiny_path, **SETTINGS, options=options)
    assert engine_args(config, on_cpu=True)["per_request_spec_decode_metrics"] == "summary"
    with pytest.raises(UserError, match="vLLM cannot ban tokens in drafts"):
        engine_args(replace(config, allowed_tokens=AllowedTokens(banned=(7,))), on_cpu=True)
    with pytest.raises(UserError, match="not been tried with an adapter"):
        engine_args(replace(config, lora=LoraConfig()), on_cpu=True)


def test_each_draft_is_checked_at_the_temperature_of_its_request():
    """vLLM's own function for CPUs leaves the output as it was."""
    output = torch.full((5,), torch.nan)
    expand(output, torch.tensor([0.5, 0.7, 0.0, 2.0]), torch.tensor([2, 2, 4, 5]), 0.0, 1.0, 128)
    assert output.tolist() == [0.5, 0.5, 1.0, 1.0, 2.0]


def test_queries_reach_the_rotation_with_two_dimensions():
    """Those of DeepSeek are a part of a longer head, and have the key of all heads."""

    def rotate(layer, positions, query, key=None):
        assert query.shape == (3, 8) and (key is None or key.shape == (3, 4))
        return query + 1, None if key is None else key + 1

    query, key = torch.arange(36.0).view(3, 2, 6)[..., 2:], torch.zeros(3, 1, 4)
    rotated, rotated_key = make_flat(rotate)(None, torch.arange(3), query, key)
    assert torch.equal(rotated, query + 1) and torch.equal(rotated_key, key + 1)
    assert make_flat(rotate)(None, torch.arange(3), query)[1] is None


ROTATE = """
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from rollouts.engines.vllm_support.plugin import register
register()
with set_current_vllm_config(VllmConfig()):
    layer = RotaryEmbedding(32, 32, 64, 10000.0, True, torch.float32)
positions, query, key = torch.arange(5), torch.randn(5, 3, 32), torch.randn(5, 1, 32)
want = layer.forward_native(positions, query.clone(), key.clone())
for a, b in zip(layer.forward_cpu(positions, query, key), want, strict=True):
    torch.testing.assert_close(a, b)
print("equal")
"""


@pytest.mark.slow
def test_vllm_rotates_every_head_by_the_position_of_its_token():
    """vLLM's own operator for CPUs takes heads for tokens."""
    done = subprocess.run([sys.executable, "-c", ROTATE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("equal\n"), done.stderr[-2000:]


def test_llvmlites_lookup_is_replaced_once(monkeypatch):
    class Library:
        def __getattr__(self, name):
            return name

    monkeypatch.setitem(sys.modules, "llvmlite.binding.ffi", SimpleNamespace(_lib_wrapper=Library))
    hide_invented_dict()
    replaced = Library.__getattr__
    hide_invented_dict()
    assert Library.__getattr__ is replaced and Library().add == "add"
    with pytest.raises(AttributeError):
        Library().__getattr__("__dict__")


def test_a_weight_loader_that_is_a_partial_function_gets_a_name():
    """vLLM's update reads the names of all, and the norm of MiniMax-M2 has such a loader."""
    layer = torch.nn.Linear(2, 2)
    layer.weight.weight_loader = partial(print, sep="")
    name_loaders(layer)
    assert layer.weight.weight_loader.__name__ == "print"


def test_an_engine_without_our_installation_is_one_sentence():
    """A Python that knows the folder, and no entry point of it."""
    code = f"import sys; sys.path.insert(0, '.'); from {require_plugin.__module__} import require_plugin as r; r()"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "core.errors.UserError: rollout.engine: vllm needs FeynRL to be installed, because vLLM finds the receiver of "
        "weights by an entry point: run `python -m pip install --no-deps --editable .` in FeynRL's folder"
    )
    require_plugin()


def test_float32_on_a_gpu_is_float32_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setenv("TRITON_F32_DEFAULT", "")  # so that it is restored
    del os.environ["TRITON_F32_DEFAULT"]
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    prepare_gpu("bfloat16")
    assert "TRITON_F32_DEFAULT" not in os.environ
    prepare_gpu("float32")
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    prepare_gpu("float32")
    assert os.environ["TRITON_F32_DEFAULT"] == "tf32"


def test_ranks_on_gpus_are_started_and_not_forked_unless_the_user_says_so(monkeypatch):
    """vLLM forks by default. On a CPU it never does."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "")  # so that it is restored
    del os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
    prepare_gpu("bfloat16")
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    prepare_gpu("bfloat16")
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


def test_an_engine_prepares_its_process_for_the_gpu_that_it_finds(tiny_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with patch.dict(os.environ):
        os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
        Scripted(tiny_path, "keep")
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_an_adapter_in_float32_is_refused_on_a_gpu_before_the_start():
    adapter = ["rollout.engine=vllm", "weight_sync.lora=adapter", "model.lora={}", "model.dtype=float32"]
    with pytest.raises(UserError, match=r"adapters take no float32 on a GPU: set model\.dtype to bfloat16, or w"):
        load_recipe(RLConfig, TINY, [*adapter, "backend=ray", "device=cuda"])
    load_recipe(RLConfig, TINY, [*adapter, "backend=ray", "device=cuda", "model.dtype=bfloat16"])
    load_recipe(RLConfig, TINY, [*adapter, "backend=ray"])


@pytest.mark.parametrize("sent", ["adapter", "merged"])
def test_engines_are_told_whether_the_adapter_comes_alone(recipe, sent):
    """`make verify` runs it: test_vllm_adapter.py."""
    changes = {"backend": "ray", "rollout.engine": "vllm", "model.lora": {"r": 3}, "weight_sync.lora": sent}
    cfg = load_recipe(RLConfig, recipe(changes), []).cfg
    plan = plan_rollouts(cfg)
    assert plan.engine.starts_empty == (sent == "merged"), "whether vLLM reads the weights of the files itself"
    assert (plan.engine.lora and plan.engine.lora.r) == (3 if sent == "adapter" else None)
    assert choose_scope(cfg, plan) == ("adapter" if sent == "adapter" else "files")


def test_drafts_of_all_replies_are_metrics_of_the_step():
    counted = SimpleNamespace(num_draft_tokens=6, histogram=[1, 1, 1, 0])
    drafts = read_drafts(SimpleNamespace(spec_decode_metrics=counted))
    talk = Conversation()
    for _ in range(2):
        talk.append_context([3])
        talk.append_reply(Completion(token_ids=[1], logp=[-1.0], versions=[0], stop="eos", drafts=drafts))
    sample = talk.make_sample(Prompt(id="0", messages=[]), counts={"turns": 2.0})
    measured = measure_counts([sample, sample])
    assert measured == {"rollout/turns_mean": 2.0, "rollout/drafted": 24.0, "rollout/accepted": 0.5}


@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_be_set_is_one_sentence_before_the_start(override):
    with pytest.raises(UserError, match=re.escape(REFUSED[override])):
        load_recipe(RLConfig, TINY, ["rollout.engine=vllm", override])


def test_another_engine_takes_none():
    with pytest.raises(UserError, match=r"rollout.engine is hf: leave rollout\.vllm out"):
        load_recipe(RLConfig, TINY, ["rollout.vllm.max_num_seqs=8"])


def test_options_without_vllm_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    list_arguments.cache_clear()
    try:
        assert tell(lambda: check_names({"max_num_seqs": 3})) == (
            "rollout.vllm is set, and vLLM is not installed: run make install"
        )
    finally:
        list_arguments.cache_clear()


def test_an_error_of_vllms_start_names_the_options_if_there_are_any():
    def start(options: dict[str, int], error: Exception) -> None:
        with naming_refused(options):
            raise error

    wrong = ValueError("3 sequences\n  are too few " + "x" * 600)
    with pytest.raises(ValueError) as raised:
        start({}, wrong)
    assert raised.value is wrong
    said = tell(lambda: start({"max_num_seqs": 3}, wrong))
    assert said == f"rollout.vllm: vLLM does not start with {{'max_num_seqs': 3}}: 3 sequences are too few {'x' * 476}"
    assert tell(lambda: start({"max_num_seqs": 3}, OSError("no GPU")), OSError) == "no GPU"


def test_every_name_that_is_refused_is_an_argument_of_vllm():
    assert {*KEYS, *OURS} <= list_arguments()
    assert len(list_arguments()) > 200


@pytest.mark.parametrize(
    ("knob", "said"),
    [("max_num_seqs", "is not of the form NAME=VALUE"), ("seed=1", "is set by seed"), ("x=1", "no engine argument")],
)
def test_a_wrong_knob_is_one_sentence(knob, said):
    with pytest.raises(UserError, match=said):
        read_knobs([knob], load_recipe(RLConfig, TINY, ["rollout.engine=vllm"]).cfg)


@pytest.mark.slow
def test_an_option_reaches_vllm_and_a_wrong_value_is_told(tiny_path):
    engine = VllmEngine(EngineConfig(model_path=tiny_path, **SETTINGS, options={"max_num_seqs": 3}))
    try:
        assert engine._loop.llm.vllm_config.scheduler_config.max_num_seqs == 3
        done = asyncio.run(engine.generate([50, 51], max_new_tokens=4, seed=7))
        assert len(done.logp) == len(done.token_ids)
    finally:
        asyncio.run(engine.close())
    with pytest.raises(UserError, match=r"rollout\.vllm: vLLM does not start with \{'max_num_seqs': 'many'\}"):
        VllmEngine(EngineConfig(model_path=tiny_path, **SETTINGS, options={"max_num_seqs": "many"}))


@pytest.mark.verify
def test_the_doctor_tells_the_price_of_an_approximation(recipe, capsys):
    path = recipe({"rollout.engine": "vllm", "rollout.kv_cache_gib": 0.1, "rollout.max_new_tokens": 16}, kind="rl")
    knobs = ["--knob", "kv_cache_dtype=fp8", "--knob", "max_num_seqs=2", "--knob", "max_num_seqs=many"]
    assert doctor([path, "--sequences", "8", "--tokens", "16", "--json", *knobs]) == 0
    without, fp8, few, refused = json.loads(capsys.readouterr().out)["knobs"]
    assert without["gap"]["mean"] < 1e-4 and few["gap"]["mean"] < 1e-4
    assert fp8["gap"]["mean"] > 10 * without["gap"]["mean"]
    assert without["changed"] == 0 < fp8["changed"]
    assert all(p["tokens_per_s"] > 0 for p in (without, fp8, few))
    assert refused["gap"] is None and "many" in refused["refused"]
