"""Options of `rollout.vllm`: checked before the start, given to vLLM, and priced by the doctor."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from analysis.doctor.__main__ import main as doctor
from analysis.doctor.knobs import read_knobs
from configs.schema import RLConfig
from core.errors import UserError
from driver.load_recipe import load_recipe
from rollouts.engines.base import EngineConfig
from rollouts.engines.vllm import VllmEngine
from rollouts.engines.vllm_support.options import KEYS, OURS, list_arguments
from unit_tests.helpers.vllm_lab import SETTINGS

TINY = str(Path(__file__).parent.parent.parent / "configs" / "tiny.yaml")
REFUSED = {
    "rollout.vllm.max_num_seq=8": "no engine argument of the installed vLLM (did you mean 'max_num_seqs'?)",
    "rollout.vllm.seed=1": "rollout.vllm.seed is set by seed",
    "rollout.vllm.max_model_len=64": "is set by data.max_prompt_tokens and rollout.max_new_tokens",
    "rollout.vllm.speculative_config={method: ngram}": "speculative decoding has not been shown to be exact",
    "rollout.vllm.quantization=fp8": "weight syncs send no quantised weights",
    "rollout.vllm.pipeline_parallel_size=2": "engines have tensor parallelism and one adapter only",
    "rollout.vllm.max_cpu_loras=2": "engines have tensor parallelism and one adapter only",
    "rollout.vllm.override_generation_config={temperature: 0.1}": "it would change the distribution",
    "rollout.vllm.logprobs_mode=raw_logprobs": "must be those of the distribution that tokens are drawn from",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_be_set_is_one_sentence_before_the_start(override):
    with pytest.raises(UserError, match=re.escape(REFUSED[override])):
        load_recipe(RLConfig, TINY, ["rollout.engine=vllm", override])


def test_another_engine_takes_none():
    with pytest.raises(UserError, match=r"rollout.engine is hf: leave rollout\.vllm out"):
        load_recipe(RLConfig, TINY, ["rollout.vllm.max_num_seqs=8"])


def test_every_name_that_is_refused_is_an_argument_of_vllm():
    assert {*KEYS, *OURS} <= list_arguments()
    assert len(list_arguments()) > 200


@pytest.mark.parametrize(
    ("knob", "said"),
    [("max_num_seqs", "is not of the form NAME=VALUE"), ("seed=1", "is set by seed"), ("x=1", "no engine argument")],
)
def test_a_wrong_knob_is_one_sentence(knob, said):
    with pytest.raises(UserError, match=said):
        read_knobs([knob], engine="vllm")


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


@pytest.mark.slow
def test_the_doctor_tells_the_price_of_an_approximation(recipe, capsys):
    path = recipe({"rollout.engine": "vllm", "rollout.kv_cache_gib": 0.1, "rollout.max_new_tokens": 16}, kind="rl")
    knobs = ["--knob", "kv_cache_dtype=fp8", "--knob", "max_num_seqs=2", "--knob", "max_num_seqs=many"]
    assert doctor([path, "--sequences", "8", "--tokens", "16", "--json", *knobs]) == 0
    without, fp8, few, refused = json.loads(capsys.readouterr().out)["knobs"]
    assert without["gap"]["mean"] < 1e-4 and few["gap"]["mean"] < 1e-4
    assert fp8["gap"]["mean"] > 10 * without["gap"]["mean"]
    assert all(p["tokens_per_s"] > 0 for p in (without, fp8, few))
    assert refused["gap"] is None and "many" in refused["refused"]
